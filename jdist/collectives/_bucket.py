"""A bucket: pieces of leaves one after the other in a flat buffer."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Piece(NamedTuple):
  """A range of a leaf's elements, or of one device's part of the leaf.

  Attributes:
    leaf: the leaf's number in the tree, from 0.
    start: the first element.
    stop: one past the last element.
  """

  leaf: int
  start: int
  stop: int

  @property
  def size(self) -> int:
    """The number of elements."""
    return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Bucket:
  """Pieces of one kind in one buffer, `[num_rows, row_size]`.

  Attributes:
    dtype: of all pieces.
    pieces: one after the other.
    offsets: where each begins in the flattened buffer.
    num_rows: the number of rows.
    row_size: elements of a row; what no piece fills is zero.
    axes: the mesh axes over which the leaves are split, beside the workers'.
      The buffers of all devices stand below each other.
  """

  dtype: str
  pieces: tuple[Piece, ...]
  offsets: tuple[int, ...]
  num_rows: int
  row_size: int
  axes: tuple[str, ...] = ()

  @classmethod
  def of(
    cls,
    pieces: Sequence[Piece],
    dtype: Any,
    *,
    num_rows: int = 1,
    granule: int = 1,
    axes: tuple[str, ...] = (),
  ) -> "Bucket":
    """Places pieces in a buffer.

    Args:
      pieces: at least one.
      dtype: of all of them.
      num_rows: rows of the buffer.
      granule: elements; pieces and rows begin at multiples of it.
      axes: the mesh axes over which the pieces' leaves are split.

    >>> Bucket.of([Piece(0, 0, 3), Piece(1, 0, 2)], "int8", granule=4).offsets
    (0, 4)
    """
    ends = itertools.accumulate(_round_up(p.size, granule) for p in pieces)
    *offsets, end = (0, *ends)
    row_size = _round_up(end, num_rows * granule) // num_rows
    name = jnp.dtype(dtype).name
    return cls(name, tuple(pieces), tuple(offsets), num_rows, row_size, axes)

  @property
  def name(self) -> str:
    """Names the kind: a dtype, and after a colon the mesh axes, if any."""
    return self.dtype + (f":{','.join(self.axes)}" if self.axes else "")

  @property
  def row(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a row."""
    return jax.ShapeDtypeStruct((self.row_size,), jnp.dtype(self.dtype))

  def pack(self, leaves: Mapping[int, jax.Array]) -> jax.Array:
    """Copies pieces of leaves into the buffer; reshapes a leaf that fills it.

    Args:
      leaves: one device's parts of the leaves, by number.
    """
    ends = (*self.offsets[1:], self.num_rows * self.row_size)
    parts = []
    for piece, start, end in zip(self.pieces, self.offsets, ends, strict=True):
      flat = leaves[piece.leaf].reshape(-1)
      if piece.size < flat.size:
        flat = jax.lax.slice(flat, (piece.start,), (piece.stop,))
      short = end - start - piece.size
      parts.append(jnp.pad(flat, (0, short)) if short else flat)
    flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return flat.reshape(self.num_rows, self.row_size)

  def unpack(self, buffer: jax.Array) -> Iterator[tuple[Piece, jax.Array]]:
    """Yields the pieces in the buffer, flat."""
    flat = buffer.reshape(-1)
    for piece, start in zip(self.pieces, self.offsets, strict=True):
      if piece.size < flat.size:
        yield piece, jax.lax.slice(flat, (start,), (start + piece.size,))
      else:
        yield piece, flat


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
