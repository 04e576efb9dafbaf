"""The methods of the registry and their parts, built from a run's options."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING

import optax

from jdist import checks, codecs, collectives, methods, reducers, transforms
from jdist.cli import _groups, _options
from jdist.transforms import intervals

if TYPE_CHECKING:
  from jdist import models

# The method that needs a trained network, which `_trained` loads.
TRAINED = "mp2"
# Numbers of steps into which a streamed message may be split; each one is a
# compiled program.  In longer rounds the message is complete before their end.
STREAM_STEPS = (1, 2, 4, 8, 16)
# Longest interval of policies that have one, unless the first one is longer.
_HIGHEST = 16
# Arguments of factories that several options make together.
_PARTS = (
  "compression", "overlap", "stream", "rule", "interval", "predictor_params",
)  # fmt: skip


def check(option: str, options: Any, names: Sequence[str]) -> None:
  """Raises a ValueError unless methods exist and use all given options."""
  known = methods.registry
  _options.check_names(option, names, "methods", known)
  run = options if isinstance(options, _groups.Common) else common(options)
  _options.check_used(options, names, known, functools.partial(takes, run))


def takes(options: _groups.Common, name: str) -> set[str]:
  """Returns the arguments of a method that can be filled, given the others.

  "late" stands for the settings of an overlap, where there is one.
  """
  method = methods.registry[name]
  found = set(method.arguments)
  if not method.in_rounds:
    found.discard("interval")
  rule = options.interval_policy
  if (method.interval_policy if rule == "method" else rule) == "growth":
    found.add("growth")
  if not method.own_momentum and {"optimizer", "inner"} & found:
    found.add("worker_optimizer")
  found |= {"mu"} if "momentum" in method.from_run else set()
  if "compression" in found:
    found |= of_compression(options)
  if _is_late(method, options):
    found.add("late")
  if method.late is not None:
    found.discard("overlap")  # It is late by definition.
  if "rule" in found and options.outer is not None:
    found -= {"outer_learning_rate", "outer_momentum"}  # Of its own rule.
    found |= of_outer(options)
  return found


def of_compression(options: Any) -> frozenset[str]:
  """Returns the arguments of the codec and of the reducer that are named."""
  named = (("codecs", "codec"), ("reducers", "reducer"))
  parts = [methods.PARTS[x].get(getattr(options, y, "")) for x, y in named]
  return frozenset().union(*map(_arguments_of, filter(callable, parts)))


def of_outer(options: Any) -> frozenset[str]:
  """Returns the arguments of the outer optimizer that is named."""
  name = getattr(options, "outer", None) or "nesterov"  # `simulate` has none.
  return _arguments_of(methods.PARTS["rules"][name])


def _arguments_of(part: Any) -> frozenset[str]:
  """Returns the names of a factory's arguments."""
  return frozenset(inspect.signature(part).parameters if callable(part) else ())


def _make(kind: str, name: str, options: Any, **more: Any) -> Any:
  """Builds a part with those options of a run that its arguments name."""
  part, given = methods.PARTS[kind][name], vars(options) | more
  if not callable(part):
    return part  # It is finished.
  takes = {x for x in _arguments_of(part) if given.get(x) is not None}
  return part(**{x: given[x] for x in takes})


def filled(options: Any) -> dict[str, Any]:
  """Returns the arguments of factories that options with a value fill."""
  return {
    argument: value
    for name, field in options.__dataclass_fields__.items()
    if "option" in field.metadata
    and (value := getattr(options, name)) is not None
    for argument in field.metadata["option"].fills
  }


