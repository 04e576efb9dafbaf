"""Parts of a method by options: compression, overlap, outer optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from jdist import codecs, methods, reducers, server, transforms
from jdist.cli import _groups

# Codecs of the largest, of some or of the fastest entries, by their part and
# whether what they leave out is kept: then random ones must not be scaled.
_SPARSE: dict[str, Callable[[float, bool], codecs.Codec]] = {
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
  # Of symmetric levels two bits have three only.
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
# With the rates that stand for themselves where none is given.
_OUTER: dict[str, tuple[float, Callable[..., optax.GradientTransformation]]] = {
  "sgd": (1.0, lambda rate, momentum: optax.sgd(rate)),
  "momentum": (0.7, lambda rate, momentum: optax.sgd(rate, momentum)),
  "nesterov": (0.7, transforms.outer_sgd),
  "adam": (0.01, lambda rate, momentum: optax.adam(rate, b1=momentum)),
}

# Options, and the arguments of factories that they fill; the others are put
# together by the functions below.
ARGUMENTS: dict[str, tuple[str, ...]] = {
  "bits": ("bits",),
  "ratio": ("ratio", "density"),
  "rank": ("rank",),
  "correction": ("correction",),
  "delay_steps": ("delay_steps",),
  "outer_learning_rate": ("outer_learning_rate",),
  "outer_momentum": ("outer_momentum",),
}


def used(method: methods.Method, options: _groups.MeanOptions) -> set[str]:
  """The options that a method uses, beside the others that are given."""
  takes, arguments = method.takes, method.arguments
  found = {
    option for option, names in ARGUMENTS.items() if arguments & set(names)
  }
  if method.in_rounds:
    found |= {"interval", "interval_policy"}
  if "compression" in takes:
    found |= {"codec", "feedback", "reducer"}
    if options.codec in _SPARSE:
      found.add("ratio")
    if options.reducer == "power_sgd":
      found.add("rank")
  if not isinstance(options, _groups.MethodOptions):
    return found
  if "overlap" in takes:
    if method.late is None:
      found.add("overlap")
    found.add("delay_steps")
    if _is_late(method, options):
      found |= {"carry", "stream"}
  elif "stream" in takes:  # By definition.
    found.add("stream")
  if "outer" in takes:
    found.add("outer")
    if options.outer is not None:
      found.add("outer_learning_rate")
      if options.outer != "sgd":
        found.add("outer_momentum")
  return found


def arguments(
  method: methods.Method, options: _groups.MethodOptions
) -> dict[str, Any]:
  """The arguments of a method's factory that options give."""
  found: dict[str, Any] = {}
  for option, names in ARGUMENTS.items():
    if (value := getattr(options, option)) is not None:
      found |= {name: value for name in names if name in method.arguments}
  takes = method.takes
  if "compression" in takes:
    found["compression"] = compression(options)
  if "overlap" in takes:
    found["overlap"] = _overlap(method, options)
  elif "stream" in takes and options.stream:
    found["stream"] = transforms.Stream()
  if "outer" in takes and options.outer is not None:
    found.pop("outer_learning_rate", None)
    found.pop("outer_momentum", None)
    found["rule"] = _outer(options)
  return found


def compression(options: _groups.MeanOptions) -> reducers.Compression | None:
  """Returns the compression that options name; None for an exact mean."""
  name, wire = options.codec, options.reducer
  feedback = _FEEDBACKS[options.feedback or "none"]()
  reducer: reducers.Reducer
  if wire in ("power_sgd", "majority_vote"):
    if name is not None:
      raise ValueError(
        f"`--codec` must be left out with `--reducer {wire}`, which packs what "
        f"it sends in its own way, got {name}."
      )
    if wire == "majority_vote":
      reducer = reducers.MajorityVote()
    else:
      reducer = reducers.PowerSGD(2 if options.rank is None else options.rank)
    return reducers.Compression(reducer, feedback)
  codec = _codec(options)
  if codec is None:
    return None
  # Annotated as names of reducers, of which these two are wires.
  reducer = reducers.compressed(codec, wire=wire)  # type: ignore[arg-type]
  return reducers.Compression(reducer, feedback)


def message(options: _groups.MeanOptions) -> server.MessageCodec | None:
  """The codec of a server's pushes; None to send every bit."""
  codec = _codec(options)
  if codec is None:
    return None
  return server.MessageCodec(codec, _FEEDBACKS[options.feedback or "none"]())


def _codec(options: _groups.MeanOptions) -> codecs.Codec | None:
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
  if name in _SPARSE:
    feedback = _FEEDBACKS[options.feedback or "none"]()
    kept = feedback is not None and feedback.keeps_rest
    ratio = _RATIO if options.ratio is None else options.ratio
    return _SPARSE[name](ratio, kept)
  return _DENSE[name]


def _is_late(method: methods.Method, options: _groups.MethodOptions) -> bool:
  return (
    method.late is not None
    or options.overlap
    or options.delay_steps is not None
  )


def _overlap(
  method: methods.Method, options: _groups.MethodOptions
) -> transforms.Delayed | None:
  if not _is_late(method, options):
    return None
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
  """The outer optimizer; Nesterov's momentum if none is named."""
  return _outer(
    options
    if options.outer is not None
    else dataclasses.replace(options, outer="nesterov")
  )


def _outer(options: _groups.OuterOptions) -> optax.GradientTransformation:
  assert options.outer is not None
  usual, make = _OUTER[options.outer]
  rate, momentum = options.outer_learning_rate, options.outer_momentum
  if rate is not None and not 0 < rate < float("inf"):
    raise ValueError(
      f"`--outer-learning-rate` must be positive and finite, got {rate}."
    )
  if momentum is not None and not 0 <= momentum <= 1:
    raise ValueError(f"`--outer-momentum` must be in [0, 1], got {momentum}.")
  return make(
    usual if rate is None else rate, 0.9 if momentum is None else momentum
  )
