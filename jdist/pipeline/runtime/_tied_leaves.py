"""Tied parameters in one program: copies on several devices, kept equal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives
from jdist.pipeline.runtime import _stage_arrays, _stages

PyTree = Any


class _Copies(NamedTuple):
  """The places of a tied leaf's copies in the devices' packed buffers.

  Attributes:
    dtype: The name of the buffer, its dtype.
    size: The number of entries.
    starts: Where copies start, int32 [devices, chunks]; 0 without a copy.
    there: Whether a chunk has a copy, bool [devices, chunks].
    owner: Whether a chunk has the first stage's copy, bool [devices, chunks].
  """

  dtype: str
  size: int
  starts: np.ndarray
  there: np.ndarray
  owner: np.ndarray


class TiedLeaves:
  """Sums the gradients of tied leaves, and gives all copies one update.

  Equal gradients are not enough to keep copies equal: a codec may round a leaf
  differently in another place of the buffer.  So all copies take the first
  stage's update.
  """

  def __init__(
    self,
    stages: Sequence[_stages.LayerLike],
    params: _stage_arrays.StageArrays,
    axis: str,
  ):
    """Looks up the copies; parameters are packed if there are any."""
    devices = params.num_devices
    shape = devices, params.num_stages // devices
    self._axis = axis
    self._leaves: list[_Copies] = []
    for path, holders in _stages.shared_paths(stages).items():
      starts, there, owner = (
        np.zeros(shape, kind) for kind in (np.int32, bool, bool)
      )
      for stage in holders:
        place = params.find(stage, path)
        # Stage s is chunk s // D of device s % D.
        at = stage % devices, stage // devices
        starts[at], there[at] = place.start, True
        owner[at] = stage == holders[0]
      self._leaves.append(
        _Copies(place.dtype, place.size, starts, there, owner)
      )

  @property
  def exist(self) -> bool:
    """Whether there are any tied leaves."""
    return bool(self._leaves)

  def sum(self, grads: PyTree) -> PyTree:
    """Gives each copy the sum over all copies; arrays are [chunks, size]."""
    return self._shared(grads, "there")

  def share(self, updates: PyTree) -> PyTree:
    """Gives each copy the value of the first stage's."""
    return self._shared(updates, "owner")

  def once(self, grads: PyTree) -> PyTree:
    """Sets all copies but the first stage's to zero."""
    if not self._leaves:
      return grads
    again = [leaf.there & ~leaf.owner for leaf in self._leaves]
    return self._changed(grads, again, lambda _, own: jnp.zeros_like(own))

  def _shared(self, arrays: PyTree, source: str) -> PyTree:
    if not self._leaves:
      return arrays
    # Every device sums its own chunks' copies; one collective for all leaves
    # then adds over the devices.
    device = collectives.index(self._axis)
    totals = []
    for leaf in self._leaves:
      starts, counted = (
        jnp.asarray(x)[device] for x in (leaf.starts, getattr(leaf, source))
      )
      total = jnp.zeros(leaf.size, arrays[leaf.dtype].dtype)
      for chunk, row in enumerate(arrays[leaf.dtype]):
        own = jax.lax.dynamic_slice(row, (starts[chunk],), (leaf.size,))
        # Select, as a product would turn an inf of another leaf into NaN.
        total += jnp.where(counted[chunk], own, jnp.zeros_like(own))
      totals.append(total)
    totals = jax.lax.psum(totals, self._axis)
    there = [leaf.there for leaf in self._leaves]
    return self._changed(arrays, there, lambda i, own: totals[i])

  def _changed(
    self,
    arrays: PyTree,
    places: Sequence[np.ndarray],
    change: Callable[[int, jax.Array], jax.Array],
  ) -> PyTree:
    """Replaces the copies at `places` by `change(leaf, copy)`.

    All devices run the same slices, as one program must; where a chunk has no
    copy, the slice at 0 is written back unchanged.
    """
    device, arrays = collectives.index(self._axis), dict(arrays)
    for i, (leaf, of_leaf) in enumerate(zip(self._leaves, places, strict=True)):
      starts, there = (jnp.asarray(x)[device] for x in (leaf.starts, of_leaf))
      for chunk, row in enumerate(arrays[leaf.dtype]):
        start = (starts[chunk],)
        own = jax.lax.dynamic_slice(row, start, (leaf.size,))
        new = jnp.where(there[chunk], change(i, own), own)
        row = jax.lax.dynamic_update_slice(row, new, start)
        arrays[leaf.dtype] = arrays[leaf.dtype].at[chunk].set(row)
    return arrays
