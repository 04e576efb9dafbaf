"""Clipping by the norm of a whole model whose parts lie on devices."""

from typing import Any

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import _tied_leaves

PyTree = Any


def clip_norm(
  grads: PyTree,
  most: float,
  tied: _tied_leaves.TiedLeaves,
  axis: str | None,
) -> PyTree:
  r"""Scales one device's part of a gradient by the norm of all of it.

  .. math:: g \leftarrow g \min(1, c / \lVert g \rVert_2)

  as `optax.clip_by_global_norm` does to the unsplit model.  All devices wait
  for each other's norms.

  Args:
    grads: of one device's stages, tied ones summed.
    most: c.
    tied: leaves that several stages have, each of which counts once.
    axis: of the devices; None for one device.
  """
  total = jnp.zeros((), float)
  for x in jax.tree.leaves(tied.once(grads)):
    total += jnp.sum(jnp.square(jnp.abs(x.astype(total.dtype))))
  if axis is not None:
    total = jax.lax.psum(total, axis)
  norm = jnp.sqrt(total)
  scale = most / jnp.maximum(norm, 1e-16)
  return jax.tree.map(
    lambda x: jnp.where(norm < most, x, x * scale.astype(x.dtype)), grads
  )
