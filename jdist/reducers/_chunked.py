"""Reduces a tree in parts of one size, each with a state of its own."""

import dataclasses
import math
import zlib
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives
from jdist.reducers import _reducer

PyTree: TypeAlias = Any
_MEBIBYTE = 2**20


class Cut(NamedTuple):
  """How the leaves of one dtype become rows.

  Attributes:
    name: the dtype's.
    leaves: their numbers, in the order in which they are sent.
    num_parts: how many rows there are.
    size: entries of a row; the last rows may end in zeros.
  """

  name: str
  leaves: tuple[int, ...]
  num_parts: int
  size: int

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """What one row is."""
    return jax.ShapeDtypeStruct((self.size,), jnp.dtype(self.name))


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
  >>> rows = halves.cut({"a": jnp.ones(2), "b": jnp.zeros(1)})
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

  def cuts(self, like: PyTree) -> tuple[Cut, ...]:
    """How a tree is cut, plain data."""
    leaves = jax.tree.leaves(like)
    found: dict[str, list[int]] = {}
    for i in collectives.leaf_order(like, self.order):
      if math.prod(leaves[i].shape):
        name = np.dtype(leaves[i].dtype).name
        found.setdefault(name, []).append(i)
    cuts = []
    for name, members in found.items():
      length = sum(math.prod(leaves[i].shape) for i in members)
      num_bytes = length * np.dtype(name).itemsize
      num = self.multiple * -(-num_bytes // (self.multiple * self.max_bytes))
      cuts.append(Cut(name, tuple(members), num, -(-length // num)))
    return tuple(cuts)

  def cut(self, tree: PyTree) -> dict[str, jax.Array]:
    """Copies a tree into rows [num_parts, size], by dtype."""
    leaves, rows = jax.tree.leaves(tree), {}
    for cut in self.cuts(tree):
      flat = jnp.concatenate([leaves[i].reshape(-1) for i in cut.leaves])
      short = cut.num_parts * cut.size - flat.size
      flat = jnp.pad(flat, (0, short)) if short else flat
      rows[cut.name] = flat.reshape(cut.num_parts, cut.size)
    return rows

  def join(self, rows: dict[str, jax.Array], like: PyTree) -> PyTree:
    """Undoes `cut`, in the dtypes of the rows; an empty leaf is empty."""
    leaves, treedef = jax.tree.flatten(like)
    out = [jnp.zeros(x.shape, x.dtype) for x in leaves]
    for cut in self.cuts(like):
      flat, start = rows[cut.name].reshape(-1), 0
      for i in cut.leaves:
        stop = start + math.prod(leaves[i].shape)
        out[i] = flat[start:stop].reshape(leaves[i].shape)
        start = stop
    return jax.tree.unflatten(treedef, out)

  def reduce_part(
    self,
    cut: Cut,
    number: jax.typing.ArrayLike,
    row: jax.Array,
    state: PyTree,
    key: jax.Array,
    axis: collectives.Axis,
  ) -> _reducer.Reduced:
    """Takes the mean of one part; a collective operation.

    Args:
      cut: the part's, one of `cuts`.
      number: of the part in its cut, the same on all workers.
      row: this worker's [size].
      state: the part's own.
      key: of the whole tree.
      axis: the workers' axis.
    """
    # By name and not by position, so that it is the same wherever it stands.
    name = np.uint32(zlib.crc32(cut.name.encode()))
    key = jax.random.fold_in(jax.random.fold_in(key, name), number)
    reduced = self.reducer.reduce(row, state, key, axis)
    return collectives.varying(_reducer.Reduced(*reduced), axis)

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """The states of all parts, [num_parts, ...], by dtype."""
    states = {}
    for cut in self.cuts(like):
      state = self.reducer.init(cut.like, axis)
      states[cut.name] = jax.tree.map(
        lambda x, n=cut.num_parts: jnp.repeat(x[None], n, 0), state
      )
    return states

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> _reducer.Reduced:
    """Takes the mean, of one part after the other."""
    wanted, found = self.cut(tree), {}
    for cut in self.cuts(tree):

      def one(_: None, part: Any, cut: Cut = cut) -> tuple[None, Any]:
        number, row, state = part
        return None, self.reduce_part(cut, number, row, state, key, axis)

      numbers = jnp.arange(cut.num_parts)
      parts = (numbers, wanted[cut.name], state[cut.name])
      _, found[cut.name] = jax.lax.scan(one, None, parts)
    means, shares, states = (
      {name: reduced[i] for name, reduced in found.items()} for i in range(3)
    )
    return _reducer.Reduced(
      self.join(means, tree),
      jax.tree.map(lambda x: x.astype(jnp.float32), self.join(shares, tree)),
      states,
    )

  def release(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """What the reducer holds back, of all parts."""
    held, states = {}, {}
    for cut in self.cuts(like):

      def one(_: None, state: PyTree, cut: Cut = cut) -> tuple[None, Any]:
        released = self.reducer.release(state, cut.like, axis)
        return None, collectives.varying(released, axis)

      _, (held[cut.name], states[cut.name]) = jax.lax.scan(
        one, None, state[cut.name], length=cut.num_parts
      )
    tree = self.join(held, like)
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
    for cut in self.cuts(like):
      bits = self.reducer.num_bits(cut.like, num_workers)
      payload += cut.num_parts * bits.payload
      sent += cut.num_parts * bits.sent
      received += cut.num_parts * bits.received
    return _reducer.Bits(payload, sent, received)
