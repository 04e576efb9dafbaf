"""Collective operations over the workers, on every substrate.

A step is written for one worker and communicates only through these functions
and an *axis*:

| axis | means | substrate |
|---|---|---|
| `None` | one worker, no communication | none |
| `"worker"` | the workers along this name | `vmap` or `shard_map` |
| `(inner, outer)` | several workers a device | `vmap` in `shard_map` |

Trees hold arrays, each worker its own.  Results are typed as varying over the
axis (`_manual_axes`).
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jdist import checks
from jdist.collectives import _buckets, _manual_axes

PyTree: TypeAlias = Any
Axis: TypeAlias = _manual_axes.Axis

# As PyTorch's DistributedDataParallel: beyond it latency hardly counts.
_BUCKET_BYTES = 25 * 2**20


def mean(tree: PyTree, axis: Axis) -> PyTree:
  """Averages every leaf over the workers.

  The averages are equal on all workers to the bit, and in the leaves' dtypes;
  integers give floats.  The sum is taken in that dtype: in float16 it overflows
  above 65504, and the mean is then infinite.

  >>> double = lambda x: mean({"w": x}, "worker")["w"]
  >>> jax.vmap(double, axis_name="worker")(jnp.array([1.0, 3.0])).tolist()
  [2.0, 2.0]
  """
  tree = _arrays(tree)
  if axis is None:  # The same dtypes as with others.
    return jax.tree.map(
      lambda x: (
        x if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.mean(x[None], 0)
      ),
      tree,
    )
  return _all_reduce(jax.lax.pmean, tree, axis)


def start_mean(tree: PyTree, axis: Axis) -> PyTree:
  """Takes a mean but for its last division; see `finish_mean`.

  For a mean of floats that other work is to hide: dividing at once would free
  the sum, and whatever XLA's CPU compiler puts into its memory would wait for
  the mean.
  """
  names = _manual_axes.bound_names(axis)
  for name in names[:-1]:
    tree = _all_reduce(jax.lax.pmean, tree, name)
  if names:
    tree = _all_reduce(jax.lax.psum, tree, names[-1])
  return _manual_axes.varying(tree, axis)


def finish_mean(tree: PyTree, axis: Axis) -> PyTree:
  """Divides the result of `start_mean`, which gives the bits of `mean`.

  >>> def both(x):
  ...   return finish_mean(start_mean(x, "worker"), "worker")
  >>> jax.vmap(both, axis_name="worker")(jnp.array([1.0, 3.0])).tolist()
  [2.0, 2.0]
  """
  names = _manual_axes.bound_names(axis)
  number = jax.lax.axis_size(names[-1]) if names else 1
  return jax.tree.map(lambda x: x / number, tree)


def sum(tree: PyTree, axis: Axis) -> PyTree:
  """Adds every leaf over the workers; see `mean`.  Bools give integers."""
  if axis is None:  # The same dtypes as with others.
    return jax.tree.map(
      lambda x: x.astype(jnp.int32) if x.dtype == bool else x, _arrays(tree)
    )
  return _all_reduce(jax.lax.psum, tree, axis)


def _all_reduce(
  reduce: Callable[[PyTree, str], PyTree], tree: PyTree, axis: Axis
) -> PyTree:
  tree = _arrays(tree)
  # An empty tree has nothing to send, and some JAX versions object to it.
  if not jax.tree.leaves(tree):
    return tree
  dtypes = jax.tree.map(lambda x: x.dtype, tree)
  if _must_widen():
    tree = jax.tree.map(_widened, tree)
  buckets, leaves = None, tree
  if len(jax.tree.leaves(tree)) > 1 and _sends_leaf_by_leaf():
    buckets = _buckets.Buckets.of(tree, max_bytes=_BUCKET_BYTES)
    leaves = buckets.pack(tree)
  for name in _manual_axes.bound_names(axis):
    # A value that is already equal on all workers would be refused, or
    # reduced twice without a word, depending on the JAX version.
    leaves = reduce(_manual_axes.varying(leaves, name), name)
  tree = leaves if buckets is None else buckets.unpack(leaves, tree)
  tree = jax.tree.map(_like, tree, dtypes)
  return _manual_axes.varying(tree, axis)


def _arrays(tree: PyTree) -> PyTree:
  """Makes numbers arrays; raises a ValueError for what is neither."""
  if all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree)):
    return tree
  checks.check_arrays("tree", tree)
  return jax.tree.map(jnp.asarray, tree)


def _sends_leaf_by_leaf() -> bool:
  """Returns whether small leaves had better share a buffer.

  Compilers for GPUs put many all-reduces into one message.  Between CPU hosts
  gloo takes one array after the other, each with the latency of a whole ring:
  for the ten leaves of LeNet ten times as long as for one buffer of them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  return (
    device is not None
    and device.platform == "cpu"
    and len(mesh.manual_axes) == len(mesh.axis_names)
    and jax.process_count() > 1
  )


def _must_widen() -> bool:
  """Returns whether to sum 16-bit floats as float32.

  XLA's CPU compiler does so anyway, but aborts the process where the mesh has
  automatic axes beside the workers' (seen in jax 0.10.2 to 0.12.0).
  """
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  return (
    device is not None
    and device.platform == "cpu"
    and 0 < len(mesh.manual_axes) < len(mesh.axis_names)
  )


def _widened(x: jax.Array) -> jax.Array:
  narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
  return x.astype(jnp.float32) if narrow else x


