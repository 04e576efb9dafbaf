"""Feedback on the shards of a worker that is itself sharded."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist import states
from jdist.reducers import _feedback, _sharded

PyTree = Any


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
  shards: _sharded.Sharded

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
