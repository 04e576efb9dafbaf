"""How many local steps a round has: fixed, scheduled, or adaptive.

An interval policy tells the length of every round.  The length of round r+1
is decided when round r begins, from the losses of rounds up to r-1, averaged
over the workers: it is the same on all workers to the bit, and the host can
read it a whole round before it is needed.

Policies see the number of the local step at which the round begins, so those
that follow a learning-rate schedule or switch at a step need no loss.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist.transforms import _checking

# A round longer than any training, and an int32.
_LONGEST = 2**30


class IntervalPolicy(NamedTuple):
  """A pair of pure functions, like an Optax transformation.

  Attributes:
    init: `() -> state`, a pytree of arrays.
    next: `(state, start_step, loss) -> interval, state`: the number of local
      steps, an int32 scalar >= 1, of the round that begins at local step
      `start_step`.  `loss` is the mean training loss of the last finished
      round over steps and workers, a float32 scalar; of the round before that
      when rounds are delayed, and NaN where it is not known; None before
      there is one.
    needs_loss: whether the loss is used.  Then `update` of the local steps
      must be given `loss=`, and 4 bytes more are sent in every round.
    constant: the interval, where it is always the same; else None.
  """

  init: Callable[[], Any]
  next: Callable[[Any, jax.Array, jax.Array | None], tuple[jax.Array, Any]]
  needs_loss: bool = False
  constant: int | None = None


def fixed(interval: int) -> IntervalPolicy:
  """Every round has `interval` local steps.

  Args:
    interval: local steps, at least 1.

  >>> fixed(8).next((), jnp.array(0), None)[0].item()
  8
  """
  _checking.check_structural("interval", interval, minimum=1)
  if interval > _LONGEST:
    raise ValueError(f"`interval` must be at most {_LONGEST}, got {interval}.")
  return IntervalPolicy(
    init=lambda: (),
    next=lambda state, start_step, loss: (
      jnp.asarray(interval, jnp.int32),
      state,
    ),
    constant=interval,
  )


def scheduled(
  schedule: Callable[[jax.Array], jax.Array | int],
) -> IntervalPolicy:
  """The interval is a function of the local step at which the round begins.

  Args:
    schedule: from an int32 scalar to the number of local steps, rounded down
      and at least 1; any Optax schedule will do.

  >>> growing = scheduled(lambda step: 2 + step // 10)
  >>> growing.next((), jnp.array(25), None)[0].item()
  4
  """
  if not callable(schedule):
    raise ValueError(
      f"`schedule` must be a function of the local step, got {schedule!r}."
    )

  def next_fn(
    state: Any, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, Any]:
    del loss
    return _whole(jnp.floor(_float(schedule(start_step)))), state

  return IntervalPolicy(lambda: (), next_fn)


class PostLocalState(NamedTuple):
  """State of `post_local`.

  Attributes:
    starts: the local steps at which the present and the next round begin,
      int32 [2].
    later: the local phase's state.
  """

  starts: jax.Array
  later: Any


def post_local(
  switch_step: int, interval: int | IntervalPolicy
) -> IntervalPolicy:
  """Synchronous at first, local steps afterwards.

  Rounds that begin before local step `switch_step` have one step.

  Args:
    switch_step: the first step of the local phase, at least 0.
    interval: the local phase's interval or policy; a policy sees only the
      losses of its own phase.

  References:
    Lin et al., Don't Use Large Mini-Batches, Use Local SGD (2020), post-local
    SGD: there the switch is the first decay of the learning rate.

  >>> rule = post_local(100, 8)
  >>> rule.next(rule.init(), jnp.array(99), None)[0].item()
  1
  """
  _checking.check_structural("switch_step", switch_step, minimum=0)
  later = as_policy(interval)

  def init_fn() -> PostLocalState:
    return PostLocalState(jnp.zeros((2,), jnp.int32), later.init())

  def next_fn(
    state: PostLocalState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, PostLocalState]:
    decided = later.next(state.later, start_step, None)
    if loss is not None and later.needs_loss:
      # The loss is that of the round before last, whose phase decides.
      own = state.starts[0] >= switch_step
      decided = _select(own, later.next(state.later, start_step, loss), decided)
    local = start_step >= switch_step
    synchronous = jnp.asarray(1, jnp.int32), state.later
    steps, later_state = _select(local, decided, synchronous)
    starts = jnp.stack([state.starts[1], start_step])
    return steps, PostLocalState(starts, later_state)

  return IntervalPolicy(init_fn, next_fn, later.needs_loss)


def ending_at(
  total_steps: int, interval: int | IntervalPolicy
) -> IntervalPolicy:
  """Shortens the last round so that it ends with the training.

  Without it the last local steps never reach the anchor unless the interval
  divides the number of steps.

  Args:
    total_steps: local steps of the whole training, at least 1.
    interval: the interval or policy to shorten.

  >>> ending_at(20, 8).next((), jnp.array(16), None)[0].item()
  4
  """
  _checking.check_structural("total_steps", total_steps, minimum=1)
  policy = as_policy(interval)

  def next_fn(
    state: Any, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, Any]:
    steps, state = policy.next(state, start_step, loss)
    left = total_steps - start_step
    return jnp.where(left > 0, jnp.minimum(steps, left), steps), state

  return IntervalPolicy(policy.init, next_fn, policy.needs_loss)


def qsr(
  learning_rate: optax.ScalarOrSchedule,
  alpha: float,
  base_interval: int,
  *,
  max_interval: int | None = None,
) -> IntervalPolicy:
  r"""The quadratic synchronization rule: longer rounds at lower rates.

  .. math:: H = \max(H_{base}, \lfloor (\alpha / \eta)^2 \rfloor)

  with the learning rate of the round's first step.

  Args:
    learning_rate: the inner optimizer's, a number or a schedule of the local
      step.
    alpha: the growth coefficient; the paper tunes it between about 0.01 and
      0.3, depending on the optimizer.
    base_interval: the shortest interval, at least 1.
    max_interval: the longest, none by default.  Use `ending_at` too: a rate
      that goes to zero asks for a round that never ends.

  References:
    Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning
    (arXiv 2310.14423).

  >>> qsr(0.1, alpha=0.4, base_interval=4).next((), jnp.array(0), None)[
  ...   0
  ... ].item()
  16
  """
  _checking.check_rate("learning_rate", learning_rate)
  _checking.check_continuous("alpha", alpha, open_low=True)
  _checking.check_structural("base_interval", base_interval, minimum=1)
  longest = _longest(max_interval, base_interval)

  def schedule(start_step: jax.Array) -> jax.Array:
    rate = _rate(learning_rate, start_step)
    # The smallest normal number: a rate of zero means the longest round.
    ratio = alpha / jnp.maximum(rate, jnp.finfo(jnp.float32).tiny)
    # A hair more, so that 0.4 / 0.1 squared is 16 and not 15.999999.
    steps = jnp.floor(jnp.minimum(ratio**2 * (1 + 1e-6), longest))
    return jnp.maximum(steps, base_interval)

  return scheduled(schedule)


class AdaCommState(NamedTuple):
  """State of `adacomm`.

  Attributes:
    interval: the present interval, int32 scalar.
    first_loss: F_0, float32 scalar; NaN until it is known.
    loss_sum: sum of the rounds' losses in this period, float32 scalar.
    rounds: rounds in this period, int32 scalar.
    next_step: the local step at which the next period begins, int32 scalar.
    first_rate: eta_0, float32 scalar.
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
) -> IntervalPolicy:
  r"""AdaComm: shorter rounds as the loss falls.

  At the end of every period, with the mean loss F of its rounds and the loss
  F_0 of the first period,

  .. math:: \tau = \lceil \sqrt{\eta_0 F / (\eta F_0)}\, \tau_0 \rceil
            \quad\text{(halving)} \qquad
            \tau = \min(\tau_{max},
            \lceil \sqrt{\eta_0 F / (\eta F_0)\, \tau_0} \rceil)
            \quad\text{(capped)}

  In the halving form, a value that is not smaller than the present interval
  is replaced by half of that.

  A learning rate that begins low and warms up would make every later round
  short; eta_0 is therefore the highest rate so far, which is the first one
  where the rate only falls.

  The rule saves little late in training, because it shortens the rounds;
  `qsr` does the opposite.

  Args:
    initial_interval: tau_0, at least 1.
    period_steps: local steps between two decisions, at least 1.
    learning_rate: the inner optimizer's, a number or a schedule of the local
      step.
    form: `"halving"` as in the paper, or `"capped"` as in the production code
      that carries the rule, with tau_0 inside the root and a maximum.
    max_interval: tau_max, used by both forms; 16 as in that code.

  References:
    Wang and Joshi, Adaptive Communication Strategies to Achieve the Best
    Error-Runtime Trade-off in Local-Update SGD (arXiv 1810.08313), section 4.
    Departures: periods are counted in local steps and not in seconds, so that
    a run can be repeated; F is a mean over a period; half of an odd interval
    is rounded down, to at least 1; eta_0 of a rate that warms up.

  >>> rule = adacomm(4, period_steps=1)
  >>> _, state = rule.next(rule.init(), jnp.array(8), jnp.array(2.0))
  >>> interval, _ = rule.next(state, jnp.array(12), jnp.array(0.5))
  >>> interval.item()  # sqrt(0.5 / 2) * 4
  2
  """
  _checking.check_structural("initial_interval", initial_interval, minimum=1)
  _checking.check_structural("period_steps", period_steps, minimum=1)
  _checking.check_rate("learning_rate", learning_rate)
  longest = _longest(max_interval, 1)
  if form not in ("halving", "capped"):
    raise ValueError(f"`form` must be 'halving' or 'capped', got {form!r}.")

  def init_fn() -> AdaCommState:
    return AdaCommState(
      interval=jnp.asarray(min(initial_interval, longest), jnp.int32),
      first_loss=jnp.asarray(jnp.nan, jnp.float32),
      loss_sum=jnp.zeros((), jnp.float32),
      rounds=jnp.zeros((), jnp.int32),
      next_step=jnp.asarray(period_steps, jnp.int32),
      first_rate=_rate(learning_rate, jnp.zeros((), jnp.int32)),
    )

  def next_fn(
    state: AdaCommState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, AdaCommState]:
    if loss is None:
      return state.interval, state
    # A loss that is not a number says nothing about the interval.
    seen = jnp.isfinite(loss)
    loss_sum = state.loss_sum + jnp.where(seen, loss, 0.0)
    rounds = state.rounds + seen.astype(jnp.int32)
    mean = loss_sum / jnp.maximum(rounds, 1).astype(jnp.float32)
    # The first period ends like the others but only sets F_0.
    decide = (start_step >= state.next_step) & (rounds > 0)
    known = jnp.isfinite(state.first_loss)
    first_loss = jnp.where(known | ~decide, state.first_loss, mean)
    rate = _rate(learning_rate, start_step)
    first_rate = jnp.maximum(state.first_rate, rate)
    ratio = _ratio(first_rate, mean, rate, first_loss)
    if form == "halving":
      steps = _whole(jnp.ceil(jnp.sqrt(ratio) * initial_interval), longest)
      half = jnp.maximum(state.interval // 2, 1)
      steps = jnp.where(steps < state.interval, steps, half)
    else:
      steps = _whole(jnp.ceil(jnp.sqrt(ratio * initial_interval)), longest)
    interval = jnp.where(decide & known, steps, state.interval)
    return interval, AdaCommState(
      interval=interval,
      first_loss=first_loss,
      loss_sum=jnp.where(decide, 0.0, loss_sum),
      rounds=jnp.where(decide, 0, rounds),
      next_step=jnp.where(decide, start_step + period_steps, state.next_step),
      first_rate=first_rate,
    )

  return IntervalPolicy(init_fn, next_fn, needs_loss=True)


class MsdpuIntervalState(NamedTuple):
  """State of `msdpu`.

  Attributes:
    first_loss: F_0, float32 scalar; NaN until it is known.
    loss: F_r, the moving average, float32 scalar; NaN until it is known.
    interval: the last interval, int32 scalar.
    first_rate: eta_0, float32 scalar.
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
) -> IntervalPolicy:
  r"""MSDPU's adaptive interval, a reconstruction.

  .. math:: H = \mathrm{clip}(\lceil H_0 \sqrt{\eta_0 F / (\eta F_0)} \rceil,
            1, H_{max})

  with F the moving average of the rounds' mean losses and F_0 the first
  round's; eta_0 is the highest rate so far, as in `adacomm`.

  Args:
    initial_interval: H_0, at least 1.
    learning_rate: the inner optimizer's, a number or a schedule of the local
      step; a decaying rate lengthens the rounds, a falling loss shortens
      them.
    max_interval: H_max, 16 by default.
    decay: of the moving average, in [0, 1); a round counts 1 - decay.

  References:
    Ju et al., multi-step delayed parameter update (2025, doi
    10.11918/202407052) names an adaptive interval and gives no formula: this
    is a reconstruction after AdaComm (arXiv 1810.08313), decided every round.

  >>> rule = msdpu(8, decay=0.0)
  >>> _, state = rule.next(rule.init(), jnp.array(0), jnp.array(2.0))
  >>> rule.next(state, jnp.array(8), jnp.array(0.5))[0].item()
  4
  """
  _checking.check_structural("initial_interval", initial_interval, minimum=1)
  _checking.check_rate("learning_rate", learning_rate)
  longest = _longest(max_interval, 1)
  _checking.check_continuous("decay", decay, high=1.0)
  if decay >= 1:
    raise ValueError(f"`decay` must be below 1, got {decay}.")

  def init_fn() -> MsdpuIntervalState:
    unknown = jnp.asarray(jnp.nan, jnp.float32)
    first = jnp.asarray(min(initial_interval, longest), jnp.int32)
    first_rate = _rate(learning_rate, jnp.zeros((), jnp.int32))
    return MsdpuIntervalState(unknown, unknown, first, first_rate)

  def next_fn(
    state: MsdpuIntervalState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, MsdpuIntervalState]:
    if loss is None:
      return state.interval, state
    # A loss that is not a number is not averaged in: it would stay forever.
    known = jnp.isfinite(state.loss)
    average = jnp.where(known, decay * state.loss + (1 - decay) * loss, loss)
    average = jnp.where(jnp.isfinite(loss), average, state.loss)
    first_loss = jnp.where(
      jnp.isfinite(state.first_loss), state.first_loss, average
    )
    rate = _rate(learning_rate, start_step)
    first_rate = jnp.maximum(state.first_rate, rate)
    ratio = _ratio(first_rate, average, rate, first_loss)
    steps = _whole(jnp.ceil(jnp.sqrt(ratio) * initial_interval), longest)
    steps = jnp.where(jnp.isfinite(ratio), steps, state.interval)
    return steps, MsdpuIntervalState(first_loss, average, steps, first_rate)

  return IntervalPolicy(init_fn, next_fn, needs_loss=True)


def as_policy(interval: int | IntervalPolicy) -> IntervalPolicy:
  """Turns the number of steps into a policy, and leaves a policy alone.

  Raises:
    ValueError: when it is neither a policy nor an int of at least 1.

  >>> as_policy(0)
  Traceback (most recent call last):
  ValueError: `interval` must be an int >= 1, got 0.
  """
  if isinstance(interval, IntervalPolicy):
    return interval
  return fixed(interval)


def _select(which: jax.Array, yes: Any, no: Any) -> Any:
  return jax.tree.map(lambda y, n: jnp.where(which, y, n), yes, no)


def _longest(max_interval: int | None, shortest: int) -> int:
  if max_interval is None:
    return _LONGEST
  _checking.check_structural("max_interval", max_interval, minimum=shortest)
  return min(max_interval, _LONGEST)


def _rate(
  learning_rate: optax.ScalarOrSchedule, step: jax.Array | int
) -> jax.Array:
  rate = learning_rate(step) if callable(learning_rate) else learning_rate
  return _float(rate)


def _ratio(
  first_rate: jax.Array, loss: jax.Array, rate: jax.Array, first_loss: jax.Array
) -> jax.Array:
  """`eta_0 F / (eta F_0)`, as a float32 scalar; a rate of zero gives inf."""
  # Losses below zero have no such rule; zero shortens the round to 1.
  return first_rate * jnp.maximum(loss, 0.0) / (rate * first_loss)


def _float(x: Any) -> jax.Array:
  return jnp.asarray(x).astype(jnp.float32)


def _whole(steps: jax.Array, longest: float = math.inf) -> jax.Array:
  """A number of steps as int32, between 1 and `longest`; NaN gives 1."""
  steps = jnp.where(jnp.isnan(steps), 1.0, steps)
  return jnp.clip(steps, 1.0, min(longest, _LONGEST)).astype(jnp.int32)
