"""A stage's update: mean gradient, optimizer, new parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import transforms

PyTree = Any


class UpdateProgram:
  """The programs that turn a sum of gradients into new parameters."""

  def __init__(self, optimizer: optax.GradientTransformation, count: int):
    """Makes the programs; they compile when they are first run.

    Args:
      optimizer: any Optax chain.
      count: micro-batches, over which gradients are averaged.
    """
    self._optimizer = optax.with_extra_args_support(optimizer)
    self._count = count
    # Earlier versions of the parameters are still read: they are not donated.
    self.update = jax.jit(self._update, donate_argnums=(0, 1))
    self.squared_norm = jax.jit(self._squared_norm)

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
    grads = jax.tree.map(
      lambda g: g * scale.astype(g.dtype), self._mean(total, params)
    )
    updates, opt_state = self._optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def _squared_norm(self, total: PyTree) -> jax.Array:
    leaves = jax.tree.leaves(total)
    norm = sum(jnp.sum(jnp.square(jnp.abs(x))) for x in leaves)
    # Of one dtype for all stages, whatever theirs.
    return jnp.asarray(norm, float) / self._count**2
