"""The methods of the registry, built from the options of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from jdist import collectives, methods, models, transforms
from jdist.cli import _composition, _groups, _options, _trained
from jdist.transforms import intervals

# In how many steps a streamed message may go; in longer rounds it has arrived
# before their end.
STREAM_STEPS = (1, 2, 4, 8, 16)
# How far the rules of `intervals` go that have a highest interval, unless the
# first one is longer.
_HIGHEST = 16
# Methods that have left the library.
_MOVED = {
  "wnn": "Weight nowcasters are in `experiments/mp2`, whose `run.py` trains "
  "with them."
}
# Optax's own.
_ADAM_B2 = 0.999
# What methods read of a run that no option of theirs is.
OF_SOME = (
  *_groups.MethodOptions.__dataclass_fields__,
  "predictor",
)


def entries() -> Mapping[str, methods.Method]:
  """All methods by name."""
  return methods.registry


def summaries() -> dict[str, str]:
  """A line about each method."""
  return {name: method.summary for name, method in entries().items()}


def check_methods(option: str, names: Sequence[str]) -> None:
  """Raises a ValueError unless there are such methods, once each."""
  _options.check_different(option, names, "methods")
  for name in names:
    if name not in entries():
      moved = f" {_MOVED[name]}" if name in _MOVED else ""
      raise ValueError(
        f"`{option}` must be of {', '.join(entries())}, got {name!r}.{moved}"
      )


def check(option: str, options: _options.Common, names: Sequence[str]) -> None:
  """Raises a ValueError unless methods have all they need and use all given."""
  check_methods(option, names)
  _trained.check_given(options, names)
  check_used(options, names)


def check_used(options: _options.Options, names: Sequence[str]) -> None:
  """Raises a ValueError that names all options that no method uses.

  What is as the preset has it is not given: presets are for all methods.
  """
  preset = getattr(options, "preset", "digits")
  usual = _options.with_preset(type(options), preset)
  found = {name: _used(name, options) for name in entries()}
  used = set().union(*(found[name] for name in names))
  ignored = [
    name
    for name in OF_SOME
    if name not in used
    and hasattr(options, name)
    and getattr(options, name) != getattr(usual, name)
  ]
  if not ignored:
    return
  told = "; ".join(
    f"`{_options.word(name)}`, got {getattr(options, name)}, is of "
    f"{', '.join(method for method, of in found.items() if name in of)}"
    f"{_WITH.get(name, '')}"
    for name in ignored
  )
  words = " and ".join(f"`{_options.word(name)}`" for name in ignored)
  raise ValueError(
    f"{words} must be left out "
    f"for {', '.join(names)}, which {'do' if len(names) > 1 else 'does'} not "
    f"use {'them' if len(ignored) > 1 else 'it'}: {told}."
  )


# Which other methods use by giving another option.
_WITH = dict.fromkeys(("carry", "stream"), ", and others with `--overlap`")


def _used(name: str, options: Any) -> set[str]:
  network = _trained.OPTIONS.get(name, ())
  return _composition.used(entries()[name], options) | set(network)


def build_method(
  name: str,
  options: _options.Common,
  run: methods.Run,
  axis: collectives.Axis,
  model: models.Model | None = None,
  networks: Mapping[str, Any] | None = None,
  predicted_steps: int | None = None,
  **fixed: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a method's chain around the worker's optimizer.

  Trained networks that it needs are loaded, unless they come in `networks`.
  `predicted_steps` are those by which a pipeline's gradients come late, None
  not to predict.  `fixed` are arguments that no option changes.
  """
  method = entries()[name]
  given = _composition.arguments(method, options)
  if method.in_rounds:
    given["interval"] = _interval(name, method, options, run)
  if name in _trained.NEEDS:
    if networks is None:
      networks = _trained.arguments(name, options, model)
    given |= networks
  given |= fixed
  inner = optimizer_of(options, run, plain=method.own_momentum)
  if predicted_steps is not None:
    adam = options.optimizer == "adamw" and not method.own_momentum
    inner = transforms.predict_weights(
      inner, predicted_steps, b2=_ADAM_B2 if adam else None
    )
  built = method.build(inner, run, axis=axis, **given)
  if not options.skip_nonfinite:
    return built
  if isinstance(built, transforms.UpdateFirst):
    raise ValueError(
      f"`--skip-nonfinite` must be left out for {name}, whose updates come a "
      "step later: nothing can stand in front of it."
    )
  return optax.chain(transforms.skip_nonfinite(axis), built)


