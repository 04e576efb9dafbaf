"""The mean by an all-to-all: every worker owns a row of all buckets.

|      | at every worker                | at the owner of a row            |
|------|--------------------------------|----------------------------------|
| up   | pack, encode, all-to-all       | decode, add up, add its residual |
| down | all-gather, decode, unpack     | encode, keep the residual        |

Rows begin at multiples of the codec's granule, so a leaf that does not fill N
granules would be mostly padding.  Each leaf is put where it takes the fewest
bits:

- in a bucket of its own, padded up to N granules;
- in a bucket that small leaves share, where each begins at a granule; larger
  ones if that saves an eighth of the bits.  It is for codecs that encode
  granules independently (twice the granules, twice the bits): with one scale
  for a whole array a large neighbour would round a small leaf to zero;
- in a bucket that is sent exactly.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import codecs, collectives, signatures, states
from jdist.reducers import _reducer
from jdist.states import PyTree

OwnerFeedback: TypeAlias = bool | Literal["own_share"]
_NumBits: TypeAlias = Callable[[jax.ShapeDtypeStruct], int]
_exact_bits: _NumBits = codecs.Dense().num_bits
# Entries of a leaf that is worth a bucket of its own.
_SMALL = 2**18


class RowLayout(NamedTuple):
  """Buckets of one row a worker; the codec leaves `exact` ones as they are."""

  buckets: collectives.Buckets
  exact: tuple[bool, ...]
  draws: str = "none"


@states.declare()
class AllToAllState(NamedTuple):
  """State of `AllToAll`, each worker its own; `()` without residuals.

  Attributes:
    residual: The part that the owner of a row has not sent yet, in units of the
      mean, float32 [row] for each encoded bucket.
  """

  residual: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class AllToAll(_reducer.Reducer):
  """Reduces rows that workers own; made by `compressed`, which describes it."""

  codec: codecs.Codec
  owner_feedback: OwnerFeedback = True

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Returns the owners' residuals, zeros; refuses a codec with a state."""
    _, coders = self._layout(like, collectives.size(axis))
    for coder in coders:
      coder.check()
    zeros = tuple(
      jnp.zeros(coder.row.shape, jnp.float32)
      for coder in coders
      if self._keeps(coder)
    )
    return collectives.varying(AllToAllState(zeros), axis) if zeros else ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    num_workers = collectives.size(axis)
    layout, coders = self._layout(tree, num_workers)
    draws = layout.draws
    if not coders:
      return _reducer.Reduced(tree, optax.tree.cast(tree, jnp.float32), state)
    kept = [coder.row for coder in coders if self._keeps(coder)]
    old = list(state.residual) if state else []
    if [x.shape for x in old] != [row.shape for row in kept]:
      got = ", ".join(f"{row.dtype}{list(row.shape)}" for row in kept)
      raise _reducer.not_of_state(f"rows {got}")
    # Up: row j of every bucket is sent to worker j, its owner.
    payloads, finite, shares = [], [], []
    # A bucket of several small leaves has the number of its first one.
    names = leaf_numbers(tree)
    numbers = [names[x.pieces[0].leaf] for x in layout.buckets.buckets]
    for i, rows in enumerate(layout.buckets.pack(tree)):
      keys = _row_keys(draws, key, numbers[i], axis)
      payload = jax.vmap(coders[i].encode)(rows, keys)
      payloads.append(payload)
      finite.append(jnp.isfinite(rows).all(1))
      shares.append(jax.vmap(coders[i].decode)(payload))
    sent = payloads, jnp.stack(finite, 1)
    rows, sound = to_owners(sent, num_workers, axis)
    sound = sound.all(0)
    # The owner adds up its row, and encodes the mean for all.
    payloads, finite, new = [], [], []
    for i, coder in enumerate(coders):
      total = add_rows(
        jnp.zeros(coder.row.shape, jnp.float32),
        jax.vmap(coder.decode)(rows[i]), lambda total, one: total + one,
        num_workers, axis, most_unrolled=16,
      )  # fmt: skip
      # The residual is added after the division, so that its unit does not
      # change with the number of workers.
      wanted = total / num_workers
      if self._keeps(coder):
        wanted = wanted + old.pop(0)
      # All workers decode into the leaf's dtype.  The error of this cast is
      # a part of the residual.
      exact, narrow = coder.row.dtype == np.float32, wanted
      if not exact:
        narrow = states.rounded(wanted, coder.row.dtype)
      finite.append(jnp.isfinite(narrow).all() & sound[i])
      payload = coder.encode(narrow, _owner_key(draws, key, numbers[i], axis))
      payloads.append(payload)
      if self._leaves_out(coder):
        known = coder.decode(payload)
        if not exact:
          known = states.rounded(known, coder.row.dtype)
        left = wanted - known.astype(jnp.float32)
        left = jnp.where(finite[-1] & jnp.isfinite(left), left, 0)
        if self._keeps(coder):
          new.append(left)
        else:
          # The feedback around the reducer keeps it, as the difference from a
          # smaller own share.
          own = collectives.index(axis)
          shares[i] = shares[i].at[own].add(-num_workers * left)
    # Down: every owner sends its row to all.
    rows, sound = to_all((payloads, jnp.stack(finite)), axis)
    means = []
    for i, coder in enumerate(coders):
      mean = jax.vmap(coder.decode)(rows[i])
      mean = jnp.where(sound[:, i, None], mean, jnp.nan)
      means.append(mean.astype(coder.row.dtype))
    unpack = layout.buckets.unpack
    return _reducer.Reduced(
      unpack(means, tree),
      optax.tree.cast(unpack(shares, tree), jnp.float32),
      AllToAllState(tuple(new)) if new else (),
    )

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """Gathers the owners' residuals, in float32."""
    if not state:
      return super().flush(state, like, axis)
    layout, coders = self._layout(like, collectives.size(axis))
    rows = iter(collectives.gather(state.residual, axis))
    buffers = [
      next(rows)
      if self._keeps(coder)
      else jnp.zeros((bucket.num_rows, bucket.row_size), jnp.float32)
      for bucket, coder in zip(layout.buckets.buckets, coders, strict=True)
    ]
    residuals = layout.buckets.unpack(buffers, like)
    residuals = optax.tree.cast(residuals, jnp.float32)
    return residuals, jax.tree.map(jnp.zeros_like, state)

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Counts a worker's rows, each with a byte that marks it as finite."""
    _, coders = self._layout(like, num_workers)
    payload = num_workers * sum(8 + coder.num_bits() for coder in coders)
    return _reducer.Bits.in_ring(payload, num_workers)

  def __str__(self) -> str:
    """Prints for instance `all_to_all Quantize(bits=8, ...)`."""
    return f"all_to_all {self.codec}"

  def _layout(
    self, tree: PyTree, num_workers: int
  ) -> tuple[RowLayout, tuple["_Coder", ...]]:
    leaves, structure = jax.tree.flatten(tree)
    kinds = tuple([(jnp.shape(x), x.dtype) for x in leaves])
    return _lay_out(self.codec, structure, kinds, num_workers)

  def _keeps(self, coder: "_Coder") -> bool:
    """Returns whether owners keep a residual of these rows."""
    return self.owner_feedback is True and self._leaves_out(coder)

  def _leaves_out(self, coder: "_Coder") -> bool:
    """Returns whether rows lose something; exact ones of float32 do not."""
    return bool(self.owner_feedback) and (
      coder.codec is not None or coder.row.dtype != np.float32
    )


