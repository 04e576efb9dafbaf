"""Delay compensation: a late gradient, corrected to the present parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.transforms.delays import _leaf_delays
from jdist.transforms.local import _anchor

PyTree = Any


def compensated(
  gradient: jax.Array,
  strength: jax.typing.ArrayLike,
  now: jax.Array,
  then: jax.Array,
) -> jax.Array:
  r"""Returns :math:`g + \lambda \, g \odot g \odot (w_{now} - w_{then})`.

  Args:
    gradient: g, at the parameters `then`.
    strength: lambda.
    now: the parameters that the gradient is to be applied to.
    then: the parameters that it was computed at.
  """
  term = strength * gradient * gradient * (now - then)
  return gradient + term.astype(gradient.dtype)


class CompensateDelayState(NamedTuple):
  """State of `compensate_delay`.

  Attributes:
    step: gradients so far, int32 scalar.
    past: the last k parameters of each leaf, arrays [k, ...], those of step t
      in row t mod k; () for k = 0.
  """

  step: jax.Array
  past: PyTree


def compensate_delay(
  strength: jax.typing.ArrayLike, steps: PyTree
) -> optax.GradientTransformationExtraArgs:
  r"""Corrects late gradients to first order for what has moved since.

  .. math:: g \leftarrow g + \lambda \, g \odot g \odot (w_t - w_{t-k})

  where :math:`w_{t-k}` are the parameters k updates ago, at which the gradient
  was computed, and :math:`g \odot g` stands for the diagonal of the Hessian.

  Stands in front of the optimizer, behind the delay:
  `delay_gradients(chain(compensate_delay(0.04, k), optimizer), k)`; in a
  pipeline in the chain that it is given, with k as `grid.delay`.

  Args:
    strength: lambda >= 0; 0 is no correction, 0.04 the paper's.
    steps: k, or a tree of them, as of `delay_gradients`.

  Returns:
    A transformation; `update` needs `params`.

  Raises:
    ValueError: when an argument is out of its range; at `init`, when `steps`
      does not fit the parameters; at trace time, when `params` is missing.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326): DC-ASGD-c, lambda constant.  Departure: a
    delay that is known, and a mean of gradients where workers average.

  >>> optimizer = optax.chain(compensate_delay(0.5, steps=1), optax.sgd(1.0))
  >>> w = jnp.array(0.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (2.0, 2.0):  # The second, 2 + 0.5 * 4 * (-2 - 0).
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   w = optax.apply_updates(w, updates)
  ...   print(updates.item())
  -2.0
  2.0
  """
  checks.check_continuous("strength", strength)
  _leaf_delays.check_steps(steps)

  def init_fn(params: optax.Params) -> CompensateDelayState:
    return CompensateDelayState(
      jnp.zeros((), jnp.int32),
      jax.tree.map(
        lambda p, k: _leaf_delays.ring(k, p),
        params,
        _leaf_delays.broadcast("steps", steps, params),
      ),
    )

  def update_fn(
    updates: optax.Updates,
    state: CompensateDelayState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, CompensateDelayState]:
    del extra_args
    _anchor.check_params(params, "`compensate_delay`")
    checks.check_gradients("updates", updates)
    factor = _anchor.scalar(strength)
    own = _leaf_delays.broadcast("steps", steps, params)

    def one(g: jax.Array, p: jax.Array, k: int, ring: Any) -> jax.Array:
      if not k:
        return g
      then = ring[state.step % k]
      return compensated(g, factor.astype(g.dtype), p, then)

    updates = jax.tree.map(one, updates, params, own, state.past)
    past = jax.tree.map(
      lambda p, k, ring: ring.at[state.step % k].set(p) if k else ring,
      params,
      own,
      state.past,
    )
    return updates, CompensateDelayState(optax.safe_increment(state.step), past)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
