"""Reduces a tree in parts of one size, each with a state of its own."""

import dataclasses
import zlib
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives
from jdist.reducers import _reducer

PyTree: TypeAlias = Any
_MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Chunked(_reducer.Reducer):
  r"""Reduces sub-tensors, one after the other, by another reducer.

  The leaves of one dtype stand one after the other in a vector, which is cut
  into M parts of one size, padded with zeros at its end:

  .. math:: M = m \left\lceil \frac{\text{bytes}}{m \cdot
            \text{max\_bytes}} \right\rceil

  with m the `multiple`.  Part i is reduced with a state of its own and a key
  into which i is folded.  So it does not matter when a part is sent, nor
  beside which others: a late mean of local steps that is streamed, some parts
  in every step, has the bits of one that is sent at once.

  Parts end where they end: what a codec takes for one array (the largest
  entries of a leaf, one scale) is of a part, which may hold some leaves and
  pieces of others.  Blocks begin with the part.

  Attributes:
    reducer: for a part, a vector; for instance
      `compressed(codecs.Quantize(4))`.
    max_bytes: what a part does not exceed before it is encoded, 4 MiB by
      default.
    order: which leaves come first, as in `plan`.
    multiple: m; the number of steps in which a whole message is to be sent,
      or one that all such numbers divide, so that every step sends equally
      many parts.

  Raises:
    ValueError: when built, for settings out of range and for a reducer that
      needs whole leaves.

  >>> halves = Chunked(_reducer.Exact(), multiple=2)
  >>> rows = halves.pack({"a": jnp.ones(2), "b": jnp.zeros(1)})
  >>> rows["float32"].tolist()
  [[1.0, 1.0], [0.0, 0.0]]
  """

  reducer: _reducer.Reducer
  max_bytes: int = 4 * _MEBIBYTE
  order: collectives.Order = "front_first"
  multiple: int = 1

  def __post_init__(self) -> None:
    _reducer.check_reducer("reducer", self.reducer)
    for name, value in (
      ("max_bytes", self.max_bytes),
      ("multiple", self.multiple),
    ):
      low = 8 if name == "max_bytes" else 1
      if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"`{name}` must be an int >= {low}, got {value!r}.")
    collectives.check_order(self.order)
    if reason := self.reducer.not_in_parts():
      raise ValueError(
        "`reducer` must be one for vectors that are cut from the tree, got "
        f"{self.reducer}: {reason} Take `compressed(codec)` for all leaves, or "
        "send at once."
      )

  @property
  def averages(self) -> bool:
    """As the reducer says."""
    return self.reducer.averages

  def buckets(self, like: PyTree) -> collectives.Buckets:
    """Returns the layout of a tree: a bucket a dtype, a row a chunk."""
    return collectives.Buckets.of(
      like,
      order=self.order,
      num_rows=self.multiple,
      max_row_bytes=self.max_bytes,
    )

  def pack(self, tree: PyTree) -> dict[str, jax.Array]:
    """Copies a tree into rows `[chunks, entries]`, by dtype."""
    buckets = self.buckets(tree)
    names = [bucket.name for bucket in buckets.buckets]
    return dict(zip(names, buckets.pack(tree), strict=True))

  def unpack(self, rows: dict[str, jax.Array], like: PyTree) -> PyTree:
    """Undoes `pack`, in the dtypes of the rows."""
    buckets = self.buckets(like)
    return buckets.unpack([rows[b.name] for b in buckets.buckets], like)

  def reduce_chunk(
    self,
    bucket: collectives.Bucket,
    number: jax.typing.ArrayLike,
    row: jax.Array,
    state: PyTree,
    key: jax.Array,
    axis: collectives.Axis,
  ) -> _reducer.Reduced:
    """Takes the mean of one chunk; a collective operation.

    Args:
      bucket: the chunk's.
      number: of the row in its bucket, the same on all workers.
      row: this worker's.
      state: the chunk's own.
      key: of the whole tree.
      axis: the workers' axis.
    """
    # By name and not by position, so that another dtype changes nothing.
    name = np.uint32(zlib.crc32(bucket.name.encode()))
    key = jax.random.fold_in(jax.random.fold_in(key, name), number)
    reduced = self.reducer.reduce(row, state, key, axis)
    return collectives.varying(_reducer.Reduced(*reduced), axis)

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """The states of all parts, [num_parts, ...], by dtype."""
    states = {}
    for bucket in self.buckets(like).buckets:
      state = self.reducer.init(bucket.row, axis)
      states[bucket.name] = jax.tree.map(
        lambda x, n=bucket.num_rows: jnp.repeat(x[None], n, 0), state
      )
    return states

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    """Takes the mean, of one part after the other."""
    wanted, found = self.pack(tree), {}
    for bucket in self.buckets(tree).buckets:

      def one(_: None, chunk: Any, bucket: Any = bucket) -> tuple[None, Any]:
        number, row, state = chunk
        return None, self.reduce_chunk(bucket, number, row, state, key, axis)

      name = bucket.name
      chunks = (jnp.arange(bucket.num_rows), wanted[name], state[name])
      _, found[name] = jax.lax.scan(one, None, chunks)
    means, shares, states = (
      {name: reduced[i] for name, reduced in found.items()} for i in range(3)
    )
    return _reducer.Reduced(
      self.unpack(means, tree),
      jax.tree.map(lambda x: x.astype(jnp.float32), self.unpack(shares, tree)),
      states,
    )

  def release(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """What the reducer holds back, of all parts."""
    held, states = {}, {}
    for bucket in self.buckets(like).buckets:

      def one(_: None, state: PyTree, bucket: Any = bucket) -> tuple[None, Any]:
        released = self.reducer.release(state, bucket.row, axis)
        return None, collectives.varying(released, axis)

      name = bucket.name
      _, (held[name], states[name]) = jax.lax.scan(
        one, None, state[name], length=bucket.num_rows
      )
    tree = self.unpack(held, like)
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree), states

  def shared(self, state: PyTree) -> PyTree:
    """As the reducer says."""
    return {name: self.reducer.shared(one) for name, one in state.items()}

  def not_in_parts(self) -> str:
    """It cuts already."""
    return "it cuts the tree itself."

  def told_workers(self, axis: collectives.Axis) -> int:
    """As the reducer says."""
    return self.reducer.told_workers(axis)

  def num_bits(self, like: PyTree, num_workers: int) -> _reducer.Bits:
    """The sum over all parts, their padding included."""
    payload, sent, received = 0, 0.0, 0.0
    for bucket in self.buckets(like).buckets:
      bits = self.reducer.num_bits(bucket.row, num_workers)
      payload += bucket.num_rows * bits.payload
      sent += bucket.num_rows * bits.sent
      received += bucket.num_rows * bits.received
    return _reducer.Bits(payload, sent, received)
