"""The workers' axis: its names, its types, and all-reduces over it.

A step is written for one worker and communicates only through functions of this
room and an *axis*:

| axis | means | substrate |
|---|---|---|
| `None` | one worker, no communication | none |
| `"worker"` | the workers along this name | `vmap` or `shard_map` |
| `(inner, outer)` | several workers a device | `vmap` in `shard_map` |

Trees hold arrays, each worker its own.  In a user's `shard_map` with
`check_vma=True` JAX types every value as *varying* over a mesh axis or equal
along it; in the programs of `Workers` it does not.  The convention here:
**everything a worker holds varies over the axis**.  Results of collectives are
equal on all workers but typed as varying, so that a `lax.cond` or a `scan`
carry takes them together with a worker's own values.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jdist import checks, states
from jdist.collectives import _buckets, _leaf_order
from jdist.states import PyTree

Axis: TypeAlias = str | tuple[str, str] | None  # Name, (inner, outer), or None.
# The default of PyTorch's DistributedDataParallel.  Latency hardly matters for
# larger messages.
_BUCKET_BYTES = 25 * 2**20
# The axis of the team whose step is being traced.  It is None outside of one,
# and where its workers are meant to train independently.
_team: contextvars.ContextVar[Axis] = contextvars.ContextVar(
  "team", default=None
)
_AXIS: contextvars.ContextVar[Axis] = contextvars.ContextVar(
  "axis of a model's parts", default=None
)


@contextlib.contextmanager
def team_of(axis: Axis) -> Iterator[None]:
  """Traces the step of one of several workers, which communicate over an axis.

  With `None`, workers are allowed not to communicate.
  """
  token = _team.set(axis)
  try:
    yield
  finally:
    _team.reset(token)


def check_axis(axis: Axis) -> None:
  """Raises a ValueError unless `axis` is None, a name, or (inner, outer)."""
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


def axis_names(axis: Axis) -> tuple[str, ...]:
  """Returns the names to reduce over one after the other, innermost first."""
  # One after the other, because some of JAX's collectives refuse a tuple of a
  # vmap and a shard_map name.
  check_axis(axis)
  if axis is None:
    return ()
  return (axis,) if isinstance(axis, str) else axis


def bound_names(axis: Axis) -> tuple[str, ...]:
  """Returns the names; raises a ValueError unless all of them are bound."""
  for name in (names := axis_names(axis)):
    try:
      jax.lax.axis_size(name)
    # JAX raises another type under each substrate.
    except (NameError, AssertionError, KeyError):
      known = _team.get()
      here = f"the workers' is {known!r}" if known else "there is none"
      raise ValueError(
        f"`axis` must be the axis of the workers that run this, got {name!r}; "
        f"{here}. Pass `axis=workers.axis`, and call it inside "
        "`workers.jit(...)`; `axis=None` is one worker alone."
      ) from None
  return names


def _varying_over(x: Any) -> frozenset[str]:
  return jax.typeof(x).manual_axis_type.varying


def _tracks_varying(name: str) -> bool:
  """Returns whether values are typed as varying or not over `name`."""
  # Under vmap, and for other names, there is nothing to track; this saves the
  # index below.
  if name not in jax.sharding.get_abstract_mesh().manual_axes:
    return False
  # A worker's index always varies where anything does.
  return name in _varying_over(jax.lax.axis_index(name))


def varying(tree: PyTree, axis: Axis) -> PyTree:
  """Types every leaf as a worker's own value; moves no data.

  Use it for constants and shared inputs that are combined with varying values.
  Outside a `shard_map` with `check_vma=True` it returns `tree`.
  """
  names = list(filter(_tracks_varying, axis_names(axis)))
  return _varying_in(tree, names) if names else tree


def varying_like(tree: PyTree, like: PyTree) -> PyTree:
  """Types every leaf as varying over all axes that leaves of `like` vary over.

  Use it for the carry of a loop over the shards of a worker, which varies over
  the mesh's other axes, too.
  """
  names = frozenset[str]().union(*map(_varying_over, jax.tree.leaves(like)))
  return _varying_in(tree, sorted(names))


def _varying_in(tree: PyTree, names: list[str]) -> PyTree:
  """Types every leaf as varying over some axes."""

  def one(x: Any) -> Any:
    # JAX refuses a repeated cast.
    missing = tuple(name for name in names if name not in _varying_over(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(one, tree)


def check_local(
  tree: PyTree, axis: Axis, *, what: str, like: PyTree = None
) -> None:
  """Raises a ValueError if a leaf is typed as equal on all workers.

  It also refuses a tree that is not like `like`, gradients of integers, an
  axis that is not bound, and no axis or a part of it where several workers run.

  Args:
    tree: This worker's, its gradients for instance.
    axis: The workers' axis.
    what: The name of the tree in errors.
    like: The parameters, if they are known.
  """
  # Under `shard_map` the gradient with respect to parameters that are *shared*
  # over the axis is already **summed** over it.  A mean of it would send
  # everything a second time and leave the sum.
  if like is not None:
    check_alike(tree, like, what)
  if any(
    getattr(x, "dtype", None) == jax.dtypes.float0
    for x in jax.tree.leaves(tree)
  ):
    checks.check_gradients(what.strip("`"), tree)
  team = _team.get()
  if axis is None and team is not None:
    raise ValueError(
      f"`axis` must be {team!r} where several workers run, got None: nothing "
      "would be sent, and each would train a model of its own. Pass "
      "`axis=workers.axis`, or to `make_step` `independent=True` if that is "
      "meant. In a loop of your own that is `with jdist.collectives."
      "team_of(None):` around the update."
    )
  if isinstance(team, tuple) and axis in team:
    raise ValueError(
      f"`axis` must be {team!r} where several workers share a device, got "
      f"{axis!r}, over which only some of them would be averaged. Pass "
      "`axis=workers.axis`."
    )
  for name in bound_names(axis):
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


def same_form(tree: PyTree, like: PyTree) -> bool:
  """Returns whether two trees of arrays have one structure, and its shapes."""
  form: Any
  ours, form = jax.tree.flatten(tree)
  theirs, wanted = jax.tree.flatten(like)
  return bool(form == wanted) and all(
    isinstance(x, jax.Array) and getattr(y, "shape", None) == x.shape
    for x, y in zip(ours, theirs, strict=True)
  )


def check_alike(tree: PyTree, like: PyTree, what: str) -> None:
  """Raises a ValueError unless a tree has the leaves of another, by shape."""
  if not same_form(tree, like):
    _leaf_order.check_leaves(tree, like, what)


def agreed(flag: jax.Array, axis: Axis) -> jax.Array:
  """Tells vmap that a flag is the same on all workers.

  A `lax.cond` on a mapped flag becomes a select under vmap: both branches run
  in every step, with their collectives.  On an agreed flag it stays a
  conditional.  Nothing is sent between devices.

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
  for name in bound_names(axis):
    # The result of a reduction is not mapped.  Over devices a flag is never
    # mapped, and a reduction would send something.
    if name not in manual:
      flag = jax.lax.pmax(flag.astype(jnp.int32), name) > 0
  return flag


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
  for name in bound_names(axis):
    worker = worker + jax.lax.axis_index(name) * stride
    stride *= jax.lax.axis_size(name)
  return worker


