r"""The discrete cosine transform of the blocks of an array.

.. math:: y_k = s_k \sum_i x_i \cos\frac{\pi (2 i + 1) k}{2 n},
          \quad s_0 = \sqrt{1/n}, \; s_{k>0} = \sqrt{2/n}

The transform (DCT-II) is orthonormal: its inverse is the transpose, and it
preserves the sum of squares.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _blocks, _codec, _gpu, _sparse


@dataclasses.dataclass(frozen=True)
class DCTTopK(_codec.Codec):
  r"""Sends the largest coefficients of each block's cosine transform.

  .. math:: \mathrm{decode}(\mathrm{encode}(x)) = D^T \mathrm{top}_k(D x)

  with the orthonormal DCT-II D of each block.  A block is a tile whose sides
  are the largest divisors, at most `chunk`, of the last dimension and of the
  product of the others; vectors have stretches.  With `chunk` 64 a matrix of
  256 x 192 has tiles of 64 x 64, and one of 100 x 10 has tiles of 50 x 10.

  A tile sends k coefficients whatever its size: with k = 32, 0.8 % of 64 x 64
  entries and 6.4 % of 50 x 10.  A prime length above `chunk` has the side 1, so
  that a vector of 127 is sent whole.  For such lengths take `ratio`, or another
  codec with `PerLeaf`.

  Source: DeMo (arXiv 2411.19870), which sends k coefficients of the tiles of
  momentum, with the sides of its authors' code.  Departure: arrays of more than
  two dimensions are treated as matrices.

  A NaN or an infinity makes its whole block NaN.

  Args:
    chunk: The longest side of a block.
    k: Coefficients of each block, or all if it has fewer; 32 by default.
    ratio: The fraction of each block in place of `k`, in (0, 1].
    values: The codec of the coefficients, as in `TopK`.

  >>> codec = DCTTopK(chunk=4, k=1)
  >>> payload, state = codec.encode(jnp.ones(4))
  >>> codec.decode(payload, state, jnp.ones(4)).round(4).tolist()
  [1.0, 1.0, 1.0, 1.0]
  """

  chunk: int = 64
  k: int | None = None
  ratio: float | None = None
  values: _sparse.Values = _sparse.FLOAT32

  sparse: ClassVar[bool] = True

  def __post_init__(self) -> None:
    checks.set_structural(self, "chunk", minimum=1)
    if self.k is None and self.ratio is None:
      object.__setattr__(self, "k", min(32, self.chunk**2))
    _sparse.check_ratio_or_k(self)
    remedy = "It counts coefficients of each tile, `chunk` ** 2."
    checks.check_int("k", self.k or 1, 1, self.chunk**2, remedy)
    _sparse.check_values(self.values)

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    return self.values.key

  def granule(self) -> int:
    """Returns the length of whole blocks of a vector."""
    return self._top((self.chunk,)).granule()

  def check(self, like: _codec.Like) -> None:
    self._top(like.shape).check(like)

  def init(self, like: _codec.Like) -> Any:
    return self._top(like.shape).init(like)

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[_sparse.Entries, Any]:
    """Returns `Entries` of the coefficients, block by block."""
    self.check(x)
    coefficients = dct(jnp.asarray(x).astype(jnp.float32), self.chunk)
    return self._top(x.shape).encode(coefficients, state, key)

  def decode(
    self, payload: _sparse.Entries, state: Any, like: _codec.Like
  ) -> jax.Array:
    flat = jax.ShapeDtypeStruct((like.size,), jnp.float32)
    coefficients = self._top(like.shape).decode(payload, state, flat)
    x = inverse_dct(coefficients, like.shape, self.chunk)
    return _blocks.narrow(x, like.dtype)

  def num_bits(self, like: _codec.Like) -> int:
    return self._top(like.shape).num_bits(like)

  def _top(self, shape: tuple[int, ...]) -> _sparse.TopK:
    """Returns the codec of the coefficients of an array of this shape."""
    block = math.prod(tile(shape, self.chunk))
    # A block is a chunk of `TopK`: both cut the flat vector at the same places.
    k = None if self.k is None else min(self.k, block)
    return _sparse.TopK(self.ratio, k, chunk=block, values=self.values)


def dct_matrix(size: int) -> np.ndarray:
  """Returns the transform as a matrix, float32 [frequency, place]."""
  place, frequency = np.arange(size), np.arange(size)[:, None]
  # In float64 first: the sums of a transform and its inverse cancel.
  matrix = np.cos(np.pi * (2 * place + 1) * frequency / (2 * size))
  matrix *= np.sqrt(np.where(frequency == 0, 1, 2) / size)
  return matrix.astype(np.float32)


def tile(shape: tuple[int, ...], chunk: int) -> tuple[int, int]:
  """Returns the sides of a block along rows and the last dimension.

  >>> tile((128, 64), 64), tile((3, 3, 32, 65), 64), tile((70,), 64)
  ((64, 64), (48, 13), (1, 35))
  """
  rows, columns = _matrix(shape)
  return _side(rows, chunk), _side(columns, chunk)


def dct(x: jax.Array, chunk: int) -> jax.Array:
  """Returns the coefficients of a float32 array, [size], block by block."""
  (rows, columns), (height, width) = _matrix(x.shape), tile(x.shape, chunk)
  if height == 1:  # A product with one more matrix would be a transposition.
    x = x.reshape(-1, width)
    return _transformed("yw,lw->yl", x, dct_matrix(width)).reshape(-1)
  x = x.reshape(rows // height, height, columns // width, width)
  both = dct_matrix(height), dct_matrix(width)
  return _transformed("yhxw,kh,lw->yxkl", x, *both).reshape(-1)


def inverse_dct(
  coefficients: jax.Array, shape: tuple[int, ...], chunk: int
) -> jax.Array:
  """Returns the array of this shape that has these coefficients."""
  (rows, columns), (height, width) = _matrix(shape), tile(shape, chunk)
  if height == 1:
    x = coefficients.reshape(-1, width)
    return _transformed("yl,lw->yw", x, dct_matrix(width)).reshape(shape)
  x = coefficients.reshape(rows // height, columns // width, height, width)
  both = dct_matrix(height), dct_matrix(width)
  return _transformed("yxkl,kh,lw->yhxw", x, *both).reshape(shape)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
  return math.prod(shape[:-1]), shape[-1] if shape else 1


def _side(length: int, longest: int) -> int:
  """Returns the largest divisor that is at most `longest`; 1 for length 0."""
  sides = range(min(length, longest), 0, -1)
  return next((side for side in sides if length % side == 0), 1)


def _transformed(how: str, x: jax.Array, *factors: Any) -> jax.Array:
  """Multiplies tiles by matrices; finite tiles have finite results."""

  def product(x: jax.Array) -> jax.Array:
    # A GPU's default precision, TF32, would not invert the transform.
    return jnp.einsum(how, x, *factors, precision=jax.lax.Precision.HIGHEST)

  def scaled(x: jax.Array, scale: Any) -> jax.Array:
    y, limit = product(x * scale), _blocks.LARGEST * scale
    y = jnp.where(_blocks.finite(y), jnp.clip(y, -limit, limit), y)
    return y / scale

  def plain(x: jax.Array, large: jax.Array) -> jax.Array:
    return scaled(x, jnp.where(large, small, np.float32(1)))

  def looped(x: jax.Array, large: jax.Array) -> jax.Array:
    # A GPU saves passes over the memory, which a CPU spends on the loop's
    # copies.  Of a conditional vmap would run both branches.
    first = product(x), large
    again = lambda carry: (scaled(x, small), ~carry[1])  # noqa: E731
    return jax.lax.while_loop(lambda carry: carry[1], again, first)[0]

  # The sums of 64 x 64 entries near float32's largest number would overflow.
  large, small = jnp.max(jnp.abs(x), initial=0) > 1e30, np.float32(2.0**-24)
  return _gpu.choose(x, large, plain=plain, cuda=looped)
