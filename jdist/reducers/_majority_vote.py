"""Means of signs, decided by vote."""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives
from jdist.reducers import _reducer

PyTree: TypeAlias = Any

_BYTE = 8


@dataclasses.dataclass(frozen=True)
class MajorityVote(_reducer.Reducer):
  r"""Sends signs, and takes the one that most workers have.

  .. math:: \mathrm{mean} = \mathrm{sign}\Big(\sum_i \mathrm{sign}(x_i)\Big),
            \quad \mathrm{sign}(0) = +1

  so that entries are +1 or -1, **a tie is +1** (of 2 workers that disagree,
  +1), and so is the vote for an entry of zero.  One bit for each entry goes
  up and one comes down: the signs of row j of every leaf go to worker j, 8 to
  a byte, who counts and sends the decision to all.  All leaves of less than
  8 MiB entries travel together: one all-to-all and one all-gather.

  `own_share` is :math:`\mathrm{sign}(x_i)`, float32.  **The reducers' law does
  not hold**: a vote is not a mean.  What does: every entry of the mean has the
  sign of :math:`\sum_i \mathrm{own\_share}_i`, or that is zero.  So error
  feedback on `own_share` is meaningless here, and refused: the minority's vote
  is lost, and signs have lost their scale.

  Leaves in whose row of a worker a NaN or an infinity was met are NaN in that
  row, on all workers.

  Reference: Bernstein et al. 2018, signSGD (arXiv:1802.04434), algorithm 3,
  and signSGD with majority vote (arXiv:1810.05291), algorithm 1, with
  momentum before it and the step's size and the weight decay after it.
  Departures: its one server is spread over the workers by rows; ties and
  zeros are +1 (the papers' sign(0) is 0, which one bit cannot tell).
  """

  @property
  def averages(self) -> bool:
    """No: a vote is no mean of the voters."""
    return False

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Nothing is kept; refuses leaves that are not of floats."""
    del axis
    for path, x in jax.tree_util.tree_leaves_with_path(like):
      if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
          "`like` must hold floats only, got "
          f"{x.dtype} at `{jax.tree_util.keystr(path)}`. `PerLeaf` reduces "
          "some leaves in another way."
        )
    return ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    """Takes the vote."""
    del key
    num_workers = collectives.size(axis)
    leaves, treedef = jax.tree.flatten(tree)
    shares = [jnp.where(x >= 0, 1.0, -1.0).astype(jnp.float32) for x in leaves]
    full = [i for i, x in enumerate(leaves) if x.size]
    if full:
      signs, finite = [], []
      for i in full:
        x = leaves[i].reshape(-1)
        row = _row(x.size, num_workers)
        x = jnp.pad(x, (0, num_workers * row - x.size))
        x = x.reshape(num_workers, row)
        signs.append(_pack(x >= 0))
        finite.append(jnp.isfinite(x).all(1))
      sent = (signs, jnp.stack(finite, 1))
      like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sent
      )
      buffers = collectives.all_to_all(
        collectives.pack_bytes(sent, num_leading=1), axis
      )
      signs, told = collectives.unpack_bytes(buffers, like, rows=num_workers)
      votes = [
        _unpack(x).astype(jnp.int32).sum(0, dtype=jnp.int32) for x in signs
      ]
      decided = [_pack(2 * vote >= num_workers) for vote in votes]
      buffers = collectives.gather(
        collectives.pack_bytes((decided, told.all(0))), axis
      )
      decided, told = collectives.unpack_bytes(buffers, like)
    means = list(leaves)
    for number, i in enumerate(full):
      x = leaves[i]
      mean = jnp.where(_unpack(decided[number]), 1.0, -1.0)
      mean = jnp.where(told[:, number, None], mean, jnp.nan)
      means[i] = mean.reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)
    return _reducer.Reduced(
      jax.tree.unflatten(treedef, means),
      jax.tree.unflatten(treedef, shares),
      state,
    )

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """A bit for each entry up and down; rows are whole bytes, and one more."""
    payload = 0
    for x in jax.tree.leaves(like):
      if size := math.prod(x.shape):
        payload += num_workers * (_row(size, num_workers) + _BYTE)
    sent = _reducer.ring_bits(payload, num_workers)
    return _reducer.Bits(payload, sent, sent)


def _row(size: int, num_workers: int) -> int:
  return -(-size // (num_workers * _BYTE)) * _BYTE


def _pack(bits: jax.Array) -> jax.Array:
  """Bools [..., 8 n] as uint8 [..., n], eight long stretches side by side."""
  lanes = bits.reshape(*bits.shape[:-1], _BYTE, bits.shape[-1] // _BYTE)
  packed = jnp.zeros_like(lanes[..., 0, :], dtype=jnp.uint8)
  for i in range(_BYTE):
    packed |= lanes[..., i, :].astype(jnp.uint8) << np.uint8(i)
  return packed


def _unpack(packed: jax.Array) -> jax.Array:
  """Undoes `_pack`."""
  lanes = [(packed >> np.uint8(i)) & np.uint8(1) for i in range(_BYTE)]
  return jnp.concatenate(lanes, -1) != 0
