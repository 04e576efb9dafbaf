r"""Adaptive intervals: the loss decides the length of a round.

Both policies follow :math:`\sqrt{\eta_0 F / (\eta F_0)}`: a falling loss
shortens the rounds, a falling learning rate lengthens them.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.transforms.intervals import _policy


class AdaCommState(NamedTuple):
  """State of `adacomm`.

  Attributes:
    interval: The present interval, int32 scalar.
    first_loss: The first loss F_0, float32 scalar; infinite until it is known.
    loss_sum: The sum of the rounds' losses in this period, float32 scalar.
    rounds: The number of rounds in this period, int32 scalar.
    next_step: The first local step of the next period, int32 scalar.
    first_rate: The highest rate so far, eta_0, float32 scalar.
  """

  interval: jax.Array
  first_loss: jax.Array
  loss_sum: jax.Array
  rounds: jax.Array
  next_step: jax.Array
  first_rate: jax.Array


def adacomm(
  initial_interval: int,
  period_steps: int,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  *,
  form: Literal["halving", "capped"] = "halving",
  max_interval: int = 16,
) -> _policy.IntervalPolicy:
  r"""Returns AdaComm's rounds, which become shorter as the loss falls.

  At the end of every period, with the mean loss F of its rounds and the loss
  F_0 of the first period,

  .. math:: \tau = \lceil \sqrt{\eta_0 F / (\eta F_0)}\, \tau_0 \rceil
            \quad\text{(halving)} \qquad
            \tau = \min(\tau_{max},
            \lceil \sqrt{\eta_0 F / (\eta F_0)\, \tau_0} \rceil)
            \quad\text{(capped)}

  In the halving form, a value that is not smaller than the present interval is
  replaced by half of that.  The rule shortens rounds and saves little late in
  training; `qsr` does the opposite.

  Args:
    initial_interval: tau_0, at least 1; in the halving form at most
      `max_interval`.
    period_steps: The number of local steps between two decisions, at least 1.
    learning_rate: The inner optimizer's rate, a number or a schedule of the
      local step.
    form: `"halving"` as in the paper, or `"capped"` as in the production code
      that carries the rule, with tau_0 inside the root and a maximum.
    max_interval: tau_max, used by both forms; 16 as in that code.

  References:
    Wang and Joshi, Adaptive Communication Strategies to Achieve the Best
    Error-Runtime Trade-off in Local-Update SGD (arXiv 1810.08313), section 4.
    Departures: periods are counted in local steps and not in seconds, so that
    a run can be repeated; F is a mean over a period; half of an odd interval
    is rounded down, to at least 1; eta_0 is the highest rate so far.

  >>> rule = adacomm(4, period_steps=1)
  >>> _, state = rule.next(rule.init(), jnp.array(8), jnp.array(2.0))
  >>> interval, _ = rule.next(state, jnp.array(12), jnp.array(0.5))
  >>> interval.item()  # sqrt(0.5 / 2) * 4
  2
  """
  initial_interval = checks.check_structural(
    "initial_interval", initial_interval, minimum=1
  )
  period_steps = checks.check_structural(
    "period_steps", period_steps, minimum=1
  )
  checks.check_rate("learning_rate", learning_rate)
  longest = _policy.longest_of(max_interval, 1)
  checks.check_choice("form", form, ("halving", "capped"))
  # The capped form starts with the root of tau_0, which may be larger.
  if form == "halving":
    _policy.check_first("initial_interval", initial_interval, longest)

  def init_fn() -> AdaCommState:
    return AdaCommState(
      interval=jnp.asarray(min(initial_interval, longest), jnp.int32),
      first_loss=jnp.asarray(_policy.UNKNOWN_LOSS, jnp.float32),
      loss_sum=jnp.zeros((), jnp.float32),
      rounds=jnp.zeros((), jnp.int32),
      next_step=jnp.asarray(period_steps, jnp.int32),
      first_rate=_policy.rate_at(learning_rate, jnp.zeros((), jnp.int32)),
    )

  def next_fn(
    state: AdaCommState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, AdaCommState]:
    if loss is None:
      return state.interval, state
    # One round with a NaN must not decide about the interval.
    seen = jnp.isfinite(loss)
    loss_sum = state.loss_sum + jnp.where(seen, loss, 0.0)
    rounds = state.rounds + seen.astype(jnp.int32)
    mean = loss_sum / jnp.maximum(rounds, 1).astype(jnp.float32)
    # The first period ends like the others but only sets F_0.
    decide = (start_step >= state.next_step) & (rounds > 0)
    known = jnp.isfinite(state.first_loss)
    first_loss = jnp.where(known | ~decide, state.first_loss, mean)
    rate = _policy.rate_at(learning_rate, start_step)
    ratio, first_rate = _ratio(state.first_rate, mean, rate, first_loss)
    if form == "halving":
      wanted = jnp.ceil(jnp.sqrt(ratio) * initial_interval)
      steps = _policy.whole_steps(wanted, longest)
      half = jnp.maximum(state.interval // 2, 1)
      steps = jnp.where(steps < state.interval, steps, half)
    else:
      wanted = jnp.ceil(jnp.sqrt(ratio * initial_interval))
      steps = _policy.whole_steps(wanted, longest)
    # Without a first loss there is nothing to compare this period with.
    interval = jnp.where(decide & known, steps, state.interval)
    return interval, AdaCommState(
      interval=interval,
      first_loss=first_loss,
      loss_sum=jnp.where(decide, 0.0, loss_sum),
      rounds=jnp.where(decide, 0, rounds),
      next_step=jnp.where(decide, start_step + period_steps, state.next_step),
      first_rate=first_rate,
    )

  return _policy.IntervalPolicy(init_fn, next_fn, needs_loss=True)


class MsdpuIntervalState(NamedTuple):
  """State of `msdpu`.

  Attributes:
    first_loss: The first loss F_0, float32 scalar; infinite until it is known.
    loss: The moving average F_r, float32 scalar; infinite until it is known.
    interval: The last interval, int32 scalar.
    first_rate: The highest rate so far, eta_0, float32 scalar.
  """

  first_loss: jax.Array
  loss: jax.Array
  interval: jax.Array
  first_rate: jax.Array


def msdpu(
  initial_interval: int,
  learning_rate: optax.ScalarOrSchedule = 1.0,
  *,
  max_interval: int = 16,
  decay: float = 0.9,
) -> _policy.IntervalPolicy:
  r"""Returns MSDPU's adaptive rounds, a reconstruction.

  .. math:: H = \mathrm{clip}(\lceil H_0 \sqrt{\eta_0 F / (\eta F_0)} \rceil,
            1, H_{max})

  with the moving average F of the rounds' mean losses, the first round's F_0
  and the highest rate so far, eta_0, as in `adacomm`.

  Args:
    initial_interval: H_0, from 1 to `max_interval`.
    learning_rate: The inner optimizer's rate, a number or a schedule of the
      local step; a decaying rate lengthens the rounds, a falling loss shortens
      them.
    max_interval: H_max, 16 by default.
    decay: The decay of the moving average, in [0, 1); the weight of a round is
      1 - decay.

  References:
    Ju et al., multi-step delayed parameter update (2025, doi
    10.11918/202407052) names an adaptive interval and gives no formula: this
    is a reconstruction after AdaComm (arXiv 1810.08313), decided every round.

  >>> rule = msdpu(8, decay=0.0)
  >>> _, state = rule.next(rule.init(), jnp.array(0), jnp.array(2.0))
  >>> rule.next(state, jnp.array(8), jnp.array(0.5))[0].item()
  4
  """
  initial_interval = checks.check_structural(
    "initial_interval", initial_interval, minimum=1
  )
  checks.check_rate("learning_rate", learning_rate)
  longest = _policy.longest_of(max_interval, 1)
  _policy.check_first("initial_interval", initial_interval, longest)
  checks.check_continuous("decay", decay, high=1.0, open_high=True)

  def init_fn() -> MsdpuIntervalState:
    unknown = jnp.asarray(_policy.UNKNOWN_LOSS, jnp.float32)
    first = jnp.asarray(initial_interval, jnp.int32)
    first_rate = _policy.rate_at(learning_rate, jnp.zeros((), jnp.int32))
    return MsdpuIntervalState(unknown, unknown, first, first_rate)

  def next_fn(
    state: MsdpuIntervalState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, MsdpuIntervalState]:
    if loss is None:
      return state.interval, state
    # A NaN would stay in the moving average forever.
    known = jnp.isfinite(state.loss)
    average = jnp.where(known, decay * state.loss + (1 - decay) * loss, loss)
    average = jnp.where(jnp.isfinite(loss), average, state.loss)
    first_loss = jnp.where(
      jnp.isfinite(state.first_loss), state.first_loss, average
    )
    rate = _policy.rate_at(learning_rate, start_step)
    ratio, first_rate = _ratio(state.first_rate, average, rate, first_loss)
    wanted = jnp.ceil(jnp.sqrt(ratio) * initial_interval)
    steps = _policy.whole_steps(wanted, longest)
    # A schedule that has ended at zero gives no ratio: the interval stays.
    steps = jnp.where(jnp.isfinite(ratio), steps, state.interval)
    return steps, MsdpuIntervalState(first_loss, average, steps, first_rate)

  return _policy.IntervalPolicy(init_fn, next_fn, needs_loss=True)


def _ratio(
  highest: jax.Array, loss: jax.Array, rate: jax.Array, first_loss: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns eta_0 F / (eta F_0), inf for a rate of zero, and the new eta_0."""
  # A rate that begins low and warms up would make every later round short.
  highest = jnp.maximum(highest, rate)
  # The rule is undefined for losses below zero; zero shortens the round to 1.
  return highest * jnp.maximum(loss, 0.0) / (rate * first_loss), highest
