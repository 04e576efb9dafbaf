"""The methods of the registry, built from the options of a run."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import optax

from jdist import collectives, methods, models, transforms
from jdist.cli import _composition, _groups, _options, _trained
from jdist.transforms import intervals

# Numbers of steps into which a streamed message may be split; each one is a
# compiled program.  In longer rounds the message is complete before their end.
STREAM_STEPS = (1, 2, 4, 8, 16)
# Longest interval of policies that have one, unless the first one is longer.
_HIGHEST = 16
# Methods that have left the library.
_MOVED = {
  "wnn": "Weight nowcasters are in `experiments/mp2`, whose `run.py` trains "
  "with them."
}
# Default of `optax.adamw`, which has no name there.
_ADAM_B2 = 0.999


def check(option: str, options: _groups.Common, names: Sequence[str]) -> None:
  """Raises a ValueError unless methods exist and use all given options."""
  for name in names:
    if name in _MOVED:
      raise ValueError(f"`{option}` must not be {name}. {_MOVED[name]}")
  known = methods.registry
  _options.check_names(option, names, "methods", known)
  takes = functools.partial(_composition.takes, options)
  _options.check_used(options, names, known, takes)


def common(options: Any, **more: Any) -> _groups.Common:
  """Returns the options of a run, as far as another command has them."""
  fields = ("interval", *_groups.MeanOptions.__dataclass_fields__)
  return _groups.Common(
    **{name: getattr(options, name) for name in fields}, **more
  )


def build_method(
  name: str,
  options: _groups.Common,
  run: methods.Run,
  axis: collectives.Axis,
  model: models.Model | None = None,
  *,
  networks: Mapping[str, Any] | None = None,
  predicted_steps: int | None = None,
  **fixed: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a method's chain around the worker's optimizer.

  Args:
    name: The method.
    options: The options of the run.
    run: The length of the run and its learning rates.
    axis: The axis of the workers.
    model: The model, which trained networks must suit.
    networks: Arguments from a trained network; None loads it if needed.
    predicted_steps: Delay of a pipeline's gradients for which the weights are
      predicted; None predicts none.
    **fixed: Arguments of the factory that no option fills.
  """
  method = methods.registry[name]
  given = _composition.arguments(method, options)
  # The policy depends on the run, and not on an option alone.
  if method.in_rounds:
    given["interval"] = _interval(name, method, options, run)
  if name == _trained.METHOD:
    given |= networks or _trained.arguments(options, model)
  # A method with its own momentum would apply it twice otherwise.
  inner = optimizer_of(options, run, plain=method.own_momentum)
  if predicted_steps is not None:
    adam = options.optimizer == "adamw" and not method.own_momentum
    inner = transforms.predict_weights(
      inner, predicted_steps, b2=_ADAM_B2 if adam else None
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
  options: _groups.Common,
  run: methods.Run,
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
  if rule == "growth" and options.schedule == "constant":
    raise ValueError(
      f"`--schedule` must be cosine for {name}, whose rounds grow as the rate "
      "falls, got constant: every round would have one step. Or take "
      "`--interval-policy fixed`."
    )
  policies = {
    "fixed": lambda: intervals.fixed(first),
    "growth": lambda: intervals.growth(rate, max_interval=first),
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
    schedule = optax.schedules.warmup_constant_schedule(peak / 10, peak, warmup)
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
    num_steps,
    warmup_steps,
    learning_rate,
    steps_per_epoch,
    options.interval,
    options.optimizer,
    options.momentum,
    options.weight_decay,
  )
