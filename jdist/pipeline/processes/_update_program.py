"""The update of a stage: mean gradient, optimizer, new parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import optax

from jdist import transforms
from jdist.pipeline.runtime import (
  _chain_check,
  _stages,
  _traced_model,
  _whole_model,
)

PyTree = Any


def sees_all(
  optimizer: optax.GradientTransformation, stages: Sequence[_stages.LayerLike]
) -> bool:
  """Returns whether one device has to run an optimizer for all stages."""
  return _chain_check.needs_all(
    optimizer,
    num_parts=len(stages),
    num_stages=len(stages),
    tied=bool(_stages.shared_paths(stages)),
    # Processes have no collective by which stages could agree.
    agree=False,
    named=True,
  )


class UpdateProgram:
  """The programs that turn a sum of gradients into new parameters.

  Attributes:
    whole: Whether the optimizer has to see all stages' leaves.  Then the first
      stage's device makes the update of all and keeps the optimizer's state.
  """

  def __init__(
    self,
    optimizer: optax.GradientTransformation,
    stages: Sequence[_stages.LayerLike],
    count: int,
  ):
    """Makes the programs for means over `count` micro-batches."""
    # Programs and not methods of a stage: all stages share one, which JAX
    # compiles once for each set of shapes.
    self._optimizer = optax.with_extra_args_support(optimizer)
    self._count, self.whole = count, sees_all(optimizer, stages)
    # Parameters are not donated: later passes may still read this version.
    self.update = jax.jit(self._update, donate_argnums=(0, 1))
    self.squared_norm = jax.jit(self._squared_norm)
    self.clipped_mean = jax.jit(self._clipped_mean, donate_argnums=0)
    self.update_all = jax.jit(self._update_all, donate_argnums=(0, 1))

  def init_all(self, params: Sequence[PyTree]) -> PyTree:
    """Makes the optimizer's state of all stages."""
    state = jax.jit(self._optimizer.init)(_stages.merge(params))
    _whole_model.check_state(state)
    return state

  def read(self, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns parameters as an iteration reads them, perhaps predicted."""
    return transforms.predicted_weights(opt_state, params)

  def _update(
    self, total: PyTree, opt_state: PyTree, params: PyTree, scale: jax.Array
  ) -> tuple[PyTree, PyTree]:
    grads = self._clipped_mean(total, params, scale)
    updates, opt_state = self._optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  def _clipped_mean(
    self, total: PyTree, params: PyTree, scale: jax.Array
  ) -> PyTree:
    def mean(total: jax.Array, param: jax.Array) -> jax.Array:
      grad = (total / self._count).astype(param.dtype)
      return grad * scale.astype(grad.dtype)

    return jax.tree.map(mean, total, params)

  def _update_all(
    self, grads: list[PyTree], opt_state: PyTree, params: list[PyTree]
  ) -> tuple[list[PyTree], PyTree]:
    """Returns each stage's new parameters from the means of all stages."""
    together = _stages.merge(params)
    updates, opt_state = self._optimizer.update(
      _stages.merge(grads), opt_state, together
    )
    new = optax.apply_updates(together, updates)
    return [_stages.pick(new, one) for one in params], opt_state

  def _squared_norm(self, total: PyTree) -> jax.Array:
    return _traced_model.squared_norm(total) / self._count**2
