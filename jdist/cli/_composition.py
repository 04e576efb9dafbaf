"""Parts of a method by options: compression, overlap and outer optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from jdist import codecs, methods, reducers, server, transforms
from jdist.cli import _groups

# Sparse codecs, by the share of the entries that they send and whether a
# feedback keeps the rest: then random entries must not be scaled up.
SPARSE: dict[str, Callable[[float, bool], codecs.Codec]] = {
  "top_k": lambda ratio, kept: codecs.TopK(ratio),
  "random_k": lambda ratio, kept: codecs.RandomK(ratio, scaled=not kept),
  "dct": lambda ratio, kept: codecs.DCTTopK(ratio=ratio),
}
_RATIO = 0.01
_DENSE: dict[str, codecs.Codec] = {
  "float16": codecs.Cast("float16"),
  "bfloat16": codecs.Cast("bfloat16"),
  "int8": codecs.Quantize(8),
  "int4": codecs.Quantize(4),
  # Two bits have only three levels that are symmetric around zero, but four
  # between the minimum and the maximum.
  "int2": codecs.Quantize(2, 256, "min_max"),
  "sign": codecs.Sign(),
  "ternary": codecs.Ternary(),
}
_FEEDBACKS: dict[str, Callable[[], reducers.Feedback | None]] = {
  "none": lambda: None,
  "error": reducers.ErrorFeedback,
  "ef21": reducers.EF21,
  "momentum": reducers.MomentumCorrection,
  "smoothing": reducers.Smoothing,
}
# Outer optimizers, with their default learning rates.
_OUTER: dict[str, tuple[float, Callable[..., optax.GradientTransformation]]] = {
  "sgd": (1.0, lambda rate, momentum: optax.sgd(rate)),
  "momentum": (0.7, lambda rate, momentum: optax.sgd(rate, momentum)),
  "nesterov": (0.7, transforms.outer_sgd),
  "adam": (0.01, lambda rate, momentum: optax.adam(rate, b1=momentum)),
}
# Arguments of factories that several options make together.
_PARTS = (
  "compression", "overlap", "stream", "rule", "interval", "predictor_params",
)  # fmt: skip


def takes(options: _groups.Common, name: str) -> set[str]:
  """Returns the arguments of a method that can be filled, given the others.

  "late" stands for the settings of an overlap, where there is one.
  """
  method = methods.registry[name]
  found = set(method.arguments)
  if not method.in_rounds:
    found.discard("interval")
  if "compression" in found:
    if options.codec in SPARSE:
      found.add("ratio")
    if options.reducer == "power_sgd":
      found.add("rank")
  if _is_late(method, options):
    found.add("late")
  if method.late is not None:
    found.discard("overlap")  # It is late by definition.
  if "rule" in found and options.outer is not None:
    found.add("outer_learning_rate")
    if options.outer != "sgd":
      found.add("outer_momentum")
  return found


def arguments(
  method: methods.Method, options: _groups.Common
) -> dict[str, Any]:
  """Returns the arguments of a method's factory that options fill."""
  found = {
    name: value
    for name, value in _groups.filled(options).items()
    if name in method.arguments and name not in _PARTS
  }
  if "compression" in method.arguments:
    found["compression"] = compression(options)
  if _is_late(method, options):
    found["overlap"] = _overlap(method, options)
  elif "stream" in method.arguments and options.stream:
    found["stream"] = transforms.Stream()
  if "rule" in method.arguments and options.outer is not None:
    # They are settings of this optimizer, and not of the method's own.
    found.pop("outer_learning_rate", None)
    found.pop("outer_momentum", None)
    found["rule"] = outer_optimizer(options)
  return found


def compression(options: _groups.MeanOptions) -> reducers.Compression | None:
  """Returns the compression that options name; None for an exact mean."""
  feedback = _FEEDBACKS[options.feedback or "none"]()
  reducer: reducers.Reducer
  if options.reducer in ("power_sgd", "majority_vote"):
    if options.codec is not None:
      raise ValueError(
        f"`--codec` must be left out with `--reducer {options.reducer}`, which "
        f"has its own encoding, got {options.codec}."
      )
    if options.reducer == "majority_vote":
      reducer = reducers.MajorityVote()
    else:
      reducer = reducers.PowerSGD(2 if options.rank is None else options.rank)
    return reducers.Compression(reducer, feedback)
  codec = _codec(options, feedback)
  if codec is None:
    return None
  # Its annotation has all reducers, of which two remain here.
  reducer = reducers.compressed(codec, wire=options.reducer)  # type: ignore[arg-type]
  return reducers.Compression(reducer, feedback)


def message(options: _groups.MeanOptions) -> server.MessageCodec | None:
  """Returns the codec of a server's pushes; None to send every bit."""
  feedback = _FEEDBACKS[options.feedback or "none"]()
  codec = _codec(options, feedback)
  return None if codec is None else server.MessageCodec(codec, feedback)


def _codec(
  options: _groups.MeanOptions, feedback: reducers.Feedback | None
) -> codecs.Codec | None:
  name = options.codec
  if name is None:
    for option in ("feedback", "reducer"):
      value = getattr(options, option)
      if value not in (None, "none"):
        raise ValueError(
          f"`--codec` must be given with `--{option} {value}`, for instance "
          "`--codec int4`."
        )
    return None
  if name in SPARSE:
    kept = feedback is not None and feedback.keeps_rest
    return SPARSE[name](
      _RATIO if options.ratio is None else options.ratio, kept
    )
  return _DENSE[name]


def _is_late(method: methods.Method, options: _groups.MethodOptions) -> bool:
  given = options.overlap or options.delay_steps is not None
  return "overlap" in method.arguments and (given or method.late is not None)


def _overlap(
  method: methods.Method, options: _groups.MethodOptions
) -> transforms.Delayed:
  own = transforms.Delayed() if method.late is None else method.late
  return dataclasses.replace(
    own,
    steps=own.steps if options.delay_steps is None else options.delay_steps,
    carry=own.carry if options.carry is None else options.carry,
    stream=transforms.Stream() if options.stream else None,
  )


def outer_optimizer(
  options: _groups.OuterOptions,
) -> optax.GradientTransformation:
  """Returns the outer optimizer, by default with Nesterov's momentum."""
  usual, make = _OUTER[options.outer or "nesterov"]
  rate, momentum = options.outer_learning_rate, options.outer_momentum
  return make(
    usual if rate is None else rate, 0.9 if momentum is None else momentum
  )
