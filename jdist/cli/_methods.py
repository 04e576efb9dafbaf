"""The methods by name, built from the options of a run.

To add one: write its line in `METHODS`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jdist import collectives, methods, models, training, transforms
from jdist.cli import _options, _trained
from jdist.transforms import intervals


class Budget(NamedTuple):
  """What a method is told about the run.

  Attributes:
    num_steps: local steps of the whole run.
    warmup_steps: of the learning rate.
    learning_rate: the schedule, a function of the local step.
    steps_per_epoch: in a pass over the training set, rounded up.
  """

  num_steps: int
  warmup_steps: int
  learning_rate: optax.Schedule
  steps_per_epoch: int = 1


# In how many steps a streamed message may go; in longer rounds it has arrived
# before their end.
STREAM_STEPS = (1, 2, 4, 8, 16)
# How far the rules of `intervals` go that have a highest interval, unless the
# first one is longer.
_HIGHEST = 16
# Who uses the options that not all methods do.
_OF_ROUNDS = (
  "local_sgd", "post_local_sgd", "diloco", "msdpu", "fed_prox", "easgd",
  "scaffold", "slow_mo", "cocod", "overlap_local_sgd", "streaming_diloco",
  "sparse_loco", "muloco",
)  # fmt: skip
USED_BY: dict[str, tuple[str, ...]] = {
  "interval": _OF_ROUNDS,
  "interval_policy": _OF_ROUNDS,
  "outer_learning_rate": ("diloco", "streaming_diloco", "muloco"),
  "outer_momentum": ("diloco", "streaming_diloco", "muloco"),
  "correction": ("msdpu",),
  "carry": ("msdpu",),
  "delay_steps": ("msdpu",),
  "stream": ("msdpu",),
  "bits": ("qsgd", "sparse_loco", "muloco"),
  "ratio": ("topk_sgd", "dgc", "sparse_loco"),
  "rank": ("powersgd",),
  "predictor": ("mp2",),
  "nowcasters": ("wnn",),
  "nowcast_steps": ("wnn",),
}


class Task(NamedTuple):
  """What a method's line is given.

  Attributes:
    inner: the worker's optimizer.
    options: of the run.
    budget: of the run.
    axis: the workers' axis.
    model: what is trained; None where only methods are built that do not ask.
  """

  inner: optax.GradientTransformation
  options: _options.Common
  budget: Budget
  axis: collectives.Axis
  model: models.Model | None = None

  def interval(self, default: str = "fixed") -> intervals.IntervalPolicy:
    """The interval policy; the last round always ends with the run."""
    return _interval(self.options, self.budget, default)

  def given(self, *names: str) -> dict[str, Any]:
    """Those options that are given; of the others a method knows better."""
    return {
      name: value
      for name in names
      if (value := getattr(self.options, name)) is not None
    }

  def without_momentum(self) -> optax.GradientTransformation:
    """SGD for a method whose momentum is the workers' own."""
    plain = dataclasses.replace(self.options, optimizer="sgd", momentum=0.0)
    return optimizer_of(plain, self.budget)


Build = Callable[[Task], optax.GradientTransformationExtraArgs]


def _msdpu(task: Task) -> optax.GradientTransformationExtraArgs:
  return methods.msdpu(
    task.inner,
    task.interval("msdpu"),
    task.budget.learning_rate,
    axis=task.axis,
    correction=task.options.correction,
    warmup_steps=task.budget.warmup_steps,
    overlap=transforms.Delayed(
      task.options.delay_steps,
      carry=task.options.carry,
      stream=transforms.Stream() if task.options.stream else None,
    ),
  )


def _scaffold(task: Task) -> optax.GradientTransformationExtraArgs:
  # Behind a momentum progress is longer, and control variates would be too.
  factor = 1.0
  if task.options.optimizer == "sgd":
    factor = 1.0 / (1.0 - task.options.momentum)
  return methods.scaffold(
    task.inner,
    task.interval(),
    lambda step: factor * task.budget.learning_rate(step),
    axis=task.axis,
  )


def _streaming_diloco(task: Task) -> optax.GradientTransformationExtraArgs:
  interval, rule = task.options.interval, task.options.interval_policy
  if rule not in ("method", "fixed"):
    raise ValueError(
      "`--interval-policy` must be fixed for streaming_diloco, whose fragments "
      f"take their turns at fixed steps, got {rule}. Leave it out, or take "
      "diloco."
    )
  return methods.streaming_diloco(
    task.inner,
    interval,
    min(4, interval),
    task.options.outer_learning_rate,
    task.options.outer_momentum,
    axis=task.axis,
    delay_steps=min(1, interval - 1),
  )


