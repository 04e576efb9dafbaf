"""Shards: the parts of a worker's leaves on its devices.

A worker may itself be spread over the mesh's other axes.  Its leaves are then
split as a PartitionSpec says, which leaves the axis of workers out.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdist.states import PyTree


def spec_leaves(
  specs: PyTree, tree: PyTree = None
) -> tuple[PartitionSpec, ...]:
  """Lists the specs of a tree's leaves.

  Args:
    specs: a tree of PartitionSpec, like the parameters.
    tree: The parameters; None if they are not known, which skips the count.
  """
  leaves = jax.tree.leaves(
    specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
  )
  number = len(leaves) if tree is None else len(jax.tree.leaves(tree))
  others = [x for x in leaves if not isinstance(x, PartitionSpec)]
  if others or len(leaves) != number:
    raise ValueError(
      "`specs` must hold one PartitionSpec for each leaf of the parameters, "
      f"{number}, got {others[0] if others else len(leaves)!r}. "
      "`Workers.specs(params)` reads them off."
    )
  return tuple(leaves)


def spec_axes(specs: Iterable[PartitionSpec]) -> tuple[str, ...]:
  """Returns the mesh axes over which something is split, sorted.

  >>> spec_axes([PartitionSpec(None, ("y", "x")), PartitionSpec("x")])
  ('x', 'y')
  """
  return tuple(
    sorted({name for spec in specs for entry in spec for name in _names(entry)})
  )


def num_shards(axes: Iterable[str]) -> int:
  """Counts the devices along axes of the mesh of the program being traced."""
  sizes = dict(jax.sharding.get_abstract_mesh().shape)
  missing = [name for name in axes if name not in sizes]
  if missing:
    raise ValueError(
      f"`specs` must name axes of the workers' mesh, {tuple(sizes)}, got "
      f"{missing}. Call it in a step of "
      "`collectives.workers(..., mesh=mesh)`, where the mesh is known."
    )
  return math.prod(sizes[name] for name in axes)


def shard_shape(shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
  """Returns the shape of one device's part of a leaf."""
  if len(spec) > len(shape):
    raise ValueError(
      "`specs` must name at most as many dimensions as each leaf has, got "
      f"{spec} for shape {list(shape)}. Leave out the axis of workers."
    )
  split = [*map(_names, spec), *[()] * (len(shape) - len(spec))]
  return tuple(
    length // num_shards(names)
    for length, names in zip(shape, split, strict=True)
  )


def map_shards(
  function: Callable[..., Any],
  axes: Iterable[str],
  *,
  in_specs: Any,
  out_specs: Any,
) -> Callable[..., Any]:
  """Maps a function over a worker's devices, inside the workers' own step.

  Args:
    function: a function of one device's parts.
    axes: The mesh axes over which they are split; with none the function is
      returned as it is.
    in_specs: The specs of its arguments, as in `jax.shard_map`.
    out_specs: The specs of its results.
  """
  names = set(axes)
  if not names:
    return function
  num_shards(names)  # Refuses axes that the mesh does not have.
  # The shards track what varies over the axes of the step around only if that
  # step does. Otherwise branches of a conditional in it would have different
  # types. An index varies wherever anything does.
  around = jax.sharding.get_abstract_mesh().manual_axes
  tracked = all(
    name in jax.typeof(jax.lax.axis_index(name)).manual_axis_type.varying
    for name in around
  )
  return jax.shard_map(
    function, in_specs=in_specs, out_specs=out_specs, axis_names=names,
    check_vma=tracked,
  )  # fmt: skip


def _names(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes in an entry of a spec."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)
