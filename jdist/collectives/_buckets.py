"""Who travels with whom, and in which order: messages as plain data.

A plan cuts a tree into *pieces* (boxes of one leaf) and puts them into
*messages* (pieces that travel as one buffer), in the order of their priority.
Large leaves are cut, so that an urgent small one need not wait behind them;
small leaves are joined, so that each does not pay its own latency.  Making a
plan touches no device, and the plan can be printed, hashed and compared.

References:
  Peng et al., A Generic Communication Scheduler for Distributed DNN Training
  Acceleration (ByteScheduler), SOSP 2019: partitions and credit.
  Jayarajan et al., Priority-based Parameter Propagation for Distributed DNN
  Training (P3), MLSys 2019: slices of layers, front layers first.
"""

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

PyTree = Any
Order = Literal["front_first", "back_first"] | Callable[[str], Any]
_MEBIBYTE = 2**20


@dataclasses.dataclass(frozen=True)
class Piece:
  """A box of one leaf.

  Attributes:
    leaf: the leaf's number in the tree, from 0.
    path: the leaf's path, for instance `dense/kernel`; empty when the tree is
      one array.
    start: the first index of each dimension.
    stop: one past the last index of each dimension.
    num_bytes: the box's size.

  >>> print(Piece(0, "dense/kernel", (2, 0), (4, 5), num_bytes=40))
  dense/kernel[2:4, 0:5]
  """

  leaf: int
  path: str
  start: tuple[int, ...]
  stop: tuple[int, ...]
  num_bytes: int

  @property
  def shape(self) -> tuple[int, ...]:
    """The lengths of the box's sides."""
    return tuple(
      stop - start for start, stop in zip(self.start, self.stop, strict=True)
    )

  def __str__(self) -> str:
    """The path and the box, as one would index it."""
    sides = ", ".join(
      f"{start}:{stop}"
      for start, stop in zip(self.start, self.stop, strict=True)
    )
    return f"{self.path or '(array)'}[{sides}]"