@functools.lru_cache(maxsize=256)
def _lay_out(
  codec: codecs.Codec, structure: Any, kinds: tuple[Any, ...], num_workers: int
) -> tuple[RowLayout, tuple["_Coder", ...]]:
  """Lays out leaves once, however often a program is traced."""
  # The cache holds shapes and no arrays.
  likes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
  tree = jax.tree.unflatten(structure, likes)
  _reducer.check_leaves(f"compressed({codec})", tree, codecs.Dense().check)
  layout = make_layout(tree, num_workers, codec.granule(), codec.num_bits)
  coders = [
    _Coder(None if exact else codec, bucket.row)
    for bucket, exact in zip(layout.buckets.buckets, layout.exact, strict=True)
  ]
  return layout._replace(draws=codec.key), tuple(coders)


def make_layout(
  tree: PyTree, num_rows: int, granule: int, num_bits: _NumBits
) -> RowLayout:
  """Chooses a bucket for every leaf, by a codec's `granule` and `num_bits`."""
  likes = jax.tree.leaves(tree)

  def bucket(leaves: Sequence[int], granule: int) -> collectives.Bucket:
    pieces = [collectives.Piece(i, 0, likes[i].size) for i in leaves]
    return collectives.Bucket.of(
      pieces, likes[leaves[0]].dtype, num_rows=num_rows, granule=granule
    )

  buckets, num_exact = [], []
  for dtype in sorted({np.dtype(like.dtype).name for like in likes}):
    places: dict[str, list[int]] = {"own": [], "shared": [], "exact": []}
    for i, like in enumerate(likes):
      if like.size and np.dtype(like.dtype).name == dtype:
        places[_place(like, num_rows, granule, num_bits)].append(i)
    own = [bucket([i], granule) for i in places["own"]]
    if places["shared"]:
      # Together they may still be mostly padding, if they are few.
      shared = bucket(places["shared"], granule)
      plain_bits = sum(_exact_bits(likes[i]) for i in places["shared"])
      if num_rows * num_bits(shared.row) < plain_bits:
        own.append(shared)
      else:
        places["exact"] += places["shared"]
    exact = [bucket(places["exact"], 1)] if places["exact"] else []
    buckets += [*own, *exact]
    num_exact += [False] * len(own) + [True] * len(exact)
  given = collectives.Buckets.given(tree, buckets)
  return RowLayout(given, tuple(num_exact))


