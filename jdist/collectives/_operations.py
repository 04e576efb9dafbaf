"""What one worker says to the others, on every substrate.

A step is written for one worker and speaks to the others only through the
functions of this file and an *axis*:

| axis | means | substrate |
|---|---|---|
| `None` | one worker, nobody to speak to | none |
| `"worker"` | the workers along this name | `vmap` or `shard_map` |
| `(inner, outer)` | several workers a device | `vmap` in `shard_map` |

The substrates differ in typing rules, and this is the one file that knows
them.  Its convention: **everything a worker holds varies over the axis**.
Results of collectives are equal on all workers, but are typed as varying, so
that they can meet a worker's own values in a `lax.cond` or a `scan` carry.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

PyTree: TypeAlias = Any
Axis: TypeAlias = str | tuple[str, str] | None


def check_axis(axis: Axis) -> None:
  """Raises a ValueError unless `axis` is None, a name, or (inner, outer).

  >>> check_axis(("worker", "worker"))
  Traceback (most recent call last):
  ValueError: `axis` must be None, a name, or two different names (inner,
  outer), got ('worker', 'worker').
  """
  if axis is None or (isinstance(axis, str) and axis):
    return
  if (
    isinstance(axis, tuple)
    and len(axis) == 2
    and all(isinstance(name, str) and name for name in axis)
    and axis[0] != axis[1]
  ):
    return
  raise ValueError(
    "`axis` must be None, a name, or two different names (inner, outer), got "
    f"{axis!r}."
  )


def _names(axis: Axis) -> tuple[str, ...]:
  """The names to go through one after the other, innermost first.

  One after the other, because a tuple of a vmap name and a shard_map name is
  accepted by some of JAX's collectives only.
  """
  check_axis(axis)
  if axis is None:
    return ()
  return (axis,) if isinstance(axis, str) else axis


def _varying_over(x: Any) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def _tracks_varying(name: str) -> bool:
  """Whether values are typed as varying or not over `name`.

  They are in a `shard_map` with `check_vma=True`, and neither under `vmap` nor
  with `check_vma=False`.  A worker's index always differs between workers.
  """
  if name not in jax.sharding.get_abstract_mesh().manual_axes:
    return False
  return name in _varying_over(jax.lax.axis_index(name))


def varying(tree: PyTree, axis: Axis) -> PyTree:
  """Types every leaf as a worker's own value; moves no data.

  Needed for constants and shared inputs that meet varying values, in a
  `shard_map` with `check_vma=True`; elsewhere it returns `tree`.

  Args:
    tree: arrays of any shapes.
    axis: the workers' axis.

  Returns:
    The same values.
  """
  for name in _names(axis):
    if _tracks_varying(name):
      # jax reports a repeated cast as an error, hence the test per leaf.
      tree = jax.tree.map(
        lambda x, name=name: (
          x
          if name in _varying_over(x)
          else jax.lax.pcast(x, name, to="varying")
        ),
        tree,
      )
  return tree


def varying_like(tree: PyTree, like: PyTree) -> PyTree:
  """Types every leaf as varying over all that some leaf of `like` varies over.

  For what goes into a loop whose results vary over more of the mesh's axes
  than the workers', as on the shards of a sharded worker.
  """
  names = frozenset[str]().union(*map(_varying_over, jax.tree.leaves(like)))
  return jax.tree.map(
    lambda x: (
      jax.lax.pcast(x, missing, to="varying")
      if (missing := tuple(sorted(names - _varying_over(x))))
      else x
    ),
    tree,
  )


def check_local(tree: PyTree, axis: Axis, *, what: str) -> None:
  """Raises a ValueError if a leaf is typed as equal on all workers.

  Under `shard_map` the gradient with respect to parameters that are *shared*
  over the axis arrives already **summed** over it: a mean of it would send
  everything a second time and leave the sum.  The typing shows it, so it is
  an error and not a wrong result.

  Args:
    tree: the values that should be each worker's own.
    axis: the workers' axis.
    what: how to name `tree` in the error.

  Raises:
    ValueError: at trace time, when a leaf does not vary over `axis`.
  """
  for name in _names(axis):
    if not _tracks_varying(name):
      continue
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      if name not in _varying_over(leaf):
        raise ValueError(
          f"{what} must be each worker's own, but leaf "
          f"`{jax.tree_util.keystr(path)}` is the same on all workers of axis "
          f"{name!r}. This usually means that the parameters are shared over "
          "the axis (`in_specs=P()`), where `jax.grad` has already summed the "
          "gradients. Give every worker its own slice of the parameters "
          "(`jdist.collectives.workers(...).replicate(params)`), or call "
          "`jdist.collectives.varying(params, axis)` before differentiating."
        )


def mean(tree: PyTree, axis: Axis) -> PyTree:
  """Averages every leaf over the workers.

  Args:
    tree: arrays of any shapes, each worker its own values.
    axis: None (one worker, whose own values these are), a name, or (inner,
      outer): first over the workers of a device, then between devices.

  Returns:
    The averages, equal on all workers to the bit, in the leaves' dtypes;
    integers give floats.

  >>> double = lambda x: mean({"w": x}, "worker")["w"]
  >>> jax.vmap(double, axis_name="worker")(jnp.array([1.0, 3.0])).tolist()
  [2.0, 2.0]
  """
  if axis is None:  # The same dtypes as with others.
    return jax.tree.map(
      lambda x: x if _is_inexact(x) else jnp.mean(x[None], 0), tree
    )
  return _all_reduce(jax.lax.pmean, tree, axis)


def start_mean(tree: PyTree, axis: Axis) -> PyTree:
  """All of a mean but its last division; see `finish_mean`.

  For a mean that is to travel under other work.  XLA's CPU compiler gives the
  memory of a value that nothing needs any more to what comes later in the
  program, and what comes later then waits until the value has been used: of a
  mean, whose division uses up the sum, the whole program waits.  So the sum is
  kept until the end of what should hide it.

  Args:
    tree: arrays of floats of any shapes, each worker its own values.
    axis: the workers' axis.

  Returns:
    What `finish_mean` takes.
  """
  names = _names(axis)
  for name in names[:-1]:
    tree = _all_reduce(jax.lax.pmean, tree, name)
  if names:
    tree = _all_reduce(jax.lax.psum, tree, names[-1])
  return varying(tree, axis)


def finish_mean(tree: PyTree, axis: Axis) -> PyTree:
  """The mean, to the bit that of `mean`.

  >>> def both(x):
  ...   return finish_mean(start_mean(x, "worker"), "worker")
  >>> jax.vmap(both, axis_name="worker")(jnp.array([1.0, 3.0])).tolist()
  [2.0, 2.0]
  """
  names = _names(axis)
  number = jax.lax.axis_size(names[-1]) if names else 1
  return jax.tree.map(lambda x: x / number, tree)


def sum(tree: PyTree, axis: Axis) -> PyTree:
  """Adds every leaf over the workers; see `mean`.

  >>> jax.vmap(lambda x: sum(x, "worker"), axis_name="worker")(
  ...   jnp.array([1.0, 3.0])
  ... ).tolist()
  [4.0, 4.0]
  """
  return _all_reduce(jax.lax.psum, tree, axis)


def _is_inexact(x: jax.Array) -> bool:
  return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _all_reduce(
  reduce: Callable[[PyTree, str], PyTree], tree: PyTree, axis: Axis
) -> PyTree:
  # An empty tree has nothing to send, and some JAX versions object to it.
  if not jax.tree.leaves(tree):
    return tree
  dtypes = jax.tree.map(lambda x: x.dtype, tree)
  if _must_widen():
    tree = jax.tree.map(_widened, tree)
  for name in _names(axis):
    # A value that is already equal on all workers would be refused, or
    # reduced twice without a word, depending on the JAX version.
    tree = reduce(varying(tree, name), name)
  tree = jax.tree.map(_like, tree, dtypes)
  return varying(tree, axis)


def _must_widen() -> bool:
  """Whether to sum 16-bit floats as float32.

  The CPU compiler does so anyway, but aborts the process in doing it when
  the mesh has automatic axes beside the workers' (seen in jax 0.10.2 to
  0.12.0).
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


