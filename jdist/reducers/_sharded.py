"""Shards: each device of a worker reduces its own parts of the leaves."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist import collectives, states
from jdist.reducers import _feedback, _reducer
from jdist.states import PyTree

_ROWS = "shards:"


class _Group(NamedTuple):
  """Leaves that are split over the same mesh axes, by their numbers."""

  axes: tuple[str, ...]
  leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sharded(_reducer.Reducer):
  """Reduces each shard of a worker that is itself sharded.

  Every device reduces its part of each leaf with those devices of the other
  workers that hold the same part: blocks, scales and largest entries are those
  of a shard, and nothing is sent between the devices of a worker.  Every shard
  has its own state and random numbers.  All devices reduce leaves that are not
  split in the same way; leaves that are split over different axes take separate
  calls.

  The state is a dict.  Under `"shards:"` and the names of the axes it has
  arrays `[shards, ...]`, split over these axes, and under `"shards:"` the state
  of the leaves that are not split, without that dimension.

  Args:
    reducer: The reducer of all shards.
    specs: How the leaves are split over the mesh's other axes, a tree of
      PartitionSpec like the tree (`Workers.specs(params)`).

  Raises:
    ValueError: If built, if `specs` is no tree of specs; at `init`, for a
      tree of another number of leaves, for axes that the mesh does not have,
      outside a mesh, and if the reducer needs a split leaf whole.
  """

  reducer: _reducer.Reducer
  specs: Any

  def __post_init__(self) -> None:
    _reducer.check_reducer("reducer", self.reducer)
    object.__setattr__(self, "specs", collectives.spec_leaves(self.specs))

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    leaves, after = self._local(like), {}
    for group in self._groups(like):
      if group.axes:
        self.reducer.check_shards()
      state = self.reducer.init(_named(group, like, leaves), axis)
      # Each device begins with the same state, which differs later.
      if group.axes:
        n = collectives.num_shards(group.axes)
        state = jax.tree.map(lambda x, n=n: jnp.repeat(x[None], n, 0), state)
      after[rows_over(group.axes)] = state
    return after

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    groups = self._groups(tree)

    def on_shards(
      leaves: list[Any], state: PyTree, key: jax.Array
    ) -> tuple[list[Any], list[Any], PyTree]:
      means, shares, after = list(leaves), list(leaves), {}
      for group in groups:
        # Devices that hold the same part of an unsplit leaf must draw the same
        # numbers, and so only the axes of the group are folded in.
        own_key = key
        for name in group.axes:
          own_key = jax.random.fold_in(own_key, jax.lax.axis_index(name))
        reduced = self.reducer.reduce(
          _named(group, tree, leaves), _row(state, group), own_key, axis
        )
        for i, name in _names(group, tree):
          means[i] = reduced.mean[name]
          shares[i] = reduced.own_share[name]
        after[rows_over(group.axes)] = _as_row(reduced.state, group)
      return collectives.varying((means, shares, after), axis)

    # The map over the shards stands inside the workers' own step, and leaves
    # the workers' axis alone.
    leaves, treedef = jax.tree.flatten(tree)
    split, rows = list(self.specs), _row_specs(state)
    means, shares, after = self.over(
      on_shards,
      in_specs=(split, rows, PartitionSpec()),
      out_specs=(split, split, rows),
    )(leaves, state, key)
    mean, share = (jax.tree.unflatten(treedef, x) for x in (means, shares))
    return _reducer.Reduced(mean, share, after)

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    groups, local = self._groups(like), self._local(like)

    def on_shards(state: PyTree) -> tuple[list[Any], PyTree]:
      # Every leaf is in a group, whose reducer returns its residual.
      residuals, after = list(local), {}
      for group in groups:
        flushed, new = self.reducer.flush(
          _row(state, group), _named(group, like, local), axis
        )
        for i, name in _names(group, like):
          residuals[i] = flushed[name]
        after[rows_over(group.axes)] = _as_row(new, group)
      return collectives.varying((residuals, after), axis)

    rows = _row_specs(state)
    residuals, after = self.over(
      on_shards, in_specs=(rows,), out_specs=(list(self.specs), rows)
    )(state)
    return jax.tree.unflatten(jax.tree.structure(like), residuals), after

  def check_shards(self) -> None:
    raise _reducer.unsuited(self, "shards", "it takes shards itself.")

  @property
  def axes(self) -> tuple[str, ...]:
    """The mesh axes over which something is split."""
    return collectives.spec_axes(self.specs)

  @property
  def rows(self) -> str:
    """The key under which a state has a row for each device."""
    return rows_over(self.axes)

  def num_rows(self) -> int:
    """Counts the devices of a worker, while a program is traced."""
    return collectives.num_shards(self.axes)

  def over(
    self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    """Maps a function over the devices of a worker."""
    return collectives.map_shards(
      function, self.axes, in_specs=in_specs, out_specs=out_specs
    )

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Adds up all devices of a worker."""
    local = self._local(like)
    one = _reducer.Bits.total(
      self.reducer.num_bits(_named(group, like, local), num_workers)
      for group in self._groups(like)
    )
    return one.times(self.num_rows())

  def _local(self, like: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Lists one device's part of each leaf."""
    specs = collectives.spec_leaves(self.specs, like)
    return [
      jax.ShapeDtypeStruct(collectives.shard_shape(x.shape, spec), x.dtype)
      for x, spec in zip(jax.tree.leaves(like), specs, strict=True)
    ]

  def _groups(self, tree: PyTree) -> tuple[_Group, ...]:
    found: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(collectives.spec_leaves(self.specs, tree)):
      found.setdefault(collectives.spec_axes([spec]), []).append(i)
    return tuple(_Group(axes, tuple(i)) for axes, i in sorted(found.items()))


def rows_over(axes: tuple[str, ...]) -> str:
  """Returns the key under which a state has a row for each shard."""
  return _ROWS + ",".join(axes)


def split_axes(path: Iterable[Any]) -> tuple[str, ...] | None:
  """Returns the mesh axes over which the rows of a state's leaf are split.

  Args:
    path: The leaf's key path in an optimizer's state.

  Returns:
    The axes, `()` for rows that are not split; None for other leaves, which
    are split as the parameters are or not at all.

  >>> state = {"shards:x,y/float32": 1, "shards:": 2, "kernel": 3}
  >>> paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  >>> [split_axes(path) for path in paths]
  [None, (), ('x', 'y')]
  """
  for step in path:
    key = getattr(step, "key", None)
    if isinstance(key, str) and key.startswith(_ROWS):
      # Behind a slash a sender names the dtype of a buffer.
      names, _, _ = key.removeprefix(_ROWS).partition("/")
      return tuple(names.split(",")) if names else ()
  return None


def _names(group: _Group, tree: PyTree) -> list[tuple[int, str]]:
  """Lists the numbers and paths of a group's leaves."""
  paths = collectives.leaf_paths(tree)
  return [(i, paths[i]) for i in group.leaves]


def _named(group: _Group, tree: PyTree, leaves: list[Any]) -> dict[str, Any]:
  """Returns a group's leaves by their paths, for rules and errors."""
  return {name: leaves[i] for i, name in _names(group, tree)}


def _row_specs(state: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: PartitionSpec(split_axes(path)), state
  )


def _row(state: PyTree, group: _Group) -> PyTree:
  """Returns a device's own state."""
  # A device sees one row of an array that is split over the devices.
  if not group.axes:
    return state[rows_over(group.axes)]
  return jax.tree.map(lambda x: x[0], state[rows_over(group.axes)])


def _as_row(state: PyTree, group: _Group) -> PyTree:
  return jax.tree.map(lambda x: x[None], state) if group.axes else state


@states.declare()
class ShardedFeedbackState(NamedTuple):
  """State of a feedback on shards.

  Attributes:
    trees: The feedback's state, whose trees are split as the parameters are,
      with `()` as its `nonfinite`.
    nonfinite: The number of rounds in which something was not finite, int32
      [devices], one for each device of a worker, split over them.
  """

  trees: PyTree
  nonfinite: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ShardedFeedback(_feedback.Feedback):
  """Keeps the residual of every device of a worker on that device.

  Nothing is sent, not even whether another shard was finite, and a feedback
  sees each shard as a leaf.  Its state must be a NamedTuple of trees like the
  parameters and of `nonfinite`.
  """

  feedback: _feedback.Feedback
  shards: Sharded

  def init(self, like: PyTree) -> ShardedFeedbackState:
    """Returns the feedback's state, whose trees are split as `like` is."""
    state = self.feedback.init(like)
    structure: Any = jax.tree.structure(like)
    for name, field in state._asdict().items():
      if name != "nonfinite" and jax.tree.structure(field) != structure:
        raise ValueError(
          "`feedback` must have a state of trees like the parameters where "
          f"`specs` are given, got {self.feedback} with {name!r}."
        )
    count = jnp.zeros(self.shards.num_rows(), jnp.int32)
    return ShardedFeedbackState(
      state._replace(nonfinite=()), {self.shards.rows: count}
    )

  def prepare(
    self, x: PyTree, state: ShardedFeedbackState
  ) -> tuple[PyTree, ShardedFeedbackState]:
    return self._over(self.feedback.prepare, (x,), state)

  def finish(
    self,
    mean: PyTree,
    own_share: PyTree,
    wanted: PyTree,
    state: ShardedFeedbackState,
  ) -> tuple[PyTree, ShardedFeedbackState]:
    return self._over(self.feedback.finish, (mean, own_share, wanted), state)

  def keep_cast(
    self, left: PyTree, state: ShardedFeedbackState
  ) -> ShardedFeedbackState:

    def kept(left: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
      return left, self.feedback.keep_cast(left, own)

    return self._over(kept, (left,), state)[1]

  def absorb(
    self, held: PyTree, state: ShardedFeedbackState
  ) -> ShardedFeedbackState | None:

    def absorbed(held: PyTree, own: PyTree) -> tuple[PyTree, PyTree]:
      return held, self.feedback.absorb(held, own)

    # This is decided once for all shards, outside of the map over them, which
    # cannot return None for some.
    if self.feedback.absorb(held, state.trees) is None:
      return None
    return self._over(absorbed, (held,), state)[1]

  def _over(
    self, function: Any, trees: tuple[PyTree, ...], state: ShardedFeedbackState
  ) -> tuple[PyTree, ShardedFeedbackState]:
    # `nonfinite` is split over the devices, a row each; the rest of the state
    # is split as the parameters are.
    structure = jax.tree.structure(trees[0])
    specs = jax.tree.unflatten(structure, self.shards.specs)
    name, axes = self.shards.rows, self.shards.axes
    rows: Any = ShardedFeedbackState(
      type(state.trees)(
        **{
          field: () if field == "nonfinite" else specs
          for field in state.trees._fields
        }
      ),
      {name: PartitionSpec(axes)},  # type: ignore[dict-item]
    )

    def on_shards(
      trees: tuple[PyTree, ...], state: ShardedFeedbackState
    ) -> tuple[PyTree, ShardedFeedbackState]:
      # A device counts for itself, since its shards alone may not be finite.
      own = state.trees._replace(nonfinite=state.nonfinite[name][0])
      out, new = function(*trees, own)
      count = {name: new.nonfinite[None]}
      return out, ShardedFeedbackState(new._replace(nonfinite=()), count)

    return self.shards.over(
      on_shards, in_specs=((specs,) * len(trees), rows), out_specs=(specs, rows)
    )(trees, state)
