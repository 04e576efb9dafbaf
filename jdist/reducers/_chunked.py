"""Chunks: parts of a tree, equal in size, each reduced with its own state."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, collectives, signatures
from jdist.reducers import _reducer
from jdist.states import PyTree


@dataclasses.dataclass(frozen=True)
class Chunked(_reducer.Reducer):
  r"""Reduces chunks of a tree, one after the other, by another reducer.

  The leaves of one dtype stand one after the other in a bucket of M rows,
  padded with zeros at its end; each row is a chunk:

  .. math:: M = m \left\lceil \frac{\text{bytes}}{m \cdot
            \text{max\_bytes}} \right\rceil

  with m the `multiple`.  Chunk i has its own state, and a key into which i is
  folded, so that a mean has the same bits whether all chunks are sent at once
  or some in every step.

  A codec sees a chunk as one array: the k largest entries, or a scale, are
  those of a chunk and not of a leaf.

  Attributes:
    reducer: The reducer of a chunk, which is a vector, for instance
      `compressed(codecs.Quantize(4))`.
    max_bytes: The largest size of a chunk before it is encoded; 4 MiB by
      default.
    multiple: m, the number of steps in which a whole tree is sent, or a
      multiple of all such numbers, so that every step sends equally many
      chunks.

  Raises:
    ValueError: If built, for a reducer that needs whole leaves.

  >>> halves = Chunked(_reducer.Exact(), multiple=2)
  >>> rows = halves.pack({"a": jnp.ones(2), "b": jnp.zeros(1)})
  >>> rows["float32"].tolist()
  [[1.0, 1.0], [0.0, 0.0]]
  """

  reducer: _reducer.Reducer
  max_bytes: int = 4 * 2**20
  multiple: int = 1

  def __post_init__(self) -> None:
    _reducer.check_reducer("reducer", self.reducer)
    checks.check_int("max_bytes", self.max_bytes, 8)
    checks.check_int("multiple", self.multiple, 1)
    self.reducer.check_chunks()

  def buckets(self, like: PyTree) -> collectives.Buckets:
    """Returns the layout of a tree: a bucket a dtype, a row a chunk."""
    leaves, structure = jax.tree.flatten(like)
    kinds = tuple((jnp.shape(x), x.dtype) for x in leaves)
    return self._buckets(structure, kinds)

  # The cache keeps reducers, which are a few settings.
  @functools.lru_cache(maxsize=256)  # noqa: B019
  def _buckets(
    self, structure: Any, kinds: tuple[Any, ...]
  ) -> collectives.Buckets:
    likes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    return collectives.Buckets.of(
      jax.tree.unflatten(structure, likes),
      num_rows=self.multiple,
      max_row_bytes=self.max_bytes,
    )

  def pack(self, tree: PyTree) -> dict[str, jax.Array]:
    """Copies a tree into rows `[chunks, entries]`, by dtype."""
    buckets = self.buckets(tree)
    names = [bucket.dtype for bucket in buckets.buckets]
    return dict(zip(names, buckets.pack(tree), strict=True))

  def unpack(self, rows: dict[str, jax.Array], like: PyTree) -> PyTree:
    """Undoes `pack`, in the dtypes of the rows."""
    buckets = self.buckets(like)
    return buckets.unpack([rows[b.dtype] for b in buckets.buckets], like)

  def reduce_chunk(
    self,
    bucket: collectives.Bucket,
    number: jax.typing.ArrayLike,
    row: jax.Array,
    state: PyTree,
    key: jax.Array,
    axis: collectives.Axis,
  ) -> _reducer.Reduced:
    """Takes the mean of a row of a bucket; a collective operation.

    The row's `number` is equal on all workers, the state is that of the chunk,
    and the key that of the whole tree.
    """
    # The name is folded in and not a position, so that leaves of another dtype
    # do not change the random numbers of these.
    name = np.uint32(zlib.crc32(bucket.dtype.encode()))
    key = jax.random.fold_in(jax.random.fold_in(key, name), number)
    reduce = signatures.plain(type(self.reducer).reduce)
    reduced = reduce(self.reducer, row, state, key, axis)
    return collectives.varying(_reducer.Reduced(*reduced), axis)

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Returns the states of all chunks, `[chunks, ...]`, by dtype."""
    # All chunks of a bucket have one shape, and so states of one form, which
    # are stacked: the loop below, or a stream, takes them by number.
    states = {}
    for bucket in self.buckets(like).buckets:
      state = self.reducer.init(bucket.row, axis)
      states[bucket.dtype] = jax.tree.map(
        lambda x, n=bucket.num_rows: jnp.repeat(x[None], n, 0), state
      )
    return states

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    """Takes the mean of one chunk after the other."""
    # In a loop, which holds the buffers of one chunk at a time.
    wanted, found = self.pack(tree), {}
    # Gradients of another dtype than the parameters would be in another bucket.
    if wanted.keys() != state.keys():
      raise _reducer.not_of_state(f"leaves of {', '.join(wanted)}")
    for bucket in self.buckets(tree).buckets:

      def one(_: None, chunk: Any, bucket: Any = bucket) -> tuple[None, Any]:
        number, row, state = chunk
        return None, self.reduce_chunk(bucket, number, row, state, key, axis)

      name = bucket.dtype
      chunks = (jnp.arange(bucket.num_rows), wanted[name], state[name])
      _, found[name] = jax.lax.scan(one, None, chunks)
    means, shares, states = (
      {name: reduced[i] for name, reduced in found.items()} for i in range(3)
    )
    shares = _reducer.as_share(self.unpack(shares, tree))
    return _reducer.Reduced(self.unpack(means, tree), shares, states)

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    # In a loop, as in `reduce`: owners gather the residuals of one chunk.
    residuals, states = {}, {}
    for bucket in self.buckets(like).buckets:

      def one(_: None, state: PyTree, bucket: Any = bucket) -> tuple[None, Any]:
        flushed = self.reducer.flush(state, bucket.row, axis)
        return None, collectives.varying(flushed, axis)

      name = bucket.dtype
      _, (residuals[name], states[name]) = jax.lax.scan(
        one, None, state[name], length=bucket.num_rows
      )
    return _reducer.as_share(self.unpack(residuals, like)), states

  def check_chunks(self) -> None:
    raise _reducer.unsuited(self, "chunks", "it splits the tree itself.")

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """Adds up all chunks, their padding included."""
    return _reducer.Bits.total(
      self.reducer.num_bits(bucket.row, num_workers).times(bucket.num_rows)
      for bucket in self.buckets(like).buckets
    )
