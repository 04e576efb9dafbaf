"""Vectors cut into blocks, and what is known of each block.

Largest entries are sought among the *bits* of floats.  The bits of |x| order
as |x| does, with every NaN above infinity, so that none is lost; and integer
maxima of contiguous lanes run at the speed of memory, where XLA's CPU
compiler gives rows of floats to a library that is three times slower.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _codec

# Rows of an array without blocks: whole bytes of integers of any width.
_ROW = 256
LARGEST = np.float32(np.finfo(np.float32).max)


def check_block(block: Any, multiple: int = 1) -> None:
  """Raises a ValueError unless `block` is None or a multiple of `multiple`."""
  if block is None:
    return
  remedy = "None means one scale for the whole array."
  checks.check_structural("block", block, minimum=1, remedy=remedy)
  if block % multiple:
    near = -(-block // multiple) * multiple
    raise ValueError(
      f"`block` must be a multiple of {multiple}, so that it fills whole "
      f"bytes, got {block}. The next one is {near}."
    )


def shapes(
  size: int, block: int | None, row: int = _ROW
) -> list[tuple[int, int]]:
  """(rows, columns) of the full blocks and of the short last one.

  Without blocks the array is laid out in rows that share a scale.

  >>> shapes(10, 4), shapes(3, 4), shapes(514, None), shapes(0, 4)
  ([(2, 4), (1, 2)], [(1, 3)], [(2, 256), (1, 2)], [])
  """
  columns = row if block is None else block
  full, rest = divmod(size, columns)
  both = [(full, columns), (1, rest)]
  return [(rows, columns) for rows, columns in both if rows * columns]


def num_blocks(size: int, block: int | None) -> int:
  """Counts the scales, that of the short block included."""
  if block is None:
    return min(size, 1)
  return sum(rows for rows, _ in shapes(size, block))


def cut(x: jax.Array, block: int | None, row: int = _ROW) -> list[jax.Array]:
  """A float array of any shape as float32 pieces [rows, columns]."""
  x = x.astype(jnp.float32).reshape(-1)
  pieces, start = [], 0
  for rows, columns in shapes(x.size, block, row):
    end = start + rows * columns
    pieces.append(x[start:end].reshape(rows, columns))
    start = end
  return pieces


def join(pieces: list[jax.Array], like: _codec.Like) -> jax.Array:
  """Float32 pieces [rows, columns] as an array of a shape and dtype."""
  flat = [piece.reshape(-1) for piece in pieces]
  if not flat:
    return jnp.zeros(like.shape, like.dtype)
  x = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
  return _codec.narrow(x.reshape(like.shape), like.dtype)


def max_abs(pieces: list[jax.Array], whole: bool) -> list[jax.Array]:
  """The largest magnitude in each row, NaN where there is one.

  Of pieces [rows, columns] these are [rows] for each; where `whole`, all rows
  of all pieces count as one, and it is [1], once.  So with the others below.
  """
  found = [_max_abs(rows) for rows in pieces]
  if not whole or not found:
    return found
  return [functools.reduce(jnp.maximum, [_max_abs(x[None]) for x in found])]


def low_high(pieces: list[jax.Array], whole: bool) -> list[jax.Array]:
  """The least and the greatest entry of each row, [2, rows] or [2, 1].

  At least one of the two is NaN where the row holds one.
  """
  lows = [_max_rows(rows, _backwards) for rows in pieces]
  highs = [_max_rows(rows, _ordered) for rows in pieces]
  if whole and lows:
    lows = [functools.reduce(jnp.maximum, [_max_rows(x[None]) for x in lows])]
    highs = [functools.reduce(jnp.maximum, [_max_rows(x[None]) for x in highs])]
  both = zip(lows, highs, strict=True)
  return [_float(_flipped(jnp.stack([~low, high]))) for low, high in both]


def l2(pieces: list[jax.Array], whole: bool) -> list[jax.Array]:
  """The Euclidean norm of each row, float32's largest number at the most."""
  found = [_l2(rows) for rows in pieces]
  if not whole or not found:
    return found
  found = [_l2(x[None]) for x in found]
  return found if len(found) == 1 else [_l2(jnp.stack(found, -1))]