def size(axis: Axis) -> int:
  """Returns the number of workers, a Python int; 1 without an axis."""
  return math.prod(map(jax.lax.axis_size, bound_names(axis)))


def mean(tree: PyTree, axis: Axis) -> PyTree:
  """Averages every leaf over the workers.

  The averages are equal on all workers to the bit, and in the leaves' dtypes;
  integers give floats.  The sum is taken in that dtype: in float16 it overflows
  above 65504, and the mean is then infinite.

  >>> double = lambda x: mean({"w": x}, "worker")["w"]
  >>> jax.vmap(double, axis_name="worker")(jnp.array([1.0, 3.0])).tolist()
  [2.0, 2.0]
  """

  def alone(x: jax.Array) -> jax.Array:  # Integers give floats here, too.
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.mean(x[None], 0)

  return _all_reduce(jax.lax.pmean, alone, tree, axis)


def sum(tree: PyTree, axis: Axis) -> PyTree:
  """Adds every leaf over the workers; see `mean`.  Bools give integers."""

  def alone(x: jax.Array) -> jax.Array:
    return x.astype(jnp.int32) if x.dtype == bool else x

  return _all_reduce(jax.lax.psum, alone, tree, axis)


def _all_reduce(
  reduce: Callable[[PyTree, str], PyTree],
  alone: Callable[[jax.Array], jax.Array],
  tree: PyTree,
  axis: Axis,
) -> PyTree:
  """Reduces over the workers; `alone` is the result of one worker's leaf."""
  tree = arrays(tree)
  manual = jax.sharding.get_abstract_mesh().manual_axes
  # Nothing is sent between the devices of a mesh axis of size one.  XLA's
  # partitioner aborts there if a leaf is split over another axis.
  names = [
    name
    for name in bound_names(axis)
    if name not in manual or jax.lax.axis_size(name) > 1
  ]
  # Some versions of JAX refuse an empty tree.
  if not names or not jax.tree.leaves(tree):
    return varying(jax.tree.map(alone, tree), axis)
  dtypes = jax.tree.map(lambda x: x.dtype, tree)
  if must_widen():
    tree = jax.tree.map(states.wide, tree)
  buckets, leaves = None, tree
  # Compilers for GPUs put many all-reduces into one message.  Gloo sends one
  # array after the other, each with the latency of a whole ring: the ten leaves
  # of LeNet take ten times as long as one buffer of them.
  if len(jax.tree.leaves(tree)) > 1 and joins_cpu_hosts():
    buckets = _buckets.Buckets.of(tree, max_bytes=_BUCKET_BYTES)
    leaves = buckets.pack(tree)
  for name in names:
    # Some versions of JAX refuse a value that is equal on all workers, and
    # others reduce it twice without an error.
    leaves = reduce(varying(leaves, name), name)
  tree = leaves if buckets is None else buckets.unpack(leaves, tree)
  tree = jax.tree.map(as_before, tree, dtypes)
  return varying(tree, axis)


