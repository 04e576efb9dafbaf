"""Sparse codecs: chunks, slots, indices of entries, and the largest ones."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, signatures
from jdist.codecs import _bits, _blocks, _codec, _indices, _largest

Values: TypeAlias = _codec.Codec
FLOAT32 = _codec.Dense()
# Positions of the split form, up to 2 n, must fit into int32.
_MAX_SIZE = 2**30


class Entries(NamedTuple):
  """The payload of a sparse codec.

  Attributes:
    values: The payload of the values' codec.
    indices: The buffers of `_indices`.
    counts: The packed number of used slots of each chunk, uint8; `()` if all
      are used.
  """

  values: Any
  indices: dict[str, jax.Array]
  counts: Any


class Sparse(_codec.Codec):
  """Base of codecs that send values and indices of chosen entries."""

  sparse: ClassVar[bool] = True
  # A chunk may use fewer entries than it has slots, which then needs counts.
  _counted: ClassVar[bool] = False

  ratio: float | None
  k: int | None
  chunk: int | None
  values: Values

  def __post_init__(self) -> None:
    check_ratio_or_k(self)
    check_values(self.values)
    if self.chunk is None:
      return
    remedy = "None means to choose among all entries."
    checks.set_structural(self, "chunk", minimum=1, remedy=remedy)
    remedy = "It counts the entries of each `chunk`."
    checks.check_int("k", self.k or 1, 1, self.chunk, remedy)

  def num_entries(self, length: int) -> int:
    """Returns `k`, or the ratio of the length rounded up."""
    return num_entries(self.ratio, self.k, length)

  @abc.abstractmethod
  def _select(self, rows: jax.Array, k: int) -> _largest.Selection:
    """Chooses k entries of each row, float32 [rows, length]."""

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    return self.values.key

  def granule(self) -> int:
    """Returns the length of whole chunks that make whole blocks of values."""
    if self.chunk is None:
      return 1
    block = self.values.granule()
    return self.chunk * (block // math.gcd(block, self.num_entries(self.chunk)))

  def check(self, like: _codec.Like) -> None:
    """Raises a ValueError for integers, and for too many or too few entries."""
    _codec.check_float(like)
    if self.chunk is None:
      check_k_fits(self.k, like)
    if like.size >= _MAX_SIZE:
      raise ValueError(
        f"`like` must have fewer than 2**30 entries, got {like.size}. Cut it "
        "at multiples of `granule()`."
      )
    self.values.check(self._values_like(like.size))

  def init(self, like: _codec.Like) -> Any:
    return self.values.init(self._values_like(like.size))

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[Entries, Any]:
    self.check(x)
    x = jnp.asarray(x).reshape(-1).astype(jnp.float32)
    indices, counts = self._choose(x)
    taken = x.at[indices].get(mode="promise_in_bounds")
    # Unused slots repeat an entry, which must not be sent twice.
    if self._counted:
      taken = jnp.where(self._used(counts, x.size), taken, 0)
      counts = _bits.pack(counts, self._count_width(x.size))
    values, state = self.values.encode(taken, state, key)
    parts = self._indices(x.size).pack(indices)
    return Entries(values, parts, counts if self._counted else ()), state

  def decode(
    self, payload: Entries, state: Any, like: _codec.Like
  ) -> jax.Array:
    indices, values = self.entries(payload, state, like.size)
    zeros = jnp.zeros(like.size, jnp.float32)
    # An addition to zero would lose the sign of -0.
    flat = zeros.at[indices].set(values, **self._placing())
    return _blocks.narrow(flat.reshape(like.shape), like.dtype)

  def add_to(self, total: jax.Array, payload: Entries, state: Any) -> jax.Array:
    indices, values = self.entries(payload, state, total.size)
    flat = total.reshape(-1).at[indices].add(values, **self._placing())
    return flat.reshape(total.shape)

  def entries(
    self, payload: Entries, state: Any, size: int
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the indices, int32 [k], and values, float32 [k], of a payload.

    They belong to the flat array of `size` entries; an unused slot has the
    index `size` and the value zero.
    """
    indices = self._indices(size).unpack(payload.indices)
    values = self.values.decode(payload.values, state, self._values_like(size))
    if self._counted:
      num, width = _blocks.num_blocks(size, self.chunk), self._count_width(size)
      counts = _bits.unpack(payload.counts, width, num)
      used = self._used(counts.astype(jnp.int32), size)
      indices = jnp.where(used, indices, size)
      values = jnp.where(used, values, 0)
    return indices, values

  def num_bits(self, like: _codec.Like) -> int:
    """Returns the bits of values, indices and counts, each in whole bytes."""
    parts = [
      self.values.num_bits(self._values_like(like.size)),
      self._indices(like.size).num_bits,
    ]
    if self._counted:
      chunks = _blocks.num_blocks(like.size, self.chunk)
      parts.append(chunks * self._count_width(like.size))
    return sum(-(-bits // 8) * 8 for bits in parts)

  def _placing(self) -> dict[str, Any]:
    # Unused slots all have the same index, which is out of bounds.
    ordered = not self._counted
    return {
      "mode": "drop", "indices_are_sorted": ordered, "unique_indices": ordered,
    }  # fmt: skip

  def _pieces(self, size: int) -> list[tuple[int, int]]:
    """Returns (rows, length) of whole chunks and of the shorter last one."""
    return _blocks.shapes(size, self.chunk or max(size, 1))

  def _slots(self, size: int) -> int:
    return sum(
      rows * self.num_entries(length) for rows, length in self._pieces(size)
    )

  def _values_like(self, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((self._slots(size),), jnp.float32)

  def _indices(self, size: int) -> _indices.Indexing:
    length = self._pieces(size)[0][1] if size else 0
    per_chunk = self.num_entries(length) if size else 0
    return _indices.Indexing(
      size, self._slots(size), length, per_chunk, distinct=not self._counted
    )

  def _count_width(self, size: int) -> int:
    return max(1, self._indices(size).per_chunk.bit_length())

  def _choose(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ascending indices of all chunks, int32 [k], and counts."""
    indices, counts = [jnp.zeros(0, jnp.int32)], [jnp.zeros(0, jnp.int32)]
    start = 0
    for rows, length in self._pieces(x.size):
      end = start + rows * length
      found = self._select(
        x[start:end].reshape(rows, length), self.num_entries(length)
      )
      # Indices within a chunk become those of the flat array.
      starts = jnp.arange(rows, dtype=jnp.int32)[:, None] * np.int32(length)
      indices.append((found.indices + starts + start).reshape(-1))
      counts.append(found.num_used)
      start = end
    return jnp.concatenate(indices), jnp.concatenate(counts)

  def _used(self, counts: jax.Array, size: int) -> jax.Array:
    """Marks the used slots, bool [k]."""
    used, first = [jnp.zeros(0, bool)], 0
    for rows, length in self._pieces(size):
      slots = jnp.arange(self.num_entries(length), dtype=jnp.int32)
      used.append((slots < counts[first : first + rows, None]).reshape(-1))
      first += rows
    return jnp.concatenate(used)


def num_entries(ratio: float | None, k: int | None, length: int) -> int:
  if k is not None:
    return min(k, length)
  assert ratio is not None
  # In floats 0.07 * 100 is a little more than 7, and must not become 8.
  wanted = math.ceil(ratio * length * (1 - 1e-12))
  return min(length, max(1, wanted))


def check_ratio_or_k(codec: Any) -> None:
  if codec.k is None:
    if codec.ratio is None:
      object.__setattr__(codec, "ratio", 0.01)
    checks.check_number("ratio", codec.ratio, high=1.0, open_low=True)
  elif codec.ratio is not None:
    raise ValueError(
      f"`ratio` and `k` are given both, {codec.ratio!r} and {codec.k!r}. Leave "
      "one of them out."
    )
  else:
    checks.set_structural(codec, "k", minimum=1, remedy="It counts entries.")


def check_values(values: Any) -> None:
  checks.check_type("values", values, _codec.Codec, "a codec")
  if values.sparse or values.key == "shared":
    raise ValueError(
      f"`values` must be a codec of all entries, got {values!r}. Use `Dense`, "
      "`Cast` or `Quantize`."
    )


def check_k_fits(k: int | None, like: _codec.Like) -> None:
  remedy = "Use `ratio`, or leave small arrays uncompressed."
  checks.check_int("k", k or 1, 1, like.size or math.inf, remedy)


@dataclasses.dataclass(frozen=True)
class TopK(Sparse):
  r"""Sends the entries of largest magnitude.

  .. math:: \mathrm{decode}(\mathrm{encode}(x))_i =
            x_i \text{ if } i \in \mathrm{top}_k(|x|) \text{ else } 0

  Equal magnitudes are ordered by their indices, and NaN precedes all numbers,
  so that it is noticed after decoding.  A payload holds k values in the order
  of their indices, packed by `values`, and the indices in the fewest bits
  (`_indices`): about 8.6 bits an index for 1 % of the entries and 12 for 0.1 %.
  With 1 % a float32 array becomes 79 times smaller with float32 values (the
  default), and 130 times with bfloat16 values.

  Args:
    ratio: The fraction of the entries that is sent, in (0, 1], at least one
      entry.  The default is 0.01, unless `k` is given.
    k: The number of entries, in place of `ratio`, of each chunk.
    chunk: The number of neighbours among which entries are chosen, so that
      every part of the array sends some; the last chunk may be shorter.  None
      (default) chooses among all entries.
    values: The codec of the vector of values; `Dense()` by default.

  Raises:
    ValueError: From `check`, for an array of fewer than `k` entries.

  >>> import jax.numpy as jnp
  >>> codec = TopK(k=2)
  >>> x = jnp.array([1.0, -3.0, 0.5, 2.0])
  >>> payload, state = codec.encode(x)
  >>> codec.decode(payload, state, x).tolist()
  [0.0, -3.0, 0.0, 2.0]
  """

  ratio: float | None = None
  k: int | None = None
  chunk: int | None = None
  values: Values = FLOAT32

  def _select(self, rows: jax.Array, k: int) -> _largest.Selection:
    return _largest.largest(rows, k)


@signatures.checked
@dataclasses.dataclass(frozen=True)
class SampledTopK(Sparse):
  """Sends the entries above a threshold that is estimated from a sample.

  For k = ceil(ratio n) entries the threshold is guessed from a strided sample
  and accepted when between 0.8 k and 1.3 k entries reach it.  If more than k
  do, the k largest are sent; if fewer do, the remaining slots decode to zero.
  Rows of less than 16384 entries, for which sampling does not pay, send exactly
  the k largest.

  Source: deep gradient compression (DGC, arXiv 1712.01887) and its authors'
  code.  Departures, with theirs in brackets: the sample begins at the first
  entry (a random one) and holds at least 32 hits (2); a wrong threshold is
  bracketed and bisected (multiplied by 0.8 up to ten times); of up to 1.3 k
  entries the k largest are sent (the first k).

  Args:
    ratio: The wanted fraction of the entries, in (0, 1]; 0.01 by default.
    sample: The fraction of the entries in the sample, in (0, 1].
    chunk: The number of neighbours among which entries are chosen, as in
      `TopK`.
    values: The codec of the vector of values.
    k: The number of entries of each chunk, in place of `ratio`.
  """

  ratio: float | None = None
  sample: signatures.Fraction = 0.01
  chunk: int | None = None
  values: Values = FLOAT32
  k: int | None = None

  _counted: ClassVar[bool] = True

  def _select(self, rows: jax.Array, k: int) -> _largest.Selection:
    # 0.8 k is the bound of the authors' code.
    return _largest.largest(
      rows, k, at_least=math.ceil(0.8 * k), sample=self.sample
    )
