"""How a tree is cut into one row for each worker, who owns it.

In an exchange, worker j adds up row j of everything and sends the result to
all.  A codec may be cut at multiples of its granule only, so a leaf that does
not fill N granules would be mostly padding.  Three ways, chosen for each leaf
by bits:

| way | for | costs |
|---|---|---|
| `own` | leaves that fill their rows | padding up to N granules |
| `shared` | small leaves, one after the other, each begun at a granule | padding up to a granule for each leaf, N granules for all |
| `exact` | what the codec would make larger | the leaf's own bits |

A leaf goes its own way if that costs at most an eighth more than the shared
one.  Leaves share a vector only if the codec treats granules independently
(twice the granules, twice the bits): otherwise, one scale for a whole array,
a small leaf would be rounded to zero by its neighbour's scale.
"""  # noqa: E501

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Way = Literal["own", "shared", "exact"]


@dataclasses.dataclass(frozen=True)
class Vector:
  """Leaves one after the other, cut into rows.

  Attributes:
    way: how its rows are sent; `"exact"` without the codec.
    leaves: the numbers of the leaves in it.
    starts: where each begins.
    row: entries of one row.
    num_rows: how many, one for each worker.
    dtype: of the leaves, all the same.
  """

  way: Way
  leaves: tuple[int, ...]
  starts: tuple[int, ...]
  row: int
  num_rows: int
  dtype: str

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """What one row is."""
    return jax.ShapeDtypeStruct((self.row,), jnp.dtype(self.dtype))

  def cut(self, leaves: Sequence[jax.Array]) -> jax.Array:
    """Copies its leaves into rows [num_rows, row]; reshapes one that fits."""
    ends = (*self.starts[1:], self.num_rows * self.row)
    parts = []
    for leaf, start, end in zip(self.leaves, self.starts, ends, strict=True):
      flat = leaves[leaf].reshape(-1)
      short = end - start - flat.size
      parts.append(jnp.pad(flat, (0, short)) if short else flat)
    flat = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return flat.reshape(self.num_rows, self.row)

  def put(
    self, rows: jax.Array, likes: Sequence[Any], out: list[jax.Array]
  ) -> None:
    """Writes its leaves, taken from rows, into `out`."""
    flat = rows.reshape(-1)
    for leaf, start in zip(self.leaves, self.starts, strict=True):
      like = likes[leaf]
      out[leaf] = flat[start : start + like.size].reshape(like.shape)


def cut_leaves(
  likes: Sequence[Any],
  num_rows: int,
  granule: int,
  num_bits: Callable[[jax.ShapeDtypeStruct], int],
) -> tuple[Vector, ...]:
  """Chooses the way of every leaf.

  Args:
    likes: arrays or `jax.ShapeDtypeStruct`, none of them empty.
    num_rows: how many workers there are.
    granule: the codec's.
    num_bits: the codec's.
  """
  vectors = []
  for dtype in sorted({np.dtype(like.dtype).name for like in likes}):
    ways: dict[Way, list[int]] = {"own": [], "shared": [], "exact": []}
    for i, like in enumerate(likes):
      if np.dtype(like.dtype).name == dtype:
        ways[_way(like, num_rows, granule, num_bits)].append(i)
    shared = _vector("shared", ways["shared"], likes, num_rows, granule)
    if shared is not None:
      bits = num_rows * num_bits(shared.like)
      if bits >= sum(_exact_bits(likes[i]) for i in shared.leaves):
        ways["exact"] += shared.leaves
        shared = None
    exact = _vector("exact", ways["exact"], likes, num_rows, 1)
    own = [_vector("own", [i], likes, num_rows, granule) for i in ways["own"]]
    vectors += [v for v in (*own, shared, exact) if v is not None]
  return tuple(vectors)


def _way(
  like: Any,
  num_rows: int,
  granule: int,
  num_bits: Callable[[jax.ShapeDtypeStruct], int],
) -> Way:
  def bits(size: int) -> int:
    return num_bits(jax.ShapeDtypeStruct((size,), like.dtype))

  own = num_rows * bits(_up(like.size, num_rows * granule) // num_rows)
  way: Way = "own"
  if num_rows > 1 and bits(2 * granule) == 2 * bits(granule):
    shared = bits(_up(like.size, granule))
    if own > 1.125 * shared:
      way, own = "shared", shared
  return "exact" if own >= _exact_bits(like) else way


def _vector(
  way: Way,
  leaves: Sequence[int],
  likes: Sequence[Any],
  num_rows: int,
  granule: int,
) -> Vector | None:
  if not leaves:
    return None
  starts, end = [], 0
  for i in leaves:
    starts.append(end)
    end += _up(likes[i].size, granule)
  row = _up(end, num_rows * granule) // num_rows
  dtype = np.dtype(likes[leaves[0]].dtype).name
  return Vector(way, tuple(leaves), tuple(starts), row, num_rows, dtype)


def _exact_bits(like: Any) -> int:
  return like.size * np.dtype(like.dtype).itemsize * 8


def _up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