def agreed(flag: jax.Array, axis: Axis) -> jax.Array:
  """Tells vmap that a flag is the same on all workers.

  A `lax.cond` on a mapped flag becomes a select under vmap: both branches run
  in every step, and between the devices of (inner, outer) the collectives of
  the rare branch happen every time.  On an agreed flag it stays a
  conditional.

  Args:
    flag: a bool scalar, equal on all workers.
    axis: the workers' axis.

  Returns:
    The same flag.  Nothing is sent between devices.

  >>> def step(x):
  ...   done = agreed(x > 0, "worker")
  ...   return jax.lax.cond(done, lambda: x, lambda: -x)
  >>> program = jax.make_jaxpr(jax.vmap(step, axis_name="worker"))(
  ...   jnp.ones(2)
  ... )
  >>> "cond" in str(program)
  True
  """
  manual = jax.sharding.get_abstract_mesh().manual_axes
  for name in _names(axis):
    if name not in manual:
      flag = jax.lax.pmax(flag.astype(jnp.int32), name) > 0
  return flag


def gather(tree: PyTree, axis: Axis, specs: PyTree = None) -> PyTree:
  """Gives every worker all workers' values.

  Args:
    tree: arrays of any shapes [...], the same on every worker.
    axis: None (one worker), a name, or (inner, outer).
    specs: how the leaves are split over the mesh's other axes, one
      `PartitionSpec` or a tree of them (`Workers.specs` reads them off).
      Every device then gathers its own part; without it XLA first puts a
      split leaf together.

  Returns:
    Arrays [workers, ...], in the order of `index`.

  >>> rows = jax.vmap(lambda x: gather(x, "worker"), axis_name="worker")(
  ...   jnp.array([1, 3])
  ... )
  >>> rows.tolist()
  [[1, 3], [1, 3]]
  """

  def one(x: jax.Array) -> jax.Array:
    rows = x[None]
    for name in _names(axis):
      # [inner, ...], then [outer, inner, ...], then one axis of workers.
      rows = jax.lax.all_gather(varying(rows, name), name)
      rows = rows.reshape(-1, *x.shape)
    return varying(rows, axis)

  return _map_parts(one, tree, specs, from_row=False)


