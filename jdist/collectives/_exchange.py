"""Rows that workers exchange, and payloads as buffers of bytes.

`_buckets` needs one dtype, and a codec's payload mixes them.  It is only
copied, and so can be sent as bytes:

- Arrays smaller than `ALONE_BYTES` share one uint8 buffer.  Those with the
  widest items come first, so that every array begins at a multiple of its own
  item size, **without padding**.
- A larger array is sent in its own shape, which saves a copy; 16-bit and 8-bit
  floats as unsigned integers of the same bits, because XLA's CPU compiler
  widens such floats in collectives.

Nothing is rounded, because every conversion is a `bitcast_convert_type`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import states
from jdist.collectives import _axis
from jdist.states import PyTree

ALONE_BYTES = 1 << 20
# From this size on, two CPU hosts exchange by a sum of integers.  Gloo's gather
# and all-to-all send one message after the other, as the notice that a process
# can receive waits behind its own message.  The pieces of a sum go both ways at
# once (experiments/peers has the times of a step with either).
_SUMMED_BYTES = 1 << 15
_UNSIGNED: dict[int, np.dtype] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


def gather(tree: PyTree, axis: _axis.Axis) -> PyTree:
  """Gathers arrays [...] of all workers on every worker: an all-gather.

  The results are [workers, ...], in the order of `index`.

  >>> rows = jax.vmap(lambda x: gather(x, "worker"), axis_name="worker")(
  ...   jnp.array([1, 3])
  ... )
  >>> rows.tolist()
  [[1, 3], [1, 3]]
  """

  def one(x: jax.Array) -> jax.Array:
    rows = x[None]
    for name in _axis.bound_names(axis):
      # The shapes are [inner, ...], then [outer, inner, ...], which becomes one
      # axis of workers.
      rows = _axis.varying(rows, name)
      if rows.nbytes >= _SUMMED_BYTES and _joins_two_hosts(rows, name):
        both = jnp.stack([rows, _from_other(rows, name)])
        rows = jnp.roll(both, jax.lax.axis_index(name), 0)
      else:
        rows = jax.lax.all_gather(rows, name)
      rows = rows.reshape(-1, *x.shape)
    return _axis.varying(rows, axis)

  return jax.tree.map(one, _axis.arrays(tree))


def reduce_scatter(tree: PyTree, axis: _axis.Axis) -> PyTree:
  """Averages rows over the workers; worker j gets row j: a reduce-scatter.

  `gather` of the result is `mean`; each of the two sends half of its bytes.

  Args:
    tree: Floats [workers, ...]; every worker has values for all rows, and gets
      the mean of one row, [...].
    axis: The workers' axis.

  >>> jax.vmap(lambda x: reduce_scatter(x, "worker"), axis_name="worker")(
  ...   jnp.array([[1.0, 2.0], [3.0, 6.0]])
  ... ).tolist()
  [2.0, 4.0]
  """
  num_workers, names = _axis.size(axis), _axis.bound_names(axis)
  manual = jax.sharding.get_abstract_mesh().manual_axes
  widen = _axis.must_widen()

  def one(x: jax.Array) -> jax.Array:
    y = _by_name(states.wide(x) if widen else x, names)
    for dim, name in zip(reversed(range(len(names))), names, strict=True):
      if name in manual:
        y = jax.lax.psum_scatter(
          _axis.varying(y, name), name, scatter_dimension=dim, tiled=False
        )
      else:  # Inside shard_map vmap has no rule for a scatter; nothing is sent.
        y = jax.lax.psum(y, name)
        y = jax.lax.dynamic_index_in_dim(
          y, jax.lax.axis_index(name), dim, keepdims=False
        )
    return _axis.varying(_axis.as_before(y / num_workers, x.dtype), axis)

  return jax.tree.map(one, _axis.arrays(tree))


def _by_name(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
  """Splits rows, one for each worker, by an axis: [outer, inner, ...]."""
  sizes = [jax.lax.axis_size(name) for name in reversed(names)]
  if x.ndim == 0 or x.shape[0] != math.prod(sizes):
    raise ValueError(
      "`tree` must hold one row a worker in the first dimension of every "
      f"leaf: {math.prod(sizes)} rows, got shape {x.shape}."
    )
  return x.reshape(*sizes, *x.shape[1:])


def all_to_all(tree: PyTree, axis: _axis.Axis) -> PyTree:
  """Sends row j of every leaf to worker j: an all-to-all.

  Args:
    tree: Arrays [workers, ...]; row j is this worker's message to worker j.
    axis: The workers' axis.

  Returns:
    Arrays [workers, ...]; row i is the message of worker i to this one.

  >>> jax.vmap(lambda x: all_to_all(x, "worker"), axis_name="worker")(
  ...   jnp.array([[11, 12], [21, 22]])
  ... ).tolist()
  [[11, 21], [12, 22]]
  """
  names = _axis.bound_names(axis)

  def one(x: jax.Array) -> jax.Array:
    y = _by_name(x, names)
    for dim, name in zip(reversed(range(len(names))), names, strict=True):
      y = _mapped(y, name)
      if y.nbytes >= 2 * _SUMMED_BYTES and _joins_two_hosts(y, name):
        other = 1 - jax.lax.axis_index(name)
        sent = jax.lax.dynamic_index_in_dim(y, other, dim)
        found = _from_other(sent, name)
        y = jax.lax.dynamic_update_index_in_dim(y, found, other, dim)
      else:
        y = jax.lax.all_to_all(y, name, dim, dim)
    return _axis.varying(y.reshape(x.shape), axis)

  return jax.tree.map(one, _axis.arrays(tree))


def _joins_two_hosts(x: jax.Array, name: str) -> bool:
  """Returns whether two CPU hosts can exchange an array by a sum."""
  return (
    x.dtype.kind in "fiu"
    and name in jax.sharding.get_abstract_mesh().manual_axes
    and jax.lax.axis_size(name) == 2
    and _axis.joins_cpu_hosts()
  )


def _from_other(x: jax.Array, name: str) -> jax.Array:
  """Returns the array of the other one of two workers."""
  bits = jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint8
  own = jax.lax.bitcast_convert_type(x, bits)
  return jax.lax.bitcast_convert_type(jax.lax.psum(own, name) - own, x.dtype)


def _mapped(x: jax.Array, name: str) -> jax.Array:
  """Makes a value mapped under vmap, or varying under shard_map."""
  # JAX's all-to-all returns a wrong shape under vmap for a value that is not
  # mapped.  The selection below changes no number.
  if name in jax.sharding.get_abstract_mesh().manual_axes:
    return _axis.varying(x, name)
  return jnp.where(jax.lax.axis_index(name) >= 0, x, x)


def pack_bytes(tree: PyTree, *, num_leading: int = 0) -> tuple[jax.Array, ...]:
  """Packs small arrays into one buffer of bytes.

  Args:
    tree: Arrays [..., *shape] of any dtypes of whole bytes.
    num_leading: How many leading dimensions all arrays share and keep, for
      instance 1 for a row for each worker.

  Returns:
    The buffer of the small arrays, uint8 [..., bytes], if there are any; then
    the large ones, in the tree's order.

  >>> tree = {"codes": jnp.uint8([7, 8]), "scale": jnp.float32(1.0)}
  >>> (buffer,) = pack_bytes(tree)
  >>> buffer.tolist()  # The scale first: its items are wider.
  [0, 0, 128, 63, 7, 8]
  """
  leaves = jax.tree.leaves(tree)
  small, large = _order(leaves, 0)
  buffers = []
  if small:
    parts = [_as_bytes(leaves[i], num_leading) for i in small]
    buffers.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1))
  return (*buffers, *(_as_integers(leaves[i]) for i in large))


def unpack_bytes(
  buffers: Sequence[jax.Array], like: PyTree, *, rows: int | None = None
) -> PyTree:
  """Undoes `pack_bytes`, also after leading dimensions were added or changed.

  Args:
    buffers: The result of `pack_bytes`, perhaps gathered since.
    like: The packed tree, arrays or `jax.ShapeDtypeStruct`, without its leading
      dimensions.
    rows: The number of rows that were packed, if there was a dimension of
      them; the size of an array is that of all its rows.

  >>> tree = {"codes": jnp.uint8([7, 8]), "scale": jnp.float32(1.0)}
  >>> unpack_bytes(pack_bytes(tree), tree)["scale"].item()
  1.0
  """
  leaves, treedef = jax.tree.flatten(like)
  small, large = _order(leaves, 0 if rows is None else rows)
  parts: dict[int, jax.Array] = {}
  rest = list(buffers)
  if small:
    buffer, start = rest.pop(0), 0
    for i in small:
      end = start + _num_bytes(leaves[i])
      parts[i] = _from_bytes(buffer[..., start:end], leaves[i])
      start = end
  for i, buffer in zip(large, rest, strict=True):
    dtype = np.dtype(leaves[i].dtype)
    same = buffer.dtype == dtype
    parts[i] = buffer if same else jax.lax.bitcast_convert_type(buffer, dtype)
  return jax.tree.unflatten(treedef, [parts[i] for i in range(len(leaves))])


def _num_bytes(leaf: Any) -> int:
  return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _order(leaves: Sequence[Any], rows: int) -> tuple[list[int], list[int]]:
  """Returns the small leaves, in their order in the buffer, and the large."""
  small: list[int] = []
  large: list[int] = []
  for i, leaf in enumerate(leaves):
    num_bytes = _num_bytes(leaf) * max(rows, 1)
    (large if num_bytes >= ALONE_BYTES else small).append(i)
  # The sort is stable, so that both ends agree on the order.
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
