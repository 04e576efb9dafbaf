"""The interface of interval policies, and those that need no loss.

They follow the local step or the learning rate.  Policies that adapt to the
loss are in `_adaptive`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks

# An int32 that is longer than any training.
LONGEST = 2**30
# A loss that is not known yet; `jax.debug_nans` would stop at a NaN.
UNKNOWN_LOSS = math.inf


class IntervalPolicy(NamedTuple):
  """A pair of pure functions, like an Optax transformation.

  Attributes:
    init: `() -> state`, a pytree of arrays.
    next: `(state, start_step, loss) -> interval, state`: the number of local
      steps, an int32 scalar >= 1, of the round that begins at local step
      `start_step`.  `loss` is the mean training loss of the last finished
      round over steps and workers, a float32 scalar; with a delay it is that of
      the round before; NaN if it is not known; None before the first one.
    needs_loss: Whether the loss is used.  `update` of the local steps then
      needs `loss=`, and 4 bytes more are sent in every round.
    constant: The interval if it never changes, else None.
  """

  init: Callable[[], Any]
  next: Callable[[Any, jax.Array, jax.Array | None], tuple[jax.Array, Any]]
  needs_loss: bool = False
  constant: int | None = None


def longest_of(max_interval: int | None, shortest: int) -> int:
  """Returns the checked largest interval."""
  if max_interval is None:
    return LONGEST
  max_interval = checks.check_structural(
    "max_interval", max_interval, minimum=shortest
  )
  return min(max_interval, LONGEST)


def check_first(name: str, interval: int, longest: int) -> None:
  """Raises a ValueError if a rule begins above its longest interval."""
  remedy = "Give a larger `max_interval`, which would cut the first round."
  checks.check_int(name, interval, 1, longest, remedy)


def rate_at(
  learning_rate: optax.ScalarOrSchedule,
  step: jax.Array | int,
  name: str = "learning_rate",
) -> jax.Array:
  """Returns the learning rate at a local step, float32 scalar."""
  rate = learning_rate(step) if callable(learning_rate) else learning_rate
  if not checks.is_scalar(rate):
    rule = f"`{name}` must give a number for each step"
    raise ValueError(f"{rule}, got {checks.show(rate)}.")
  # An injected number has the dtype of the parameters, which may be bfloat16.
  return jnp.asarray(rate).astype(jnp.float32)


def whole_steps(steps: jax.Array, longest: float = math.inf) -> jax.Array:
  """Casts a number of steps to int32 in 1 to `longest`; NaN becomes 1."""
  steps = jnp.where(jnp.isnan(steps), 1.0, steps)
  return jnp.clip(steps, 1.0, min(longest, LONGEST)).astype(jnp.int32)


def fixed(interval: int) -> IntervalPolicy:
  """Returns rounds of `interval` local steps.

  Args:
    interval: The number of local steps, at least 1.

  >>> fixed(8).next((), jnp.array(0), None)[0].item()
  8
  """
  interval = checks.check_structural("interval", interval, minimum=1)
  interval = min(interval, LONGEST)
  return IntervalPolicy(
    init=lambda: (),
    next=lambda state, start_step, loss: (
      jnp.asarray(interval, jnp.int32),
      state,
    ),
    # Rounds of a constant length take this number and do not call `next`.
    constant=interval,
  )


def scheduled(
  schedule: Callable[[jax.Array], jax.Array | int],
) -> IntervalPolicy:
  """Returns rounds whose interval is a function of their first local step.

  Args:
    schedule: A function from an int32 scalar to the number of local steps, such
      as an Optax schedule; it is rounded down, to at least 1.

  >>> growing = scheduled(lambda step: 2 + step // 10)
  >>> growing.next((), jnp.array(25), None)[0].item()
  4
  """
  checks.check_function("schedule", schedule, "the local step", 1)

  def next_fn(
    state: Any, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, Any]:
    del loss
    steps = rate_at(schedule, start_step, "schedule")
    return whole_steps(jnp.floor(steps)), state

  return IntervalPolicy(lambda: (), next_fn)


class PostLocalState(NamedTuple):
  """State of `post_local`.

  Attributes:
    starts: The local steps at which the present and the next round begin,
      int32 [2].
    later: The state of the local phase.
  """

  starts: jax.Array
  later: Any


def post_local(
  switch_step: int, interval: int | IntervalPolicy
) -> IntervalPolicy:
  """Returns rounds of one step, and longer ones from `switch_step` on.

  Args:
    switch_step: The first step of the local phase, at least 0.
    interval: The interval or policy of the local phase; a policy sees only the
      losses of its own phase.

  References:
    Lin et al., post-local SGD (arXiv 1808.07217), which switches at the first
    decay of the learning rate.

  >>> rule = post_local(100, 8)
  >>> rule.next(rule.init(), jnp.array(99), None)[0].item()
  1
  """
  switch_step = checks.check_structural("switch_step", switch_step, minimum=0)
  later = as_policy(interval)

  def init_fn() -> PostLocalState:
    return PostLocalState(jnp.zeros((2,), jnp.int32), later.init())

  def next_fn(
    state: PostLocalState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, PostLocalState]:
    decided = later.next(state.later, start_step, None)
    if loss is not None and later.needs_loss:
      # The loss belongs to the round before last.  The policy must not see it
      # if that round was synchronous.
      own = state.starts[0] >= switch_step
      decided = optax.tree.where(
        own, later.next(state.later, start_step, loss), decided
      )
    # Both are computed and one is selected: `later` must not advance before.
    local = start_step >= switch_step
    synchronous = jnp.asarray(1, jnp.int32), state.later
    steps, later_state = optax.tree.where(local, decided, synchronous)
    # The next call receives the loss of the round that began at `starts[0]`.
    starts = jnp.stack([state.starts[1], start_step])
    return steps, PostLocalState(starts, later_state)

  return IntervalPolicy(init_fn, next_fn, later.needs_loss)


def ending_at(
  total_steps: int, interval: int | IntervalPolicy
) -> IntervalPolicy:
  """Shortens the last round so that it ends with the training.

  Otherwise the last local steps never reach the anchor, unless the interval
  divides the number of steps.

  Args:
    total_steps: The local steps of the whole training, at least 1.
    interval: The interval or policy to shorten.

  >>> ending_at(20, 8).next((), jnp.array(16), None)[0].item()
  4
  """
  total_steps = checks.check_structural("total_steps", total_steps, minimum=1)
  policy = as_policy(interval)

  def next_fn(
    state: Any, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, Any]:
    steps, state = policy.next(state, start_step, loss)
    # A training that continues beyond its planned end has the policy's rounds.
    left = total_steps - start_step
    return jnp.where(left > 0, jnp.minimum(steps, left), steps), state

  return IntervalPolicy(policy.init, next_fn, policy.needs_loss)


def qsr(
  learning_rate: optax.ScalarOrSchedule,
  alpha: float,
  base_interval: int,
  *,
  max_interval: int | None = None,
  warmup_steps: int | None = None,
) -> IntervalPolicy:
  r"""Returns longer rounds at lower rates, by the quadratic rule.

  .. math:: H = \max(H_{base}, \lfloor (\alpha / \eta)^2 \rfloor)

  with the learning rate of the round's first step; during a warm-up of the
  rate, with the first rate after it.  The small rates of a warm-up would
  otherwise give the longest rounds at the beginning.

  Args:
    learning_rate: The inner optimizer's rate, a number or a schedule of the
      local step.
    alpha: The growth coefficient; the paper tunes it between about 0.01 and
      0.3, depending on the optimizer.
    base_interval: The shortest interval, at least 1.
    max_interval: The longest interval; None is no limit.  Use `ending_at` too:
      a rate near zero gives a round that never ends.
    warmup_steps: The number of local steps in which the rate rises, required
      for a schedule that rises at its beginning.  0 takes every rate as it is.

  References:
    Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning
    (arXiv 2310.14423); the warm-up in section 2.

  >>> rule = qsr(0.1, alpha=0.4, base_interval=4)
  >>> rule.next((), jnp.array(0), None)[0].item()
  16
  """
  checks.check_rate("learning_rate", learning_rate)
  alpha = checks.check_continuous("alpha", alpha, open_low=True)
  base_interval = checks.check_structural(
    "base_interval", base_interval, minimum=1
  )
  longest = longest_of(max_interval, base_interval)
  if warmup_steps is None:
    _check_falls(learning_rate)
    warmup_steps = 0
  warmup_steps = checks.check_structural(
    "warmup_steps", warmup_steps, minimum=0
  )

  def schedule(start_step: jax.Array) -> jax.Array:
    settled = jnp.maximum(start_step, warmup_steps)
    rate = rate_at(learning_rate, settled)
    steps = _squared_ratio(alpha, rate, longest)
    return jnp.maximum(steps, base_interval)

  return scheduled(schedule)


def _check_falls(learning_rate: optax.ScalarOrSchedule) -> None:
  """Raises a ValueError for a schedule that rises in its first step."""
  if not callable(learning_rate):
    return
  first, second = (rate_at(learning_rate, i) for i in (0, 1))
  # Under `optax.inject_hyperparams` the rates are known only at run time.
  if checks.is_traced(first):
    return
  if second > first:
    raise ValueError(
      "`warmup_steps` must be given for a `learning_rate` that rises at first, "
      f"got {float(first):g} and {float(second):g} in the first two steps: "
      "rounds would be sized by the warm-up's small rates. Pass the number of "
      "steps in which it rises."
    )


class GrowthState(NamedTuple):
  """State of `growth`.

  Attributes:
    highest_rate: The highest rate so far, eta_0, float32 scalar.
  """

  highest_rate: jax.Array


def growth(
  learning_rate: optax.ScalarOrSchedule,
  *,
  start: float = 1 / 3,
  max_interval: int = 16,
) -> IntervalPolicy:
  r"""Returns rounds of one step that become longer as the rate falls.

  .. math:: H = \mathrm{clip}(\lfloor (c\, \eta_0 / \eta)^2 \rfloor,
            1, H_{max})

  with the highest rate so far, :math:`\eta_0`: two steps at 0.7 c of it, four
  at c / 2.  Rounds keep one step while the rate warms up or is constant.

  Args:
    learning_rate: The inner optimizer's rate, a schedule of the local step.
    start: c > 0; c^2 is the number of steps in the first rounds.  The limit of
      stability allows a c of 1 and more (`methods.msdpu`); its bound is
      the workers' drift, which depends on the problem: the default of a third
      keeps rounds of one step in two thirds of a cosine, and saves less than
      30 % of the means.  Choose c on validation data, as H.
    max_interval: H_max, at least 1.

  References:
    Gu et al., A Quadratic Synchronization Rule for Distributed Deep Learning
    (arXiv 2310.14423): `qsr` with a base of 1 and :math:`\alpha = c \eta_0`,
    which need not be known in advance.

  >>> rates = jnp.array([0.4, 0.2, 0.4 / 3, 0.1])
  >>> rule = growth(lambda step: rates[step], start=0.5)
  >>> [rule.next(rule.init(), t, None)[0].item() for t in (0, 1, 2, 3)]
  [1, 1, 2, 4]
  """
  checks.check_rate("learning_rate", learning_rate)
  checks.check_continuous("start", start, open_low=True)
  longest = longest_of(max_interval, 1)

  def init_fn() -> GrowthState:
    first = jnp.zeros((), jnp.int32)
    return GrowthState(rate_at(learning_rate, first))

  def next_fn(
    state: GrowthState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, GrowthState]:
    del loss
    rate = rate_at(learning_rate, start_step)
    highest = jnp.maximum(state.highest_rate, rate)
    steps = _squared_ratio(start * highest, rate, longest)
    return whole_steps(steps, longest), GrowthState(highest)

  return IntervalPolicy(init_fn, next_fn)


def _squared_ratio(
  wanted: jax.typing.ArrayLike, rate: jax.Array, longest: float
) -> jax.Array:
  """Returns the steps of the quadratic rule, (wanted / rate)^2 rounded down."""
  # Dividing by the smallest normal number gives the longest round for a rate
  # of zero, without an infinity.
  ratio = wanted / jnp.maximum(rate, jnp.finfo(jnp.float32).tiny)
  # The margin makes 0.4 / 0.1 squared 16 and not 15.999999.
  return jnp.floor(jnp.minimum(ratio**2 * (1 + 1e-6), longest))


def as_policy(interval: int | IntervalPolicy) -> IntervalPolicy:
  """Returns the policy of a number of steps, or a given policy itself."""
  if not isinstance(interval, IntervalPolicy):
    return fixed(interval)
  checks.check_function("interval.next", interval.next, "state, step, loss", 3)
  if interval.constant is not None:
    checks.check_structural("interval.constant", interval.constant, minimum=1)

  def next_fn(
    state: Any, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, Any]:
    checks.check_arrays("interval.init()", state)
    found = interval.next(state, start_step, loss)
    steps, after = checks.check_pair("interval.next", found, "steps, state")
    if not checks.is_scalar(steps):
      rule = "`interval.next` must return an int32 scalar as the steps"
      raise ValueError(f"{rule}, got {checks.show(steps)}.")
    rule = "`interval.next` must keep its state's form"
    checks.check_form(rule, after, state, exact=True)
    return jnp.asarray(steps, jnp.int32), after

  return interval._replace(next=next_fn)
