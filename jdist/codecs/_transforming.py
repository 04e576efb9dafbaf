r"""The discrete cosine transform of the blocks of an array.

.. math:: y_k = s_k \sum_i x_i \cos\frac{\pi (2 i + 1) k}{2 n},
          \quad s_0 = \sqrt{1/n}, \; s_{k>0} = \sqrt{2/n}

It is orthonormal (DCT-II): the inverse is the transpose, and the sum of the
squares stays.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist.codecs import _blocks, _checking, _codec, _entries, _sparsifying

_HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class DCTTopK(_codec.Codec):
  r"""Sends the largest coefficients of each block's cosine transform.

  .. math:: \mathrm{decode}(\mathrm{encode}(x)) = D^T \mathrm{top}_k(D x)

  with the orthonormal DCT-II D of each block: a tile of `chunk` x `chunk`
  where the last dimension and the product of the others are multiples of
  `chunk`, else `chunk` neighbours of the flat array, the last block shorter.

  Source: DeMo (arXiv 2411.19870), which sends k coefficients of the tiles of
  momentum.  Departures: their tiles are of the largest divisors not above
  `chunk`, where an array that `chunk` does not divide is taken as a vector
  here; arrays of more than two dimensions are matrices here.

  A NaN or an infinity makes its whole block NaN.

  Args:
    chunk: the side of a block, 64 by default.
    k: coefficients of each block, or all if it has fewer; 32 by default.
    ratio: the part of each block in place of `k`, in (0, 1].
    values: as in `TopK`.

  >>> codec = DCTTopK(chunk=4, k=1)
  >>> payload, state = codec.encode(jnp.ones(4))
  >>> codec.decode(payload, state, jnp.ones(4)).round(4).tolist()
  [1.0, 1.0, 1.0, 1.0]
  """

  chunk: int = 64
  k: int | None = None
  ratio: float | None = None
  values: _entries.Values = _entries.FLOAT32

  sparse: ClassVar[bool] = True

  def __post_init__(self) -> None:
    _checking.check_int("chunk", self.chunk, 1)
    if self.k is None and self.ratio is None:
      object.__setattr__(self, "k", min(32, self.chunk**2))
    _entries.check_ratio_or_k(self)
    if self.k is not None and self.k > self.chunk**2:
      raise ValueError(
        f"`k` must be at most `chunk` ** 2, got k={self.k} of tiles of "
        f"{self.chunk} x {self.chunk}. It counts coefficients of each tile."
      )
    _entries.check_values(self.values)

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    """The one that the codec of the values wants."""
    return self.values.key

  def granule(self) -> int:
    """Whole blocks of a vector."""
    return self._top((self.chunk,)).granule()

  def check(self, like: _codec.Like) -> None:
    """Raises a ValueError for integers and for too large an array."""
    self._top(like.shape).check(like)

  def init(self, like: _codec.Like) -> Any:
    """The state of the codec of the values."""
    return self._top(like.shape).init(like)

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[_entries.Entries, Any]:
    """Returns `Entries` of the coefficients, block by block."""
    self.check(x)
    coefficients = dct(jnp.asarray(x).astype(jnp.float32), self.chunk)
    return self._top(x.shape).encode(coefficients, state, key)

  def decode(
    self, payload: _entries.Entries, state: Any, like: _codec.Like
  ) -> jax.Array:
    """Transforms the coefficients back."""
    flat = jax.ShapeDtypeStruct((like.size,), jnp.float32)
    coefficients = self._top(like.shape).decode(payload, state, flat)
    x = inverse_dct(coefficients, like.shape, self.chunk)
    return _blocks.narrow(x, like.dtype)

  def num_bits(self, like: _codec.Like) -> int:
    """Bits of the values and of the indices."""
    return self._top(like.shape).num_bits(like)

  def _top(self, shape: tuple[int, ...]) -> _sparsifying.TopK:
    """What chooses the coefficients of the blocks of such an array."""
    block = block_size(shape, self.chunk)
    k = None if self.k is None else min(self.k, block)
    return _sparsifying.TopK(self.ratio, k, chunk=block, values=self.values)


def dct_matrix(size: int) -> np.ndarray:
  """The transform as a matrix, float32 [frequency, place].

  >>> dct_matrix(2).round(3).tolist()
  [[0.7070000171661377, 0.7070000171661377], \
[0.7070000171661377, -0.7070000171661377]]
  """
  place, frequency = np.arange(size), np.arange(size)[:, None]
  matrix = np.cos(np.pi * (2 * place + 1) * frequency / (2 * size))
  matrix *= np.sqrt(np.where(frequency == 0, 1, 2) / size)
  return matrix.astype(np.float32)


def block_size(shape: tuple[int, ...], chunk: int) -> int:
  """Entries of a block: a square tile where both dimensions divide, or a row.

  >>> block_size((128, 64), 64), block_size((128, 65), 64)
  (4096, 64)
  """
  return chunk * chunk if _tiled(shape, chunk) else chunk


def dct(x: jax.Array, chunk: int) -> jax.Array:
  """The coefficients of all blocks, one after another.

  Args:
    x: float32 of any shape.
    chunk: side of the square tiles of a matrix (all dimensions but the last
      are its rows) whose dimensions it divides; else length of the pieces of
      the flat array, of which the last may be shorter.

  Returns:
    float32 [size], block by block.
  """

  def transform(x: jax.Array) -> jax.Array:
    if not _tiled(x.shape, chunk):
      return _by_pieces(x.reshape(-1), chunk, inverse=False)
    tiles = x.reshape(-1, chunk, x.shape[-1] // chunk, chunk)
    matrix = dct_matrix(chunk)
    return jnp.einsum(
      "yhxw,kh,lw->yxkl", tiles, matrix, matrix, precision=_HIGHEST
    ).reshape(-1)

  return _finitely(transform, x)


def inverse_dct(
  coefficients: jax.Array, shape: tuple[int, ...], chunk: int
) -> jax.Array:
  """The array of this shape that has these coefficients."""

  def transform(coefficients: jax.Array) -> jax.Array:
    if not _tiled(shape, chunk):
      return _by_pieces(coefficients, chunk, inverse=True).reshape(shape)
    tiles = coefficients.reshape(-1, shape[-1] // chunk, chunk, chunk)
    matrix = dct_matrix(chunk)
    return jnp.einsum(
      "yxkl,kh,lw->yhxw", tiles, matrix, matrix, precision=_HIGHEST
    ).reshape(shape)

  return _finitely(transform, coefficients)


def _tiled(shape: tuple[int, ...], chunk: int) -> bool:
  if len(shape) < 2 or not math.prod(shape):
    return False
  rows = math.prod(shape[:-1])
  return rows % chunk == 0 and shape[-1] % chunk == 0


def _finitely(
  transform: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
  """Transforms an array; where it is finite, so is the result."""
  largest = jnp.max(jnp.abs(x), initial=0)
  scale = jnp.where(largest > 1e30, np.float32(2.0**-24), np.float32(1))
  y = transform(x * scale)
  limit = _blocks.LARGEST * scale
  y = jnp.where(_blocks.finite(y), jnp.clip(y, -limit, limit), y)
  return y / scale


def _by_pieces(x: jax.Array, chunk: int, inverse: bool) -> jax.Array:
  whole = x.size // chunk * chunk
  parts = []
  for part, length in ((x[:whole], chunk), (x[whole:], x.size - whole)):
    if part.size:
      matrix = dct_matrix(length) if inverse else dct_matrix(length).T
      pieces = part.reshape(-1, length)
      parts.append(jnp.matmul(pieces, matrix, precision=_HIGHEST).reshape(-1))
  return jnp.concatenate(parts) if parts else x
