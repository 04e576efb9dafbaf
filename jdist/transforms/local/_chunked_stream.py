"""Streaming by few bytes: sub-tensors through a reducer, some in every step.

A sub-tensor has a number, a reducer's state and a random key of its own, so
that nothing in it depends on when it is sent.  The feedback acts once a round
on the whole message.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers, states
from jdist.transforms.local import _anchor, _sender

PyTree = Any


@states.declare(shared=("arrived", "mean_loss", "position"), streams=True)
class ChunkedStreamState(NamedTuple):
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
  """A part that is sent in this step, `fresh` if it was not sent before.

  `name` is the dtype's, alone in a dict that has no arrays.
  """

  name: dict[str, tuple[()]]
  number: jax.Array
  fresh: jax.Array
  reduced: reducers.Reduced


class ChunkedStream(_sender.Sender):
  """Sends parts of the message in every step, from the state, by a reducer.

  The compression's reducer is a `reducers.Chunked`; of `like`, a contribution,
  only shapes matter.
  """

  compression: reducers.Compression

  def __init__(
    self,
    compression: reducers.Compression,
    axis: collectives.Axis,
    like: _sender.Contribution,
  ):
    super().__init__(axis, compression)
    self._feeds_back = compression.feedback is not None
    self._parts = compression.reducer
    # Progress is float32 at the least, and so is what is wanted of it.
    self._shape = like.message
    buckets = self._parts.buckets(like.message).buckets
    self._buckets = {bucket.name: bucket for bucket in buckets}

  def hold(
    self,
    new: _sender.Contribution,
    before: ChunkedStreamState | None,
    memory: reducers.CompressionState,
  ) -> ChunkedStreamState:
    """Splits what this worker wants to send into rows."""
    wanted, _ = self.compression.prepare(new.message, memory)
    sent = self._parts.pack(wanted)
    # Overwritten by what arrives next.
    rows = jax.tree.map(jnp.zeros_like, sent)
    keeps = self._feeds_back
    if before is None:
      before = ChunkedStreamState(
        (), (), {}, rows, jax.tree.map(jnp.copy, rows) if keeps else (),
        jax.tree.map(jnp.zeros_like, new.exact), {},
      )  # fmt: skip
    return before._replace(
      progress=new.message if keeps else (),
      loss=new.exact,
      sent=sent,
      position={name: jnp.zeros((), jnp.int32) for name in sent},
    )

  def own(self, held: ChunkedStreamState) -> _sender.Contribution:
    if self._feeds_back:
      return _sender.Contribution(held.progress, held.loss)
    progress = self._parts.unpack(held.sent, self._shape)
    return _sender.Contribution(progress, held.loss)

  def send(
    self,
    held: ChunkedStreamState,
    steps: int,
    memory: reducers.CompressionState,
  ) -> tuple[Any, ...]:
    key = self.compression.key(memory)
    states = memory.reducer
    found = []
    for name, bucket in self._buckets.items():
      if bucket.num_rows % steps:
        raise ValueError(
          "`stream_steps` must divide the number of sub-tensors, so that "
          f"nothing is sent twice, got {steps} for {bucket.num_rows}. Give "
          "`Compression(reducers.Chunked(reducer, multiple=...))` a multiple "
          "of all numbers of steps."
        )
      reducers.note(self._parts.reducer, bucket.row, self.axis)
      for i in range(bucket.num_rows // steps):
        position = held.position[name] + i
        number = jnp.minimum(position, bucket.num_rows - 1)
        row, before = _row((held.sent[name], states[name]), number)
        reduced = self._parts.reduce_chunk(
          bucket, number, row, before, key, self.axis
        )
        fresh = position < bucket.num_rows
        found.append(Sent({name: ()}, number, fresh, reduced))
    # One number, and exactly: in every step, since a step cannot know whether
    # it is the first.
    loss = collectives.start_mean(held.loss, self.axis)
    return (tuple(found), loss)

  def receive(
    self,
    held: ChunkedStreamState,
    sent: tuple[Any, ...],
    memory: reducers.CompressionState,
    in_flight: jax.Array,
    *,
    write_back: bool = True,
  ) -> tuple[ChunkedStreamState, reducers.CompressionState]:
    """Stores what has been sent, in the conditional at the step's end.

    Of a message that is none, before the first delayed round, the reducer's
    state stays as it is.
    """
    del write_back  # Parts are compressed before, and not held here.
    found, loss = sent
    arrived, position = dict(held.arrived), dict(held.position)
    shares = dict(held.shares) if self._feeds_back else {}
    states = dict(memory.reducer)
    for part in found:
      ((name, _),) = part.name.items()
      mean, share, new = part.reduced
      at = part.number
      arrived[name] = _with_row(arrived[name], mean, at, part.fresh)
      if shares:
        shares[name] = _with_row(shares[name], share, at, part.fresh)
      states[name] = _with_row(states[name], new, at, part.fresh & in_flight)
      position[name] = position[name] + part.fresh.astype(jnp.int32)
    held = held._replace(
      arrived=arrived,
      shares=shares if self._feeds_back else (),
      position=position,
      mean_loss=collectives.finish_mean(loss, self.axis),
    )
    return held, memory._replace(reducer=states)

  def complete(
    self, held: ChunkedStreamState, sent: tuple[Any, ...] = ()
  ) -> jax.Array:
    position = dict(held.position)
    for part in sent[0] if sent else ():
      ((name, _),) = part.name.items()
      position[name] = position[name] + part.fresh.astype(jnp.int32)
    there = [
      position[name] >= bucket.num_rows
      for name, bucket in self._buckets.items()
    ]
    return jnp.stack(there).all() if there else jnp.asarray(True)

  def mean(
    self,
    held: ChunkedStreamState,
    present: _sender.Contribution,
    late: jax.Array | bool,
    steps: int | None,
    memory: reducers.CompressionState,
  ) -> tuple[_sender.Contribution, reducers.CompressionState]:
    progress, loss = _anchor.either(late, self.own(held), present)
    prepared, feedback = self.compression.prepare(progress, memory)
    have = (
      held.arrived, held.shares, memory.reducer,
      held.mean_loss,
    )  # fmt: skip
    if steps is not None:
      wanted, arrived = held.sent, have
    else:
      wanted = _anchor.either(late, held.sent, self._parts.pack(prepared))
      done = _anchor.either(
        late, held.position, jax.tree.map(jnp.zeros_like, held.position)
      )
      # Of what was streamed before there is nothing left to send.
      arrived = jax.lax.cond(
        collectives.agreed(late & self.complete(held), self.axis),
        lambda: collectives.varying(have, self.axis),
        lambda: collectives.varying(
          (
            *self._send_rest(wanted, have[:3], done, memory),
            collectives.mean(loss, self.axis),
          ),
          self.axis,
        ),
      )
    means, shares, states, mean_loss = arrived
    if self._feeds_back:
      shares = self._parts.unpack(shares, self._shape)
    mean, feedback = self.compression.finish(
      self._parts.unpack(means, self._shape),
      shares,
      self._parts.unpack(wanted, self._shape),
      feedback,
    )
    mean = optax.tree.cast_like(mean, self._shape)
    new = memory._replace(
      step=optax.safe_increment(memory.step), reducer=states, feedback=feedback
    )
    out = _sender.Contribution(mean, mean_loss), new
    return collectives.varying(out, self.axis)

  def flush(
    self, held: ChunkedStreamState, memory: reducers.CompressionState
  ) -> tuple[PyTree, reducers.CompressionState]:
    """Takes the mean with every bit, and of what is held back beside it.

    What has arrived is not sent again; what it has left out is sent, where
    there is a feedback.
    """

    def left(name: str, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
      rows = jnp.arange(wanted.shape[0])[:, None] < held.position[name]
      mean = jnp.where(rows, held.arrived[name], 0)
      if self._feeds_back:
        return mean, wanted - jnp.where(rows, held.shares[name], 0)
      return mean, jnp.where(rows, 0, wanted)

    each = {name: left(name, rows) for name, rows in held.sent.items()}
    rest = collectives.mean({k: v[1] for k, v in each.items()}, self.axis)
    means = {name: each[name][0] + rest[name] for name in each}
    owned, kept = self._parts.flush(memory.reducer, self._shape, self.axis)
    mean = jax.tree.map(
      lambda m, h: (m + h).astype(m.dtype),
      self._parts.unpack(means, self._shape),
      owned,
    )
    progress = self.own(held).message
    _, feedback = self.compression.prepare(progress, memory)
    wanted = self._parts.unpack(held.sent, self._shape)
    mean, feedback = self.compression.finish(mean, wanted, wanted, feedback)
    new = memory._replace(
      step=optax.safe_increment(memory.step), reducer=kept, feedback=feedback
    )
    mean = optax.tree.cast_like(mean, self._shape)
    return collectives.varying((mean, new), self.axis)

  def _send_rest(
    self,
    wanted: dict[str, jax.Array],
    have: tuple[Any, Any, Any],
    done: dict[str, jax.Array],
    memory: reducers.CompressionState,
  ) -> tuple[Any, Any, Any]:
    """All parts at once; what has arrived stays as it is."""
    reducers.note(self._parts, self._shape, self.axis)
    key = self.compression.key(memory)
    keeps = self._feeds_back
    means, shares, states = {}, {}, {}
    for name, bucket in self._buckets.items():

      def one(_: None, part: Any, bucket: Any = bucket) -> tuple[None, Any]:
        number, row, mean, share, before = part
        reduced = self._parts.reduce_chunk(
          bucket, number, row, before, key, self.axis
        )
        new = (reduced.mean, reduced.own_share if keeps else (), reduced.state)
        old = (mean, share, before)
        kept = _anchor.either(number < done[bucket.name], old, new)
        return None, collectives.varying(kept, self.axis)

      parts = (
        jnp.arange(bucket.num_rows), wanted[name], have[0][name],
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