def reduce_scatter(tree: PyTree, axis: Axis) -> PyTree:
  """Averages rows over the workers; worker j gets row j: a reduce-scatter.

  `gather` of the result is `mean`, half of whose bytes each of the two sends.

  Args:
    tree: arrays [workers, ...] of floats; every worker has values for all rows.
    axis: None (one worker), a name, or (inner, outer).

  Returns:
    Arrays [...]: the mean over all workers of the row of this one.

  Raises:
    ValueError: when a leaf's first dimension is not the number of workers.

  >>> jax.vmap(lambda x: scatter(x, "worker"), axis_name="worker")(
  ...   jnp.array([[1.0, 2.0], [3.0, 6.0]])
  ... ).tolist()
  [2.0, 4.0]
  """
  num_workers, names = size(axis), _names(axis)
  manual = jax.sharding.get_abstract_mesh().manual_axes
  widen = _must_widen()

  def one(x: jax.Array) -> jax.Array:
    _check_rows(x, num_workers)
    sizes = [jax.lax.axis_size(name) for name in reversed(names)]
    y = _widened(x) if widen else x
    y = y.reshape(*sizes, *x.shape[1:])
    for dim, name in zip(reversed(range(len(names))), names, strict=True):
      if name in manual:
        y = jax.lax.psum_scatter(
          varying(y, name), name, scatter_dimension=dim, tiled=False
        )
      else:  # Nothing is sent, and inside shard_map vmap has no rule for it.
        y = jax.lax.psum(y, name)
        y = jax.lax.dynamic_index_in_dim(
          y, jax.lax.axis_index(name), dim, keepdims=False
        )
    return varying(_like(y / num_workers, x.dtype), axis)

  return jax.tree.map(one, tree)


