"""Means over two levels: fast links inside, slow ones between."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jdist import collectives
from jdist.reducers import _chunked, _reducer

PyTree: TypeAlias = Any
_ALL_BYTES = 2**62  # As few parts as there are to be.


class HierarchicalState(NamedTuple):
  """State of `Hierarchical`.

  Attributes:
    inner: the inner reducer's.
    outer: the outer reducer's; the same on all workers of a host, or with
      `parts` a dict with each worker's own of its part, by dtype.
  """

  inner: PyTree
  outer: PyTree


@dataclasses.dataclass(frozen=True)
class Hierarchical(_reducer.Reducer):
  r"""Reduces inside each host by one reducer, then between hosts by another.

  With the axis (inner, outer), :math:`h` the mean of a host's workers by
  `inner`, over the first name, and the mean of those by `outer`, over the
  second:

  .. math:: \mathrm{own\_share} = \mathrm{own\_share}^{inner}
            - (h - \mathrm{own\_share}^{outer})

  what `outer` has left out is everyone's of the host, so the law holds over
  all workers.  Every worker of a host takes part in the outer reduction with
  the same bytes: where the inner axis is `vmap`'s they are sent once, and where
  it is one of the mesh they are sent by each device.

  There (in a `shard_map` of one's own over both names: `workers` spreads over
  one axis of a mesh), with n `parts`, as many as a host has devices, device j
  reduces part j of h only and all gather the means inside the host: each sends
  1/n of the bytes between hosts.  With `Exact()` inside, h is taken by a
  reduce-scatter and no device ever holds all of it.  What is left out of part
  j is then device j's alone, n times, so that the law holds without sending
  it:

  .. math:: \mathrm{own\_share}_i = \mathrm{own\_share}_i^{inner}
            - [i = j] \, n (h - \mathrm{own\_share}^{outer}) \quad
            \text{in part } j

  Parts are those of `Chunked`: vectors of one size across leaves.

  Args:
    inner: over the first name, for instance `Exact()`.
    outer: over the second, for instance `compressed(codecs.Quantize(4))`; with
      several parts one for vectors.
    parts: n; 1, the default, sends everything from everywhere.

  Raises:
    ValueError: when built, for what is not a reducer, for `parts` below 1 and
      an outer reducer that does not suit them; at `init` and `reduce`, for an
      axis that is a single name (with None there is one worker on each level),
      and for several parts that are not as many as the workers of a host.
  """

  inner: _reducer.Reducer
  outer: _reducer.Reducer
  parts: int = 1

  def __post_init__(self) -> None:
    for name in ("inner", "outer"):
      _reducer.check_reducer(name, getattr(self, name))
    if (
      isinstance(self.parts, bool)
      or not isinstance(self.parts, int)
      or self.parts < 1
    ):
      raise ValueError(f"`parts` must be an int >= 1, got {self.parts!r}.")
    if self.parts > 1:
      self._in_parts()

  @property
  def averages(self) -> bool:
    """Whether both do."""
    return self.inner.averages and self.outer.averages

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """The states of both."""
    inner, outer = self._levels(axis)
    if self.parts > 1:
      far = {
        bucket.name: self.outer.init(bucket.row, outer)
        for bucket in self._in_parts().buckets(like).buckets
      }
    else:
      far = self.outer.init(like, outer)
    state = HierarchicalState(self.inner.init(like, inner), far)
    return collectives.varying(state, axis) if jax.tree.leaves(state) else ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    """Takes the mean."""
    inner, outer = self._levels(axis)
    if not isinstance(state, HierarchicalState):
      state = self._nothing(tree)
    first, second = jax.random.split(key)
    if outer is not None:
      # Hosts are workers too, for what is drawn inside of them.
      first = jax.random.fold_in(first, collectives.index(outer))
    if self.parts > 1:
      return self._reduce_parts(tree, state, first, second, axis)
    near = self.inner.reduce(tree, state.inner, first, inner)
    far = self.outer.reduce(near.mean, state.outer, second, outer)
    share = jax.tree.map(
      lambda own, mean, sent: own - (mean.astype(jnp.float32) - sent),
      near.own_share,
      near.mean,
      far.own_share,
    )
    new = HierarchicalState(near.state, far.state)
    return _reducer.Reduced(
      far.mean, share, new if jax.tree.leaves(new) else ()
    )

  def release(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """What both hold back; of the hosts' the mean."""
    inner, outer = self._levels(axis)
    if not isinstance(state, HierarchicalState):
      state = self._nothing(like)
    near, near_state = self.inner.release(state.inner, like, inner)
    if self.parts > 1:
      parts, rows, far_state = self._in_parts(), {}, {}
      for bucket in parts.buckets(like).buckets:
        name = bucket.name
        row, far_state[name] = self.outer.release(
          state.outer[name], bucket.row, outer
        )
        rows[name] = collectives.gather(row, inner)
      far = parts.unpack(rows, like)
    else:
      far, far_state = self.outer.release(state.outer, like, outer)
    held = jax.tree.map(jnp.add, collectives.mean(near, outer), far)
    new = HierarchicalState(near_state, far_state)
    return held, new if jax.tree.leaves(new) else ()

  def shared(self, state: PyTree) -> PyTree:
    """What `outer` shares is shared by all; what `inner` does, by a host.

    With several parts `outer`'s is of one part, which one device of a host has.
    """
    if not isinstance(state, HierarchicalState):
      return jax.tree.map(lambda _: False, state)
    if self.parts > 1:
      return jax.tree.map(lambda _: False, state)
    return HierarchicalState(
      jax.tree.map(lambda _: False, state.inner),
      self.outer.shared(state.outer),
    )

  def whole_leaves(self) -> str:
    """As the reducers say."""
    return self.inner.whole_leaves() or self.outer.whole_leaves()

  def not_in_parts(self) -> str:
    """As the reducers say."""
    return self.inner.not_in_parts() or self.outer.not_in_parts()

  def told_workers(self, axis: collectives.Axis) -> int:
    """The hosts."""
    return self.outer.told_workers(self._levels(axis)[1])

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """What each device sends to other hosts; `num_workers` counts **hosts**."""
    if self.parts == 1:
      return self.outer.num_bits(like, num_workers)
    found = [
      self.outer.num_bits(bucket.row, num_workers)
      for bucket in self._in_parts().buckets(like).buckets
    ]
    return _reducer.Bits(
      sum(bits.payload for bits in found),
      sum(bits.sent for bits in found),
      sum(bits.received for bits in found),
    )

  def _reduce_parts(
    self,
    tree: PyTree,
    state: HierarchicalState,
    first: jax.Array,
    second: jax.Array,
    axis: collectives.Axis,
  ) -> _reducer.Reduced:
    """Each worker of a host reduces its part between hosts."""
    inner, outer = self._levels(axis)
    parts, number = self._in_parts(), collectives.index(inner)
    if isinstance(self.inner, _reducer.Exact):
      own = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
      mine, near_state = (
        collectives.reduce_scatter(parts.pack(tree), inner),
        state.inner,
      )
    else:
      near = self.inner.reduce(tree, state.inner, first, inner)
      own, near_state = near.own_share, near.state
      mine = {
        name: jax.lax.dynamic_index_in_dim(rows, number, keepdims=False)
        for name, rows in parts.pack(near.mean).items()
      }
    means, left, far_state = {}, {}, {}
    for bucket in parts.buckets(tree).buckets:
      name, row = bucket.name, mine[bucket.name]
      far = parts.reduce_chunk(
        bucket, number, row, state.outer[name], second, outer
      )
      means[name] = collectives.gather(far.mean, inner)
      rest = self.parts * (row.astype(jnp.float32) - far.own_share)
      rows = jnp.arange(self.parts)[:, None] == number
      left[name] = jnp.where(rows, rest, 0)
      far_state[name] = far.state
    share = jax.tree.map(jnp.subtract, own, parts.unpack(left, tree))
    new = HierarchicalState(near_state, far_state)
    reduced = _reducer.Reduced(
      parts.unpack(means, tree), share, new if jax.tree.leaves(new) else ()
    )
    return collectives.varying(reduced, axis)

  def _in_parts(self) -> _chunked.Chunked:
    return _chunked.Chunked(
      self.outer, max_bytes=_ALL_BYTES, multiple=self.parts
    )

  def _nothing(self, like: PyTree) -> HierarchicalState:
    if self.parts == 1:
      return HierarchicalState((), ())
    buckets = self._in_parts().buckets(like).buckets
    return HierarchicalState((), {bucket.name: () for bucket in buckets})

  def _levels(
    self, axis: collectives.Axis
  ) -> tuple[collectives.Axis, collectives.Axis]:
    inner, outer = _levels(axis)
    if self.parts not in (1, collectives.size(inner)):
      raise ValueError(
        "`parts` must be 1 or the number of workers in a host, "
        f"{collectives.size(inner)}, got {self.parts}."
      )
    return inner, outer


def _levels(
  axis: collectives.Axis,
) -> tuple[collectives.Axis, collectives.Axis]:
  if axis is None:
    return None, None
  if isinstance(axis, str):
    raise ValueError(
      "`axis` must be two names (inner, outer) for `Hierarchical`, got "
      f"{axis!r}. With one level, use its outer reducer alone."
    )
  return axis
