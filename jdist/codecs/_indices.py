"""Ascending indices in the fewest bits.

For K indices below n one of four forms is chosen, by their sizes alone:

- `all`: K = n, and nothing need be said.
- `bitmap`: a bit for each of the n entries.
- `local`: each index within its chunk of c entries, in ceil(log2(c)) bits;
  which chunk it is in follows from its place.
- `split` (Elias-Fano): the l low bits of each index as they are, and the high
  part, which only grows, as a row of bits: the j-th index, with the high part
  h, sets bit h + j.  That is K * l, to whole bytes, and K + (n - 1 >> l)
  bits; 8.6 for each of 1 % of the entries, where 65536 entries would need 16
  locally.  Source: P. Elias, "Efficient storage and retrieval by content and
  address of static files", J. ACM 21(2), 1974.
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
    size: n, the number of entries.
    num: K, the number of indices.
    chunk: entries of a chunk; the first `per_chunk` indices are in the first
      chunk, and so on; those of a shorter last chunk come last.
    per_chunk: indices in each chunk.
    distinct: whether no index occurs twice.

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
    """Bits of an index within its chunk."""
    return (min(self.chunk, self.size) - 1).bit_length() if self.size else 0

  @property
  def low(self) -> int:
    """Bits of the low part, when split."""
    options = range(max(1, self.size.bit_length()))
    return min(options, key=self._split_bits)

  @property
  def form(self) -> Form:
    """The form of the fewest bits, the plainer one of two equals."""
    sizes = self._sizes()
    return min(sizes, key=sizes.__getitem__)

  @property
  def num_bits(self) -> int:
    """The size of what they fill."""
    return min(self._sizes().values())

  def _sizes(self) -> dict[Form, int]:
    """The bits of each form that will do, plainer ones first."""
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
    high = jax.lax.shift_right_logical(indices, jnp.int32(self.low)) + places
    parts["high"] = self._pack_bits(high, self._num_high(self.low))
    return parts

  def unpack(self, parts: dict[str, jax.Array]) -> jax.Array:
    """The indices, int32 [num]."""
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
    # The low parts are filled up to a whole byte before the row of bits.
    return 8 * _bits.num_bytes(self.num, low) + self._num_high(low)

  def _starts(self) -> jax.Array:
    """The first index of each index's chunk."""
    places = jnp.arange(self.num, dtype=jnp.int32)
    return places // np.int32(max(1, self.per_chunk)) * np.int32(self.chunk)

  def _pack_bits(self, positions: jax.Array, size: int) -> jax.Array:
    bits = jnp.zeros(size, jnp.uint8)
    bits = bits.at[positions].set(
      1, mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True
    )
    return _bits.pack(bits, 1)

  def _unpack_bits(self, packed: jax.Array, size: int) -> jax.Array:
    words = _largest.pack_words(_bits.unpack(packed, 1, size)[None] > 0)
    return _largest.first_set(words, self.num).indices[0]
