"""A codec as a reducer: means of encoded trees.

| codec | wire | collectives |
|---|---|---|
| linear | `sum` | an all-reduce of the payloads |
| sparse | `gather` | an all-gather of the payloads, which everyone adds up |
| others | `all_to_all` | each worker adds up and encodes a row of all trees |
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jdist import checks, codecs, collectives
from jdist.reducers import _all_to_all, _reducer
from jdist.states import PyTree

Wire: TypeAlias = Literal["sum", "all_to_all", "gather"]
OwnerFeedback: TypeAlias = _all_to_all.OwnerFeedback


def compressed(
  codec: codecs.Codec,
  *,
  wire: Wire | None = None,
  owner_feedback: OwnerFeedback = True,
) -> "Compressed | _all_to_all.AllToAll":
  r"""Makes a reducer of a codec.

  With C encoding and decoding and :math:`x_i` the tree of worker i of N, leaf
  by leaf:

  .. math::
    \text{sum, gather:} \quad & \mathrm{mean} = \frac1N \sum_i C(x_i) \\
    \text{all\_to\_all:} \quad & w = \frac1N \sum_i C(x_i) + e, \quad
      \mathrm{mean} = C(w), \quad e \leftarrow w - \mathrm{mean}

  and :math:`\mathrm{own\_share}_i = C(x_i)`.  Sums are in float32 and in the
  order of the workers, those of an all-reduce in the payload's dtype.

  In an all-to-all worker j owns row j of every bucket, and e is its residual of
  that row, with the error of the cast of the mean to a narrower leaf.  Small
  leaves share a bucket, and tiny ones are sent exactly.

  Payloads are sent as bytes: one all-reduce, one all-gather, or one all-to-all
  and one all-gather for all leaves of less than 1 MiB, and one for each larger
  array.

  **Not finite.**  A leaf (a row, in an all-to-all) that holds a NaN or an
  infinity at one worker, or in the sum, is NaN on all workers, whatever the
  codec does with it: a byte for each leaf is sent along.  The `sum` wire adds
  payloads; if these hold chosen entries only, all of them are NaN.  The owner's
  residual of a row that is not finite becomes zero.

  Args:
    codec: The encoding.  Its random numbers have their own key for each leaf,
      row, worker (unless they share it) and owner.
    wire: How payloads are sent.  None chooses `"sum"` for a linear codec,
      `"gather"` for a sparse one (N - 1 payloads for each worker), and
      `"all_to_all"` otherwise, which takes codecs without state only.
      `"all_to_all"` sums a linear codec of 16 bits in float32.
    owner_feedback: The treatment of the part that an owner leaves out, in an
      all-to-all only.  With True (default) the owner keeps it, e, which costs
      1/N of the tree in float32 a worker.  With `"own_share"` it is subtracted
      N times from the owner's share: no state is needed, and the error feedback
      around the reducer keeps it, in one worker, whose messages become larger.
      With False it is lost, and the law does not hold.

  Raises:
    ValueError: If built, for a wire that does not suit the codec or has no
      owners; at `init`, for a leaf that does not suit the codec or has no
      floats.  `PerLeaf` sends such leaves in another way.

  References: The all-to-all is the two-sided compression of DoubleSqueeze (Tang
  et al. 2019, arXiv:1905.05957, algorithm 1) with its one server spread over
  the workers by rows, as in 1-bit Adam (arXiv:2102.02888, where the owner's
  residual is the "server error").  Departures: none in the arithmetic; rows end
  at the codec's granules.
  """
  wanted = "a codec, for instance `codecs.Quantize(8)`"
  checks.check_type("codec", codec, codecs.Codec, wanted)
  # Payloads that can be added take one all-reduce.  Chosen entries differ from
  # worker to worker, so that an owner's sum would not be sparse.
  if wire is None:
    wire = "sum" if codec.linear else "gather" if codec.sparse else "all_to_all"
  checks.check_choice("wire", wire, ("sum", "all_to_all", "gather"))
  checks.check_choice(
    "owner_feedback", owner_feedback, (True, False, "own_share")
  )
  if wire == "all_to_all":
    return _all_to_all.AllToAll(codec, owner_feedback)
  if owner_feedback is not True:
    raise ValueError(
      "`owner_feedback` is of an all-to-all only and must be left out with "
      f"wire={wire!r}, got {owner_feedback!r}: no worker owns a part there."
    )
  return Compressed(codec, wire)


@dataclasses.dataclass(frozen=True)
class Compressed(_reducer.Reducer):
  """Reduces whole leaves, by a sum or a gather; made by `compressed`."""

  codec: codecs.Codec
  wire: Literal["sum", "gather"]

  def __post_init__(self) -> None:
    if self.wire == "sum" and not self.codec.linear:
      raise ValueError(
        f"`wire` must be 'all_to_all' or 'gather' for {self.codec}, got 'sum': "
        "it is not linear, and the sum of its payloads does not decode to the "
        "sum of the arrays."
      )

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Returns the codec's states of all leaves that are sent."""
    self._check(like)
    states = tuple(map(self.codec.init, _sent(like)))
    return collectives.varying(states, axis) if jax.tree.leaves(states) else ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    self._check(tree)
    leaves = _sent(tree)
    if not leaves:
      floats = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
      return _reducer.Reduced(tree, floats, state)
    draws, payloads, states = self.codec.key, [], []
    # Each worker and leaf has a key, so that errors of rounding are independent
    # and average out; a codec like random-k needs the same entries everywhere.
    key = _all_to_all.own_key(draws, key, axis)
    before = state or ((),) * len(leaves)
    pairs = zip(
      _all_to_all.leaf_numbers(tree), jax.tree.leaves(tree), strict=True
    )
    numbers = [number for number, x in pairs if x.size]
    for i, x, s in zip(numbers, leaves, before, strict=True):
      own = _all_to_all.leaf_key(draws, key, i)
      payload, s = self.codec.encode(x, s, own)
      payloads.append(payload)
      states.append(s)
    # A worker decodes its own payload, as the others will.
    shares = self._decode_all(payloads, states, leaves)
    # Codecs may hide a NaN, in a sign for instance, and so it is sent apart.
    finite = [jnp.isfinite(x).all() for x in leaves]
    if self.wire == "gather":
      totals = self._gathered(
        (payloads, jnp.stack(finite)), states, leaves, axis
      )
    else:
      if self.codec.sparse:
        # An entry that is not finite may not be among those that are sent.
        payloads = list(map(_poisoned, payloads, finite))
      totals = self._decode_all(collectives.sum(payloads, axis), states, leaves)
    # The sum is divided in float32, and cast once.
    num_workers = collectives.size(axis)
    means = [
      (total / num_workers).astype(x.dtype)
      for total, x in zip(totals, leaves, strict=True)
    ]
    return _reducer.Reduced(
      _with_sent(tree, means),
      jax.tree.map(lambda x: x.astype(jnp.float32), _with_sent(tree, shares)),
      tuple(states) if jax.tree.leaves(states) else (),
    )

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts the payload; a gather adds a byte that marks it as finite."""
    self._check(like)
    leaves = _sent(like)
    payload = sum(map(self.codec.num_bits, leaves))
    if self.wire == "sum":
      return _reducer.Bits.in_ring(payload, num_workers)
    payload += 8 * len(leaves)
    return _reducer.Bits(payload, float((num_workers - 1) * payload))

  def __str__(self) -> str:
    """Prints for instance `gather TopK(ratio=0.01, ...)`."""
    return f"{self.wire} {self.codec}"

  def _gathered(
    self, sent: Any, states: list[Any], leaves: list[Any], axis: Any
  ) -> list[jax.Array]:
    """Adds up the payloads of all workers."""
    # Every worker decodes all payloads itself, one after the other, so that N
    # dense arrays are never held at once.
    rows, finite = _all_to_all.to_all(sent, axis)
    totals = []
    for i, (row, s, x) in enumerate(zip(rows, states, leaves, strict=True)):
      total = _all_to_all.add_rows(
        jnp.zeros(x.shape, jnp.float32), row,
        functools.partial(self.codec.add_to, state=s), collectives.size(axis),
        axis, most_unrolled=1,
      )  # fmt: skip
      totals.append(jnp.where(finite[:, i].all(), total, jnp.nan))
    return totals

  def _decode_all(
    self, payloads: Sequence[Any], states: Sequence[Any], leaves: Sequence[Any]
  ) -> list[jax.Array]:
    return [
      self.codec.decode(p, s, jax.ShapeDtypeStruct(x.shape, jnp.float32))
      for p, s, x in zip(payloads, states, leaves, strict=True)
    ]

  def _check(self, tree: PyTree) -> None:
    _reducer.check_leaves(f"compressed({self.codec})", tree, self.codec.check)


def _sent(tree: PyTree) -> list[Any]:
  """Lists the leaves that have elements."""
  return [x for x in jax.tree.leaves(tree) if x.size]


def _with_sent(tree: PyTree, sent: list[Any]) -> PyTree:
  """Replaces the leaves of a tree that `_sent` lists."""
  found = iter(sent)
  return jax.tree.map(lambda x: next(found) if x.size else x, tree)


def _poisoned(payload: PyTree, finite: jax.Array) -> PyTree:
  """Replaces the floats of a payload by NaN, unless its leaf is finite."""
  return jax.tree.map(
    lambda x: (
      jnp.where(finite, x, jnp.full((), jnp.nan, x.dtype))
      if jnp.issubdtype(x.dtype, jnp.inexact)
      else x
    ),
    payload,
  )