@dataclasses.dataclass(frozen=True)
class Message:
  """Pieces that travel as one buffer.

  Attributes:
    pieces: at least one; all of one dtype, and unsharded if several.
  """

  pieces: tuple[Piece, ...]

  @property
  def num_bytes(self) -> int:
    """The size of the buffer."""
    return sum(piece.num_bytes for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Messages in the order of their priority; made by `plan`.

  Attributes:
    messages: the most urgent one first.  Together their pieces hold every
      element of every leaf exactly once.
    credit: how many messages may be in flight.
    max_bytes: the size that a message should not exceed.
    shapes: the shape of each leaf of the tree.
    dtypes: the name of the dtype of each leaf of the tree.
  """

  messages: tuple[Message, ...]
  credit: int
  max_bytes: int
  shapes: tuple[tuple[int, ...], ...]
  dtypes: tuple[str, ...]

  @property
  def num_bytes(self) -> int:
    """The size of all messages."""
    return sum(message.num_bytes for message in self.messages)

  @property
  def oversized(self) -> tuple[int, ...]:
    """The messages larger than `max_bytes`: boxes that only a cut along a
    sharded dimension would make smaller.
    """
    return tuple(
      i
      for i, message in enumerate(self.messages)
      if message.num_bytes > self.max_bytes
    )

  def waits_for(self, i: int) -> int | None:
    """The message that must have finished before message `i` starts.

    Args:
      i: the number of a message, from 0.

    Returns:
      The number of an earlier message, or None if `i` may start at once.

    Raises:
      ValueError: when there is no message `i`.
    """
    if not 0 <= i < len(self.messages):
      raise ValueError(
        f"`i` must be the number of one of the {len(self.messages)} messages, "
        f"got {i}."
      )
    return i - self.credit if i >= self.credit else None

  def __str__(self) -> str:
    """A line for each message: its number, what it waits for, its pieces."""
    plural = "" if len(self.messages) == 1 else "s"
    lines = [
      f"{len(self.messages)} message{plural}, {self.num_bytes:,} bytes, at "
      f"most {self.credit} in flight",
      f"{'#':>5} {'after':>5} {'bytes':>13}  pieces",
    ]
    for i, message in enumerate(self.messages):
      before = self.waits_for(i)
      mark = "!" if i in self.oversized else " "
      head = (
        f"{i:>5} {'-' if before is None else before:>5} "
        f"{message.num_bytes:>13,}{mark} "
      )
      # Lines end after a plus: a piece with its plus holds no plain space.
      pieces = " + ".join(self._name(piece) for piece in message.pieces)
      lines += textwrap.wrap(
        pieces.replace(" ", "\xa0").replace("+\xa0", "+ "),
        width=80,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
      )
    if self.oversized:
      lines.append(
        f"! larger than {self.max_bytes:,} bytes: sharded dimensions are not "
        "cut"
      )
    return "\n".join(lines).replace("\xa0", " ")

  def _name(self, piece: Piece) -> str:
    whole = piece.shape == self.shapes[piece.leaf]
    return (piece.path or "(array)") if whole else str(piece)


def plan(
  tree: PyTree,
  *,
  max_bytes: int = 4 * _MEBIBYTE,
  order: Order = "front_first",
  join: bool = True,
  credit: int = 4,
  shardings: PyTree = None,
) -> Plan:
  """Cuts a tree into messages and orders them.

  A leaf of more than `max_bytes` is cut into boxes of nearly equal size: by
  rows (its first dimension), and when one row is too large, within the row.
  Smaller pieces join their neighbours in the order, and only those: a message
  waits for the last of its pieces, so one that reached far ahead would hold
  up everything behind it.

  Args:
    tree: what one worker sends: arrays or `jax.ShapeDtypeStruct`.
    max_bytes: the size that a message should not exceed.  Small ones let
      urgent leaves overtake, large ones pay the latency less often.  Message
      sizes count a worker's whole leaves, also where its devices share them.
    order: which leaf is most urgent.  `"front_first"`: the order of the tree's
      leaves, which is that of the layers in the forward pass where names sort
      so.  Dict keys sort **alphabetically** (`layer10` before `layer2`, `head`
      before `stem`): where they do not sort by layer, give a function from a
      leaf's path, such as `"layer10/kernel"`, to something that sorts.
      `"back_first"`: the reverse, in which gradients become ready.
    join: whether small neighbours share a message.  False gives sub-tensors,
      one piece a message.
    credit: how many messages may be in flight.  1 obeys the order strictly
      and leaves the network idle between messages; many fill it and let
      urgent messages queue behind others.
    shardings: how a leaf's dimensions are split over the mesh's axes within a
      worker: None (not at all), or a tree like `tree` of PartitionSpec,
      NamedSharding or None; or one for all leaves.  A sharded dimension is
      never cut, and a sharded leaf never joined with another: both would make
      the devices of a worker exchange its data.  So a piece of a sharded leaf
      may exceed `max_bytes`; `Plan.oversized` lists these and printing the
      plan marks them.

  Returns:
    The plan.  Leaves without elements have no piece.

  Raises:
    ValueError: when an argument is not as described.

  >>> tree = {
  ...   "conv": jax.ShapeDtypeStruct((4, 10), "float32"),
  ...   "dense": {
  ...     "bias": jax.ShapeDtypeStruct((5,), "float32"),
  ...     "kernel": jax.ShapeDtypeStruct((3, 5), "float32"),
  ...   },
  ... }
  >>> print(plan(tree, max_bytes=80, credit=2))
  3 messages, 240 bytes, at most 2 in flight
      # after         bytes  pieces
      0     -            80  conv[0:2, 0:10]
      1     -            80  conv[2:4, 0:10]
      2     0            80  dense/bias + dense/kernel

  References:
    ByteScheduler (module docstring) calls the two knobs partition size and
    credit.  Departure: its credit counts bytes and is given back message by
    message; here it counts messages, as compilers do
    (`xla_gpu_experimental_parallel_collective_overlap_limit`).  P3 slices by
    parameters; `join=False` with `"front_first"` is its order.
  """
  for name, value in (("max_bytes", max_bytes), ("credit", credit)):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
  with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
  paths = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in with_paths
  ]
  leaves = [leaf for _, leaf in with_paths]
  for path, leaf in zip(paths, leaves, strict=True):
    _check_leaf(path, leaf, max_bytes)
  sharded = [
    _sharded_dims(path, leaf, sharding)
    for path, leaf, sharding in zip(
      paths, leaves, _per_leaf(shardings, treedef), strict=True
    )
  ]

  messages: list[Message] = []
  last: tuple[Any, bool] | None = None
  for leaf in _ordered(paths, order):
    shape, dtype = leaves[leaf].shape, dtype_of(leaves[leaf])
    kind = (dtype, bool(sharded[leaf]))
    limit = max_bytes // dtype.itemsize
    for start, stop in _boxes(tuple(shape), sharded[leaf], limit):
      size = math.prod(b - a for a, b in zip(start, stop, strict=True))
      piece = Piece(leaf, paths[leaf], start, stop, size * dtype.itemsize)
      if (
        join
        and kind == last == (dtype, False)
        and messages[-1].num_bytes + piece.num_bytes <= max_bytes
      ):
        messages[-1] = Message((*messages[-1].pieces, piece))
      else:
        messages.append(Message((piece,)))
      last = kind
  return Plan(
    tuple(messages),
    credit,
    max_bytes,
    tuple(tuple(leaf.shape) for leaf in leaves),
    tuple(dtype_of(leaf).name for leaf in leaves),
  )


def dtype_of(leaf: Any) -> Any:
  """The dtype as JAX holds it: a NumPy float64 is usually a float32 there."""
  return jax.dtypes.canonicalize_dtype(leaf.dtype)


def _check_leaf(path: str, leaf: Any, max_bytes: int) -> None:
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
  if max_bytes < dtype_of(leaf).itemsize:
    raise ValueError(
      f"`max_bytes` must hold at least one element, got {max_bytes} for "
      f"{leaf.dtype} at {path!r}."
    )


def _per_leaf(shardings: PyTree, treedef: Any) -> list[Any]:
  if shardings is None or isinstance(shardings, PartitionSpec | NamedSharding):
    return [shardings] * treedef.num_leaves
  try:
    return list(treedef.flatten_up_to(shardings))
  except ValueError as error:
    raise ValueError(
      "`shardings` must be None, one sharding, or a tree like `tree` of "
      f"PartitionSpec, NamedSharding or None: {error}"
    ) from error


def _sharded_dims(path: str, leaf: Any, sharding: Any) -> frozenset[int]:
  """The dimensions that the devices of one worker share."""
  if sharding is None:
    return frozenset()
  spec, sizes = sharding, None
  if isinstance(sharding, NamedSharding):
    spec, sizes = sharding.spec, dict(sharding.mesh.shape)
  if not isinstance(spec, PartitionSpec):
    raise ValueError(
      "`shardings` must hold PartitionSpec, NamedSharding or None, got "
      f"{type(sharding).__name__} at {path!r}."
    )
  if len(spec) > len(leaf.shape):
    raise ValueError(
      f"`shardings` must have at most one entry for each dimension, got "
      f"{spec} for shape {tuple(leaf.shape)} at {path!r}. Leave out the axis "
      "of workers."
    )

  def is_split(entry: Any) -> bool:
    if entry is None or sizes is None or entry is PartitionSpec.UNCONSTRAINED:
      return entry is not None and entry != ()
    names = (entry,) if isinstance(entry, str) else entry
    return math.prod(sizes[name] for name in names) > 1

  return frozenset(dim for dim, entry in enumerate(spec) if is_split(entry))


def check_order(order: Order) -> None:
  """Raises a ValueError unless leaves can be ordered so."""
  if order not in ("front_first", "back_first") and not callable(order):
    raise ValueError(
      "`order` must be 'front_first', 'back_first' or a function of a leaf's "
      f"path, got {order!r}."
    )


def leaf_order(tree: PyTree, order: Order) -> tuple[int, ...]:
  """The numbers of a tree's leaves, the most urgent one first.

  Args:
    tree: any tree.
    order: as of `plan`.

  >>> leaf_order({"a": 1, "b": 2}, "back_first")
  (1, 0)
  """
  paths = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]
  return tuple(_ordered(paths, order))


def _ordered(paths: Sequence[str], order: Order) -> list[int]:
  """The numbers of the leaves, the most urgent one first."""
  check_order(order)
  if order == "front_first":
    return list(range(len(paths)))
  if order == "back_first":
    return list(reversed(range(len(paths))))
  assert callable(order)
  keys = [order(path) for path in paths]
  try:
    return sorted(range(len(paths)), key=keys.__getitem__)
  except TypeError as error:
    raise ValueError(
      "`order` must give keys that can be compared with each other, got "
      f"{keys[:3]}: {error}."
    ) from error


def _boxes(
  shape: tuple[int, ...], uncut: frozenset[int], limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
  """Yields (start, stop) of boxes of at most `limit` elements, in order.

  Cuts the first dimension that may be cut; where one index of it still holds
  too much, takes it index by index and cuts the next.

  >>> list(_boxes((2, 5), frozenset(), limit=3))
  [((0, 0), (1, 2)), ((0, 2), (1, 5)), ((1, 0), (2, 2)), ((1, 2), (2, 5))]
  >>> list(_boxes((2, 5), frozenset({0}), limit=6))
  [((0, 0), (2, 2)), ((0, 2), (2, 5))]
  """
  size = math.prod(shape)
  if size == 0:
    return
  # Each dimension as a list of (start, stop).
  cuts = [[(0, length)] for length in shape]
  for dim, length in enumerate(shape):
    if size <= limit:
      break
    if dim in uncut:
      continue
    size //= length  # Now of one index.
    parts = -(-length // max(limit // size, 1))
    cuts[dim] = [
      (i * length // parts, (i + 1) * length // parts) for i in range(parts)
    ]
  for box in itertools.product(*cuts):
    yield tuple(side[0] for side in box), tuple(side[1] for side in box)
