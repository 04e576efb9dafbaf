"""Learning rates that fall with the delay."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, states
from jdist.transforms.delays import _leaf_delays
from jdist.transforms.local import _anchor

PyTree = Any


@states.declare(shared=("step",))
class ScaleByDelayState(NamedTuple):
  """State of `scale_by_delay`.

  Attributes:
    step: updates so far, int32 scalar.
  """

  step: jax.Array


def scale_by_delay(
  delays: PyTree,
  power: jax.typing.ArrayLike = 1.0,
  *,
  anneal_steps: jax.typing.ArrayLike = float("inf"),
  offset: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Divides updates by a power of their delay that may fade with time.

  .. math:: u \leftarrow u \, \max(\tau + o, 1)^{-p_t}, \qquad
            p_t = p \, \bigl(1 - \min(t / T, 1)\bigr)

  with the delay :math:`\tau`: by default the rate falls as 1 / delay and stays
  there; `offset=1` is :math:`1 / (1 + \tau)`.

  Stands behind the optimizer, `chain(optimizer, scale_by_delay(k))`, or in
  front of one that is linear in the gradients, as SGD is and Adam is not.

  Args:
    delays: tau >= 0, a number or a tree of them whose structure is that of the
      parameters or a prefix of it.
    power: p >= 0; 0 leaves the rate as it is.
    anneal_steps: T > 0, updates after which the rate is whole; infinite by
      default: never.
    offset: o >= 0, added to every delay.

  Returns:
    A transformation.

  Raises:
    ValueError: when an argument is out of its range; at trace time, when
      `delays` does not fit the updates.

  References:
    Yang et al., PipeMare (MLSys 2021): p = 1, annealed.  Departure: a delay
    below 1 leaves the rate as it is.  Zhang et al., Staleness-aware
    Async-SGD (arXiv 1511.05950): p = 1, not annealed.

  >>> optimizer = optax.chain(
  ...   optax.sgd(1.0), scale_by_delay(4, anneal_steps=2)
  ... )
  >>> state = optimizer.init(jnp.array(0.0))
  >>> for _ in range(3):  # 4 ** -1, 4 ** -0.5, 4 ** 0
  ...   updates, state = optimizer.update(jnp.array(1.0), state)
  ...   print(updates.item())
  -0.25
  -0.5
  -1.0
  """
  for one in jax.tree.leaves(delays, is_leaf=lambda x: x is None) or [None]:
    checks.check_continuous("delays", one)
  checks.check_continuous("power", power)
  checks.check_continuous("anneal_steps", anneal_steps, open_low=True)
  checks.check_continuous("offset", offset)

  def init_fn(params: optax.Params) -> ScaleByDelayState:
    del params
    return ScaleByDelayState(jnp.zeros((), jnp.int32))

  def update_fn(
    updates: optax.Updates,
    state: ScaleByDelayState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ScaleByDelayState]:
    del params, extra_args
    checks.check_gradients("updates", updates)
    done = jnp.minimum(
      _anchor.scalar(state.step) / _anchor.scalar(anneal_steps), 1.0
    )
    exponent = _anchor.scalar(power) * (1.0 - done)

    def one(u: jax.Array, delay: jax.typing.ArrayLike) -> jax.Array:
      base = jnp.maximum(_anchor.scalar(delay) + _anchor.scalar(offset), 1.0)
      return u * (base**-exponent).astype(u.dtype)

    updates = jax.tree.map(
      one, updates, _leaf_delays.broadcast("delays", delays, updates)
    )
    return updates, ScaleByDelayState(optax.safe_increment(state.step))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
