"""Means over two levels: inside a host, and between hosts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, collectives, states
from jdist.reducers import _chunked, _reducer
from jdist.states import PyTree

_ALL_BYTES = 2**62  # A size that no chunk exceeds: parts are not cut further.


@states.declare()
class HierarchicalState(NamedTuple):
  """State of `Hierarchical`.

  Attributes:
    inner: The inner reducer's state.  With `parts` it is a pair with the outer
      reducer's state of this worker's part, a dict by dtype.
    outer: The outer reducer's state, equal on all workers of a host; `()` with
      `parts`.
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

  where the own share of every worker of the host lacks the error of `outer`,
  so that the law holds over all workers.  All of them take part in the outer
  reduction with the same bytes, which are sent once if the inner axis is that
  of a `vmap`, and by each device if it is one of the mesh.

  In the second case (a user's `shard_map` over both names), with n `parts`, one
  for each device of a host, device j reduces part j of h only, and all gather
  the means inside the host: each sends 1/n of the bytes between hosts.  With
  `Exact()` inside, h is taken by a reduce-scatter, and no device holds all of
  it.  The own share of device j lacks n times the residual of part j:

  .. math:: \mathrm{own\_share}_i = \mathrm{own\_share}_i^{inner}
            - [i = j] \, n (h - \mathrm{own\_share}^{outer}) \quad
            \text{in part } j

  Parts are the chunks of `Chunked`.

  Args:
    inner: The reducer over the first name, for instance `Exact()`.
    outer: The reducer over the second name, for instance
      `compressed(codecs.Quantize(4))`; with several parts it must take vectors.
    parts: n; with 1, the default, every device sends all of h.

  Raises:
    ValueError: If built, for an argument that is no reducer, for `parts`
      below 1 and an outer reducer that does not suit them; at `init` and
      `reduce`, for an axis that is a single name (None is one worker on each
      level), and if several parts are not as many as the workers of a host.
  """

  inner: _reducer.Reducer
  outer: _reducer.Reducer
  parts: int = 1

  def __post_init__(self) -> None:
    for name in ("inner", "outer"):
      _reducer.check_reducer(name, getattr(self, name))
    checks.set_structural(self, "parts", minimum=1)
    if self.parts > 1:
      self._chunked()

  def init(self, like: PyTree, axis: collectives.Axis) -> HierarchicalState:
    inner, outer = self._levels(axis)
    near = self.inner.init(like, inner)
    if self.parts > 1:
      far = {
        bucket.dtype: self.outer.init(bucket.row, outer)
        for bucket in self._chunked().buckets(like).buckets
      }
      state = HierarchicalState((near, far), ())
    else:
      state = HierarchicalState(near, self.outer.init(like, outer))
    return collectives.varying(state, axis)

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    inner, outer = self._levels(axis)
    # The second key is equal on all workers of a host, which reduce one mean.
    first, second = jax.random.split(key)
    if outer is not None:
      # Each host draws its own numbers, as workers do.
      first = jax.random.fold_in(first, collectives.index(outer))
    if self.parts > 1:
      return self._reduce_parts(tree, state, first, second, axis)
    # All workers of a host hold the same mean, reduce it with the same key, and
    # so stay equal to the bit.
    near = self.inner.reduce(tree, state.inner, first, inner)
    far = self.outer.reduce(near.mean, state.outer, second, outer)
    share = jax.tree.map(
      lambda own, mean, sent: own - (_reducer.as_share(mean) - sent),
      near.own_share, near.mean, far.own_share,
    )  # fmt: skip
    new = HierarchicalState(near.state, far.state)
    return _reducer.Reduced(far.mean, share, new)

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """Empties the owners' residuals of both levels."""
    inner, outer = self._levels(axis)
    if self.parts > 1:
      chunked, rows, old = self._chunked(), {}, state.inner
      near, near_state = self.inner.flush(old[0], like, inner)
      far_state = {}
      for bucket in chunked.buckets(like).buckets:
        row, far_state[bucket.dtype] = self.outer.flush(
          old[1][bucket.dtype], bucket.row, outer
        )
        rows[bucket.dtype] = collectives.gather(row, inner)
      far = chunked.unpack(rows, like)
      new = HierarchicalState((near_state, far_state), ())
    else:
      near, near_state = self.inner.flush(state.inner, like, inner)
      far, outer_state = self.outer.flush(state.outer, like, outer)
      new = HierarchicalState(near_state, outer_state)
    # Residuals inside a host are in units of its mean, and those of all hosts
    # are averaged.
    residuals = jax.tree.map(jnp.add, collectives.mean(near, outer), far)
    return residuals, new

  def check_chunks(self) -> None:
    self.inner.check_chunks()
    self.outer.check_chunks()

  def num_workers(self, axis: collectives.Axis) -> int:
    """Returns the number of hosts."""
    return self.outer.num_workers(self._levels(axis)[1])

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts a device's bits between hosts; `num_workers` counts **hosts**."""
    if self.parts == 1:
      return self.outer.num_bits(like, num_workers)
    return _reducer.Bits.total(
      self.outer.num_bits(bucket.row, num_workers)
      for bucket in self._chunked().buckets(like).buckets
    )

  def _reduce_parts(
    self,
    tree: PyTree,
    state: HierarchicalState,
    first: jax.Array,
    second: jax.Array,
    axis: collectives.Axis,
  ) -> _reducer.Reduced:
    """Lets each worker of a host reduce its part between hosts."""
    inner, outer = self._levels(axis)
    chunked, number = self._chunked(), collectives.index(inner)
    near_state, old = state.inner
    # A reduce-scatter sends half the bytes of an all-reduce.
    if isinstance(self.inner, _reducer.Exact):
      own = _reducer.as_share(tree)
      mine = collectives.reduce_scatter(chunked.pack(tree), inner)
    else:
      near = self.inner.reduce(tree, near_state, first, inner)
      own, near_state = near.own_share, near.state
      mine = {
        name: jax.lax.dynamic_index_in_dim(rows, number, keepdims=False)
        for name, rows in chunked.pack(near.mean).items()
      }
    means, left, far_state = {}, {}, {}
    for bucket in chunked.buckets(tree).buckets:
      name, row = bucket.dtype, mine[bucket.dtype]
      far = chunked.reduce_chunk(bucket, number, row, old[name], second, outer)
      means[name] = collectives.gather(far.mean, inner)
      # One device of a host accounts for the rest, and the law counts all n.
      rest = self.parts * (_reducer.as_share(row) - far.own_share)
      rows = jnp.arange(self.parts, dtype="int32")[:, None] == number
      left[name] = jnp.where(rows, rest, 0)
      far_state[name] = far.state
    share = jax.tree.map(jnp.subtract, own, chunked.unpack(left, tree))
    new = HierarchicalState((near_state, far_state), ())
    reduced = _reducer.Reduced(chunked.unpack(means, tree), share, new)
    return collectives.varying(reduced, axis)

  def _chunked(self) -> _chunked.Chunked:
    return _chunked.Chunked(
      self.outer, max_bytes=_ALL_BYTES, multiple=self.parts
    )

  def _levels(
    self, axis: collectives.Axis
  ) -> tuple[collectives.Axis, collectives.Axis]:
    if isinstance(axis, str):
      raise ValueError(
        "`axis` must be two names (inner, outer) for `Hierarchical`, got "
        f"{axis!r}. With one level, use its outer reducer alone."
      )
    # Without an axis both levels have one worker.
    inner, outer = (None, None) if axis is None else axis
    if self.parts not in (1, collectives.size(inner)):
      raise ValueError(
        "`parts` must be 1 or the number of workers in a host, "
        f"{collectives.size(inner)}, got {self.parts}."
      )
    return inner, outer
