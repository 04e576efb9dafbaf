"""Small trees in few buffers, between the programs of a pair in one process."""

import dataclasses
import functools
from typing import Any

import jax

from jdist import collectives, states
from jdist.states import PyTree

# Each array that a program takes or returns costs about a microsecond on a CPU,
# which a small net's arithmetic hardly exceeds; larger copies cost more.
_MAX_BYTES = 1 << 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
  """A tree whose leaves are in one buffer for each dtype."""

  buffers: tuple[jax.Array, ...]
  layout: Any = dataclasses.field(metadata={"static": True})


@functools.lru_cache(maxsize=256)
def _layout(structure: Any, kinds: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
  # One object for equal trees: JAX compares it in every call of a program.
  return collectives.Buckets.of(list(kinds)), structure, kinds


@jax.jit
def pack(*trees: PyTree) -> tuple[PyTree, ...]:
  """Packs each tree, unless it is large, has keys, or is packed."""
  return tuple(map(_pack, trees))


def _pack(tree: PyTree) -> PyTree:
  leaves, structure = jax.tree.flatten(tree)
  if (
    isinstance(tree, Packed)
    or len(leaves) < 2
    or states.num_bytes(leaves) > _MAX_BYTES
    or any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in leaves)
  ):
    return tree
  kinds = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
  layout = _layout(structure, kinds)
  # Without a barrier the compiler fuses across the copy, and rounds otherwise.
  return Packed(layout[0].pack(jax.lax.optimization_barrier(leaves)), layout)


def unpack(tree: PyTree) -> PyTree:
  """Undoes `pack` in all parts of a tree."""
  return jax.tree.map(
    lambda x: _unpack(x) if isinstance(x, Packed) else x,
    tree,
    is_leaf=lambda x: isinstance(x, Packed),
  )


@jax.jit
def _unpack(packed: Packed) -> PyTree:
  buckets, structure, kinds = packed.layout
  leaves = buckets.unpack(packed.buffers, list(kinds))
  return jax.tree.unflatten(structure, leaves)