def _check_rows(x: jax.Array, num_workers: int) -> None:
  if x.ndim == 0 or x.shape[0] != num_workers:
    raise ValueError(
      "`tree` must hold one row a worker in the first dimension of every "
      f"leaf: {num_workers} rows, got shape {x.shape}."
    )


def all_to_all(tree: PyTree, axis: Axis, specs: PyTree = None) -> PyTree:
  """Sends row j of every leaf to worker j: an all-to-all.

  Args:
    tree: arrays [workers, ...]; row j is this worker's message to worker j.
    axis: None (one worker), a name, or (inner, outer).
    specs: how the rows are split over the mesh's other axes, see `gather`.

  Returns:
    Arrays [workers, ...]; row i is worker i's message to this worker.

  Raises:
    ValueError: when a leaf's first dimension is not the number of workers.

  >>> jax.vmap(lambda x: exchange(x, "worker"), axis_name="worker")(
  ...   jnp.array([[11, 12], [21, 22]])
  ... ).tolist()
  [[11, 21], [12, 22]]
  """
  num_workers = size(axis)
  names = _names(axis)

  def one(x: jax.Array) -> jax.Array:
    _check_rows(x, num_workers)
    # [outer, inner, ...]: one dimension for each name.
    sizes = [jax.lax.axis_size(name) for name in reversed(names)]
    y = x.reshape(*sizes, *x.shape[1:])
    for dim, name in zip(reversed(range(len(names))), names, strict=True):
      y = jax.lax.all_to_all(_mapped(y, name), name, dim, dim)
    return varying(y.reshape(x.shape), axis)

  return _map_parts(one, tree, specs, from_row=True)


def _map_parts(
  one: Callable[[jax.Array], jax.Array],
  tree: PyTree,
  specs: PyTree,
  *,
  from_row: bool,
) -> PyTree:
  """Maps `one`, which returns rows, over the parts that the devices hold.

  A shard_map over the mesh's other axes, inside the workers' own: then there
  is nothing left that XLA could put together.
  """
  if specs is None:
    return jax.tree.map(one, tree)
  if isinstance(specs, PartitionSpec):
    specs = jax.tree.map(lambda _: specs, tree)

  def on_parts(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    used = set()
    for entry in spec:
      names = entry if isinstance(entry, tuple) else (entry,)
      used |= {name for name in names if name is not None}
    if not used:
      return one(x)
    rows = PartitionSpec(None, *spec)
    return jax.shard_map(
      one,
      in_specs=rows if from_row else spec,
      out_specs=rows,
      axis_names=used,
    )(x)

  return jax.tree.map(on_parts, tree, specs)


def _mapped(x: jax.Array, name: str) -> jax.Array:
  """Makes a value one that each worker has for itself, under vmap too.

  JAX's all-to-all returns a wrong shape under vmap when all workers hold the
  same array, which vmap does not repeat along its axis.
  """
  if name in jax.sharding.get_abstract_mesh().manual_axes:
    return varying(x, name)
  return jnp.where(jax.lax.axis_index(name) >= 0, x, x)


def index(axis: Axis) -> jax.Array:
  """This worker's number, from 0, as an int32 scalar.

  With (inner, outer) the workers of one device are neighbours:
  `outer_index * inner_size + inner_index`.

  >>> jax.vmap(lambda x: x + index("worker"), axis_name="worker")(
  ...   jnp.array([10, 20])
  ... ).tolist()
  [10, 21]
  """
  worker, stride = jnp.zeros((), jnp.int32), 1
  for name in _names(axis):
    worker = worker + jax.lax.axis_index(name) * stride
    stride *= jax.lax.axis_size(name)
  return worker


def size(axis: Axis) -> int:
  """The number of workers, a Python int.

  >>> size(None)
  1
  """
  number = 1
  for name in _names(axis):
    number *= jax.lax.axis_size(name)
  return number
