"""The majority vote of signs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdist import codecs, collectives
from jdist.reducers import _all_to_all, _reducer
from jdist.states import PyTree

_BYTE = 8


@dataclasses.dataclass(frozen=True)
class MajorityVote(_reducer.Reducer):
  r"""Sends signs, and takes the sign of the majority.

  .. math:: \mathrm{mean} = \mathrm{sign}\Big(\sum_i \mathrm{sign}(x_i)\Big),
            \quad \mathrm{sign}(0) = +1

  so that entries are +1 or -1; **a tie is +1**, and so is a worker's vote for
  an entry of zero.  Row j of every leaf is sent to worker j, 8 signs to a byte,
  which counts and sends the decision to all: one all-to-all and one all-gather
  for all leaves of less than 8 Mi entries.

  `own_share` is :math:`\mathrm{sign}(x_i)`, float32.  **The reducers' law does
  not hold**, because a vote is not a mean.  Every entry of the mean has the
  sign of :math:`\sum_i \mathrm{own\_share}_i`, unless that is zero.  Error
  feedback is refused: the minority's vote is lost, and signs have lost their
  scale.

  A row of a leaf that holds a NaN or an infinity at a worker is NaN on all.

  Reference: Bernstein et al. 2018, signSGD (arXiv:1802.04434), algorithm 3,
  and signSGD with majority vote (arXiv:1810.05291), algorithm 1, with
  momentum before it and the step's size and the weight decay after it.
  Departures: its one server is spread over the workers by rows; ties and
  zeros are +1 (the papers' sign(0) is 0, which one bit cannot say).
  """

  @property
  def averages(self) -> bool:
    """False, because a vote is not the mean of the votes."""
    return False

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Returns no state; refuses leaves without floats."""
    del axis
    _reducer.check_leaves(self, like, codecs.Dense().check)
    return ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    del key
    num_workers = collectives.size(axis)
    leaves, treedef = jax.tree.flatten(tree)
    # `jnp.sign` would be 0 for an entry of zero.
    shares = [jnp.where(x >= 0, 1.0, -1.0).astype(jnp.float32) for x in leaves]
    buckets, means = _buckets(leaves, num_workers), tree
    if buckets.buckets:
      rows = buckets.pack(leaves)
      finite = jnp.stack([jnp.isfinite(x).all(1) for x in rows], 1)
      sent = [codecs.pack(x >= 0, 1) for x in rows]
      # Signs travel packed, so that owners count bits.
      signs, finite = _all_to_all.to_owners((sent, finite), num_workers, axis)
      decided = []
      for votes, bucket in zip(signs, buckets.buckets, strict=True):
        ones = codecs.unpack(votes, 1, bucket.row_size).astype(jnp.int32)
        # With >= a tie is +1: one bit has no third value.
        most = 2 * ones.sum(0, dtype=jnp.int32) >= num_workers
        decided.append(codecs.pack(most, 1))
      decided, finite = _all_to_all.to_all((decided, finite.all(0)), axis)
      votes = []
      for i, bucket in enumerate(buckets.buckets):
        sign = codecs.unpack(decided[i], 1, bucket.row_size) > 0
        vote = jnp.where(sign, 1.0, -1.0)
        vote = jnp.where(finite[:, i, None], vote, jnp.nan)
        votes.append(vote.astype(bucket.dtype))
      means = jax.tree.unflatten(treedef, buckets.unpack(votes, leaves))
    return _reducer.Reduced(means, jax.tree.unflatten(treedef, shares), state)

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts one bit for each entry, up and down, and a byte for each row."""
    buckets = _buckets(jax.tree.leaves(like), num_workers).buckets
    payload = num_workers * sum(b.row_size + _BYTE for b in buckets)
    return _reducer.Bits.in_ring(payload, num_workers)


def _buckets(likes: list[Any], num_workers: int) -> collectives.Buckets:
  """Lays out each leaf in rows of whole bytes, one for each worker."""
  return collectives.Buckets.given(
    likes,
    [
      collectives.Bucket.of(
        [collectives.Piece(i, 0, x.size)],
        x.dtype,
        num_rows=num_workers,
        granule=_BYTE,
      )
      for i, x in enumerate(likes)
      if x.size
    ],
  )