def root_mean_square(pieces: list[jax.Array], whole: bool) -> list[jax.Array]:
  """The Euclidean norm of each row by the root of its length."""
  found = [_root_mean_square(rows) for rows in pieces]
  if not whole or not found:
    return found
  size = sum(rows.size for rows in pieces)
  shares = [np.float32((rows.size / size) ** 0.5) for rows in pieces]
  found = [_root_mean_square(x[None]) for x in found]
  parts = [x * share for x, share in zip(found, shares, strict=True)]
  return parts if len(parts) == 1 else [_l2(jnp.stack(parts, -1))]


def mean_abs(pieces: list[jax.Array], whole: bool) -> list[jax.Array]:
  """The mean magnitude of each row."""
  found = [_mean_abs(rows) for rows in pieces]
  if not whole or not found:
    return found
  size = sum(rows.size for rows in pieces)
  shares = [np.float32(rows.size / size) for rows in pieces]
  means = [_mean_abs(x[None]) for x in found]
  return [
    functools.reduce(
      jnp.add, [m * share for m, share in zip(means, shares, strict=True)]
    )
  ]


def quotient(rows: jax.Array, scale: jax.Array) -> jax.Array:
  """`rows / scale[:, None]` for scales of any size; 0 where a scale is 0.

  In two products, since XLA turns a quotient by a scale for a row into a
  product with its reciprocal, and that of float32's largest numbers is
  denormal, which is zero on a CPU.  Powers of two lose nothing.
  """
  power = _power(scale)
  inverse = 1 / _nonzero(scale * power)
  return (rows * power[:, None]) * inverse[:, None]


def ratio(rows: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
  """`(rows - low) / (high - low)`, for ranges of any size; 0 for none."""
  power = _power(jnp.maximum(jnp.abs(low), jnp.abs(high)))
  low, high = low * power, high * power
  inverse = 1 / _nonzero(high - low)
  return (rows * power[:, None] - low[:, None]) * inverse[:, None]


def _power(scale: jax.Array) -> jax.Array:
  """The power of two that brings scales nearer to 1."""
  two = np.float32(2.0**64)
  return jnp.where(scale > two, 1 / two, jnp.where(scale < 1 / two, two, 1))


def _nonzero(scale: jax.Array) -> jax.Array:
  return jnp.where(scale == 0, jnp.ones_like(scale), scale)


def with_scales(
  pieces: list[jax.Array], scales: Sequence[jax.Array]
) -> Iterator[tuple[jax.Array, jax.Array]]:
  """Pieces beside their scales in float32, of which there may be but one."""
  if len(scales) == 1:
    scales = [scales[0]] * len(pieces)
  for rows, scale in zip(pieces, scales, strict=True):
    yield rows, scale.astype(jnp.float32)


def _max_abs(rows: jax.Array) -> jax.Array:
  return _float(_max_rows(rows, lambda x: _int(x) & _codec.MAGNITUDE))


def _l2(rows: jax.Array) -> jax.Array:
  largest = _max_abs(rows)
  scaled = quotient(rows, largest)
  norm = largest * jnp.sqrt((scaled * scaled).sum(-1))
  return jnp.where(_codec.finite(largest), jnp.minimum(norm, LARGEST), jnp.nan)


def _root_mean_square(rows: jax.Array) -> jax.Array:
  largest = _max_abs(rows)
  scaled = quotient(rows, largest)
  mean = jnp.minimum((scaled * scaled).mean(-1), 1)
  return jnp.where(_codec.finite(largest), largest * jnp.sqrt(mean), jnp.nan)


def _mean_abs(rows: jax.Array) -> jax.Array:
  largest = _max_abs(rows)
  scaled = jnp.abs(quotient(rows, largest))
  mean = jnp.minimum(scaled.mean(-1), 1) * largest
  return jnp.where(_codec.finite(largest), mean, jnp.nan)


def _ordered(x: jax.Array) -> jax.Array:
  """Floats as int32 of the same order."""
  return _flipped(_int(x))


def _backwards(x: jax.Array) -> jax.Array:
  """Floats as int32 of the opposite order."""
  return ~_ordered(x)


def _flipped(bits: jax.Array) -> jax.Array:
  """Flips the magnitudes of negative numbers, or flips them back."""
  return bits ^ ((bits >> np.int32(31)) & _codec.MAGNITUDE)


def _int(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _max_rows(
  rows: jax.Array, of: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
  """Maxima of the int32 `of(rows)` of [rows, columns].

  Eight contiguous lanes of 32 first: beyond it XLA's CPU compiler writes
  temporaries.
  """
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
