"""A stage's update: mean gradient, optimizer, new parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import transforms
from jdist.pipeline.runtime import check_state, merge, pick

PyTree = Any


class UpdateProgram:
  """The programs that turn a sum of gradients into new parameters."""

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    count: int,
    *,
    whole: bool = False,
  ):
    """Makes the programs; they compile when they are first run.

    Args:
      optimizer: any Optax chain.
      count: micro-batches, over which gradients are averaged.
      whole: whether it has to see all stages' leaves: then the first stage's
        device makes the update of all, and keeps the optimizer's state.
    """
    self._optimizer = optax.with_extra_args_support(optimizer)
    self._count, self.whole = count, whole
    # Earlier versions of the parameters are still read: they are not donated.
    self.update = jax.jit(self._update, donate_argnums=(0, 1))
    self.squared_norm = jax.jit(self._squared_norm)
    self.clipped_mean = jax.jit(self._clipped_mean, donate_argnums=0)
    self.update_all = jax.jit(self._update_all, donate_argnums=(0, 1))

  def init_all(self, params: Sequence[PyTree]) -> PyTree:
    """Makes the state that is kept for all stages.

    Args:
      params: of each stage, nested dicts.

    Raises:
      ValueError: when it has rounds or predicts weights.
    """
    state = jax.jit(self._optimizer.init)(merge(params))
    check_state(state)
    return state

  def read(self, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns parameters as an iteration reads them: predicted, if they are."""
    return transforms.predicted_weights(opt_state, params)

  def _mean(self, total: PyTree, params: PyTree) -> PyTree:
    return jax.tree.map(
      lambda g, w: (g / self._count).astype(w.dtype), total, params
    )

  def _update(
    self, total: PyTree, opt_state: PyTree, params: PyTree, scale: jax.Array
  ) -> tuple[PyTree, PyTree]:
    grads = self._clipped_mean(total, params, scale)
    updates, opt_state = self._optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def _clipped_mean(
    self, total: PyTree, params: PyTree, scale: jax.Array
  ) -> PyTree:
    return jax.tree.map(
      lambda g: g * scale.astype(g.dtype), self._mean(total, params)
    )

  def _update_all(
    self, grads: list[PyTree], opt_state: PyTree, params: list[PyTree]
  ) -> tuple[list[PyTree], PyTree]:
    """Returns each stage's new parameters, of the means of all stages."""
    together = merge(params)
    updates, opt_state = self._optimizer.update(
      merge(grads), opt_state, together
    )
    new = optax.apply_updates(together, updates)
    return [pick(new, one) for one in params], opt_state

  def _squared_norm(self, total: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(total)
    norm = sum(jnp.sum(jnp.square(jnp.abs(x))) for x in leaves)
    # Of one dtype for all stages, whatever theirs.
    return jnp.asarray(norm, float) / self._count**2
