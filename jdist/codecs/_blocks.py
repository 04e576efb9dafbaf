"""Vectors cut into blocks, and the scales of each block.

Maxima are taken over the *bits* of floats.  The bits of |x| have the order of
|x|, with every NaN above infinity, so that no NaN is lost.  Integer maxima of
contiguous lanes also run at the speed of memory, where XLA's CPU compiler calls
a library for rows of floats that is three times slower.
"""

import abc
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, states
from jdist.codecs import _codec, _gpu

# The row length without blocks: codes of every width fill whole bytes.
_ROW = 256
LARGEST = np.float32(np.finfo(np.float32).max)
# Bits of a float32: all but the sign, and those of infinity.
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


class Quantized(NamedTuple):
  """Blocks, as `Quantize`, `Sign` and `Ternary` send them.

  Both fields are tuples of the full blocks and the short last one, if they are
  not empty.  Without blocks, rows have 256 entries (`Ternary`: 240).

  Attributes:
    codes: uint8 [rows, bytes], each row packed by `_bits`; uint16
      [rows, entries] for 16 bits.
    scales: float32 [rows]; for `range="min_max"` the smallest and largest
      entries, [2, rows].  Without blocks there is one, [1] or [2, 1].
  """

  # Codes stay in rows: XLA's CPU compiler packs one long vector four times
  # slower.

  codes: tuple[jax.Array, ...]
  scales: tuple[jax.Array, ...]


class Blocked(_codec.Codec):
  """Sends codes of the entries of each block, and a scale for each block."""

  block: int | None
  _row: ClassVar[int] = _ROW

  @abc.abstractmethod
  def _scales(self, pieces: list[jax.Array]) -> list[jax.Array]:
    """Returns [rows] or [2, rows] for each piece, or one without blocks."""

  @abc.abstractmethod
  def _encoded(
    self, rows: jax.Array, scale: jax.Array, key: Any, start: int
  ) -> jax.Array:
    """Packs float32 [rows, columns]; `start` entries precede them."""

  @abc.abstractmethod
  def _decoded(
    self, packed: jax.Array, columns: int, scale: jax.Array
  ) -> jax.Array:
    """Unpacks float32 [rows, columns]."""

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[Quantized, Any]:
    if x.dtype.kind in "biuc":  # Each trace would pay for another call.
      self.check(x)
    pieces = cut(x, self.block, self._row)
    scales = self._scales(pieces)
    codes, start = [], 0
    for rows, scale in with_scales(pieces, scales):
      codes.append(self._encoded(rows, scale, key, start))
      start += rows.size
    return Quantized(tuple(codes), tuple(scales)), state

  def decode(
    self, payload: Quantized, state: Any, like: _codec.Like
  ) -> jax.Array:
    del state
    both = with_scales(list(payload.codes), payload.scales)
    pieces = [
      self._decoded(packed, columns, scale)
      for (packed, scale), (_, columns) in zip(
        both, shapes(like.size, self.block, self._row), strict=True
      )
    ]
    return join(pieces, like)


