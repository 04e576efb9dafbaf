"""Growth: rounds of one step that become longer as the learning rate falls."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.transforms.intervals import _policy


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
) -> _policy.IntervalPolicy:
  r"""Returns rounds of one step that become longer as the rate falls.

  .. math:: H = \mathrm{clip}(\lfloor (c\, \eta_0 / \eta)^2 \rfloor,
            1, H_{max})

  with the highest rate so far, :math:`\eta_0`: two steps at 0.7 c of it, four
  at c / 2.  Rounds keep one step while the rate warms up or is constant.

  Args:
    learning_rate: The inner optimizer's rate, a schedule of the local step.
    start: c > 0; values up to 1 begin with rounds of one step.  A third gives
      two steps at 0.24 of the highest rate.  A mean of every step may be one
      step late from there on: its `transforms.stability_limit` (with a momentum
      of 0.9, and 1/8 carried) is 0.24 of synchronous SGD's.
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
  longest = _policy.longest(max_interval, 1)

  def init_fn() -> GrowthState:
    first = jnp.zeros((), jnp.int32)
    return GrowthState(_policy.rate_at(learning_rate, first))

  def next_fn(
    state: GrowthState, start_step: jax.Array, loss: jax.Array | None
  ) -> tuple[jax.Array, GrowthState]:
    del loss
    rate = _policy.rate_at(learning_rate, start_step)
    highest = jnp.maximum(state.highest_rate, rate)
    # Dividing by the smallest normal number gives the longest round for a rate
    # of zero, without an infinity.
    ratio = start * highest / jnp.maximum(rate, jnp.finfo(jnp.float32).tiny)
    # The margin keeps a ratio of exactly 2 from being rounded down to 1.
    steps = jnp.floor(jnp.minimum(ratio**2 * (1 + 1e-6), longest))
    return _policy.whole_steps(steps, longest), GrowthState(highest)

  return _policy.IntervalPolicy(init_fn, next_fn)