def _like(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  # pmean of integers is a float on purpose; only floats go back.
  return x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x


def gather(tree: PyTree, axis: Axis) -> PyTree:
  """Collects arrays [...] of all workers on every worker: an all-gather.

  They are [workers, ...], in the order of `index`.

  >>> rows = jax.vmap(lambda x: gather(x, "worker"), axis_name="worker")(
  ...   jnp.array([1, 3])
  ... )
  >>> rows.tolist()
  [[1, 3], [1, 3]]
  """

  def one(x: jax.Array) -> jax.Array:
    rows = x[None]
    for name in _manual_axes.bound_names(axis):
      # [inner, ...], then [outer, inner, ...], then one axis of workers.
      rows = jax.lax.all_gather(_manual_axes.varying(rows, name), name)
      rows = rows.reshape(-1, *x.shape)
    return _manual_axes.varying(rows, axis)

  return jax.tree.map(one, _arrays(tree))


def reduce_scatter(tree: PyTree, axis: Axis) -> PyTree:
  """Averages rows over the workers; worker j gets row j: a reduce-scatter.

  `gather` of the result is `mean`; each of the two sends half of its bytes.

  Args:
    tree: arrays [workers, ...] of floats, on every worker values for all rows,
      of which it gets one, [...].
    axis: the workers' axis.

  Raises:
    ValueError: when a leaf's first dimension is not the number of workers.

  >>> jax.vmap(lambda x: reduce_scatter(x, "worker"), axis_name="worker")(
  ...   jnp.array([[1.0, 2.0], [3.0, 6.0]])
  ... ).tolist()
  [2.0, 4.0]
  """
  num_workers, names = size(axis), _manual_axes.bound_names(axis)
  manual = jax.sharding.get_abstract_mesh().manual_axes
  widen = _must_widen()

  def one(x: jax.Array) -> jax.Array:
    y = _by_name(_widened(x) if widen else x, names)
    for dim, name in zip(reversed(range(len(names))), names, strict=True):
      if name in manual:
        y = jax.lax.psum_scatter(
          _manual_axes.varying(y, name),
          name,
          scatter_dimension=dim,
          tiled=False,
        )
      else:  # Nothing is sent, and inside shard_map vmap has no rule for it.
        y = jax.lax.psum(y, name)
        y = jax.lax.dynamic_index_in_dim(
          y, jax.lax.axis_index(name), dim, keepdims=False
        )
    return _manual_axes.varying(_like(y / num_workers, x.dtype), axis)

  return jax.tree.map(one, _arrays(tree))


def _by_name(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
  """Splits rows, one a worker, by the names of an axis: [outer, inner, ...]."""
  sizes = [jax.lax.axis_size(name) for name in reversed(names)]
  if x.ndim == 0 or x.shape[0] != math.prod(sizes):
    raise ValueError(
      "`tree` must hold one row a worker in the first dimension of every "
      f"leaf: {math.prod(sizes)} rows, got shape {x.shape}."
    )
  return x.reshape(*sizes, *x.shape[1:])


def all_to_all(tree: PyTree, axis: Axis) -> PyTree:
  """Sends row j of every leaf to worker j: an all-to-all.

  Args:
    tree: arrays [workers, ...]; row j is what this worker sends to worker j.
    axis: the workers' axis.

  Returns:
    Arrays [workers, ...]; row i is what worker i sent to this one.

  Raises:
    ValueError: when a leaf's first dimension is not the number of workers.

  >>> jax.vmap(lambda x: all_to_all(x, "worker"), axis_name="worker")(
  ...   jnp.array([[11, 12], [21, 22]])
  ... ).tolist()
  [[11, 21], [12, 22]]
  """
  names = _manual_axes.bound_names(axis)

  def one(x: jax.Array) -> jax.Array:
    y = _by_name(x, names)
    for dim, name in zip(reversed(range(len(names))), names, strict=True):
      y = jax.lax.all_to_all(_mapped(y, name), name, dim, dim)
    return _manual_axes.varying(y.reshape(x.shape), axis)

  return jax.tree.map(one, _arrays(tree))


def _mapped(x: jax.Array, name: str) -> jax.Array:
  """Makes a value mapped under vmap, or varying under shard_map.

  JAX's all-to-all returns a wrong shape under vmap for a value that is not
  mapped.
  """
  if name in jax.sharding.get_abstract_mesh().manual_axes:
    return _manual_axes.varying(x, name)
  return jnp.where(jax.lax.axis_index(name) >= 0, x, x)


def index(axis: Axis) -> jax.Array:
  """Returns this worker's number, from 0, as an int32 scalar.

  With (inner, outer) the workers of one device are neighbours:
  `outer_index * inner_size + inner_index`.

  >>> jax.vmap(lambda x: x + index("worker"), axis_name="worker")(
  ...   jnp.array([10, 20])
  ... ).tolist()
  [10, 21]
  """
  worker, stride = jnp.zeros((), jnp.int32), 1
  for name in _manual_axes.bound_names(axis):
    worker = worker + jax.lax.axis_index(name) * stride
    stride *= jax.lax.axis_size(name)
  return worker


def size(axis: Axis) -> int:
  """Returns the number of workers, a Python int; 1 without an axis."""
  number = 1
  for name in _manual_axes.bound_names(axis):
    number *= jax.lax.axis_size(name)
  return number
