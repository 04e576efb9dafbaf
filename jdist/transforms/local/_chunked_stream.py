"""Streaming through a reducer: sub-tensors by few bytes, some in every step.

What `_streaming` does with plain sums.  A part has a number, a reducer's
state and a random key of its own, so that nothing in it depends on when it is
sent.
The feedback acts on the whole message, once a round:

    round's end    prepare          what this worker wants to send
    every step     reduce           the next parts of it, from the state
    round's end    finish           what was left out, from all parts' shares

`make_sender` chooses between this, `_chunked_stream`, and sending at once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers
from jdist.transforms import intervals
from jdist.transforms.local import _anchor, _clock, _sender, _streaming

PyTree = Any
# The numbers of steps in which a message is sent divide it: 1, 2, 4, 8, 16.
_USUAL_STEPS = 16


class PartsState(NamedTuple):
  """A message under way, part by part.

  Rows are float32 [parts, entries], under the name of the leaves' dtype.

  Attributes:
    progress: the message as it is, a tree; `()` without a feedback, when
      `sent` holds just that.
    loss: the round's mean loss, float32 scalar; `()` if none is needed.
    sent: rows of what this worker wants to send.
    arrived: rows of the workers' mean, those before `position`.
    shares: rows of what this worker has sent; `()` without a feedback.
    mean_loss: the workers' mean of the loss; `()` if none is needed.
    position: how many parts have arrived, int32 scalars.
  """

  progress: PyTree
  loss: Any
  sent: dict[str, jax.Array]
  arrived: dict[str, jax.Array]
  shares: Any
  mean_loss: Any
  position: dict[str, jax.Array]


class Sent(NamedTuple):
  """A part that is sent in this step.

  Attributes:
    name: the dtype's name, alone in a dict that has no arrays.
    number: of the part, int32 scalar.
    fresh: whether it was not sent before, bool scalar.
    reduced: what the reducer has returned.
  """

  name: dict[str, tuple[()]]
  number: jax.Array
  fresh: jax.Array
  reduced: reducers.Reduced


class StreamingParts:
  """Sends parts of the message in every step, from the state, by a reducer."""

  def __init__(
    self,
    reduction: reducers.Reduction,
    axis: collectives.Axis,
    like: _sender.Message,
  ):
    """Lays out the rows for messages like `like`."""
    assert isinstance(reduction.reducer, reducers.Chunked)
    self._reduction, self._axis = reduction, axis
    self._parts = reduction.reducer
    # Progress is float32 at the least, and so is what is wanted of it.
    self._shape = like.progress
    self._cuts = {cut.name: cut for cut in self._parts.cuts(like.progress)}

  def hold(
    self,
    message: _sender.Message,
    before: PartsState | None,
    remembered: reducers.ReductionState,
  ) -> PartsState:
    """Makes a message the next one to be sent."""
    wanted, _ = self._reduction.prepared(message.progress, remembered)
    sent = self._parts.cut(wanted)
    # What arrives next is written over it.
    rows = jax.tree.map(jnp.zeros_like, sent)
    keeps = self._reduction.has_feedback
    if before is None:
      before = PartsState(
        (), (), {}, rows, jax.tree.map(jnp.copy, rows) if keeps else (),
        jax.tree.map(jnp.zeros_like, message.loss), {},
      )  # fmt: skip
    return before._replace(
      progress=message.progress if keeps else (),
      loss=message.loss,
      sent=sent,
      position={name: jnp.zeros((), jnp.int32) for name in sent},
    )

  def own(self, state: PartsState) -> _sender.Message:
    """This worker's message that is held."""
    if self._reduction.has_feedback:
      return _sender.Message(state.progress, state.loss)
    progress = self._parts.join(state.sent, self._shape)
    return _sender.Message(progress, state.loss)

  def start(
    self,
    state: PartsState,
    steps: int | None,
    remembered: reducers.ReductionState,
  ) -> tuple[Any, ...]:
    """Sends the next parts; nothing waits for them yet."""
    if steps is None:
      return ()
    key = self._reduction.key(remembered)
    states = self._reduction.joined(remembered)
    found = []
    for name, cut in self._cuts.items():
      if cut.num_parts % steps:
        raise ValueError(
          "`stream_steps` must divide the number of sub-tensors, so that "
          f"nothing is sent twice, got {steps} for {cut.num_parts}. Give "
          "`reducer=reducers.Chunked(reducer, multiple=...)` a multiple "
          "of all numbers of steps."
        )
      reducers.note(self._parts.reducer, cut.like, self._axis)
      for i in range(cut.num_parts // steps):
        position = state.position[name] + i
        number = jnp.minimum(position, cut.num_parts - 1)
        row, before = _row((state.sent[name], states[name]), number)
        reduced = self._parts.reduce_part(
          cut, number, row, before, key, self._axis
        )
        fresh = position < cut.num_parts
        found.append(Sent({name: ()}, number, fresh, reduced))
    # One number, and exactly: in every step, since a step cannot know whether
    # it is the first.
    loss = collectives.start_mean(state.loss, self._axis)
    return (tuple(found), loss)

  def finish(
    self,
    state: PartsState,
    sent: tuple[Any, ...],
    remembered: reducers.ReductionState,
    in_flight: jax.Array,
  ) -> tuple[PartsState, reducers.ReductionState]:
    """Writes down what has been sent, in the conditional at the step's end.

    Of a message that is none, before the first delayed round, the reducer
    remembers nothing.
    """
    found, loss = sent
    arrived, position = dict(state.arrived), dict(state.position)
    shares = dict(state.shares) if self._reduction.has_feedback else {}
    states = dict(self._reduction.joined(remembered))
    for part in found:
      ((name, _),) = part.name.items()
      mean, share, new = part.reduced
      at = part.number
      arrived[name] = _with_row(arrived[name], mean, at, part.fresh)
      if shares:
        shares[name] = _with_row(shares[name], share, at, part.fresh)
      states[name] = _with_row(states[name], new, at, part.fresh & in_flight)
      position[name] = position[name] + part.fresh.astype(jnp.int32)
    state = state._replace(
      arrived=arrived,
      shares=shares if self._reduction.has_feedback else (),
      position=position,
      mean_loss=collectives.finish_mean(loss, self._axis),
    )
    return state, self._reduction.with_states(remembered, states)

  def complete(
    self, state: PartsState, sent: tuple[Any, ...] = ()
  ) -> jax.Array:
    """Whether all has arrived, with what is being sent in this step."""
    position = dict(state.position)
    for part in sent[0] if sent else ():
      ((name, _),) = part.name.items()
      position[name] = position[name] + part.fresh.astype(jnp.int32)
    there = [
      position[name] >= cut.num_parts for name, cut in self._cuts.items()
    ]
    return jnp.stack(there).all() if there else jnp.asarray(True)

  def mean(
    self,
    state: PartsState,
    present: _sender.Message,
    late: jax.Array,
    steps: int | None,
    remembered: reducers.ReductionState,
  ) -> tuple[_sender.Message, reducers.ReductionState]:
    """The workers' mean of what is held, or of `present` if not `late`."""
    progress, loss = _anchor.either(late, self.own(state), present)
    prepared, feedback = self._reduction.prepared(progress, remembered)
    have = (
      state.arrived, state.shares, self._reduction.joined(remembered),
      state.mean_loss,
    )  # fmt: skip
    if steps is not None:
      wanted, arrived = state.sent, have
    else:
      wanted = _anchor.either(late, state.sent, self._parts.cut(prepared))
      done = _anchor.either(
        late, state.position, jax.tree.map(jnp.zeros_like, state.position)
      )
      # Of what was streamed before there is nothing left to send.
      arrived = jax.lax.cond(
        collectives.agreed(late & self.complete(state), self._axis),
        lambda: collectives.varying(have, self._axis),
        lambda: collectives.varying(
          (
            *self._send_rest(wanted, have[:3], done, remembered),
            collectives.mean(loss, self._axis),
          ),
          self._axis,
        ),
      )
    means, shares, states, mean_loss = arrived
    if self._reduction.has_feedback:
      shares = self._parts.join(shares, self._shape)
    mean, feedback = self._reduction.finished(
      self._parts.join(means, self._shape),
      shares,
      self._parts.join(wanted, self._shape),
      feedback,
    )
    mean = reducers.like(mean, self._shape)
    new = self._reduction.with_states(remembered, states)._replace(
      step=optax.safe_increment(remembered.step), feedback=feedback
    )
    out = _sender.Message(mean, mean_loss), new
    return collectives.varying(out, self._axis)

  def exact_mean(
    self, state: PartsState, remembered: reducers.ReductionState
  ) -> tuple[PyTree, reducers.ReductionState]:
    """The mean of what is held with every bit, and what is held back.

    What has arrived is not sent again; what it has left out is sent, where
    there is a feedback.
    """

    def left(name: str, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
      rows = jnp.arange(wanted.shape[0])[:, None] < state.position[name]
      mean = jnp.where(rows, state.arrived[name], 0)
      if self._reduction.has_feedback:
        return mean, wanted - jnp.where(rows, state.shares[name], 0)
      return mean, jnp.where(rows, 0, wanted)

    each = {name: left(name, rows) for name, rows in state.sent.items()}
    rest = collectives.mean({k: v[1] for k, v in each.items()}, self._axis)
    means = {name: each[name][0] + rest[name] for name in each}
    held, kept = self._parts.release(
      self._reduction.joined(remembered), self._shape, self._axis
    )
    mean = jax.tree.map(
      lambda m, h: (m + h).astype(m.dtype),
      self._parts.join(means, self._shape),
      held,
    )
    progress = self.own(state).progress
    _, feedback = self._reduction.prepared(progress, remembered)
    wanted = self._parts.join(state.sent, self._shape)
    mean, feedback = self._reduction.finished(mean, wanted, wanted, feedback)
    new = self._reduction.with_states(remembered, kept)._replace(
      step=optax.safe_increment(remembered.step), feedback=feedback
    )
    mean = reducers.like(mean, self._shape)
    return collectives.varying((mean, new), self._axis)

  def _send_rest(
    self,
    wanted: dict[str, jax.Array],
    have: tuple[Any, Any, Any],
    done: dict[str, jax.Array],
    remembered: reducers.ReductionState,
  ) -> tuple[Any, Any, Any]:
    """All parts at once; what has arrived stays as it is."""
    reducers.note(self._parts, self._shape, self._axis)
    key = self._reduction.key(remembered)
    keeps = self._reduction.has_feedback
    means, shares, states = {}, {}, {}
    for name, cut in self._cuts.items():

      def one(_: None, part: Any, cut: Any = cut) -> tuple[None, Any]:
        number, row, mean, share, before = part
        reduced = self._parts.reduce_part(
          cut, number, row, before, key, self._axis
        )
        new = (reduced.mean, reduced.own_share if keeps else (), reduced.state)
        old = (mean, share, before)
        kept = _anchor.either(number < done[cut.name], old, new)
        return None, collectives.varying(kept, self._axis)

      parts = (
        jnp.arange(cut.num_parts), wanted[name], have[0][name],
        have[1][name] if keeps else (), have[2][name],
      )  # fmt: skip
      _, found = jax.lax.scan(one, None, parts)
      means[name], shares[name], states[name] = found
    return means, shares if keeps else (), states


def _row(tree: PyTree, number: jax.Array) -> PyTree:
  return jax.tree.map(
    lambda x: jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree
  )


def _with_row(
  tree: PyTree, row: PyTree, number: jax.Array, fresh: jax.Array
) -> PyTree:
  def one(x: jax.Array, new: jax.Array) -> jax.Array:
    old = jax.lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
    new = jnp.where(fresh, new.astype(x.dtype), old)
    return jax.lax.dynamic_update_index_in_dim(x, new, number, 0)

  return jax.tree.map(one, tree, row)


def make_sender(
  axis: collectives.Axis,
  policy: intervals.IntervalPolicy,
  stream: _streaming.Stream | None,
  reduction: reducers.Reduction | None,
) -> _sender.MakeSender:
  """Chooses a sender: at once, or streamed, exactly or by a reducer."""

  def sender(anchor: PyTree) -> _sender.Sender:
    """Made when the program is traced; of the anchor only shapes matter."""
    if stream is None:
      return _sender.AtOnce(axis, reduction)
    like = _sender.Message(anchor, _clock.no_loss(policy))
    if reduction is not None:
      return StreamingParts(reduction, axis, like)
    return _streaming.Streaming(stream, axis, like)

  return sender


def in_parts(
  stream: _streaming.Stream,
  reducer: reducers.Reducer,
  steps: int | None,
) -> reducers.Chunked:
  """A reducer of sub-tensors, as `stream` cuts them.

  Args:
    stream: how.
    reducer: of a part; or one that is in parts already, and then stays.
    steps: the interval if it is fixed.
  """
  reducers.check_reducer("reducer", reducer)
  if isinstance(reducer, reducers.Chunked):
    return reducer
  return reducers.Chunked(
    reducer,
    max_bytes=stream.max_bytes,
    order=stream.order,
    multiple=_USUAL_STEPS if steps is None else steps,
  )


def check_whole_workers(specs: PyTree, stream: _streaming.Stream) -> None:
  """Raises a ValueError where shards of workers would be streamed."""
  given = stream.specs if specs is None else specs
  if given is not None:
    raise ValueError(
      "`specs` must be None where a `reducer` is streamed, whose sub-tensors "
      f"are of whole workers, got {given}. Send at once, `stream=None`, where "
      "a worker is itself sharded."
    )
