"""Messages between stages: flat arrays of one size."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any


class Message:
  """The layout of what a device sends in a tick, the same for all stages.

  All devices run one program and permute one array, so outputs of unlike shapes
  are flattened and padded to the largest.

  >>> message = Message([jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(3)])
  >>> message.flat(jnp.ones(2)).tolist(), message.sent_bytes
  ([1.0, 1.0, 0.0], 12)
  >>> message.unflat(jnp.arange(3.0), 0).tolist()
  [0.0, 1.0]
  """

  def __init__(self, between: Sequence[PyTree]):
    """Lays out the outputs of all stages but the last."""
    self._between = tuple(between)
    dtypes = {leaf.dtype for x in between for leaf in jax.tree.leaves(x)}
    if len(dtypes) > 1:
      raise ValueError(
        "`stages` must pass on arrays of one dtype in one program, got "
        f"{', '.join(sorted(map(str, dtypes)))}. Cast in the layers, or run "
        "each stage in a process of its own."
      )
    # A single stage sends nothing, but a program has no array of size 0.
    self.dtype = next(iter(dtypes), jnp.dtype(jnp.float32))
    self.size = max(
      (sum(leaf.size for leaf in jax.tree.leaves(x)) for x in between),
      default=1,
    )

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in a tick, each way."""
    return self.size * self.dtype.itemsize

  def flat(self, x: Any) -> jax.Array:
    """Flattens a stage's outputs, or their gradient, and pads with zeros."""
    # Gradients have the shapes of the outputs, so one layout serves both ways.
    parts = [leaf.reshape(-1) for leaf in jax.tree.leaves(x)]
    used = sum(part.size for part in parts)
    if used < self.size:
      parts.append(jnp.zeros(self.size - used, self.dtype))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

  def unflat(self, flat: jax.Array, number: int) -> Any:
    """Undoes `flat` for the outputs of stage `number`."""
    leaves, structure = jax.tree.flatten(self._between[number])
    found, start = [], 0
    for leaf in leaves:
      part = jax.lax.slice(flat, (start,), (start + leaf.size,))
      found.append(part.reshape(leaf.shape))
      start += leaf.size
    return jax.tree.unflatten(structure, found)
