"""Nesterov's look-ahead for late gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.transforms.local import _anchor

PyTree = Any


class LookAheadState(NamedTuple):
  """State of `scale_by_look_ahead`.

  Attributes:
    momentum: the gradients' moving average, in the parameters' dtypes.
  """

  momentum: PyTree


def scale_by_look_ahead(
  momentum: jax.typing.ArrayLike = 0.99,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes Nesterov's steps with gradients that the momentum discounts.

  .. math:: m \leftarrow \gamma m + (1 - \gamma) g, \qquad
            u = \gamma m + (1 - \gamma) g

  The parameters are the points y of the look-ahead, and with a delay k and the
  rate :math:`\eta` their path is that of

  .. math:: y_t = w_t + \gamma (w_t - w_{t-1}), \qquad
            w_{t+1} = y_t - \eta (1 - \gamma) \nabla f(y_{t-k})

  A momentum near 1 makes a late gradient a small part of a long average, whose
  direction hardly turns in k steps, and looks ahead along it.

  Stands in front of a rate: `delay_gradients(chain(scale_by_look_ahead(),
  optax.scale(-0.1)), k)`.  With Adam's scaling it is `optax.nadamw(rate,
  b1=0.99)`, which the paper trains with.

  Args:
    momentum: gamma in [0, 1); 0 is plain gradient descent, 0.99 the paper's.

  Returns:
    A transformation.

  Raises:
    ValueError: when `momentum` is out of its range.

  References:
    Ajanthan et al., Nesterov Method for Asynchronous Pipeline Parallel
    Optimization (arXiv 2505.01099), after its abstract and published code,
    NAdam with a momentum of 0.99: a reconstruction where these are silent.
    Departures: one constant momentum, where the code has a warm-up of it and an
    option that lowers it for late stages; no correction of the first steps.

  >>> optimizer = optax.chain(scale_by_look_ahead(0.5), optax.scale(-1.0))
  >>> state = optimizer.init(jnp.array(0.0))
  >>> for _ in range(2):  # m = 0.5, 0.75
  ...   updates, state = optimizer.update(jnp.array(1.0), state)
  ...   print(updates.item())
  -0.75
  -0.875
  """
  checks.check_continuous("momentum", momentum)
  if not checks.is_traced(momentum) and float(momentum) >= 1:  # type: ignore[arg-type]
    raise ValueError(
      f"`momentum` must be below 1, got {momentum}: gradients would not count."
    )
  gamma = _anchor.scalar(momentum)

  def mixed(m: jax.Array, g: jax.Array) -> jax.Array:
    c = gamma.astype(g.dtype)
    return c * m.astype(g.dtype) + (1 - c) * g

  def init_fn(params: optax.Params) -> LookAheadState:
    return LookAheadState(jax.tree.map(jnp.zeros_like, params))

  def update_fn(
    updates: optax.Updates,
    state: LookAheadState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LookAheadState]:
    del params, extra_args
    checks.check_gradients("updates", updates)
    new = jax.tree.map(mixed, state.momentum, updates)
    ahead = jax.tree.map(mixed, new, updates)
    new = jax.tree.map(lambda x, m: x.astype(m.dtype), new, state.momentum)
    return ahead, LookAheadState(new)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
