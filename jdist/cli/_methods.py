"""The methods by name, built from the options of a run.

To add one: write its line in `METHODS`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from jdist import collectives, transforms
from jdist.cli import _options
from jdist.transforms import intervals


class Budget(NamedTuple):
  """What a method is told about the run.

  Attributes:
    num_steps: local steps of the whole run.
    warmup_steps: of the learning rate.
    learning_rate: the schedule, a function of the local step.
  """

  num_steps: int
  warmup_steps: int
  learning_rate: optax.Schedule


# In how many steps a streamed message may go; the interval is 16 at most.
STREAM_STEPS = (1, 2, 4, 8, 16)

Build = Callable[
  [
    optax.GradientTransformation,
    _options.Common,
    Budget,
    collectives.Axis,
  ],
  optax.GradientTransformationExtraArgs,
]


def _ssgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del options, budget
  return transforms.ssgd(inner, axis=axis)


def _local_sgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.local_sgd(inner, _interval(options, budget), axis=axis)


def _post_local_sgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.post_local_sgd(
    inner, _interval(options, budget), budget.num_steps // 2, axis=axis
  )


def _diloco(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.diloco(
    inner,
    _interval(options, budget),
    options.outer_learning_rate,
    options.outer_momentum,
    axis=axis,
  )


def _msdpu(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.msdpu(
    inner,
    _interval(options, budget, default="msdpu"),
    budget.learning_rate,
    axis=axis,
    correction=options.correction,
    carry=options.carry,
    warmup_steps=budget.warmup_steps,
    stream=transforms.Stream() if options.stream else None,
  )


def _fed_prox(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.fed_prox(inner, _interval(options, budget), axis=axis)


def _easgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.easgd(inner, _interval(options, budget), axis=axis)


def _cocod(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.cocod(inner, _interval(options, budget), axis=axis)


def _overlap_local_sgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  interval = _interval(options, budget)
  return transforms.overlap_local_sgd(inner, interval, axis=axis)


def _scaffold(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  # Behind a momentum progress is longer, and control variates would be too.
  factor = 1.0
  if options.optimizer == "sgd":
    factor = 1.0 / (1.0 - options.momentum)
  return transforms.scaffold(
    inner,
    _interval(options, budget),
    lambda step: factor * budget.learning_rate(step),
    axis=axis,
  )


def _slow_mo(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.slow_mo(
    inner, _interval(options, budget), budget.learning_rate, axis=axis
  )


def _od_sgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del options
  return transforms.od_sgd(inner, budget.learning_rate, axis=axis)


def _streaming_diloco(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  return transforms.streaming_diloco(
    inner,
    options.interval,
    min(4, options.interval),
    options.outer_learning_rate,
    options.outer_momentum,
    axis=axis,
    delay_steps=min(1, options.interval - 1),
  )


def _qsgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del budget
  return transforms.qsgd(inner, axis=axis, **_given(options, "bits"))


def _terngrad(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del options, budget
  return transforms.terngrad(inner, axis=axis)


def _signsgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del inner
  plain = _without_momentum(options, budget)
  return transforms.signsgd(plain, options.momentum, axis=axis)


def _ef_signsgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del options, budget
  return transforms.ef_signsgd(inner, axis=axis)


def _one_bit_adam(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del inner
  return transforms.one_bit_adam(
    budget.learning_rate,
    # The paper's 15 to 20 % of the run, and all of the rate's warm-up.
    max(1, budget.warmup_steps, budget.num_steps // 6),
    axis=axis,
    weight_decay=options.weight_decay,
  )


def _topk_sgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del budget
  return transforms.topk_sgd(inner, axis=axis, **_given(options, "ratio"))


def _dgc(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del inner
  return transforms.dgc(
    _without_momentum(options, budget),
    momentum=options.momentum,
    axis=axis,
    nesterov=True,
    steps_per_phase=budget.warmup_steps or None,
    **_given(options, "ratio"),
  )


def _powersgd(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del budget
  return transforms.powersgd(inner, options.rank, axis=axis)


def _demo(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del inner
  return transforms.demo(_without_momentum(options, budget), axis=axis)


def _sparse_loco(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  given = _given(options, "bits")
  if options.ratio is not None:
    given["density"] = options.ratio
  interval = _interval(options, budget)
  return transforms.sparse_loco(inner, interval, axis=axis, **given)


def _muloco(
  inner: optax.GradientTransformation,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  del inner
  return transforms.muloco(
    budget.learning_rate,
    _interval(options, budget),
    options.outer_learning_rate,
    options.outer_momentum,
    axis=axis,
    weight_decay=options.weight_decay,
    **_given(options, "bits"),
  )


METHODS: dict[str, Build] = {
  "ssgd": _ssgd,
  "local_sgd": _local_sgd,
  "post_local_sgd": _post_local_sgd,
  "diloco": _diloco,
  "msdpu": _msdpu,
  "fed_prox": _fed_prox,
  "easgd": _easgd,
  "scaffold": _scaffold,
  "slow_mo": _slow_mo,
  "cocod": _cocod,
  "overlap_local_sgd": _overlap_local_sgd,
  "od_sgd": _od_sgd,
  "streaming_diloco": _streaming_diloco,
  "qsgd": _qsgd,
  "terngrad": _terngrad,
  "signsgd": _signsgd,
  "ef_signsgd": _ef_signsgd,
  "one_bit_adam": _one_bit_adam,
  "topk_sgd": _topk_sgd,
  "dgc": _dgc,
  "powersgd": _powersgd,
  "demo": _demo,
  "sparse_loco": _sparse_loco,
  "muloco": _muloco,
}


def check_method(option: str, name: str) -> None:
  """Raises a ValueError unless there is such a method."""
  if name not in METHODS:
    raise ValueError(
      f"`{option}` must be of {', '.join(METHODS)}, got {name!r}."
    )


def build_method(
  name: str,
  options: _options.Common,
  budget: Budget,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  """Builds a method's chain around the worker's optimizer."""
  return METHODS[name](_optimizer(options, budget), options, budget, axis)


def _optimizer(
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


def _without_momentum(
  options: _options.Common, budget: Budget
) -> optax.GradientTransformation:
  """SGD for a method whose momentum is the workers' own."""
  plain = dataclasses.replace(options, optimizer="sgd", momentum=0.0)
  return _optimizer(plain, budget)


def _given(options: _options.Common, *names: str) -> dict[str, Any]:
  """Those options that are given; of the others a method knows better."""
  return {
    name: value
    for name in names
    if (value := getattr(options, name)) is not None
  }


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
    policy = intervals.msdpu(first, rate)
  elif rule == "adacomm":
    policy = intervals.adacomm(first, max(1, budget.num_steps // 10), rate)
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
  return Budget(num_steps, warmup, schedule)