def arrays(tree: PyTree) -> PyTree:
  """Converts numbers to arrays; raises a ValueError for other leaves."""
  if all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree)):
    return tree
  checks.check_arrays("tree", tree)
  return jax.tree.map(jnp.asarray, tree)


def joins_cpu_hosts() -> bool:
  """Returns whether the step's collectives are gloo's between CPU hosts."""
  manual, axes = _cpu_axes()
  return 0 < manual == axes and jax.process_count() > 1


def must_widen() -> bool:
  """Returns whether to sum 16-bit floats as float32."""
  # XLA's CPU compiler does so anyway, but aborts the process where the mesh has
  # automatic axes next to the workers' (seen in jax 0.10.2 to 0.12.0).
  manual, axes = _cpu_axes()
  return 0 < manual < axes


def _cpu_axes() -> tuple[int, int]:
  """Counts the manual axes of a mesh of CPUs, and all of them."""
  mesh = jax.sharding.get_abstract_mesh()
  device = mesh.abstract_device
  if device is None or device.platform != "cpu":
    return 0, 0
  return len(mesh.manual_axes), len(mesh.axis_names)


def as_before(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Undoes `states.wide` after a reduction."""
  # A mean of integers is a float on purpose, and stays one.
  return x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x


@contextlib.contextmanager
def model_parts(axis: Axis) -> Iterator[None]:
  """Names the axis over which the leaves of one model are distributed.

  Updates that are traced in this context see a part of the leaves: those of a
  pipeline, whose devices hold the leaves of their own stages.

  Args:
    axis: The axis of the devices of one model; None where each holds all of it.

  >>> def update(gradient):
  ...   with model_parts("stage"):
  ...     return sum_of_parts(gradient)
  >>> jax.vmap(update, axis_name="stage")(jax.numpy.array([1.0, 2.0])).tolist()
  [3.0, 3.0]
  """
  check_axis(axis)
  token = _AXIS.set(axis)
  try:
    yield
  finally:
    _AXIS.reset(token)


def sum_of_parts(x: jax.Array) -> jax.Array:
  """Adds a number over the devices that hold parts of one model.

  A norm or a flag of all leaves is then equal on all devices.  A device that
  holds all of the model sends nothing.

  >>> sum_of_parts(jax.numpy.array(2.0)).item()
  2.0
  """
  axis = _AXIS.get()
  return x if axis is None else sum(x, axis)