def _arguments(
  method: methods.Method, options: _groups.Common
) -> dict[str, Any]:
  """Returns the arguments of a method's factory that options fill."""
  found = {
    name: value
    for name, value in filled(options).items()
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
  feedback = _feedback(options)
  if options.reducer in methods.PARTS["reducers"]:
    if options.codec is not None:
      raise ValueError(
        f"`--codec` must be left out with `--reducer {options.reducer}`, which "
        f"has its own encoding, got {options.codec}."
      )
    reducer = _make("reducers", options.reducer, options)
    return reducers.Compression(reducer, feedback)
  if (codec := _codec(options, feedback)) is None:
    return None
  # Of all reducers' names two remain here.
  reducer = reducers.compressed(codec, wire=options.reducer)  # type: ignore[arg-type]
  return reducers.Compression(reducer, feedback)


def message(options: _groups.MeanOptions) -> reducers.MessageCodec | None:
  """Returns the codec of a server's pushes; None to send them exactly."""
  feedback = _feedback(options)
  codec = _codec(options, feedback)
  return None if codec is None else reducers.MessageCodec(codec, feedback)


def edge_codec(options: Any) -> codecs.Codec | None:
  """Returns the codec of messages between stages; None to send them exactly."""
  name = options.edge_codec
  return name and _make("codecs", name, options, scaled=False)


def _feedback(options: _groups.MeanOptions) -> reducers.Feedback | None:
  if options.feedback in (None, "none"):
    return None
  return _make("feedbacks", options.feedback, options)


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
  # Random entries must not be scaled up where a feedback keeps the rest.
  kept = getattr(feedback, "keeps_rest", False)
  return _make("codecs", name, options, scaled=not kept)


def _is_late(method: methods.Method, options: _groups.MethodOptions) -> bool:
  given = options.overlap or options.delay_steps is not None
  return "overlap" in method.arguments and (given or method.late is not None)


def _overlap(
  method: methods.Method, options: _groups.MethodOptions
) -> transforms.Delayed:
  given: dict[str, Any] = {"steps": options.delay_steps, "carry": options.carry}
  given["stream"] = transforms.Stream() if options.stream else None
  chosen = {x: value for x, value in given.items() if value is not None}
  return dataclasses.replace(method.late or transforms.Delayed(), **chosen)


def outer_optimizer(
  options: _groups.OuterOptions,
) -> optax.GradientTransformation:
  """Returns the outer optimizer, by default with Nesterov's momentum."""
  return _make("rules", options.outer or "nesterov", options)


def common(options: Any, **more: Any) -> _groups.Common:
  """Returns the options of a run, as far as another command has them."""
  fields = ("interval", *_groups.MeanOptions.__dataclass_fields__)
  return _groups.Common(**{x: getattr(options, x) for x in fields}, **more)


def build_method(
  name: str,
  options: _groups.Common,
  run: methods.Run,
  axis: collectives.Axis,
  model: "models.Model | None" = None,
  *,
  networks: Mapping[str, Any] | None = None,
  predicted_steps: int | None = None,
  **fixed: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a method's chain around the worker's optimizer.

  A trained network must suit `model`, and is loaded unless `networks` has its
  arguments. Weights are predicted for gradients that are late by
  `predicted_steps`, and `fixed` arguments are filled by no option.
  """
  method = methods.registry[name]
  given = _arguments(method, options)
  # The policy depends on the run, and not on an option alone.
  if method.in_rounds:
    given["interval"] = _interval(name, method, options, run)
  if name == TRAINED:
    # Imported here, because a server's commands need no networks.
    from jdist.cli import _trained

    given |= networks or _trained.arguments(options, model)
  # A method with its own momentum would apply it twice otherwise.
  inner = optimizer_of(options, run, plain=method.own_momentum)
  if predicted_steps is not None:
    adam = options.optimizer == "adamw" and not method.own_momentum
    # Optax's default has no name there.
    inner = transforms.predict_weights(
      inner, predicted_steps, b2=0.999 if adam else None
    )
  built = method.build(inner, run, axis=axis, **given | fixed)
  if not options.skip_nonfinite:
    return built
  if isinstance(built, transforms.UpdateFirst):
    raise ValueError(
      f"`--skip-nonfinite` must be left out for {name}, which applies updates "
      "before gradients are computed, so that nothing can be in front of it."
    )
  return optax.chain(transforms.skip_nonfinite(axis), built)


def optimizer_of(
  options: _groups.Common, run: methods.Run, *, plain: bool = False
) -> optax.GradientTransformation:
  """Returns a worker's optimizer; plain SGD if momentum is the method's own."""
  rate = run.learning_rate
  if options.optimizer == "adamw" and not plain:
    return optax.adamw(rate, weight_decay=options.weight_decay)
  momentum, decay = 0.0 if plain else options.momentum, options.weight_decay
  return optax.chain(
    optax.trace(momentum, nesterov=True) if momentum else optax.identity(),
    optax.add_decayed_weights(decay) if decay else optax.identity(),
    optax.scale_by_learning_rate(rate),
  )


def _interval(
  name: str, method: methods.Method, options: _groups.Common, run: methods.Run
) -> int | intervals.IntervalPolicy:
  """Returns the interval's policy, whose last round ends with the run."""
  rule, first = options.interval_policy, options.interval
  if method.interval_policy is None:
    if rule not in ("method", "fixed"):
      raise ValueError(
        f"`--interval-policy` must be fixed for {name}, whose fragments take "
        f"turns at fixed steps, got {rule}. Leave it out, or take diloco."
      )
    return first
  if rule == "method":
    rule = method.interval_policy  # type: ignore[assignment]
  rate, longest = run.learning_rate, max(first, _HIGHEST)
  most = {"fixed": first, "growth": first, "qsr": math.inf}.get(rule, longest)
  remedy = "Leave it out, or take longer rounds by `--interval`."
  checks.check_int("--delay-steps", options.delay_steps or 0, 0, most, remedy)
  if rule == "growth" and options.schedule == "constant":
    raise ValueError(
      f"`--schedule` must be cosine for {name}, whose rounds grow as the rate "
      "falls, got constant: every round would have one step. Or take "
      "`--interval-policy fixed`."
    )
  policies = {
    "fixed": lambda: intervals.fixed(first),
    "growth": lambda: intervals.growth(
      rate, start=options.growth_start, max_interval=first
    ),
    "msdpu": lambda: intervals.msdpu(first, rate, max_interval=longest),
    "adacomm": lambda: intervals.adacomm(
      first, max(1, run.num_steps // 10), rate, max_interval=longest
    ),
    # The rule exceeds the first interval once the rate is below half of its
    # peak, so that rounds grow in the second half of a cosine.
    "qsr": lambda: intervals.qsr(
      rate,
      0.5 * float(rate(run.warmup_steps)) * first**0.5,
      first,
      warmup_steps=run.warmup_steps,
    ),
  }
  return intervals.ending_at(run.num_steps, policies[rule]())


def make_budget(
  options: _groups.Common, peak: float, steps_per_epoch: float
) -> methods.Run:
  """Returns the run for which methods are built: its length and its rates."""
  length = num_steps(options.epochs, options.steps, steps_per_epoch)
  warmup = min(round(options.warmup_epochs * steps_per_epoch), length // 2)
  if options.schedule == "cosine":
    # Ends above zero, because interval policies divide by the rate.
    schedule = optax.warmup_cosine_decay_schedule(
      peak / 10, peak, warmup, max(length, warmup + 1), peak / 100
    )
  else:
    # Without a warm-up Optax's schedule stays at its first value.
    first = peak / 10 if warmup else peak
    schedule = optax.schedules.warmup_constant_schedule(first, peak, warmup)
  return run_of(options, length, warmup, schedule, math.ceil(steps_per_epoch))


def num_steps(epochs: float, steps: int | None, steps_per_epoch: float) -> int:
  """Returns the length of a run in steps, of which `steps` counts if given."""
  return steps or max(1, round(epochs * steps_per_epoch))


def run_of(
  options: _groups.Common,
  num_steps: int,
  warmup_steps: int,
  learning_rate: optax.Schedule,
  steps_per_epoch: int = 1,
) -> methods.Run:
  """Returns a run of a given length, otherwise with the values of options."""
  return methods.Run(
    num_steps, warmup_steps, learning_rate, steps_per_epoch, options.interval,
    options.optimizer, options.momentum, options.weight_decay,
  )  # fmt: skip