def _place(
  like: Any, num_rows: int, granule: int, num_bits: _NumBits
) -> Literal["own", "shared", "exact"]:
  def bits(size: int) -> int:
    return num_bits(jax.ShapeDtypeStruct((size,), like.dtype))

  def padded(multiple: int) -> int:
    return -(-like.size // multiple) * multiple

  fewest = num_rows * bits(padded(num_rows * granule) // num_rows)
  place: Literal["own", "shared"] = "own"
  # A codec with a header, or one scale for an array, fails this test.
  if bits(2 * granule) == 2 * bits(granule):
    shared = bits(padded(granule))
    # Each small leaf would be encoded by kernels of its own, which cost their
    # launch; a large one is copied into a bucket only if that saves bits.
    if fewest > 1.125 * shared or like.size < _SMALL:
      place, fewest = "shared", shared
  return "exact" if fewest >= _exact_bits(like) else place


class _Coder(NamedTuple):
  """Encodes and decodes a row, or passes it on without a codec."""

  codec: codecs.Codec | None
  row: jax.ShapeDtypeStruct

  def encode(self, x: jax.Array, key: jax.Array | None) -> PyTree:
    if self.codec is None:
      return x
    encode = signatures.plain(type(self.codec).encode)
    return encode(self.codec, x, (), key)[0]

  def decode(self, payload: PyTree) -> jax.Array:
    if self.codec is None:
      return payload.astype(jnp.float32)
    like = jax.ShapeDtypeStruct(self.row.shape, jnp.float32)
    decode = signatures.plain(type(self.codec).decode)
    return decode(self.codec, payload, (), like)

  def num_bits(self) -> int:
    if self.codec is None:
      return _exact_bits(self.row)
    return self.codec.num_bits(self.row)

  def check(self) -> None:
    codec = self.codec
    if codec is None:
      return
    codec.check(self.row)
    if jax.tree.leaves(jax.eval_shape(codec.init, self.row)):
      raise ValueError(
        f"`wire` must be {'sum' if codec.linear else 'gather'!r} for "
        f"{codec}, got 'all_to_all': it keeps a state, which the owner of "
        "a row would need from every worker to decode."
      )


def add_rows(
  total: jax.Array,
  rows: PyTree,
  add: Callable[[jax.Array, PyTree], jax.Array],
  num_rows: int,
  axis: collectives.Axis,
  *,
  most_unrolled: int,
) -> jax.Array:
  """Adds every worker's row, in the order of the workers."""
  # The order is fixed, so that all workers get the same bits.  Unrolled sums
  # are fused into one pass over the memory; long ones take too long to compile.
  if num_rows <= most_unrolled:
    for i in range(num_rows):
      total = add(total, jax.tree.map(lambda x, i=i: x[i], rows))
    return total
  total, _ = jax.lax.scan(
    lambda total, row: (collectives.varying(add(total, row), axis), None),
    collectives.varying_like(collectives.varying(total, axis), rows),
    rows,
  )
  return total


def to_owners(sent: PyTree, num_workers: int, axis: collectives.Axis) -> PyTree:
  """Sends row j of every array to worker j, as few buffers of bytes."""
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), sent
  )
  buffers = collectives.pack_bytes(sent, num_leading=1)
  buffers = collectives.all_to_all(buffers, axis)
  return collectives.unpack_bytes(buffers, like, rows=num_workers)


def to_all(sent: PyTree, axis: collectives.Axis) -> PyTree:
  """Gathers every worker's arrays, as few buffers of bytes."""
  buffers = collectives.gather(collectives.pack_bytes(sent), axis)
  return collectives.unpack_bytes(buffers, sent)


# A reduction has one key, which is equal on all workers.


def own_key(draws: str, key: jax.Array, axis: collectives.Axis) -> jax.Array:
  """Returns this worker's key, or that of all if the codec needs one key."""
  if draws != "worker":
    return key
  return jax.random.fold_in(key, collectives.index(axis))


def leaf_key(draws: str, key: jax.Array, number: int) -> jax.Array | None:
  """Returns the key of a leaf; None for a codec without random numbers."""
  return None if draws == "none" else jax.random.fold_in(key, number)


def leaf_numbers(tree: PyTree) -> list[int]:
  """Returns numbers of leaves' paths, for random numbers of their own."""
  # By its path a leaf draws the same in a pipeline's stage as in the model.
  paths = jax.tree_util.tree_leaves_with_path(tree)
  return [zlib.crc32(jax.tree_util.keystr(x).encode()) >> 1 for x, _ in paths]


def _row_keys(
  draws: str, key: jax.Array, number: int, axis: collectives.Axis
) -> jax.Array | None:
  """Returns a key for each of a worker's rows of a bucket."""
  drawn = leaf_key(draws, own_key(draws, key, axis), 2 * number)
  if drawn is None:
    return None
  return jax.random.split(drawn, collectives.size(axis))


def _owner_key(
  draws: str, key: jax.Array, number: int, axis: collectives.Axis
) -> jax.Array | None:
  """Returns the key of this worker as the owner of a row of a bucket."""
  drawn = leaf_key(draws, key, 2 * number + 1)
  if drawn is None:
    return None
  return jax.random.fold_in(drawn, collectives.index(axis))
