"""Trees and outputs of stages as arrays of equal shapes on every device."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist.pipeline.runtime import _stages
from jdist.states import PyTree


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """The place of a leaf in a packed buffer."""

  dtype: str
  start: int
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.shape)


class StageArrays:
  """Trees, one for each stage, as arrays `[devices, ...]`.

  Trees whose leaves have the same shapes, whatever their names, are stacked
  leaf by leaf under the names of the first.  Others are packed: their leaves
  are concatenated in a buffer for each dtype, padded to the longest stage.  An
  optimizer of a packed buffer must treat each number alone.

  Arrays are `[devices, chunks, ...]`.  Stacked trees may have their chunks
  apart, as `[devices, ...]` in a tuple with a tree for each chunk, or a tree
  alone for one chunk: an optimizer then sees the leaves of its stages as they
  are, except for scalars, which are `[devices, 1]`.

  Attributes:
    stacked: Whether trees are stacked, and not packed.
    apart: Whether their chunks are apart.
    num_devices: The number of devices; stage s is chunk `s // num_devices` of
      device `s % num_devices`.
  """

  def __init__(
    self,
    trees: Sequence[PyTree],
    num_devices: int,
    *,
    pack: bool | None = None,
    apart: bool = False,
  ):
    """Lays out trees; by default only those of unlike shapes are packed."""
    self.num_devices = num_devices
    self._shapes = [_stages.shapes_of(tree) for tree in trees]
    # Names do not matter: equal layers have different ones.
    kinds = [
      [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
      for tree in self._shapes
    ]
    alike = all(kind == kinds[0] for kind in kinds)
    self.stacked = alike if pack is None else not pack
    assert alike or not self.stacked
    self.apart = self.stacked and apart
    self._leaves: list[list[_Leaf]] = []
    self.sizes: dict[str, int] = {}
    # The places of leaves in packed buffers, one behind the other by dtype.
    for kind in kinds:
      ends: dict[str, int] = {}
      leaves = []
      for shape, dtype in kind:
        name = str(dtype)
        leaves.append(_Leaf(name, ends.get(name, 0), shape))
        ends[name] = ends.get(name, 0) + leaves[-1].size
        self.sizes[name] = max(self.sizes.get(name, 0), ends[name])
      self._leaves.append(leaves)

  @property
  def num_stages(self) -> int:
    """The number of stages."""
    return len(self._shapes)

  @property
  def num_chunks(self) -> int:
    """The number of stages on each device."""
    return self.num_stages // self.num_devices

  def find(self, stage: int, path: str) -> _Leaf:
    """Returns the place of a leaf by its path, see `jax.tree_util.keystr`."""
    paths = list(_stages.by_path(self._shapes[stage]))
    return self._leaves[stage][paths.index(path)]

  def join(self, trees: Sequence[PyTree]) -> PyTree:
    """Makes the arrays `[devices, ...]` of all stages."""
    own = [self.to_own(tree, i) for i, tree in enumerate(trees)]

    # [stages, ...] -> [chunks, devices, ...] -> [devices, chunks, ...]
    def stack(*leaves: jax.Array) -> jax.Array:
      found = jnp.stack(leaves)
      found = found.reshape(self.num_chunks, -1, *found.shape[1:])
      return jnp.swapaxes(found, 0, 1)

    arrays = jax.tree.map(stack, *own)
    return self.take_apart(arrays, 1) if self.apart else arrays

  def take_apart(self, arrays: PyTree, axis: int = 0) -> PyTree:
    """Splits arrays along their axis of chunks."""

    def take(x: jax.Array, chunk: int) -> jax.Array:
      # A scalar of a stage keeps the axis: an optimizer's scalars have none and
      # are thereby known to be the same on all devices.
      keep = x.ndim == axis + 1
      return jax.lax.index_in_dim(x, chunk, axis, keepdims=keep)

    found = tuple(
      jax.tree.map(lambda x, c=c: take(x, c), arrays)
      for c in range(self.num_chunks)
    )
    return found if len(found) > 1 else found[0]

  def chunk(self, arrays: PyTree, stage: int) -> PyTree:
    """Returns the result of `to_own` for a stage from one device's arrays."""
    number = stage // self.num_devices
    if not self.apart:
      return jax.tree.map(lambda x: x[number], arrays)
    own = arrays[number] if self.num_chunks > 1 else arrays
    likes = jax.tree.leaves(self._shapes[stage])
    leaves = zip(jax.tree.leaves(own), likes, strict=True)
    found = [x.reshape(like.shape) for x, like in leaves]
    return jax.tree.unflatten(jax.tree.structure(own), found)

  def split(self, arrays: PyTree) -> list[PyTree]:
    """Undoes `join`."""
    found = []
    for s in range(self.num_stages):
      own = jax.tree.map(lambda x, s=s: x[s % self.num_devices], arrays)
      found.append(self.to_tree(self.chunk(own, s), s))
    return found

  def to_own(self, tree: PyTree, stage: int) -> PyTree:
    """Converts a stage's tree to the form in which one device holds it."""
    if self.stacked:
      return self._named(tree, 0)
    parts: dict[str, list[jax.Array]] = {name: [] for name in self.sizes}
    for x, leaf in zip(jax.tree.leaves(tree), self._leaves[stage], strict=True):
      parts[leaf.dtype].append(jnp.ravel(x).astype(leaf.dtype))
    found = {}
    for name, size in self.sizes.items():
      used = sum(x.size for x in parts[name])
      # All devices run one program, so shorter stages are padded.
      parts[name].append(jnp.zeros(size - used, name))
      found[name] = jnp.concatenate(parts[name])
    return found

  def to_tree(self, own: PyTree, stage: int) -> PyTree:
    """Undoes `to_own`."""
    if self.stacked:
      return self._named(own, stage)
    leaves = []
    for x in self._leaves[stage]:
      part = jax.lax.slice(own[x.dtype], (x.start,), (x.start + x.size,))
      leaves.append(part.reshape(x.shape))
    return jax.tree.unflatten(jax.tree.structure(self._shapes[stage]), leaves)

  def _named(self, tree: PyTree, stage: int) -> PyTree:
    """Renames the leaves of a tree as in a stage."""
    structure = jax.tree.structure(self._shapes[stage])
    return jax.tree.unflatten(structure, jax.tree.leaves(tree))


class Message:
  """The layout of what a device sends in a tick, the same for all stages.

  All devices run one program and permute one array, so outputs of unlike shapes
  are flattened and padded to the largest.

  >>> message = Message([jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(3)])
  >>> message.flat(jnp.ones(2), 0).tolist()
  [1.0, 1.0, 0.0]
  >>> message.unflat(jnp.arange(3.0), 0).tolist()
  [0.0, 1.0]
  """

  def __init__(self, between: Sequence[PyTree]):
    """Lays out the outputs of all stages but the last."""
    self._packed = StageArrays(between, 1, pack=True)
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

  def flat(self, x: Any, number: int) -> jax.Array:
    """Flattens the outputs of stage `number`, or their gradient."""
    # Gradients have the shapes of the outputs, so one layout serves both ways.
    found: jax.Array = self._packed.to_own(x, number)[self._name]
    return found

  def unflat(self, flat: jax.Array, number: int) -> Any:
    """Undoes `flat`."""
    return self._packed.to_tree({self._name: flat}, number)
