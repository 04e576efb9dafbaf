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
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jdist import checks, codecs, collectives, states
from jdist.reducers import _all_to_all, _reducer

PyTree: TypeAlias = Any
Wire: TypeAlias = Literal["sum", "all_to_all", "gather"]
OwnerFeedback: TypeAlias = _all_to_all.OwnerFeedback


@states.declare()
class CompressedState(NamedTuple):
  """State of `compressed`; each worker its own.

  Attributes:
    codec: the codec's state for each leaf; `()` for an all-to-all.
    residual: what the owner of a row has not sent yet, in units of the mean:
      float32 [row] for each encoded bucket of an all-to-all; else `()`.
  """

  codec: PyTree
  residual: tuple[jax.Array, ...]


def compressed(
  codec: codecs.Codec,
  *,
  wire: Wire | None = None,
  owner_feedback: OwnerFeedback = True,
) -> "Compressed":
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
  that row, with what the cast of the mean to a narrower leaf leaves out.  Small
  leaves share a bucket, and tiny ones are sent exactly.

  Payloads are sent as bytes: one all-reduce, one all-gather, or one all-to-all
  and one all-gather for all leaves of less than 1 MiB, and one for each larger
  array.

  **Not finite.**  A leaf (a row, in an all-to-all) that holds a NaN or an
  infinity at one worker, or in the sum, is NaN on all workers, whatever the
  codec makes of it: a byte for each is sent along.  Over the `sum` wire it is
  the sum of the payloads; where they hold chosen entries only, NaN for all of
  these.  Entries of the owner's residual that would not be finite become zero.

  Args:
    codec: the encoding.  Its random numbers have a key of their own for each
      leaf, row, worker (unless they share it) and owner.
    wire: None, by the codec: `"sum"` for a linear one, `"gather"` for a sparse
      one (N - 1 payloads for each worker), else `"all_to_all"` (codecs without
      state only).  `"all_to_all"` sums a linear codec of 16 bits in float32.
    owner_feedback: what becomes of what an owner leaves out; only for an
      all-to-all.  True (default): it keeps it, e, which costs 1/N of the tree
      in float32 a worker.  `"own_share"`: its own share has N e less, and no
      state is needed: the error feedback around the reducer keeps it, in that
      one worker, whose message is the more uneven for it.  False: it is lost,
      and the law does not hold.

  Returns:
    A reducer for trees of floats.

  Raises:
    ValueError: when built, for a wire that does not suit the codec; at `init`,
      for a leaf that the codec does not suit or that is not of floats.
      `PerLeaf` sends such leaves another way.

  >>> reducer = compressed(codecs.Codec)
  Traceback (most recent call last):
  ValueError: `codec` must be a codec, for instance `codecs.Quantize(8)`, got
  <class 'jdist.codecs._codec.Codec'>.

  References: the all-to-all is the two-sided compression of DoubleSqueeze (Tang
  et al. 2019, arXiv:1905.05957, algorithm 1) with its one server spread over
  the workers by rows, as in 1-bit Adam (arXiv:2102.02888, where the owner's
  residual is the "server error").  Departures: none in the arithmetic; rows end
  at the codec's granules.
  """
  if not isinstance(codec, codecs.Codec):
    raise ValueError(
      "`codec` must be a codec, for instance `codecs.Quantize(8)`, got "
      f"{codec!r}."
    )
  if wire is None:
    wire = "sum" if codec.linear else "gather" if codec.sparse else "all_to_all"
  return Compressed(codec, wire, owner_feedback)


@dataclasses.dataclass(frozen=True)
class Compressed(_reducer.Reducer):
  """The reducer of a codec; made by `compressed`, which says what they mean."""

  codec: codecs.Codec
  wire: Wire
  owner_feedback: OwnerFeedback = True

  def __post_init__(self) -> None:
    checks.check_choice("wire", self.wire, ("sum", "all_to_all", "gather"))
    if self.wire == "sum" and not self.codec.linear:
      raise ValueError(
        f"`wire` must be 'all_to_all' or 'gather' for {self.codec}, got 'sum': "
        "it is not linear, and the sum of its payloads does not decode to the "
        "sum of the arrays."
      )
    checks.check_choice(
      "owner_feedback", self.owner_feedback, (True, False, "own_share")
    )

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """The codec's states and the owners' residuals, zeros."""
    self._check(like)
    likes = [x for x in jax.tree.leaves(like) if x.size]
    if self.wire != "all_to_all":
      states = tuple(self.codec.init(x) for x in likes)
      return _state(collectives.varying(states, axis), ())
    zeros = self._rows.init(likes, axis)
    return _state((), collectives.varying(zeros, axis))

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    """Takes the mean."""
    self._check(tree)
    # Of an empty leaf there is nothing to send.
    means, treedef = jax.tree.flatten(tree)
    shares = [x.astype(jnp.float32) for x in means]
    full = [i for i, x in enumerate(means) if x.size]
    if full:
      leaves = [means[i] for i in full]
      if not isinstance(state, CompressedState):
        state = CompressedState(tuple(() for _ in full), ())
      parts: tuple[Any, Any]
      if self.wire == "all_to_all":
        found, sent, residual = self._rows.reduce(
          leaves, state.residual, key, axis
        )
        parts = (), residual
      else:
        found, sent, parts = self._whole_leaves(leaves, state, key, axis)
      for i, mean, share in zip(full, found, sent, strict=True):
        means[i], shares[i] = mean, share
      state = _state(*parts)
    return _reducer.Reduced(
      jax.tree.unflatten(treedef, means),
      jax.tree.unflatten(treedef, shares),
      state,
    )

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """Gathers the owners' residuals, in float32."""
    held, treedef = jax.tree.flatten(
      jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    )
    if not isinstance(state, CompressedState) or not state.residual:
      return jax.tree.unflatten(treedef, held), state
    full = [i for i, x in enumerate(held) if x.size]
    leaves = jax.tree.leaves(like)
    likes = [leaves[i] for i in full]
    found = self._rows.flush(state.residual, likes, axis)
    for i, leaf in zip(full, found, strict=True):
      held[i] = leaf
    empty = jax.tree.map(jnp.zeros_like, state.residual)
    return jax.tree.unflatten(treedef, held), state._replace(residual=empty)

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts the payload with the bytes that say whether all is finite."""
    self._check(like)
    likes = [x for x in jax.tree.leaves(like) if x.size]
    n = num_workers
    if self.wire == "all_to_all":
      payload = self._rows.payload_bits(likes, n)
      sent = _reducer.ring_bits(payload, n)
    else:
      payload = sum(self.codec.num_bits(x) for x in likes)
      if self.wire == "gather":
        payload += 8 * len(likes)
        sent = float((n - 1) * payload)
      else:
        sent = _reducer.ring_bits(payload, n)
    return _reducer.Bits(payload, sent, sent)

  def __str__(self) -> str:
    """Prints for instance `all_to_all Quantize(bits=8, ...)`."""
    return f"{self.wire} {self.codec}"

  @property
  def _rows(self) -> _all_to_all.AllToAll:
    return _all_to_all.AllToAll(self.codec, self.owner_feedback)

  def _whole_leaves(
    self, leaves: list[Any], state: CompressedState, key: jax.Array, axis: Any
  ) -> tuple[list[Any], list[Any], tuple[Any, Any]]:
    """Returns means, own shares, and the state's parts, of sum and gather."""
    draws, payloads, states = self.codec.key, [], []
    key = _all_to_all.own_key(draws, key, axis)
    for i, (x, s) in enumerate(zip(leaves, state.codec, strict=True)):
      own = _all_to_all.leaf_key(draws, key, i)
      payload, s = self.codec.encode(x, s, own)
      payloads.append(payload)
      states.append(s)
    shares = self._decode_all(payloads, states, leaves)
    finite = [jnp.isfinite(x).all() for x in leaves]
    if self.wire == "gather":
      totals = self._gathered(
        (payloads, jnp.stack(finite)), states, leaves, axis
      )
    else:
      if self.codec.sparse:
        # An entry that is not finite may be one of those that are not sent.
        payloads = list(map(_poisoned, payloads, finite))
      totals = self._decode_all(collectives.sum(payloads, axis), states, leaves)
    num_workers = collectives.size(axis)
    means = [
      (total / num_workers).astype(x.dtype)
      for total, x in zip(totals, leaves, strict=True)
    ]
    return means, shares, (tuple(states), ())

  def _gathered(
    self, sent: Any, states: list[Any], leaves: list[Any], axis: Any
  ) -> list[jax.Array]:
    """Adds up what all workers have sent."""
    buffers = collectives.gather(collectives.pack_bytes(sent), axis)
    rows, finite = collectives.unpack_bytes(buffers, sent)
    totals = []
    for i, (row, s, x) in enumerate(zip(rows, states, leaves, strict=True)):
      total = _all_to_all.add_rows(
        jnp.zeros(x.shape, jnp.float32),
        row,
        functools.partial(self.codec.add_to, state=s),
        axis,
        most_unrolled=1,
      )
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
    leaves, structure = jax.tree.flatten(tree)
    kinds = tuple((tuple(x.shape), x.dtype) for x in leaves)
    self._check_kinds(structure, kinds)

  # The cache keeps reducers, which are a few settings.
  @functools.lru_cache(maxsize=256)  # noqa: B019
  def _check_kinds(self, structure: Any, kinds: tuple[Any, ...]) -> None:
    """Raises a ValueError for a leaf that the codec does not suit."""
    likes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    tree = jax.tree.unflatten(structure, likes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      if not leaf.size:
        continue
      try:
        codecs.Codec.check(self.codec, leaf)
        if self.wire != "all_to_all":
          self.codec.check(leaf)
      except ValueError as error:
        raise ValueError(
          f"`compressed({self.codec})` does not suit leaf "
          f"`{jax.tree_util.keystr(path)}`: {error} "
          "`PerLeaf` reduces some leaves in another way."
        ) from None


def _poisoned(payload: PyTree, finite: jax.Array) -> PyTree:
  """Replaces the floats of a payload by NaN, unless its leaf is finite."""
  return jax.tree.map(
    lambda x: (
      jnp.where(finite, x, jnp.full((), jnp.nan, x.dtype))
      if jnp.issubdtype(x.dtype, jnp.floating)
      else x
    ),
    payload,
  )


def _state(codec: PyTree, residual: tuple[jax.Array, ...]) -> PyTree:
  """Returns the state, `()` if there is nothing in it."""
  state = CompressedState(codec, residual)
  return state if jax.tree.leaves(state) else ()
