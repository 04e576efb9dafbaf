"""Streaming: a part of a late message is sent in every step, exactly.

The sub-tensors are read from the state, so that a part waits for nothing in the
step and the step for no part.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jdist import checks, collectives, reducers, states
from jdist.transforms.local import _anchor, _sender

PyTree = Any
_MEBIBYTE = 2**20


@states.declare(shared=("arrived", "position"), streams=True)
class StreamState(NamedTuple):
  """A message under way.

  The buffers' keys name what is in them: a dtype, and after a colon the mesh
  axes over which its leaves are split.  A buffer is `[parts, length]`, a row
  for each part of a worker that is itself sharded, else one row.

  Attributes:
    sent: this worker's message.
    arrived: the mean of all workers' messages, as far as `position`.
    position: how many elements of a row have arrived, int32 scalars.
  """

  sent: dict[str, jax.Array]
  arrived: dict[str, jax.Array]
  position: dict[str, jax.Array]


class Part(NamedTuple):
  """A sub-tensor that is sent in this step, under its buffer's name.

  It begins at `start`; `total` is the workers' mean but for its last division.
  """

  start: dict[str, jax.Array]
  own: dict[str, jax.Array]
  total: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """The split of a delayed message into sub-tensors.

  In a round of H steps every step sends the next `1/H` of the message, in
  sub-tensors of `max_bytes` at the most and of one size.

  Attributes:
    max_bytes: the size that a sub-tensor does not exceed; 4 MiB by default.
    order: priority, which leaves are sent first, as of `collectives.Buckets`.
      All are applied together at the round's end, so it changes no result.
    specs: how the parameters are split over the mesh's other axes, a tree of
      PartitionSpec (`Workers.specs(params)`), for workers that are themselves
      sharded: every device sends its own part.  Not with a reducer.

  >>> Stream(max_bytes=4096).cut(10_000, 5, itemsize=4)
  (2, 1000)
  """

  max_bytes: int = 4 * _MEBIBYTE
  order: collectives.Order = "front_first"
  specs: PyTree = None

  def __post_init__(self) -> None:
    checks.set_structural(self, "max_bytes", minimum=8)
    collectives.check_order(self.order)

  def cut(self, length: int, steps: int, *, itemsize: int) -> tuple[int, int]:
    """The number of sub-tensors in a step, and the elements of each."""
    in_step = -(-length // steps)
    number = -(-in_step * itemsize // self.max_bytes)
    return number, -(-in_step // number)

  def sender(
    self, axis: collectives.Axis, like: _sender.Contribution
  ) -> "ExactStream":
    """Makes what sends a message exactly; of `like` only shapes matter."""
    return ExactStream(self, axis, like)


class ExactStream(_sender.Sender):
  """Sends a part of the message in every step, from the state.

  `steps` says in how many steps the whole message goes, and is static; None
  sends it when the mean is due.  It may change from step to step: sending goes
  on at `position`, and a round waits for its last sub-tensor, so nothing is
  lost.  Of `like`, a contribution, only shapes matter.
  """

  def __init__(
    self, stream: Stream, axis: collectives.Axis, like: _sender.Contribution
  ):
    super().__init__(axis, None)
    self._stream, self._like = stream, like
    # What is averaged exactly is the last.
    order = collectives.leaf_order(like.message, stream.order)
    exact, specs = range(len(order), len(jax.tree.leaves(like))), None
    if stream.specs is not None:
      specs = [
        *collectives.spec_leaves(stream.specs, like.message),
        *(PartitionSpec() for _ in exact),
      ]
    self._buckets = collectives.Buckets.of(
      like, order=(*order, *exact), specs=specs
    )

  def hold(
    self, new: _sender.Contribution, before: StreamState | None, memory: PyTree
  ) -> StreamState:
    """Packs a contribution into buffers."""
    del memory
    sent = self._pack(new)
    return StreamState(
      sent=sent,
      # Overwritten by what arrives next.
      arrived=jax.tree.map(jnp.zeros_like, sent) if before is None else (
        before.arrived
      ),
      position={name: jnp.zeros((), jnp.int32) for name in sent},
    )  # fmt: skip

  def own(self, held: StreamState) -> _sender.Contribution:
    return self._unpack(held.sent)

  def send(
    self, held: StreamState, steps: int, memory: PyTree
  ) -> tuple[Part, ...]:
    """Starts the next sub-tensors; nothing waits for them yet."""
    del memory
    sent = []
    for name, whole in held.sent.items():
      length = whole.shape[1]
      number, size = self._stream.cut(
        length, steps, itemsize=whole.dtype.itemsize
      )
      position = held.position[name]
      for _ in range(number):
        # The last one begins earlier rather than to be padded.
        start = jnp.minimum(position, length - size)
        own = jax.lax.dynamic_slice_in_dim(whole, start, size, 1)
        total = collectives.start_mean(own, self.axis)
        sent.append(Part({name: start}, {name: own}, {name: total}))
        position = jnp.minimum(position + size, length)
    return tuple(sent)

  def receive(
    self,
    held: StreamState,
    sent: tuple[Part, ...],
    memory: PyTree,
    in_flight: jax.Array,
    *,
    write_back: bool = True,
  ) -> tuple[StreamState, PyTree]:
    """Stores the means of what has been sent.

    Stands in the conditional at the end of the step and, with `write_back`,
    writes the worker's own part back to where it came from: so the memory of
    both is used until then.  XLA's CPU compiler else gives it to the
    computation, which then has to wait for what it should hide; on GPUs it
    costs two copies of the whole message.
    """
    del in_flight
    own, arrived, position = map(dict, (held.sent, held.arrived, held.position))
    for part in sent:
      ((name, start),) = part.start.items()
      mean = collectives.finish_mean(part.total[name], self.axis)
      stored = [(arrived, mean)]
      if write_back:
        stored.append((own, part.own[name]))
      for whole, piece in stored:
        whole[name] = jax.lax.dynamic_update_slice_in_dim(
          whole[name], piece, start, 1
        )
      position[name] = _end_of(part)[name]
    return StreamState(own, arrived, position), memory

  def complete(
    self, held: StreamState, sent: tuple[Part, ...] = ()
  ) -> jax.Array:
    position = dict(held.position)
    for part in sent:
      position |= _end_of(part)
    there = [
      position[name] >= whole.shape[1] for name, whole in held.sent.items()
    ]
    return jnp.stack(there).all() if there else jnp.asarray(True)

  def mean(
    self,
    held: StreamState,
    present: _sender.Contribution,
    late: jax.Array | bool,
    steps: int | None,
    memory: PyTree,
  ) -> tuple[_sender.Contribution, PyTree]:
    if steps is not None:
      return self._unpack(held.arrived), memory
    # Of what was streamed before there is nothing left to send.
    arrived = jax.lax.cond(
      collectives.agreed(late & self.complete(held), self.axis),
      lambda: collectives.varying(held.arrived, self.axis),
      lambda: collectives.mean(
        held.sent
        if late is True
        else _anchor.either(late, held.sent, self._pack(present)),
        self.axis,
      ),
    )
    return self._unpack(arrived), memory

  def _pack(self, new: _sender.Contribution) -> dict[str, jax.Array]:
    names = [bucket.name for bucket in self._buckets.buckets]
    return dict(zip(names, self._buckets.pack(new), strict=True))

  def _unpack(self, buffers: dict[str, jax.Array]) -> _sender.Contribution:
    found = [buffers[bucket.name] for bucket in self._buckets.buckets]
    return self._buckets.unpack(found, self._like)


def _end_of(part: Part) -> dict[str, jax.Array]:
  """Returns how far a message has arrived with a part."""
  ((name, start),) = part.start.items()
  return {name: start + part.own[name].shape[1]}


def buffer_axes(path: tuple[Any, ...]) -> tuple[str, ...] | None:
  """The mesh axes over which the rows of a state are split.

  Those of a buffer, or of what a reducer keeps for each shard.

  Args:
    path: a leaf's key path in an optimizer's state.

  Returns:
    The axes, `()` for rows that are not split; None for other leaves.

  >>> state = StreamState({"float32:x,y": 1}, {"float32": 2}, {"float32": 3})
  >>> [buffer_axes(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)]
  [('x', 'y'), (), None]
  """
  for step in path:
    over = reducers.row_axes(getattr(step, "key", None))
    if over is not None:
      return over
  if len(path) < 2:
    return None
  field, key = (getattr(path[-2], "name", ""), getattr(path[-1], "key", ""))
  if field not in ("sent", "arrived"):
    return None
  _, _, axes = str(key).partition(":")
  return tuple(axes.split(",")) if axes else ()
