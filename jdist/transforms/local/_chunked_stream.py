"""Streaming: a message is sent in sub-tensors, some of them in every step.

The sub-tensors are read from the state, so that none of them waits for the
step's gradients, and the step waits for none of them.  A compressed one has a
number, a reducer's state and a random key of its own: nothing in it depends on
the step in which it is sent.  The feedback acts once a round, on the whole
message.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers, signatures, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _delayed

SyncState: TypeAlias = _delayed.SyncState


@states.declare(shared=("arrived", "mean_loss", "position"), streams=True)
class ChunkedStreamState(NamedTuple):
  """A message of which some sub-tensors were sent.

  Each bucket, one for a kind of leaves, is an array under its name.  Compressed
  ones are rows `[sub-tensors, entries]`.  Exact ones are `[1, entries]`, or
  `[devices, entries]` for a worker that is itself sharded.

  Attributes:
    progress: The message, a tree; `()` without a feedback, where `sent` holds
      the same numbers.
    loss: The round's mean loss, float32 scalar; `()` if none is needed, or if
      it is a part of an exact message.
    sent: The buckets that this worker wants to send.
    arrived: Buckets of the workers' mean, valid before `position`.
    shares: Buckets of this worker's own share; `()` without a feedback.
    mean_loss: The workers' mean of `loss`.
    position: How many sub-tensors (or entries, if exact) were received, an
      int32 scalar for each bucket, by their sorted names.
  """

  progress: PyTree
  loss: Any
  sent: dict[str, jax.Array]
  arrived: dict[str, jax.Array]
  shares: Any
  mean_loss: Any
  position: tuple[jax.Array, ...]


class Part(NamedTuple):
  """A sub-tensor that is sent in this step.

  Attributes:
    start: Its number, or its first entry if it is exact.
    own: This worker's entries, if it is exact.
    result: a `Reduced`, or of an exact one the mean but for its last division.
  """

  start: jax.Array
  own: Any
  result: Any


class Sent(NamedTuple):
  """The sub-tensors of each bucket that a step sends, and the loss."""

  parts: tuple[tuple[Part, ...], ...]
  loss: Any


class _Layout(NamedTuple):
  """The buckets of a message, made once for parameters of one form."""

  names: tuple[str, ...]
  buckets: collectives.Buckets
  like: PyTree

  def pack(self, tree: PyTree) -> dict[str, jax.Array]:
    return dict(zip(self.names, self.buckets.pack(tree), strict=True))

  def unpack(self, *each: dict[str, jax.Array]) -> Any:
    """Returns a tree, or several."""
    trees = [
      self.buckets.unpack([rows[name] for name in self.names], self.like)
      for rows in each
    ]
    return trees if len(trees) > 1 else trees[0]


class ChunkedStream:
  """Sends some sub-tensors of a message in every step, from the state.

  The number of steps in which a message is sent is static, and may change from
  step to step: `position` counts the sent rows, so that nothing is lost.

  A compression is by `reducers.Chunked`; `like` maps a tree like the anchor to
  the form of a message.
  """

  def __init__(
    self,
    stream: _delayed.Stream,
    compression: reducers.Compression | None,
    axis: collectives.Axis,
    like: Callable[[PyTree], PyTree],
    needs_loss: bool,
  ):
    self.compression, self.axis = compression, axis
    pair = axis if isinstance(axis, tuple) else (None, axis)
    self._inner: collectives.Axis = pair[0]
    self._outer: collectives.Axis = pair[1]
    self._stream, self._like = stream, like
    self._loss = jax.ShapeDtypeStruct((), jnp.float32) if needs_loss else ()
    # A layout is the same in every trace of a chain, and several methods need
    # it in one trace.
    self._layouts: dict[Any, _Layout] = {}
    # A compression decodes rows one by one; exact means need no rows, and are
    # cut where it suits the number of steps.
    self._exact = compression is None
    self._dim = 1 if compression is None else 0
    self._feeds_back = (
      compression is not None and compression.feedback is not None
    )

  def hold(
    self, new: _delayed.Contribution, state: SyncState
  ) -> ChunkedStreamState:
    """Packs this worker's message into buckets."""
    layout, keeps = self._layout(state.anchor), self._feeds_back
    before = getattr(state.flight, "held", None)
    if self.compression is None:
      sent, loss = layout.pack(new), ()
    else:
      wanted, _ = self.compression.prepare(new.message, state.compression)
      sent, loss = layout.pack(wanted), new.exact
    if before is None:
      # Later rounds leave the old means there: they are overwritten before
      # they are read, and to clear them would cost a pass over the memory.
      rows = jax.tree.map(jnp.zeros_like, sent)
      before = ChunkedStreamState(
        (), (), {}, rows, jax.tree.map(jnp.copy, rows) if keeps else (),
        jax.tree.map(jnp.zeros_like, loss), (),
      )  # fmt: skip
    return before._replace(
      progress=new.message if keeps else (), loss=loss, sent=sent,
      position=tuple([jnp.zeros((), jnp.int32) for _ in sent]),
    )  # fmt: skip

  def own(self, state: SyncState) -> Any:
    """Returns this worker's contribution that is held."""
    held = state.flight.held
    if self._feeds_back:
      return _delayed.Contribution(held.progress, held.loss)
    found = self._layout(state.anchor).unpack(held.sent)
    return found if self._exact else _delayed.Contribution(found, held.loss)

  def send(self, state: SyncState, steps: int) -> Sent:
    """Starts the next sub-tensors; nothing waits for them yet."""
    held, memory = state.flight.held, state.compression
    layout = self._layout(state.anchor)
    # The key is that of the whole mean, whose number does not change until the
    # mean is complete: each sub-tensor draws the same numbers in every step.
    key = None if self.compression is None else self.compression.key(memory)
    found = []
    for name, bucket, position in zip(
      layout.names, layout.buckets.buckets, held.position, strict=True
    ):
      whole = held.sent[name]
      number, size = self._cut(bucket, whole, steps)
      parts, length = [], whole.shape[self._dim]
      for _ in range(number):
        # The last one begins earlier, so that all have one size.
        start = jnp.minimum(position, length - size)
        own = jax.lax.dynamic_slice_in_dim(whole, start, size, self._dim)
        if self.compression is None:
          # The receiver divides: to do it here would free the sum, and whatever
          # XLA's CPU compiler then put into its memory would wait for the mean.
          near = collectives.mean(own, self._inner)
          total = collectives.sum(near, self._outer)
          parts.append(Part(start, own, total))
        else:
          chunks, row = self.compression.reducer, own[0]
          reducers.note(chunks.reducer, row, self.axis)
          state = _row(memory.reducer[name], start)
          reduce = signatures.plain(type(chunks).reduce_chunk)
          reduced = reduce(chunks, bucket, start, row, state, key, self.axis)
          parts.append(Part(start, (), reduced))
        position = jnp.minimum(position + size, length)
      found.append(tuple(parts))
    # The loss is a number, which every step sends: no step can know whether it
    # is the round's first.
    loss = held.loss
    if not isinstance(loss, tuple):
      near = collectives.mean(loss, self._inner)
      loss = collectives.sum(near, self._outer)
    return Sent(tuple(found), loss)

  def receive(
    self, state: SyncState, sent: Sent, *, write_back: bool = True
  ) -> SyncState:
    """Stores the means of this step's messages.

    It runs in the conditional at the step's end, and with `write_back` it
    writes an exact part back to where it was read: so the memory of both is
    used until then.  XLA's CPU compiler would otherwise give it to the
    computation, which then waits for the communication that it should hide.
    On GPUs this would cost two copies of the whole message.
    """
    held, memory, flight = state.flight.held, state.compression, state.flight
    own, arrived = dict(held.sent), dict(held.arrived)
    shares = dict(held.shares) if self._feeds_back else {}
    states = {} if self._exact else dict(memory.reducer)
    for name, parts, position in zip(
      sorted(own), sent.parts, held.position, strict=True
    ):
      for part in parts:
        if self._exact:
          mean = part.result / collectives.size(self._outer)
          arrived[name] = _with_entries(arrived[name], mean, part.start)
          if write_back:
            own[name] = _with_entries(own[name], part.own, part.start)
          continue
        mean, share, new = part.result
        # A row that was received before stays, and so does its state: to apply
        # a reducer twice would count its residual twice.
        fresh = part.start >= position
        arrived[name] = _with_row(arrived[name], mean, part.start, fresh)
        if shares:
          shares[name] = _with_row(shares[name], share, part.start, fresh)
        # Before the first delayed round the message is empty, and leaves no
        # trace in the reducer's state.
        fresh &= flight.in_flight
        states[name] = _with_row(states[name], new, part.start, fresh)
    held = held._replace(
      sent=own, arrived=arrived, shares=shares if self._feeds_back else (),
      position=self._positions(held, sent),
    )  # fmt: skip
    if not isinstance(sent.loss, tuple):
      loss = sent.loss / collectives.size(self._outer)
      held = held._replace(mean_loss=loss)
    if not self._exact:
      memory = memory._replace(reducer=states)
    return state._replace(flight=flight._replace(held=held), compression=memory)

  def complete(self, state: SyncState, sent: Any = None) -> jax.Array:
    """Returns whether all was received, this step's rows included."""
    held = state.flight.held
    there = [
      position >= held.sent[name].shape[self._dim]
      for name, position in zip(
        sorted(held.sent), self._positions(held, sent), strict=True
      )
    ]
    return jnp.stack(there).all() if there else jnp.asarray(True)

  def mean(
    self,
    state: SyncState,
    present: _delayed.Contribution,
    late: jax.Array | bool,
    steps: int | None,
  ) -> tuple[_delayed.Contribution, Any]:
    """Takes the mean of the held message, or of `present` if not `late`.

    With `steps` all was streamed; otherwise missing rows are sent now.
    """
    held, memory = state.flight.held, state.compression
    # Feedback is prepared again: its state must follow from the message that
    # was sent, and not from the present one.
    layout, feedback, prepared = self._layout(state.anchor), (), present
    have: Any = held.arrived, held.shares, (), held.mean_loss
    if self.compression is not None:
      have = held.arrived, held.shares, memory.reducer, held.mean_loss
      own = self.own(state)
      present = own if late is True else _anchor.either(late, own, present)
      prepared, feedback = self.compression.prepare(present.message, memory)
    wanted = held.sent
    if steps is None:
      done = held.position
      # A round that is not delayed sends its own message, from the start.
      if late is not True:
        wanted = _anchor.either(late, wanted, layout.pack(prepared))
        done = _anchor.either(late, done, jax.tree.map(jnp.zeros_like, done))

      def send_rest() -> Any:
        rest = self._send_rest(layout, wanted, have, done, memory)
        if self._exact:
          return rest
        return *rest[:3], collectives.mean(present.exact, self.axis)

      # Nothing remains to send if the whole message was streamed.
      have = jax.lax.cond(
        collectives.agreed(late & self.complete(state), self.axis),
        lambda: collectives.varying(have, self.axis),
        lambda: collectives.varying(send_rest(), self.axis),
      )
    means, shares, states, mean_loss = have
    if self.compression is None:
      return layout.unpack(means), memory
    if self._feeds_back:
      mean, shares, wanted = layout.unpack(means, shares, wanted)
    else:
      mean = layout.unpack(means)
    mean, feedback = self.compression.finish(
      mean, shares, wanted, feedback, layout.like
    )
    new = memory._replace(
      step=optax.safe_increment(memory.step), reducer=states, feedback=feedback
    )
    out = _delayed.Contribution(mean, mean_loss), new
    return collectives.varying(out, self.axis)

  def flush(self, state: SyncState) -> tuple[PyTree, Any]:
    """Takes the exact mean of the message and of all residuals.

    Received parts are not sent again, but their residuals are, if a feedback
    kept them.
    """
    if self.compression is None:
      message = self.own(state).message
      return collectives.mean(message, self.axis), ()
    held, memory = state.flight.held, state.compression
    layout, rests, means = self._layout(state.anchor), {}, {}
    # Rows before `position` were received.  With a feedback the difference from
    # this worker's share is sent exactly, without one it was lost.
    for name, position in zip(layout.names, held.position, strict=True):
      wanted = held.sent[name]
      rows = jnp.arange(wanted.shape[0], dtype="int32")[:, None] < position
      means[name] = jnp.where(rows, held.arrived[name], 0)
      rests[name] = (
        wanted - jnp.where(rows, held.shares[name], 0)
        if self._feeds_back
        else jnp.where(rows, 0, wanted)
      )
    rests = collectives.mean(rests, self.axis)
    means = {name: means[name] + rests[name] for name in means}
    owned, kept = self.compression.reducer.flush(
      memory.reducer, layout.like, self.axis
    )
    mean = jax.tree.map(
      lambda m, h: (m + h).astype(m.dtype), layout.unpack(means), owned
    )
    progress = self.own(state).message
    _, feedback = self.compression.prepare(progress, memory)
    wanted = layout.unpack(held.sent)
    mean, feedback = self.compression.finish(
      mean, wanted, wanted, feedback, layout.like
    )
    new = memory._replace(
      step=optax.safe_increment(memory.step), reducer=kept, feedback=feedback
    )
    return collectives.varying((mean, new), self.axis)

  def _send_rest(
    self,
    layout: _Layout,
    wanted: dict[str, jax.Array],
    have: tuple[Any, ...],
    done: tuple[jax.Array, ...],
    memory: Any,
  ) -> tuple[Any, ...]:
    """Sends all missing rows at once, and keeps the received ones."""
    if self.compression is None:
      return collectives.mean(wanted, self.axis), *have[1:]
    chunks, keeps = self.compression.reducer, self._feeds_back
    reducers.note(chunks, layout.like, self.axis)
    key = self.compression.key(memory)
    means, shares, states = {}, {}, {}
    for name, bucket, position in zip(
      layout.names, layout.buckets.buckets, done, strict=True
    ):
      # All rows are reduced, also those that were received before: a loop whose
      # length depends on the position would need a collective in a `while`.
      def one(
        _: None, part: Any, bucket: Any = bucket, position: Any = position
      ) -> tuple[None, Any]:
        number, row, before = part
        mean, share, state = chunks.reduce_chunk(
          bucket, number, row, before[2], key, self.axis
        )
        new = mean, share if keeps else (), state
        kept = _anchor.either(number < position, before, new)
        return None, collectives.varying(kept, self.axis)

      before = have[0][name], have[1][name] if keeps else (), have[2][name]
      parts = jnp.arange(bucket.num_rows), wanted[name], before
      _, found = jax.lax.scan(one, None, parts)
      means[name], shares[name], states[name] = found
    return means, shares if keeps else (), states

  def _cut(self, bucket: Any, whole: jax.Array, steps: int) -> tuple[int, int]:
    """Returns the number of a bucket's parts in a step, and their size."""
    if self._exact:
      return self._stream.cut(
        whole.shape[1], steps, itemsize=whole.dtype.itemsize
      )
    if bucket.num_rows % steps:
      raise ValueError(
        "`stream_steps` must divide the number of sub-tensors, so that "
        f"nothing is sent twice, got {steps} for {bucket.num_rows}. Give "
        "`Compression(reducers.Chunked(reducer, multiple=...))` a multiple "
        "of all numbers of steps."
      )
    return bucket.num_rows // steps, 1

  def _positions(
    self, held: ChunkedStreamState, sent: Any
  ) -> tuple[jax.Array, ...]:
    """Returns how far each bucket is received, this step's rows included."""
    if not isinstance(sent, Sent):
      return held.position
    found = []
    for name, parts, position in zip(
      sorted(held.sent), sent.parts, held.position, strict=True
    ):
      length = held.sent[name].shape[self._dim]
      size = parts[0].own.shape[1] if self._exact and parts else 1
      found.append(jnp.minimum(position + len(parts) * size, length))
    return tuple(found)

  def _layout(self, anchor: PyTree) -> _Layout:
    """Lays out a message once, however often a program asks for it."""
    leaves, structure = jax.tree.flatten(anchor)
    # Fragments share a sender, and each has an anchor of another form.  The
    # shards of a sharded worker depend on the mesh of the program.
    key = (
      structure,
      tuple((x.shape, x.dtype) for x in leaves),
      jax.sharding.get_abstract_mesh(),
    )
    if key in self._layouts:
      return self._layouts[key]
    likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    like = self._like(jax.tree.unflatten(structure, likes))
    if self.compression is not None:
      buckets = self.compression.reducer.buckets(like)
    else:
      buckets = self._stream.buckets(like, self._loss)
      like = _delayed.Contribution(like, self._loss)
    # JAX sorts the keys of a dict, and positions follow the sorted names.
    in_order = sorted(buckets.buckets, key=_name)
    buckets = dataclasses.replace(buckets, buckets=tuple(in_order))
    layout = _Layout(tuple(map(_name, in_order)), buckets, like)
    return self._layouts.setdefault(key, layout)


def _name(bucket: collectives.Bucket) -> str:
  """Names a bucket; `reducers.split_axes` reads the mesh axes off the name."""
  over = reducers.rows_over(bucket.axes) + "/" if bucket.axes else ""
  return over + bucket.dtype


def _row(tree: PyTree, number: jax.Array) -> PyTree:
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree
  )


def _with_row(
  tree: PyTree, row: PyTree, number: jax.Array, fresh: jax.Array
) -> PyTree:
  # The old row is selected, rather than the whole array, which would be copied.
  def one(x: jax.Array, new: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
    new = jnp.where(fresh, new.astype(x.dtype), old)
    return jax.lax.dynamic_update_index_in_dim(x, new, number, 0)

  return jax.tree.map(one, tree, row)


def _with_entries(
  whole: jax.Array, part: jax.Array, start: jax.Array
) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(whole, part, start, 1)