def check_block(block: Any, multiple: int = 1) -> None:
  """Raises a ValueError unless `block` is None or a multiple of `multiple`."""
  if block is None:
    return
  remedy = "None means one scale for the whole array."
  block = checks.check_structural("block", block, minimum=1, remedy=remedy)
  if block % multiple:
    near = -(-block // multiple) * multiple
    raise ValueError(
      f"`block` must be a multiple of {multiple}, so that it fills whole "
      f"bytes, got {block}. The next one is {near}."
    )


def shapes(
  size: int, block: int | None, row: int = _ROW
) -> list[tuple[int, int]]:
  """Returns (rows, columns) of the full blocks and of the short last one.

  Without blocks the array is laid out in rows that share a scale.

  >>> shapes(10, 4), shapes(3, 4), shapes(514, None), shapes(0, 4)
  ([(2, 4), (1, 2)], [(1, 3)], [(2, 256), (1, 2)], [])
  """
  columns = row if block is None else block
  full, rest = divmod(size, columns)
  both = [(full, columns), (1, rest)]
  return [(rows, columns) for rows, columns in both if rows * columns]


def num_blocks(size: int, block: int | None) -> int:
  """Returns the number of scales, that of the short block included."""
  if block is None:
    return min(size, 1)
  return sum(rows for rows, _ in shapes(size, block))


def cut(x: jax.Array, block: int | None, row: int = _ROW) -> list[jax.Array]:
  """Returns a float array of any shape as float32 pieces [rows, columns]."""
  x = x.astype(jnp.float32).reshape(-1)
  pieces, start = [], 0
  for rows, columns in shapes(x.size, block, row):
    end = start + rows * columns
    pieces.append(x[start:end].reshape(rows, columns))
    start = end
  return pieces


def join(pieces: list[jax.Array], like: _codec.Like) -> jax.Array:
  """Returns float32 pieces [rows, columns] as an array like another."""
  flat = [piece.reshape(-1) for piece in pieces]
  if not flat:
    return jnp.zeros(like.shape, like.dtype)
  x = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
  return narrow(x.reshape(like.shape), like.dtype)


Rows = list[jax.Array]


def low_high(pieces: Rows, whole: bool) -> Rows:
  """Returns the smallest and largest entry of each row, [2, rows] or [2, 1].

  At least one of the two is NaN if the row holds a NaN.
  """

  def most(of: Callable[[jax.Array], jax.Array]) -> Rows:
    found = [_max_rows(rows, of) for rows in pieces]
    if not whole or not found:
      return found
    return [_greatest([_max_rows(x[None]) for x in found])]

  both = zip(most(lambda x: ~_ordered(x)), most(_ordered), strict=True)
  return [_float(_flipped(jnp.stack([~low, high]))) for low, high in both]


def quotient(rows: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns `rows / scale[:, None]` for scales of any size, and 0 / 0 = 0."""
  # XLA turns a quotient by a row's scale into a product with its reciprocal,
  # which is denormal, and zero on a CPU, for the largest numbers of float32.
  # Two products avoid that, and powers of two are exact.
  power = _power(scale)
  inverse = 1 / _nonzero(scale * power)
  return (rows * power[:, None]) * inverse[:, None]


def ratio(rows: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  """Returns `(rows - low) / (high - low)`; 0 for an empty range."""
  power = _power(jnp.maximum(jnp.abs(low), jnp.abs(high)))
  low, high = low * power, high * power
  inverse = 1 / _nonzero(high - low)
  return (rows * power[:, None] - low[:, None]) * inverse[:, None]


def _power(scale: jax.Array) -> jax.Array:
  """Returns a power of two whose product with the scale is nearer to 1."""
  two = np.float32(2.0**64)
  return jnp.where(scale > two, 1 / two, jnp.where(scale < 1 / two, two, 1))


def _nonzero(scale: jax.Array) -> jax.Array:
  return jnp.where(scale == 0, jnp.ones_like(scale), scale)


def with_scales(
  pieces: list[jax.Array], scales: Sequence[jax.Array]
) -> Iterator[tuple[jax.Array, jax.Array]]:
  """Yields pieces with their scales in float32; one scale is for all pieces."""
  if len(scales) == 1:
    scales = [scales[0]] * len(pieces)
  for rows, scale in zip(pieces, scales, strict=True):
    yield rows, scale.astype(jnp.float32)


def _greatest(found: Rows) -> jax.Array:
  return functools.reduce(jnp.maximum, found)


def _norm(found: Rows) -> jax.Array:
  return found[0] if len(found) == 1 else _l2(jnp.stack(found, -1))


def _max_abs(rows: jax.Array) -> jax.Array:
  return _float(_max_rows(rows, lambda x: _int(x) & _MAGNITUDE))


def _max_all(rows: jax.Array) -> jax.Array:
  return _float((_int(rows) & _MAGNITUDE).max()[None])


def _by_largest(
  rows: jax.Array, of: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
  """Returns `of(rows / largest, largest)`; NaN where that is not finite."""
  # Squares of the entries themselves would overflow, or vanish.
  largest = _max_abs(rows)
  found = of(quotient(rows, largest), largest)
  return jnp.where(finite(largest), found, jnp.nan)


def _l2(rows: jax.Array) -> jax.Array:
  return _by_largest(
    rows, lambda s, m: jnp.minimum(m * jnp.sqrt((s * s).sum(-1)), LARGEST)
  )


def _root_mean_square(rows: jax.Array) -> jax.Array:
  return _by_largest(
    rows, lambda s, m: m * jnp.sqrt(jnp.minimum((s * s).mean(-1), 1))
  )


def _mean_abs(rows: jax.Array) -> jax.Array:
  return _by_largest(rows, lambda s, m: jnp.minimum(jnp.abs(s).mean(-1), 1) * m)


# The scale of a row; and for one scale of all rows the function that joins the
# pieces' numbers, with the power of a piece's share of entries as its weight.
_SCALES: dict[str, tuple[Any, Any, float | None]] = {
  "max_abs": (_max_abs, _greatest, None),
  "norm": (_l2, _norm, None),
  "root_mean_square": (_root_mean_square, _norm, 0.5),
  "mean_abs": (_mean_abs, functools.partial(functools.reduce, jnp.add), 1),
}


def scales(kind: str, pieces: Rows, whole: bool) -> Rows:
  """Returns the scale of each row, NaN if the row holds a NaN.

  Pieces [rows, columns] have scales [rows]; with `whole`, all rows of all
  pieces have a single one, [1].  A norm is at most float32's largest number.
  """
  of, join, power = _SCALES[kind]
  if not whole or not pieces:
    return [of(rows) for rows in pieces]

  def plain(rows: jax.Array) -> jax.Array:
    return of(of(rows)[None])

  # A GPU reduces all of an array at the speed of memory, and lanes slower.
  cuda = _max_all if kind == "max_abs" else plain
  found = [_gpu.choose(rows, plain=plain, cuda=cuda) for rows in pieces]
  if power is not None:
    size = sum(rows.size for rows in pieces)
    shares = [np.float32((rows.size / size) ** power) for rows in pieces]
    found = [x * share for x, share in zip(found, shares, strict=True)]
  return [join(found)]


def _ordered(x: jax.Array) -> jax.Array:
  """Returns floats as int32 of the same order."""
  return _flipped(_int(x))


def _flipped(bits: jax.Array) -> jax.Array:
  """Flips the magnitudes of negative numbers, or flips them back."""
  return bits ^ ((bits >> np.int32(31)) & _MAGNITUDE)


def _int(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _max_rows(
  rows: jax.Array, of: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
  """Returns the maxima of the int32 `of(rows)` of [rows, columns]."""
  # Rows of 256 are reduced as eight contiguous lanes of 32; for longer ones
  # XLA's CPU compiler writes temporaries.
  num_rows, columns = rows.shape
  if columns > 256 and columns % 256 == 0:
    parts = _max_rows(rows.reshape(-1, 256), of)
    return _max_rows(parts.reshape(num_rows, -1))
  width = columns // 8
  if width < 2:
    return of(rows).max(-1)
  values = [of(rows[:, i * width : (i + 1) * width]) for i in range(8)]
  while len(values) > 1:
    pairs = zip(values[::2], values[1::2], strict=True)
    values = [jnp.maximum(a, b) for a, b in pairs]
  largest = values[0].max(-1)
  if columns % 8:
    largest = jnp.maximum(largest, of(rows[:, 8 * width :]).max(-1))
  return largest


def narrow(x: jax.Array, dtype: np.dtype | type) -> jax.Array:
  """Casts float32 to a dtype; finite numbers stay finite."""
  dtype = jnp.dtype(dtype)
  if dtype.itemsize >= 4:
    return x.astype(dtype)
  largest = np.float32(jnp.finfo(dtype).max)
  x = jnp.where(finite(x), jnp.clip(x, -largest, largest), x)
  return states.rounded(x, dtype)


def finite(x: jax.Array) -> jax.Array:
  """Marks the entries that are neither infinite nor NaN."""
  return (_int(x) & _MAGNITUDE) < _INFINITY