def _one_bit_adam(task: Task) -> optax.GradientTransformationExtraArgs:
  budget = task.budget
  return methods.one_bit_adam(
    budget.learning_rate,
    # The paper's 15 to 20 % of the run, and all of the rate's warm-up.
    max(1, budget.warmup_steps, budget.num_steps // 6),
    axis=task.axis,
    weight_decay=task.options.weight_decay,
  )


def _dgc(task: Task) -> optax.GradientTransformationExtraArgs:
  return methods.dgc(
    task.without_momentum(),
    momentum=task.options.momentum,
    axis=task.axis,
    nesterov=True,
    steps_per_phase=task.budget.warmup_steps or None,
    **task.given("ratio"),
  )


def _sparse_loco(task: Task) -> optax.GradientTransformationExtraArgs:
  given = task.given("bits")
  if task.options.ratio is not None:
    given["density"] = task.options.ratio
  return methods.sparse_loco(
    task.inner, task.interval(), axis=task.axis, **given
  )


def _muloco(task: Task) -> optax.GradientTransformationExtraArgs:
  return methods.muloco(
    task.budget.learning_rate,
    task.interval(),
    task.options.outer_learning_rate,
    task.options.outer_momentum,
    axis=task.axis,
    weight_decay=task.options.weight_decay,
    **task.given("bits"),
  )


def _mp2(task: Task) -> optax.GradientTransformationExtraArgs:
  assert task.model is not None
  return _trained.mp2(task.inner, task.options, task.model, task.axis)


METHODS: dict[str, Build] = {
  "ssgd": lambda t: methods.ssgd(t.inner, axis=t.axis),
  "local_sgd": lambda t: methods.local_sgd(t.inner, t.interval(), axis=t.axis),
  "post_local_sgd": lambda t: methods.post_local_sgd(
    t.inner, t.interval(), t.budget.num_steps // 2, axis=t.axis
  ),
  "diloco": lambda t: methods.diloco(
    t.inner,
    t.interval(),
    t.options.outer_learning_rate,
    t.options.outer_momentum,
    axis=t.axis,
  ),
  "msdpu": _msdpu,
  "fed_prox": lambda t: methods.fed_prox(t.inner, t.interval(), axis=t.axis),
  "easgd": lambda t: methods.easgd(t.inner, t.interval(), axis=t.axis),
  "scaffold": _scaffold,
  "slow_mo": lambda t: methods.slow_mo(
    t.inner, t.interval(), t.budget.learning_rate, axis=t.axis
  ),
  "cocod": lambda t: methods.cocod(t.inner, t.interval(), axis=t.axis),
  "overlap_local_sgd": lambda t: methods.overlap_local_sgd(
    t.inner, t.interval(), axis=t.axis
  ),
  "od_sgd": lambda t: methods.od_sgd(
    t.inner, t.budget.learning_rate, axis=t.axis
  ),
  "streaming_diloco": _streaming_diloco,
  "qsgd": lambda t: methods.qsgd(t.inner, axis=t.axis, **t.given("bits")),
  "terngrad": lambda t: methods.terngrad(t.inner, axis=t.axis),
  "signsgd": lambda t: methods.signsgd(
    t.without_momentum(), t.options.momentum, axis=t.axis
  ),
  "ef_signsgd": lambda t: methods.ef_signsgd(t.inner, axis=t.axis),
  "one_bit_adam": _one_bit_adam,
  "topk_sgd": lambda t: methods.topk_sgd(
    t.inner, axis=t.axis, **t.given("ratio")
  ),
  "dgc": _dgc,
  "powersgd": lambda t: methods.powersgd(t.inner, t.options.rank, axis=t.axis),
  "demo": lambda t: methods.demo(t.without_momentum(), axis=t.axis),
  "sparse_loco": _sparse_loco,
  "muloco": _muloco,
  "mp2": _mp2,
  "wnn": lambda t: _trained.wnn(
    t.inner, t.options, t.budget.steps_per_epoch, t.axis
  ),
}


def check_method(option: str, name: str) -> None:
  """Raises a ValueError unless there is such a method."""
  if name not in METHODS:
    raise ValueError(
      f"`{option}` must be of {', '.join(METHODS)}, got {name!r}."
    )


def check_used(options: _options.Common, methods: Sequence[str]) -> None:
  """Raises a ValueError when an option is given that no method uses.

  What is as the preset has it is not given: presets are for all methods.
  """
  usual = _options.with_preset(type(options), options.preset)
  for name, users in USED_BY.items():
    value = getattr(options, name)
    if value != getattr(usual, name) and not set(users) & set(methods):
      raise ValueError(
        f"`--{name.replace('_', '-')}` must be left out for "
        f"{', '.join(methods)}, which does not use it, got {value}. It is of "
        f"{', '.join(users)}."
      )


def build_method(
  name: str,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
  model: models.Model | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds a method's chain around the worker's optimizer."""
  inner = optimizer_of(options, budget)
  return METHODS[name](Task(inner, options, budget, axis, model))


def can_be_told(state: training.TrainState) -> bool:
  """Whether a host may say which steps end the rounds of a run.

  Args:
    state: its first one, arrays or shapes.
  """
  ahead = jax.eval_shape(transforms.rounds_ahead, state.opt_state)
  return ahead is not None


def optimizer_of(
  options: _options.Common, budget: Budget
) -> optax.GradientTransformation:
  rate = budget.learning_rate
  if options.optimizer == "adamw":
    return optax.adamw(rate, weight_decay=options.weight_decay)
  momentum = optax.trace(options.momentum, nesterov=True)
  return optax.chain(
    momentum if options.momentum else optax.identity(),
    optax.add_decayed_weights(options.weight_decay)
    if options.weight_decay
    else optax.identity(),
    optax.scale_by_learning_rate(rate),
  )


def _interval(
  options: _options.Common, budget: Budget, default: str = "fixed"
) -> intervals.IntervalPolicy:
  """The interval policy; the last round always ends with the run."""
  rule, first = options.interval_policy, options.interval
  if rule == "method":
    rule = default  # type: ignore[assignment]
  rate = budget.learning_rate
  if rule == "fixed":
    policy = intervals.fixed(first)
  elif rule == "msdpu":
    policy = intervals.msdpu(first, rate, max_interval=max(first, _HIGHEST))
  elif rule == "adacomm":
    policy = intervals.adacomm(
      first,
      max(1, budget.num_steps // 10),
      rate,
      max_interval=max(first, _HIGHEST),
    )
  else:
    # So that the interval begins to grow in the last third of a cosine.
    highest = float(rate(budget.warmup_steps))
    policy = intervals.qsr(rate, 0.5 * highest * first**0.5, first)
  return intervals.ending_at(budget.num_steps, policy)


def check_rate(peak: float) -> None:
  """Raises a ValueError unless a learning rate can be one."""
  if not 0 < peak < math.inf:
    raise ValueError(
      f"`--learning-rate` must be positive and finite, got {peak}."
    )


def check_budget(options: _options.Common) -> None:
  """Raises a ValueError when the length of a run or a round is wrong."""
  if options.steps is None and not options.epochs > 0:
    raise ValueError(f"`--epochs` must be positive, got {options.epochs}.")
  if options.steps is not None and options.steps < 1:
    raise ValueError(f"`--steps` must be at least 1, got {options.steps}.")
  if options.interval < 1:
    raise ValueError(
      f"`--interval` must be at least 1, got {options.interval}; 1 is a round "
      "every step."
    )
  if options.warmup_epochs < 0:
    raise ValueError(
      f"`--warmup-epochs` must not be negative, got {options.warmup_epochs}."
    )


def make_budget(
  options: _options.Common, peak: float, steps_per_epoch: float
) -> Budget:
  """The learning rate's schedule and the length of a run."""
  check_rate(peak)
  num_steps = options.steps or max(1, round(options.epochs * steps_per_epoch))
  warmup = min(round(options.warmup_epochs * steps_per_epoch), num_steps // 2)
  if options.schedule == "cosine":
    # Not quite zero at the end: rules that divide by the rate stay finite.
    schedule = optax.warmup_cosine_decay_schedule(
      peak / 10, peak, warmup, max(num_steps, warmup + 1), peak / 100
    )
  else:
    schedule = optax.schedules.warmup_constant_schedule(peak / 10, peak, warmup)
  return Budget(num_steps, warmup, schedule, math.ceil(steps_per_epoch))