def optimizer_of(
  options: _options.Common, run: methods.Run, *, plain: bool = False
) -> optax.GradientTransformation:
  """Each worker's optimizer; plain SGD for a method with its own momentum."""
  rate = run.learning_rate
  if options.optimizer == "adamw" and not plain:
    return optax.adamw(rate, weight_decay=options.weight_decay)
  momentum = 0.0 if plain else options.momentum
  return optax.chain(
    optax.trace(momentum, nesterov=True) if momentum else optax.identity(),
    optax.add_decayed_weights(options.weight_decay)
    if options.weight_decay
    else optax.identity(),
    optax.scale_by_learning_rate(rate),
  )


def _interval(
  name: str,
  method: methods.Method,
  options: _options.Common,
  run: methods.Run,
) -> int | intervals.IntervalPolicy:
  """The interval policy; the last round always ends with the run."""
  rule, first = options.interval_policy, options.interval
  if method.interval_policy is None:
    if rule not in ("method", "fixed"):
      raise ValueError(
        f"`--interval-policy` must be fixed for {name}, whose fragments take "
        f"their turns at fixed steps, got {rule}. Leave it out, or take diloco."
      )
    return first
  if rule == "method":
    rule = method.interval_policy  # type: ignore[assignment]
  policy: intervals.IntervalPolicy
  rate, highest = run.learning_rate, max(first, _HIGHEST)
  if rule == "fixed":
    policy = intervals.fixed(first)
  elif rule == "growth":
    if options.schedule == "constant":
      raise ValueError(
        f"`--schedule` must be cosine for {name}, whose rounds grow as the "
        "rate falls, got constant: every round would have one step. Or take "
        "`--interval-policy fixed`."
      )
    policy = intervals.growth(rate, max_interval=first)
  elif rule == "msdpu":
    policy = intervals.msdpu(first, rate, max_interval=highest)
  elif rule == "adacomm":
    period = max(1, run.num_steps // 10)
    policy = intervals.adacomm(first, period, rate, max_interval=highest)
  else:
    # So that the interval begins to grow in the last third of a cosine.
    peak = float(rate(run.warmup_steps))
    policy = intervals.qsr(
      rate, 0.5 * peak * first**0.5, first, warmup_steps=run.warmup_steps
    )
  return intervals.ending_at(run.num_steps, policy)


def check_rate(peak: float) -> None:
  """Raises a ValueError unless a learning rate can be one."""
  if not 0 < peak < math.inf:
    raise ValueError(
      f"`--learning-rate` must be positive and finite, got {peak}."
    )


def make_budget(
  options: _options.Common, peak: float, steps_per_epoch: float
) -> methods.Run:
  """The run that methods are built for: its length and its rates."""
  check_rate(peak)
  length = num_steps(options.epochs, options.steps, steps_per_epoch)
  warmup = min(round(options.warmup_epochs * steps_per_epoch), length // 2)
  if options.schedule == "cosine":
    # Not quite zero at the end: rules that divide by the rate stay finite.
    schedule = optax.warmup_cosine_decay_schedule(
      peak / 10, peak, warmup, max(length, warmup + 1), peak / 100
    )
  else:
    schedule = optax.schedules.warmup_constant_schedule(peak / 10, peak, warmup)
  return run_of(options, length, warmup, schedule, math.ceil(steps_per_epoch))


def num_steps(epochs: float, steps: int | None, steps_per_epoch: float) -> int:
  """Returns the length of a run in steps, of which `steps` counts if given."""
  return steps or max(1, round(epochs * steps_per_epoch))


def run_of(
  options: _options.Common,
  num_steps: int,
  warmup_steps: int,
  learning_rate: optax.Schedule,
  steps_per_epoch: int = 1,
) -> methods.Run:
  """A run of a stated length, otherwise as the options have it."""
  return methods.Run(
    num_steps,
    warmup_steps,
    learning_rate,
    steps_per_epoch,
    options.interval,
    options.optimizer,
    options.momentum,
    options.weight_decay,
  )
