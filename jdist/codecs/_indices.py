"""Ascending indices in the fewest bits.

For K indices below n the smallest of four forms is chosen:

- `all`: K = n, and nothing is sent.
- `bitmap`: a bit for each of the n entries.
- `local`: each index within its chunk of c entries, in ceil(log2(c)) bits; its
  chunk follows from its place.
- `split` (Elias-Fano): the l low bits of each index, and the high parts, which
  ascend, as a row of bits: the j-th index with the high part h sets bit h + j.
  These are K * l bits, to whole bytes, and K + (n - 1 >> l) bits; for 1 % of
  65536 entries 8.6 bits an index, where `local` needs 16.  Source: P. Elias,
  "Efficient storage and retrieval by content and address of static files",
  J. ACM 21(2), 1974.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist.codecs import _bits, _largest

Form = Literal["all", "bitmap", "local", "split"]


@dataclasses.dataclass(frozen=True)
class Indexing:
  """The packed form of `num` ascending indices below `size`.

  Attributes:
    size: The number n of entries.
    num: The number K of indices.
    chunk: Entries of a chunk; the first `per_chunk` indices are in the first
      chunk, and so on; a shorter last chunk may have fewer.
    per_chunk: Indices in each chunk.
    distinct: Whether no index occurs twice.

  >>> Indexing(65536, 656, 65536, 656).form
  'split'
  >>> Indexing(65536, 656, 65536, 656).num_bits
  5615
  """

  size: int
  num: int
  chunk: int
  per_chunk: int
  distinct: bool = True

  @property
  def width(self) -> int:
    """The bits of an index within its chunk."""
    return (min(self.chunk, self.size) - 1).bit_length() if self.size else 0

  @property
  def low(self) -> int:
    """The bits of the low part of the form `split`."""
    options = range(max(1, self.size.bit_length()))
    return min(options, key=self._split_bits)

  @property
  def form(self) -> Form:
    """The form of the fewest bits, the simpler one of two equals."""
    sizes = self._sizes()
    return min(sizes, key=sizes.__getitem__)

  @property
  def num_bits(self) -> int:
    """The number of bits of all indices."""
    return min(self._sizes().values())

  def _sizes(self) -> dict[Form, int]:
    """Returns the bits of each possible form, simpler ones first."""
    # Slots that are not in use repeat an index, which a bitmap cannot express.
    if self.distinct and self.num == self.size:
      return {"all": 0}
    bitmap: dict[Form, int] = {"bitmap": self.size} if self.distinct else {}
    local, split = self.num * self.width, self._split_bits(self.low)
    return bitmap | {"local": local, "split": split}

  def pack(self, indices: jax.Array) -> dict[str, jax.Array]:
    """Packs ascending indices, int32 [num], to named uint8 buffers."""
    match self.form:
      case "all":
        return {}
      case "bitmap":
        return {"bitmap": self._pack_bits(indices, self.size)}
      case "local":
        if not self.width or not self.num:
          return {}
        codes = (indices - self._starts()).astype(jnp.uint32)
        return {"local": _bits.pack(codes, self.width)}
    parts = {}
    if self.low:
      parts["low"] = _bits.pack(indices.astype(jnp.uint32), self.low)
    places = jnp.arange(self.num, dtype=jnp.int32)
    # Adding the place makes the positions distinct, also of equal high parts.
    high = jax.lax.shift_right_logical(indices, jnp.int32(self.low)) + places
    parts["high"] = self._pack_bits(high, self._num_high(self.low))
    return parts

  def unpack(self, parts: dict[str, jax.Array]) -> jax.Array:
    """Unpacks the indices, int32 [num]."""
    match self.form:
      case "all":
        return jnp.arange(self.num, dtype=jnp.int32)
      case "bitmap":
        return self._unpack_bits(parts["bitmap"], self.size)
      case "local":
        if not self.width or not self.num:
          return self._starts()
        codes = _bits.unpack(parts["local"], self.width, self.num)
        return codes.astype(jnp.int32) + self._starts()
    high = self._unpack_bits(parts["high"], self._num_high(self.low))
    high = high - jnp.arange(self.num, dtype=jnp.int32)
    indices = jax.lax.shift_left(high, jnp.int32(self.low))
    if self.low:
      low = _bits.unpack(parts["low"], self.low, self.num)
      indices = indices | low.astype(jnp.int32)
    return indices

  def _num_high(self, low: int) -> int:
    return self.num + (max(0, self.size - 1) >> low)

  def _split_bits(self, low: int) -> int:
    # Low parts and high parts are separate buffers of whole bytes.
    return 8 * _bits.num_bytes(self.num, low) + self._num_high(low)

  def _starts(self) -> jax.Array:
    """Returns the first index of each index's chunk."""
    places = jnp.arange(self.num, dtype=jnp.int32)
    return places // np.int32(max(1, self.per_chunk)) * np.int32(self.chunk)

  def _pack_bits(self, positions: jax.Array, size: int) -> jax.Array:
    bits = jnp.zeros(size, jnp.uint8)
    # The promises spare XLA checks of bounds, and atomics on GPUs.
    bits = bits.at[positions].set(
      1, mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True
    )
    return _bits.pack(bits, 1)

  def _unpack_bits(self, packed: jax.Array, size: int) -> jax.Array:
    words = _largest.pack_words(_bits.unpack(packed, 1, size)[None] > 0)
    return _largest.first_set(words, self.num).indices[0]
