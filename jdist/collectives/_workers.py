"""The runner: one worker's step on all workers, on any substrate.

Every array has a leading axis of workers on every substrate, `[workers, ...]`,
sharded over the mesh's worker axis where there is one.  So each worker
differentiates its own slice, and gradients are local everywhere.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jdist import checks, signatures, states
from jdist.collectives import _axis, _shards
from jdist.states import PyTree

_UNSPLIT = PartitionSpec()
# Words of JAX's errors for constraints where no axis of a mesh is automatic.
_OF_CONSTRAINTS = ("constraint requires", "UNCONSTRAINED", "not found in mesh")


@functools.lru_cache(64)
def _spread(
  num_workers: int, shardings: tuple[jax.sharding.Sharding, ...]
) -> Callable[[list[Any]], list[jax.Array]]:
  """Returns a program that gives every worker a copy of each leaf."""
  # A device_put would hold all copies in one place first.

  def spread(leaves: list[Any]) -> list[jax.Array]:
    shapes = [(num_workers, *jnp.shape(x)) for x in leaves]
    return list(map(jnp.broadcast_to, map(_strong, leaves), shapes))

  return jax.jit(spread, out_shardings=list(shardings))


def _strong(x: Any) -> Any:
  """Returns an array whose dtype is not weak."""
  # The results of a step are never weakly typed: a step whose first arguments
  # are would be compiled twice.
  if getattr(x, "weak_type", False):
    return jax.lax.convert_element_type(x, x.dtype)
  return x


@signatures.explained
@dataclasses.dataclass(frozen=True)
class Workers:
  """The workers of a run and their substrate; made by `workers`.

  Attributes:
    num_workers: The number of workers, over all processes.
    substrate: `"none"`, `"vmap"` or `"shard_map"`.
    axis: The axis that a step passes to `jdist.collectives`.
    mesh: The devices of `"shard_map"`, else None.
  """

  num_workers: int
  substrate: Literal["none", "vmap", "shard_map"]
  axis: _axis.Axis
  mesh: Mesh | None = None
  made_by = ", as of `jdist.workers(...)`"  # Errors show it.

  @property
  def mesh_axis(self) -> str:
    """The name of the mesh axis that holds the workers."""
    return self.axis[-1] if isinstance(self.axis, tuple) else str(self.axis)

  @property
  def inner_axes(self) -> dict[str, int]:
    """The mesh's other axes, over which a worker is split, and their sizes."""
    shape = {} if self.mesh is None else self.mesh.shape
    return {x: size for x, size in shape.items() if x != self.mesh_axis}

  @property
  def workers_per_device(self) -> int:
    """The number of workers on each device."""
    if self.mesh is None:
      return self.num_workers
    return self.num_workers // self.mesh.shape[self.mesh_axis]

  @functools.cached_property
  def local_workers(self) -> tuple[int, ...]:
    """The numbers of the workers that run in this process."""
    if self.mesh is None:
      return tuple(range(self.num_workers))
    # The devices of one worker may belong to several processes.  Each process
    # that owns one of them feeds the worker.
    dim = self.mesh.axis_names.index(self.mesh_axis)
    rows = np.moveaxis(self.mesh.devices, dim, 0)
    mine = jax.process_index()
    return tuple(
      row * self.workers_per_device + slot
      for row, devices in enumerate(rows)
      if any(d.process_index == mine for d in np.ravel(devices))
      for slot in range(self.workers_per_device)
    )

  def sharding(self, spec: PartitionSpec = _UNSPLIT) -> jax.sharding.Sharding:
    """Returns the sharding of arrays `[workers, ...]`.

    `spec` splits the remaining dimensions over the mesh's other axes.
    """
    if self.mesh is None:
      return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    # Compiled programs return shardings without a trailing None.  One that is
    # written in another way would compile the step again.
    dims = list(spec)
    while dims and dims[-1] is None:
      dims.pop()
    return NamedSharding(self.mesh, PartitionSpec(self.mesh_axis, *dims))

  def specs(self, tree: PyTree) -> PyTree:
    """Reads the PartitionSpecs, without the axis of workers, off arrays."""

    def one(x: jax.Array) -> PartitionSpec:
      if isinstance(x.sharding, NamedSharding):
        return PartitionSpec(*x.sharding.spec[1:])
      return _UNSPLIT

    return jax.tree.map(one, tree)

  def jit(
    self,
    step: Callable[..., PyTree],
    *,
    donate_argnums: int | Sequence[int] = (),
    out_specs: PyTree = None,
  ) -> Any:
    """Compiles one worker's step into one program for all workers.

    Args:
      step: Takes and returns pytrees of one worker's arrays, without the
        leading axis of workers; communicates over `self.axis`.
      donate_argnums: The arguments whose memory the results may reuse.
      out_specs: How the results are split over the mesh's other axes: a
        `PartitionSpec`, or None where the compiler may choose, for each result
        or for whole subtrees.  A step that returns a state should give it,
        `(team.specs(state), None)`: otherwise the compiler may split a leaf
        that was not, and the next call compiles again.

    Returns:
      A jitted function of pytrees of arrays `[workers, ...]`, with JAX's
      `lower`, `trace` and so on.
    """
    # The compiler may place results that depend on no argument anywhere; the
    # next call, which takes them as arguments, would compile again.
    if self.mesh is None:
      placed = self.sharding()
    else:
      placed = jax.tree.map(self.sharding, out_specs)
    return jax.jit(
      self.spmd(step), donate_argnums=donate_argnums, out_shardings=placed
    )

  def spmd(self, step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Maps `step` over the leading axis of workers, without compiling it."""
    one = _squeezed(step)
    if self.substrate == "none":
      mapped: Callable[..., PyTree] = one
    elif self.substrate == "vmap":
      mapped = jax.vmap(step, axis_name=str(self.axis))
    else:
      spec = PartitionSpec(self.mesh_axis)
      if isinstance(self.axis, tuple):
        one = jax.vmap(step, axis_name=self.axis[0])
      mapped = jax.shard_map(
        one,
        mesh=self.mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={self.mesh_axis},
        # JAX's types of varying values would refuse loops and branches of a
        # user's loss that run under `vmap`, and cannot type vmap inside
        # shard_map.  Without them a gradient through a collective is that of
        # the sum of all workers' losses, as it is under `vmap`.
        check_vma=False,
      )

    @functools.wraps(step)
    def in_team(*args: PyTree) -> PyTree:
      self._check(args)
      # The step is traced here, where `check_local` must know its team.
      with _axis.team_of(self.axis if self.num_workers > 1 else None):
        try:
          return mapped(*args)
        except (RuntimeError, ValueError) as error:
          # JAX's own words are about a mesh that the user has not made.
          if any(word in str(error) for word in _OF_CONSTRAINTS):
            raise ValueError(
              "`step` must constrain shardings only by axes of the mesh other "
              f"than the workers', got {self.substrate!r} with "
              f"{[*self.inner_axes]}. Write `if workers.inner_axes:` in front, "
              "or take Flax's boxes away by `flax.linen.unbox(params)`."
            ) from error
          raise

    return in_team

  def _check(self, args: tuple[PyTree, ...]) -> None:
    """Refuses arguments without an axis of workers, and explicit meshes."""
    for number, arg in enumerate(args):
      for name, x in checks.named_leaves(arg).items():
        if jnp.ndim(x) == 0 or jnp.shape(x)[0] != self.num_workers:
          raise ValueError(
            f"`args[{number}]` of the step must hold arrays [workers, ...], "
            f"of {self.num_workers} rows, got shape {jnp.shape(x)}"
            f"{f' at {name!r}' if name else ''}. `workers.shard` splits a "
            "batch, `workers.replicate` copies what all have, and "
            "`workers.jit(optimizer.init)(params)` makes a state; a constant "
            "belongs into the step itself."
          )
    around = jax.sharding.get_abstract_mesh()
    if self.mesh is not None and _is_explicit(around):
      raise ValueError(
        "`mesh` of `jax.set_mesh` must have automatic axes around the workers' "
        f"programs, got {around.axis_types} of {around.axis_names}. "
        "Leave `jax.set_mesh` out, or set `workers.mesh`."
      )

  def replicate(
    self,
    tree: PyTree,
    specs: PyTree | PartitionSpec = _UNSPLIT,
    laws: Mapping[str, states.Law] | None = None,
  ) -> PyTree:
    """Gives every worker a copy of `tree`: arrays `[workers, ...]`.

    Random keys, as those of an NNX model's dropout, are folded by the workers'
    numbers where there are several.

    Args:
      tree: One worker's arrays, equal in all processes.
      specs: How the arrays are split over the mesh's other axes: one
        `PartitionSpec` for all, or a tree of them like `tree`.
      laws: The laws of leaves that `jdist.states` does not infer, by their
        names; a "constant" key is equal on all workers.
    """
    checks.check_arrays("tree", tree, shapes=False)
    given = states.exceptions(tree, laws) if laws else ()
    found = jax.tree.leaves(states.find_laws(tree, laws=given))
    likes, structure = jax.tree.flatten(tree)
    leaves = list(map(states.key_words, likes))
    # A program over several processes takes arrays of the host only.
    if jax.process_count() > 1:
      leaves = list(map(_to_host, leaves))
    if isinstance(specs, PartitionSpec):
      shardings = (self.sharding(specs),) * len(leaves)
    else:
      named = _shards.spec_leaves(specs, tree)
      shardings = tuple(map(self.sharding, named))
    copies = _spread(self.num_workers, shardings)(leaves)
    for i, (like, law) in enumerate(zip(likes, found, strict=True)):
      if law == "random" or states.is_key(like):
        apart = law == "random" and self.num_workers > 1
        copies[i] = self._as_keys(copies[i], like, apart)
    return jax.tree.unflatten(structure, copies)

  def _as_keys(self, rows: jax.Array, like: jax.Array, apart: bool) -> Any:
    """Returns the data of a key for each worker as keys that stand apart."""

    def one(row: jax.Array, number: jax.Array) -> jax.Array:
      key = states.as_key(row, like)
      return states.fold_key(key, number) if apart else key

    numbers = np.arange(self.num_workers, dtype=np.uint32)
    program = jax.jit(jax.vmap(one), out_shardings=self.sharding())
    return program(rows, numbers)

  def place(self, tree: PyTree) -> PyTree:
    """Puts arrays that already have their axis of workers onto the devices.

    The rows of the host's arrays are those of `local_workers`; the results are
    `[workers, ...]`.  They are copies, and the arrays may be refilled.
    """
    rows = len(self.local_workers)

    def one(x: Any) -> jax.Array:
      checks.check_bits("tree", x)
      if np.shape(x)[:1] != (rows,):
        raise ValueError(
          f"`tree` must have one row for each of this process's {rows} "
          f"workers, got an array of shape {np.shape(x)}. To split a batch "
          "by workers, call `shard`."
        )
      try:
        if isinstance(x, np.ma.MaskedArray):  # A copy would have no mask.
          raise TypeError("a masked array")
        if jax.process_count() == 1:
          return jax.device_put(_own(x), self.sharding())
        own, whole = _own(_to_host(x)), (self.num_workers, *np.shape(x)[1:])
        return jax.make_array_from_process_local_data(
          self.sharding(), own, whole
        )
      except TypeError as error:
        raise ValueError(
          f"`tree` must be a tree of arrays of numbers, got {checks.show(x)}. "
          "Encode text, dates and objects as integers, fill masked entries, "
          "and cast types that JAX does not know."
        ) from error

    return jax.tree.map(one, tree)

  def shard(self, batch: PyTree) -> PyTree:
    """Splits a batch evenly over the workers and places it.

    Args:
      batch: Arrays `[workers * n, ...]`; on several processes this process's
        part, `[local workers * n, ...]`.

    Returns:
      Arrays `[workers, n, ...]`: worker i has samples i*n to (i+1)*n.
    """
    rows = len(self.local_workers)

    def split(x: Any) -> Any:
      if _is_explicit(getattr(getattr(x, "sharding", None), "mesh", None)):
        x = _to_host(x)  # JAX would ask how to shard the reshaped array.
      if np.ndim(x) == 0 or np.shape(x)[0] % rows:
        raise ValueError(
          f"`batch` must divide evenly over {rows} workers, got an array of "
          f"shape {np.shape(x)}. Make the batch a multiple of {rows}."
        )
      return x.reshape(rows, x.shape[0] // rows, *x.shape[1:])

    return self.place(jax.tree.map(split, batch))

  def view(self, tree: PyTree, worker: int | None = None) -> PyTree:
    """Returns one worker's rows of arrays `[workers, ...]`.

    The worker must run in this process; by default it is the first one here.
    """
    worker = self.local_workers[0] if worker is None else worker
    if np.ndim(worker) or worker not in self.local_workers:
      raise ValueError(
        f"`worker` must run in this process, one of {self.local_workers}, "
        f"got {checks.show(worker)}. To see all workers, call `gather`."
      )
    checks.check_arrays("tree", tree)
    for name, x in checks.named_leaves(tree).items():
      if jnp.ndim(x) == 0:
        raise ValueError(
          "`tree` must hold arrays [workers, ...], got a scalar"
          f"{f' at {name!r}' if name else ''}. Pass what `jit` returned."
        )
    return jax.tree.map(lambda x: _row(x, worker), tree)

  def gather(self, tree: PyTree) -> PyTree:
    """Returns arrays `[workers, ...]` as NumPy arrays, in every process."""
    if jax.process_count() == 1:
      return jax.tree.map(_to_host, tree)
    jax.tree.map(_check_plain, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _own(x: Any) -> Any:
  """Returns an array that its owner cannot change any more."""
  # JAX reads a NumPy array after the call, and on a CPU shares its memory: a
  # loader that refills one buffer would change a batch that is being used.
  return _strong(x) if isinstance(x, jax.Array) else np.array(x)


def _is_explicit(mesh: Any) -> bool:
  return any(
    kind == AxisType.Explicit for kind in getattr(mesh, "axis_types", ())
  )


def _squeezed(step: Callable[..., PyTree]) -> Callable[..., PyTree]:
  """Runs `step` on the only row and adds a leading axis to its results."""

  @functools.wraps(step)  # Profiles and programs show its name.
  def on_row(*args: PyTree) -> PyTree:
    row = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
    # An array that a step returns unchanged needs no copy.
    rows = zip(jax.tree.leaves(row), jax.tree.leaves(args), strict=True)
    given = {id(x): whole for x, whole in rows}
    return jax.tree.map(
      lambda x: given[id(x)] if id(x) in given else _as_row(x), step(*row)
    )

  return on_row


def _as_row(x: jax.Array) -> jax.Array:
  # Without the barrier XLA may fuse the new shape with the computation of the
  # value, and compute that twice where the step also uses the old shape: a
  # momentum, for instance, cannot be updated in place then.  Compiled for 8
  # H200, a step has 3 copies with the barrier and 9 without.  XLA's CPU
  # compiler drops barriers before it fuses, and keeps such copies.  Each leaf
  # has a barrier of its own, so that none of them waits for another.
  return jnp.expand_dims(jax.lax.optimization_barrier(x), 0)


def _row(x: jax.Array, worker: int) -> jax.Array:
  """Returns row `worker` of an array, which this process must hold."""
  if not isinstance(x, jax.Array) or x.is_fully_addressable:
    return x[worker]
  if states.is_key(x):
    return states.as_key(_row(states.key_words(x), worker), x)
  parts: dict[tuple[tuple[int, int], ...], jax.Array] = {}
  for shard in x.addressable_shards:
    # Slices have no hash before Python 3.12, bounds do.
    (start, stop), *box = (
      side.indices(length)[:2]
      for side, length in zip(shard.index, x.shape, strict=True)
    )
    if start <= worker < stop:
      parts[tuple(box)] = shard.data[worker - start]
  if sum(part.size for part in parts.values()) != math.prod(x.shape[1:]):
    raise ValueError(
      f"`worker` must have all its devices in this process, but worker {worker}"
      " is sharded over several processes. To see all workers, call `gather`."
    )
  if len(parts) == 1:
    return next(iter(parts.values()))
  # A worker that is itself sharded is put together on the host.
  whole = np.empty(x.shape[1:], x.dtype)
  for bounds, part in parts.items():
    whole[tuple(slice(*side) for side in bounds)] = np.asarray(part)
  return jnp.asarray(whole)


def _to_host(x: Any) -> Any:
  _check_plain(x)
  return np.asarray(x)


def _check_plain(x: Any) -> None:
  if states.is_key(x):
    raise ValueError(
      "`tree` must hold plain arrays here, got a typed PRNG key. Pass "
      "`jax.random.key_data(key)` and wrap it again with "
      "`jax.random.wrap_key_data`."
    )
