"""Messages between stages: flat arrays of one size."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import _stage_arrays

PyTree = Any


class Message:
  """The layout of what a device sends in a tick, the same for all stages.

  All devices run one program and permute one array, so outputs of unlike shapes
  are flattened and padded to the largest.

  >>> message = Message([jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(3)])
  >>> message.flat(jnp.ones(2), 0).tolist(), message.sent_bytes
  ([1.0, 1.0, 0.0], 12)
  >>> message.unflat(jnp.arange(3.0), 0).tolist()
  [0.0, 1.0]
  """

  def __init__(self, between: Sequence[PyTree]):
    """Lays out the outputs of all stages but the last."""
    self._packed = _stage_arrays.StageArrays(between, 1, pack=True)
    sizes = self._packed.sizes
    if len(sizes) > 1:
      raise ValueError(
        "`stages` must pass on arrays of one dtype in one program, got "
        f"{', '.join(sorted(sizes))}. Cast in the layers, or run "
        "each stage in a process of its own."
      )
    # A single stage sends nothing, but a program has no array of size 0.
    ((self._name, self.size),) = sizes.items() or (("float32", 1),)
    self.dtype = jnp.dtype(self._name)

  @property
  def sent_bytes(self) -> int:
    """Bytes that a device sends in a tick, each way."""
    return self.size * self.dtype.itemsize

  def flat(self, x: Any, number: int) -> jax.Array:
    """Flattens the outputs of stage `number`, or their gradient."""
    # Gradients have the shapes of the outputs, so one layout serves both ways.
    found: jax.Array = self._packed.to_own(x, number)[self._name]
    return found

  def unflat(self, flat: jax.Array, number: int) -> Any:
    """Undoes `flat`."""
    return self._packed.to_tree({self._name: flat}, number)
