"""Buckets: a tree's leaves one after the other in flat buffers.

A collective costs its latency whatever its size, so small leaves share a
buffer.  A large leaf is cut, so that an urgent one need not wait for all of it.
The layout is plain data, made without arrays.

References:
  Peng et al., A Generic Communication Scheduler for Distributed DNN Training
  Acceleration (ByteScheduler), SOSP 2019: partitions.
  Jayarajan et al., Priority-based Parameter Propagation for Distributed DNN
  Training (P3), MLSys 2019: slices of layers, front layers first.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist import checks
from jdist.collectives import _leaf_order, _shards
from jdist.states import PyTree

Order: TypeAlias = _leaf_order.Order


class Piece(NamedTuple):
  """A range of elements of a leaf, or of one device's part of the leaf.

  Attributes:
    leaf: The leaf's number in the tree, from 0.
    start: The first element.
    stop: One past the last element.
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
    dtype: The dtype of all pieces.
    pieces: The pieces, in the order of the buffer.
    offsets: Where each piece begins in the flattened buffer.
    num_rows: The number of rows.
    row_size: The elements of a row; those that no piece fills are zero.
    axes: The mesh axes, other than the workers', over which the leaves are
      split.  The buffers of all devices are stacked along the rows.
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
    """Places pieces in a buffer, each at a multiple of `granule` elements.

    The leaves of the pieces are split over the mesh's `axes`.

    >>> Bucket.of([Piece(0, 0, 3), Piece(1, 0, 2)], "int8", granule=4).offsets
    (0, 4)
    """
    ends = itertools.accumulate(_round_up(p.size, granule) for p in pieces)
    *offsets, end = (0, *ends)
    row_size = _round_up(end, num_rows * granule) // num_rows
    name = jnp.dtype(dtype).name
    return cls(name, tuple(pieces), tuple(offsets), num_rows, row_size, axes)

  @property
  def row(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a row."""
    return jax.ShapeDtypeStruct((self.row_size,), jnp.dtype(self.dtype))

  def pack(self, leaves: Mapping[int, jax.Array]) -> jax.Array:
    """Copies pieces of leaves, one device's parts by number, into a buffer."""
    # A leaf that fills the buffer is reshaped only, which copies nothing.
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


@dataclasses.dataclass(frozen=True)
class Buckets:
  """The buckets of a tree; made by `Buckets.of`.

  Attributes:
    buckets: The buckets, the most urgent one first.
    paths: The path of each leaf of the tree, for instance `dense/kernel`.
    shapes: The shape of each leaf.
    dtypes: The name of the dtype of each leaf.
    specs: How each leaf is split over the mesh's axes other than the workers'.
  """

  buckets: tuple[Bucket, ...]
  paths: tuple[str, ...]
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[str, ...]
  specs: tuple[PartitionSpec, ...]

  @classmethod
  def of(
    cls,
    tree: PyTree,
    *,
    order: Order | Sequence[int] = "front_first",
    max_bytes: int | None = None,
    num_rows: int = 1,
    max_row_bytes: int | None = None,
    specs: PyTree = None,
  ) -> "Buckets":
    """Distributes a tree over buckets, one for each kind of leaves.

    Leaves are of one kind if they have one dtype and are split over the same
    mesh axes.  With `max_bytes` a larger leaf is cut into pieces of nearly
    equal size, and a bucket, which waits for the last of its pieces, holds
    neighbours in the order only.  Leaves without elements are in none.

    Args:
      tree: One worker's arrays or `jax.ShapeDtypeStruct`.
      order: `"front_first"` is the order of the tree's leaves, and
        `"back_first"` its reverse, in which gradients become ready.  A function
        from a leaf's path, such as `"layer10/kernel"`, to a key sorts by it:
        dict keys sort **alphabetically** (`layer10` before `layer2`).  A
        sequence has the number of each leaf once.
      max_bytes: The largest size of a bucket; None makes one for each kind.
      num_rows: The number of rows of a buffer, which is padded with zeros.
      max_row_bytes: The largest size of a row; a buffer has a multiple of
        `num_rows` rows where that is needed.
      specs: How leaves are split over the mesh's axes other than the workers',
        a tree of PartitionSpec, for use in a step, where the mesh is known.
        Every device packs its own parts.

    >>> dense = {"bias": jnp.zeros(5), "kernel": jnp.zeros((3, 5))}
    >>> tree = {"conv": jnp.zeros((4, 10)), "dense": dense}
    >>> found = Buckets.of(tree, max_bytes=80)  # Each holds 20 floats.
    >>> [len(bucket.pieces) for bucket in found.buckets]
    [1, 1, 2]
    """
    given = {"max_bytes": max_bytes, "max_row_bytes": max_row_bytes}
    limits = {name: x for name, x in given.items() if x is not None}
    for name, value in (("num_rows", num_rows), *limits.items()):
      checks.check_int(name, value, 1)
    empty = cls.given(tree, (), specs)
    found: list[tuple[tuple[str, tuple[str, ...]], list[Piece]]] = []
    of_kind: dict[Any, list[Piece]] = {}
    if isinstance(order, str) or callable(order):
      order = _leaf_order.leaf_order(tree, order)
    order = _leaf_order.check_numbers(order, len(empty.shapes))
    for leaf in order:
      # A device packs its own part of a leaf, so this is the size of a part.
      size = math.prod(_shard_shape(empty.shapes[leaf], empty.specs[leaf]))
      if not size:
        continue
      kind = empty.dtypes[leaf], _shards.spec_axes([empty.specs[leaf]])
      itemsize = jnp.dtype(kind[0]).itemsize
      for name, limit in limits.items():
        remedy = f"An element of {empty.paths[leaf]!r} is as large."
        checks.check_int(name, limit, itemsize, remedy=remedy)
      if max_bytes is None:
        if kind not in of_kind:
          found.append((kind, of_kind.setdefault(kind, [])))
        of_kind[kind].append(Piece(leaf, 0, size))
        continue
      # Pieces of nearly equal size, so that the last is not a tiny message.
      parts = -(-size // (max_bytes // itemsize))
      for i in range(parts):
        piece = Piece(leaf, i * size // parts, (i + 1) * size // parts)
        if found and found[-1][0] == kind:
          held = sum(p.size for p in found[-1][1])
          if (held + piece.size) * itemsize <= max_bytes:
            found[-1][1].append(piece)
            continue
        found.append((kind, [piece]))

    def rows_of(pieces: list[Piece], dtype: str) -> int:
      if max_row_bytes is None:
        return num_rows
      size = sum(p.size for p in pieces)
      of_row = max_row_bytes // jnp.dtype(dtype).itemsize
      return num_rows * -(-size // (num_rows * of_row))

    buckets = tuple(
      Bucket.of(pieces, dtype, num_rows=rows_of(pieces, dtype), axes=axes)
      for (dtype, axes), pieces in found
    )
    return dataclasses.replace(empty, buckets=buckets)

  @classmethod
  def given(
    cls, tree: PyTree, buckets: Sequence[Bucket], specs: PyTree = None
  ) -> "Buckets":
    """Returns buckets of a tree that were not made by `of`."""
    paths, leaves = _leaf_order.leaf_paths(tree), jax.tree.leaves(tree)
    for path, leaf in zip(paths, leaves, strict=True):
      _check_leaf(path, leaf)
    return cls(
      buckets=tuple(buckets),
      paths=paths,
      shapes=tuple(tuple(leaf.shape) for leaf in leaves),
      # JAX usually holds a float64 of NumPy as float32.
      dtypes=tuple(
        jax.dtypes.canonicalize_dtype(leaf.dtype).name for leaf in leaves
      ),
      specs=(PartitionSpec(),) * len(leaves)
      if specs is None
      else _shards.spec_leaves(specs, tree),
    )

  def pack(self, tree: PyTree) -> tuple[jax.Array, ...]:
    """Copies a tree into the buffers.

    Args:
      tree: Arrays of the shapes and dtypes for which the buckets were made.

    Returns:
      A buffer for each bucket, `[num_rows, row_size]`; for a worker that is
      itself sharded `[shards * num_rows, row_size]`.

    >>> tree = [jnp.array([1, 2]), jnp.array(3), jnp.array([[4, 5], [6, 7]])]
    >>> [x.tolist() for x in Buckets.of(tree, max_bytes=12).pack(tree)]
    [[[1, 2, 3]], [[4, 5]], [[6, 7]]]
    """
    self._check(jax.tree.leaves(tree), "tree")
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    for leaf, dtype in zip(leaves, self.dtypes, strict=True):
      if leaf.dtype.name != dtype:
        raise ValueError(
          f"`tree` must have the dtypes of the buckets, got {leaf.dtype} for "
          f"{dtype}. Make the buckets of the tree that is sent."
        )
    buffers = []
    for bucket in self.buckets:
      held = {piece.leaf: leaves[piece.leaf] for piece in bucket.pieces}
      pack = bucket.pack
      if bucket.axes:
        pack = _shards.map_shards(
          pack, bucket.axes, in_specs=({i: self.specs[i] for i in held},),
          out_specs=PartitionSpec(bucket.axes),
        )  # fmt: skip
      buffers.append(pack(held))
    return tuple(buffers)

  def unpack(self, buffers: Sequence[jax.Array], like: PyTree) -> PyTree:
    """Copies buffers back into a tree; undoes `pack`.

    Args:
      buffers: Shaped as `pack` makes them; of any dtype, which the leaves then
        have.
      like: The tree for which the buckets were made, arrays or
        `jax.ShapeDtypeStruct`.  Only the values of leaves that are in no bucket
        are used; those of a shape are zeros.

    >>> tree = [jnp.array([1, 2]), jnp.array(3), jnp.array([[4, 5], [6, 7]])]
    >>> buckets = Buckets.of(tree, max_bytes=12)
    >>> doubled = [2 * buffer for buffer in buckets.pack(tree)]
    >>> buckets.unpack(doubled, tree)[2].tolist()
    [[8, 10], [12, 14]]
    """
    leaves, treedef = jax.tree.flatten(like)
    self._check(leaves, "like")
    if not hasattr(buffers, "__len__") or len(buffers) != len(self.buckets):
      raise ValueError(
        f"`buffers` must be one for each of the {len(self.buckets)} buckets, "
        f"got {checks.show(buffers)}."
      )
    # All buckets that are split alike are unpacked in one map over the shards,
    # because a leaf may have pieces in several of them.
    of_axes: dict[tuple[str, ...], dict[int, jax.Array]] = {}
    for i, (bucket, buffer) in enumerate(
      zip(self.buckets, buffers, strict=True)
    ):
      rows = bucket.num_rows
      if bucket.axes:
        rows *= _shards.num_shards(bucket.axes)
      if np.shape(buffer) != (rows, bucket.row_size):
        raise ValueError(
          f"`buffers` must be shaped as `pack` makes them: bucket {i} has "
          f"shape {(rows, bucket.row_size)}, got {np.shape(buffer)}."
        )
      of_axes.setdefault(bucket.axes, {})[i] = buffer
    out = [
      leaf if isinstance(leaf, jax.Array) else jnp.zeros(leaf.shape, leaf.dtype)
      for leaf in leaves
    ]
    for axes, held in of_axes.items():
      found = {p.leaf for i in held for p in self.buckets[i].pieces}
      unpack = self._unpack_shard
      if axes:
        unpack = _shards.map_shards(
          unpack, axes, in_specs=(PartitionSpec(axes),),
          out_specs={leaf: self.specs[leaf] for leaf in found},
        )  # fmt: skip
      for leaf, x in unpack(held).items():
        out[leaf] = x
    return jax.tree.unflatten(treedef, out)

  def _unpack_shard(
    self, buffers: Mapping[int, jax.Array]
  ) -> dict[int, jax.Array]:
    """Puts together one device's parts of the leaves in some buckets."""
    parts: dict[int, list[jax.Array]] = {}
    for i in sorted(buffers):
      for piece, flat in self.buckets[i].unpack(buffers[i]):
        parts.setdefault(piece.leaf, []).append(flat)
    return {
      leaf: (flat[0] if len(flat) == 1 else jnp.concatenate(flat)).reshape(
        _shard_shape(self.shapes[leaf], self.specs[leaf])
      )
      for leaf, flat in parts.items()
    }

  def _check(self, leaves: Sequence[Any], what: str) -> None:
    shapes = tuple(tuple(np.shape(leaf)) for leaf in leaves)
    if shapes != self.shapes:
      pairs = enumerate(itertools.zip_longest(shapes, self.shapes))
      leaf, (got, wanted) = next((i, p) for i, p in pairs if p[0] != p[1])
      raise ValueError(
        f"`{what}` must have the shapes of the buckets: leaf {leaf} was "
        f"{'no leaf' if wanted is None else wanted}, got "
        f"{'no leaf' if got is None else got}. Make the buckets of one "
        "worker's tree, without the axis of workers."
      )


def _check_leaf(path: str, leaf: Any) -> None:
  if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
    raise ValueError(
      "`tree` must hold arrays or `jax.ShapeDtypeStruct`, got "
      f"{type(leaf).__name__} at {path!r}."
    )
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    raise ValueError(
      f"`tree` must hold plain arrays, got dtype {leaf.dtype} at {path!r}. "
      "Leave PRNG keys out, or pass `jax.random.key_data(key)`."
    )


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _shard_shape(shape: tuple[int, ...], spec: PartitionSpec) -> Any:
  """Returns the shape of one device's part, of a leaf that may be whole."""
  return _shards.shard_shape(shape, spec) if len(spec) else shape
