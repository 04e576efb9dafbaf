"""Joins payloads of any dtypes into one buffer of bytes, and parts them again.

A collective costs its latency whatever it carries, so what is small travels
together; copying costs time too, so what is large travels alone:

- arrays of less than `ALONE_BYTES` become one uint8 buffer, those of the
  widest items first.  So every array begins at a multiple of its own item
  size, **without padding**: the buffer has the bytes of its arrays and no more.
- a larger one goes as it is, in its own shape; if it is of 16-bit or 8-bit
  floats, as unsigned integers of the same bits, because XLA's CPU compiler
  widens such floats in collectives.

Nothing is rounded on the way: all of it is `bitcast_convert_type`.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any

ALONE_BYTES = 1 << 20
_UNSIGNED: dict[int, np.dtype] = {
  1: np.dtype(np.uint8),
  2: np.dtype(np.uint16),
}


def pack_bytes(tree: PyTree, *, num_leading: int = 0) -> tuple[jax.Array, ...]:
  """Copies what is small into one buffer of bytes.

  Args:
    tree: arrays [..., *shape] of any dtypes of whole bytes.
    num_leading: how many leading dimensions all arrays share, for instance 1
      for a row a worker; they stay as they are.

  Returns:
    The buffers: of what is joined, uint8 [..., bytes], if there is anything;
    then the large arrays, in the tree's order.

  >>> tree = {"codes": jnp.uint8([7, 8]), "scale": jnp.float32(1.0)}
  >>> (buffer,) = pack_bytes(tree)
  >>> buffer.tolist()  # The scale first: its items are wider.
  [0, 0, 128, 63, 7, 8]
  """
  leaves = jax.tree.leaves(tree)
  joined, alone = _order(leaves, 0)
  buffers = []
  if joined:
    parts = [_as_bytes(leaves[i], num_leading) for i in joined]
    buffers.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1))
  return (*buffers, *(_as_integers(leaves[i]) for i in alone))


def unpack_bytes(
  buffers: Sequence[jax.Array], like: PyTree, *, rows: int | None = None
) -> PyTree:
  """Undoes `join`, also where the buffers have got other leading dimensions.

  Args:
    buffers: made by `join`, perhaps gathered or exchanged since.
    like: what was joined, arrays or `jax.ShapeDtypeStruct`, without its
      leading dimensions.
    rows: how many rows were joined, if there was a dimension of them: what is
      large is told by all rows together.

  Returns:
    Arrays [..., *shape] of like's dtypes.

  >>> tree = {"codes": jnp.uint8([7, 8]), "scale": jnp.float32(1.0)}
  >>> unpack_bytes(pack_bytes(tree), tree)["scale"].item()
  1.0
  """
  leaves, treedef = jax.tree.flatten(like)
  joined, alone = _order(leaves, 0 if rows is None else rows)
  parts: dict[int, jax.Array] = {}
  rest = list(buffers)
  if joined:
    buffer, start = rest.pop(0), 0
    for i in joined:
      end = start + _num_bytes(leaves[i])
      parts[i] = _from_bytes(buffer[..., start:end], leaves[i])
      start = end
  for i, buffer in zip(alone, rest, strict=True):
    parts[i] = _from_integers(buffer, leaves[i])
  return jax.tree.unflatten(treedef, [parts[i] for i in range(len(leaves))])


def _num_bytes(leaf: Any) -> int:
  return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _order(leaves: Sequence[Any], rows: int) -> tuple[list[int], list[int]]:
  """Which leaves are joined, in their order in the buffer, and which not."""
  small: list[int] = []
  large: list[int] = []
  for i, leaf in enumerate(leaves):
    num_bytes = _num_bytes(leaf) * max(rows, 1)
    (large if num_bytes >= ALONE_BYTES else small).append(i)
  # The sort is stable: of equal widths the first comes first.
  small.sort(key=lambda i: -np.dtype(leaves[i].dtype).itemsize)
  return small, large


def _as_bytes(x: jax.Array, num_leading: int) -> jax.Array:
  leading = x.shape[:num_leading]
  if x.dtype == np.bool_:
    x = x.astype(np.uint8)
  x = jax.lax.bitcast_convert_type(x, np.uint8)
  return x.reshape(*leading, math.prod(x.shape[num_leading:]))


def _from_bytes(x: jax.Array, like: Any) -> jax.Array:
  dtype = np.dtype(like.dtype)
  shape = (*x.shape[:-1], *like.shape)
  if dtype.itemsize > 1:
    shape = (*shape, dtype.itemsize)
  x = x.reshape(shape)
  if dtype == np.bool_:
    return x != 0
  return jax.lax.bitcast_convert_type(x, dtype)


def _as_integers(x: jax.Array) -> jax.Array:
  if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize in _UNSIGNED:
    return jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])
  return x


def _from_integers(x: jax.Array, like: Any) -> jax.Array:
  dtype = np.dtype(like.dtype)
  return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
