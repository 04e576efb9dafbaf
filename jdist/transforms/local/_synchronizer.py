"""The round engine: when a round ends, what is sent, and what moves.

A `Synchronizer` brings one tree of parameters together, round after round.  How
anchor and workers move is the sync rule's, when the mean arrives the overlap's
(`Delayed`), and by how many bytes the compression's:

    send      first in a step: the next part of what is under way
    finish    last in a step: the mean that is due arrives, the round ends
    drain     instead of a step: everything that was begun is brought in
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers, states
from jdist.transforms import _control, intervals
from jdist.transforms.local import (
  _anchor,
  _chunked_stream,
  _clock,
  _delayed,
  _sender,
  _streaming,
  _sync_rule,
)

PyTree = Any


@states.declare(shared=("anchor", "memory", "kept"))
class SyncState(NamedTuple):
  """State of a `Synchronizer`.

  Attributes:
    clock: the round's.
    anchor: the parameters all workers agree on, float32.
    memory: the sync rule's state: the outer optimizer's, for instance.
    kept: how far the worker stands beside the anchor on purpose: the part of
      its pending progress that is in its parameters, float32 scalar; `()`
      where every round ends on the anchor.
    flight: the message under way, a `Flight`; `()` without a delay.
    compression: the compression's state, `()` without one.
  """

  clock: _clock.RoundClock
  anchor: PyTree
  memory: PyTree
  kept: Any
  flight: Any
  compression: Any


class Step(NamedTuple):
  """A worker's local step, before and after the workers come together.

  Attributes:
    updates: of the parameters.
    inner: the inner optimizer's state.
    sync: the synchronizer's.
  """

  updates: PyTree
  inner: PyTree
  sync: SyncState


@dataclasses.dataclass(frozen=True, eq=False)
class Synchronizer:
  """Brings one tree together, round after round."""

  optimizer: optax.GradientTransformation
  policy: intervals.IntervalPolicy
  axis: collectives.Axis
  rule: _sync_rule.SyncRule
  overlap: _delayed.Delayed | None
  compression: reducers.Compression | None

  @property
  def within(self) -> bool:
    """Whether a mean arrives within the next round, and not at its end."""
    late = self.overlap
    return late is not None and late.steps is not None and late.steps > 0

  @property
  def late(self) -> bool:
    """Whether a mean is late at all."""
    return self.overlap is not None and self.overlap.steps != 0

  @property
  def mixes(self) -> bool:
    """Whether workers stay beside the anchor when a mean arrives."""
    return self.overlap is not None and self.overlap.mix is not None

  @property
  def relative(self) -> bool:
    """Whether a message is a difference to something that all know."""
    if self.compression is not None:
      return True
    return self.late and not self.rule.beside

  def init(self, params: optax.Params) -> SyncState:
    """Returns the state before the first step, on the anchor."""
    anchor = jax.tree.map(_anchor.wide_copy, params)
    memory: Any = ()
    if self.compression is not None:
      memory = self.compression.init(self.rule.like(anchor), self.axis)
    beside = self.late or self.mixes or self.rule.beside
    state = SyncState(
      clock=_clock.start(self.policy),
      anchor=anchor,
      # Each leaf a buffer of its own, because the state may be donated.
      memory=jax.tree.map(jnp.copy, self.rule.init(anchor)),
      kept=jnp.zeros((), jnp.float32) if beside else (),
      flight=(),
      compression=memory,
    )
    if not self.late:
      return state
    assert self.overlap is not None
    decides = self.within or self.overlap.stream is not None
    after = self.overlap.after_step if decides else 0
    flight = _delayed.Flight(
      held=self._hold_nothing(state, None),
      in_flight=jnp.asarray(False),
      arrived_loss=_unknown() if self.within else (),
      due_after=jnp.asarray(self.overlap.steps or 0, jnp.int32),
      device_before=jnp.asarray(after, jnp.int32),
    )
    return state._replace(flight=flight)

  def send(
    self, state: SyncState, control: _control.Control
  ) -> tuple[Any, ...]:
    """Starts the next parts of what is under way.

    First in a step, and from the state: nothing waits for the step's gradients,
    and they wait for nothing.
    """
    steps = self._stream_steps(control)
    if steps is None:
      return ()
    return self._sender(state.anchor).send(
      state.flight.held, steps, state.compression
    )

  def finish(
    self,
    step: Step,
    params: optax.Params,
    sent: tuple[Any, ...],
    control: _control.Control,
  ) -> Step:
    """Ends the round if it is over, after the local step."""
    steps = self._stream_steps(control)
    ends = control.round_ends
    if self.within or ends is not None:
      step, sent = self._receive_last(step, sent), ()
    if self.within:
      step = self._arrive_if_due(step, params, steps, control)
    if ends is None:
      over = step.sync.clock.is_over()
      if self.within:
        over &= ~step.sync.flight.in_flight
      elif steps is not None:
        sender = self._sender(step.sync.anchor)
        over &= sender.complete(step.sync.flight.held, sent)
      step = jax.lax.cond(
        collectives.agreed(over, self.axis),
        lambda step, sent, params: self._end(step, sent, params, steps),
        lambda step, sent, params: self._go_on(step, sent),
        step,
        sent,
        params,
      )
    elif ends:
      if steps is not None and not self.within:
        step = step._replace(sync=self._lost_unless_there(step.sync))
      step = self._end(step, (), params, steps)
    else:
      step = self._go_on(step, ())
    return step

  def drain(
    self, inner: PyTree, state: SyncState, params: optax.Params, residuals: bool
  ) -> Step:
    """Brings in everything that was begun, the oldest first; no step."""
    begun = state.clock.is_begun()
    if residuals and self.compression is not None:
      begun = jnp.ones_like(begun)
    if self.rule.beside and not self.late:
      begun |= state.kept > 0  # The workers stand apart between rounds, too.
    local = jax.tree.map(_anchor.wide, params)
    end = self._round(Step((), inner, state), params, local)
    sender, relative = self._sender(state.anchor), True
    if self.rule.beside:
      relative = self.relative
    message = self.rule.message(end, relative)
    if self.late:
      mean, memory = sender.flush(state.flight.held, state.compression)
      in_flight = state.flight.in_flight
      state = self._select_memory(in_flight, memory, state)
      end = self._move_if(in_flight, end, mean, (), relative)
      if self.rule.beside:  # Where it is, seen from the new anchor.
        message = self.rule.message(end, relative)
    mean, memory = sender.flush_now(message, state.compression)
    state = self._select_memory(begun, memory, state)
    exact = collectives.mean(self.rule.exact(end), self.axis)

    def settle(end: _sync_rule.Round) -> _sync_rule.Round:
      departed = end._replace(memory=self.rule.depart(end))
      return self.rule.settle(departed, mean, exact, relative)

    end = self._change_if(begun, end, settle)
    state = state._replace(
      clock=state.clock.cut_short(self.policy),
      anchor=end.anchor,
      memory=end.memory,
      kept=jax.tree.map(jnp.zeros_like, state.kept),
    )
    if self.late:
      flight = state.flight._replace(
        held=self._hold_nothing(state, state.flight.held),
        in_flight=jnp.zeros_like(state.flight.in_flight),
        arrived_loss=_unknown() if self.within else (),
      )
      state = state._replace(flight=flight)
    updates = _anchor.onto(state.anchor, params)
    return collectives.varying(Step(updates, end.inner, state), self.axis)

  # A round's end, in its three forms.

  def _end(
    self,
    step: Step,
    sent: tuple[Any, ...],
    params: optax.Params,
    steps: int | None,
  ) -> Step:
    step = self._receive(step, sent)
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self._round(step, params, local)
    if not self.late:
      target, loss, inner, state = self._end_now(end, step.sync)
    elif self.within:
      target, loss, inner, state = self._end_within(end, step.sync, steps)
    else:
      target, loss, inner, state = self._end_late(end, step.sync, steps)
    # A worker that goes nowhere keeps its inner update to the bit.
    updates = _anchor.towards(step.updates, target, local)
    state = state._replace(clock=state.clock.end(self.policy, loss))
    return collectives.varying(Step(updates, inner, state), self.axis)

  def _go_on(self, step: Step, sent: tuple[Any, ...]) -> Step:
    state = self._receive(step, sent).sync
    state = state._replace(clock=state.clock.unsynchronized())
    return collectives.varying(step._replace(sync=state), self.axis)

  def _end_now(
    self, end: _sync_rule.Round, state: SyncState
  ) -> tuple[PyTree, Any, PyTree, SyncState]:
    """Takes the mean of this round; nothing is under way."""
    new = _sender.Contribution(
      self.rule.message(end, self.relative),
      (state.clock.mean_loss(), self.rule.exact(end)),
    )
    mean, memory = self._sender(state.anchor).mean_now(new, state.compression)
    loss, exact = mean.exact
    departed = end._replace(memory=self.rule.depart(end))
    after = self.rule.move(departed, mean.message, exact, self.relative)
    target = self._mixed(end, after)
    if target is None:
      target = self.rule.place(end, after)
    state = state._replace(
      anchor=after.anchor,
      memory=after.memory,
      kept=jax.tree.map(jnp.ones_like, state.kept),
      compression=memory,
    )
    return target, loss, after.inner, state

  def _end_late(
    self, end: _sync_rule.Round, state: SyncState, steps: int | None
  ) -> tuple[PyTree, Any, PyTree, SyncState]:
    """Takes the mean of the round before, and holds this round's message."""
    late = self._is_late(state, steps)
    flight = state.flight
    present = self._contribution(end, state)
    end = end._replace(memory=self.rule.depart(end))
    # In the first delayed round nothing has arrived yet. Nothing happens to
    # the anchor then: a momentum must not move it by a gradient of zero. What
    # was sent of nothing, a sign perhaps, does not stay in a residual either.
    arrived = flight.in_flight | ~late
    mean, memory = self._sender(state.anchor).mean(
      flight.held, present, late, steps, state.compression
    )
    state = self._select_memory(arrived, memory, state)
    after = self._move_if(arrived, end, mean.message, (), self.relative)
    loss, _ = mean.exact
    if self.policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    state = state._replace(anchor=after.anchor, memory=after.memory)
    target, state = self._set_out(end, present, late, state)
    return target, loss, after.inner, state

  def _end_within(
    self, end: _sync_rule.Round, state: SyncState, steps: int | None
  ) -> tuple[PyTree, Any, PyTree, SyncState]:
    """Holds this round's message; the last one has arrived before."""
    late = self._is_late(state, steps)
    present = self._contribution(end, state)
    state = state._replace(memory=self.rule.depart(end))
    target, state = self._set_out(end, present, late, state)
    loss = state.flight.arrived_loss
    flight = state.flight._replace(arrived_loss=_unknown())
    return target, loss, end.inner, state._replace(flight=flight)

  def _set_out(
    self,
    end: _sync_rule.Round,
    present: _sender.Contribution,
    late: jax.Array,
    state: SyncState,
  ) -> tuple[PyTree, SyncState]:
    """Returns where the next round begins, and holds what it sends."""
    rule, late_by = self.rule, self.overlap
    assert late_by is not None
    if rule.beside:
      after = end._replace(anchor=state.anchor, memory=state.memory)
      target = end.local if self.within else rule.place(end, after)
      here = after._replace(local=target)
      present = present._replace(message=rule.message(here, self.relative))
      keep = jnp.ones((), jnp.float32)
    elif self.mixes:
      target, keep = end.local, jnp.ones((), jnp.float32)
    else:
      rho = late_by.carry
      if rho is None:
        rho = 1 / collectives.size(self.axis)
      keep = jnp.where(late, _anchor.scalar(rho), 0.0)
      # Without a delay the round's progress is in the anchor already.
      left = jax.tree.map(lambda p: jnp.where(late, p, 0.0), present.message)
      present = present._replace(message=left)
      target = jax.tree.map(
        lambda a, p: a - _anchor.rounded(keep * p),
        state.anchor, rule.progress_in(left),
      )  # fmt: skip
    flight = state.flight._replace(
      held=self._sender(state.anchor).hold(
        present, state.flight.held, state.compression
      ),
      in_flight=late,
    )
    return target, state._replace(flight=flight, kept=keep)

  # A mean that arrives within the next round.

  def _arrive_if_due(
    self,
    step: Step,
    params: optax.Params,
    steps: int | None,
    control: _control.Control,
  ) -> Step:
    arrives = control.arrives
    if (arrives is None) != (control.round_ends is None):
      raise ValueError(
        "`control` must say both `round_ends` and `arrives`, or none of them, "
        "where a mean arrives within a round, got "
        f"round_ends={control.round_ends} and {arrives=}."
      )
    if arrives is None:
      state = step.sync
      sender = self._sender(state.anchor)
      assert self.overlap is not None and self.overlap.steps is not None
      delay = jnp.minimum(self.overlap.steps, state.clock.interval)
      due = state.flight.in_flight & (state.clock.round_step >= delay)
      if steps is not None:
        due &= sender.complete(state.flight.held)
      late = self._is_late(state, steps)
      due = jnp.where(late, due, state.clock.is_over())
      return jax.lax.cond(
        collectives.agreed(due, self.axis),
        lambda step, params: self._arrive(step, params, steps),
        lambda step, params: collectives.varying(step, self.axis),
        step,
        params,
      )
    if not arrives:
      return step
    if steps is not None:
      step = step._replace(sync=self._lost_unless_there(step.sync))
    return self._arrive(step, params, steps)

  def _arrive(
    self, step: Step, params: optax.Params, steps: int | None
  ) -> Step:
    """Moves the anchor by the mean of what was under way."""
    state = step.sync
    late = self._is_late(state, steps)
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self._round(step, params, local)
    mean, memory = self._sender(state.anchor).mean(
      state.flight.held, self._contribution(end, state), late, steps,
      state.compression,
    )  # fmt: skip
    after = self.rule.move(end, mean.message, (), self.relative)
    target = self._mixed(end, after)
    if target is None and self.rule.beside:
      target = self.rule.place(end, after)
    elif target is None:
      # Without a delay the round's progress is in the anchor already.
      target = jax.tree.map(
        lambda a, p: a - jnp.where(late, p, 0.0), after.anchor, end.progress
      )
    kept = state.kept
    if not (self.mixes or self.rule.beside):
      kept = jnp.zeros_like(kept)
    loss, _ = mean.exact
    flight = state.flight._replace(
      in_flight=jnp.zeros_like(state.flight.in_flight),
      arrived_loss=loss if self.policy.needs_loss else (
        state.flight.arrived_loss
      ),
    )  # fmt: skip
    state = state._replace(
      anchor=after.anchor,
      memory=after.memory,
      kept=kept,
      compression=memory,
      flight=flight,
    )
    updates = _anchor.towards(step.updates, target, local)
    return collectives.varying(Step(updates, after.inner, state), self.axis)

  # What the forms share.

  def _round(
    self, step: Step, params: optax.Params, local: PyTree
  ) -> _sync_rule.Round:
    state = step.sync
    start = state.anchor
    if self.late and not self.rule.beside:
      # The round began at anchor - kept * pending; of that the worker keeps
      # no copy, and what rounding adds to it is sent along as progress.
      kept = state.kept
      if self.mixes:
        kept = state.flight.in_flight.astype(jnp.float32)
      held = self._sender(state.anchor).own(state.flight.held).message
      start = jax.tree.map(
        lambda a, p: a - _anchor.rounded(kept * p),
        state.anchor, self.rule.progress_in(held),
      )  # fmt: skip
    return _sync_rule.Round(
      anchor=state.anchor,
      local=local,
      progress=jax.tree.map(jnp.subtract, start, local),
      params=params,
      inner=step.inner,
      memory=state.memory,
      step=state.clock.step - 1,
      optimizer=self.optimizer,
      num_workers=collectives.size(self.axis),
    )

  def _contribution(
    self, end: _sync_rule.Round, state: SyncState
  ) -> _sender.Contribution:
    message = self.rule.message(end, self.relative)
    return _sender.Contribution(message, (state.clock.mean_loss(), ()))

  def _mixed(
    self, before: _sync_rule.Round, after: _sync_rule.Round
  ) -> PyTree | None:
    if self.overlap is None or self.overlap.mix is None:
      return None
    own = _anchor.scalar(self.overlap.mix)

    def one(w: jax.Array, a: jax.Array) -> jax.Array:
      alpha = own.astype(a.dtype)
      return alpha * w + (1 - alpha) * a

    return jax.tree.map(one, before.local, after.anchor)

  def _move_if(
    self,
    flag: jax.Array,
    end: _sync_rule.Round,
    mean: PyTree,
    exact: PyTree,
    relative: bool,
  ) -> _sync_rule.Round:
    return self._change_if(
      flag, end, lambda end: self.rule.move(end, mean, exact, relative)
    )

  def _change_if(
    self, flag: jax.Array, end: _sync_rule.Round, change: Any
  ) -> _sync_rule.Round:
    """Applies a change, or nothing; `flag` is equal on all workers."""

    # A conditional and not a selection: a compiler cannot merge it with what
    # comes before, and so rounds alike in every form of the program.
    def moving(end: _sync_rule.Round) -> PyTree:
      parts = end.anchor, end.memory, end.inner
      return collectives.varying(parts, self.axis)

    anchor, memory, inner = jax.lax.cond(
      collectives.agreed(flag, self.axis),
      lambda: moving(change(end)),
      lambda: moving(end),
    )
    return end._replace(anchor=anchor, memory=memory, inner=inner)

  def _select_memory(
    self, flag: jax.Array, memory: PyTree, state: SyncState
  ) -> SyncState:
    memory = _anchor.either(flag, memory, state.compression)
    return state._replace(compression=memory)

  def _is_late(self, state: SyncState, steps: int | None) -> jax.Array:
    """Returns whether this round is one of the delayed ones."""
    assert self.overlap is not None
    begins = state.clock.step - state.clock.round_step
    late = begins >= self.overlap.after_step
    if steps is not None:  # What was streamed is what there is.
      late = jnp.full_like(late, True)
    return late

  def _hold_nothing(self, state: SyncState, before: Any) -> Any:
    nothing = _sender.Contribution(
      jax.tree.map(jnp.zeros_like, self.rule.like(state.anchor)),
      (_clock.unknown_loss(self.policy), ()),
    )
    return self._sender(state.anchor).hold(nothing, before, state.compression)

  def _sender(self, anchor: PyTree) -> Any:
    """Makes the sender; of the anchor only shapes matter."""
    stream = None if self.overlap is None else self.overlap.stream
    if stream is None:
      return _sender.Sender(self.axis, self.compression)
    like = _sender.Contribution(
      self.rule.like(anchor), (_clock.unknown_loss(self.policy), ())
    )
    if self.compression is not None:
      return _chunked_stream.ChunkedStream(self.compression, self.axis, like)
    return _streaming.ExactStream(stream, self.axis, like)

  # What only a stream does.

  def _stream_steps(self, control: _control.Control) -> int | None:
    steps = control.stream_steps
    stream = None if self.overlap is None else self.overlap.stream
    if stream is None:
      if steps not in ("fixed", None):
        raise ValueError(
          "`stream_steps` must be left out of the control of a method that "
          f"streams nothing, got {steps}. Build it with "
          "`overlap=Delayed(stream=Stream())` to stream."
        )
      return None
    return self._fixed_steps() if steps == "fixed" else steps

  def _fixed_steps(self) -> int:
    """Returns in how many steps a message is sent where no host chooses."""
    assert self.overlap is not None
    steps, after = self.policy.constant, self.overlap.after_step
    if after:
      reason = f"the first {after} steps are not delayed"
    elif steps is None:
      reason = "the interval is not one number"
    elif steps > (self.overlap.steps or steps):
      # All has arrived before the round's last steps.
      reason = (
        f"the mean arrives {self.overlap.steps} steps into a longer round"
      )
    else:
      return steps
    # To send all at the round's end, in a conditional, would hide nothing, and
    # nobody would notice.
    raise ValueError(
      "`stream_steps` must be given to `update`, in its `control`, by a "
      f"streamed method whose steps do not all send alike: here {reason}. Let "
      "the host choose: `jdist.training.Trainer(workers, step, "
      "stream_steps=(1, 2, 4, 8, 16))`, or in a loop of your own by "
      "`jdist.transforms.rounds_ahead`; None sends all that is left at the "
      "round's end."
    )

  def _receive(self, step: Step, sent: tuple[Any, ...]) -> Step:
    """Stores what has been sent in this step."""
    if not sent:
      return step
    state = step.sync
    held, memory = self._sender(state.anchor).receive(
      state.flight.held, sent, state.compression, state.flight.in_flight
    )
    flight = state.flight._replace(held=held)
    return step._replace(sync=state._replace(flight=flight, compression=memory))

  def _receive_last(self, step: Step, sent: tuple[Any, ...]) -> Step:
    """Stores what has been sent, on CPUs not before the updates are there.

    XLA's CPU compiler gives memory that is free to what comes next, which then
    has to wait for it; so a message under way must keep its own until the
    computation that hides it has ended.  On GPUs copies run beside the
    kernels, and nothing need be done.
    """
    if not sent:
      return step
    state = step.sync

    def both(state: SyncState) -> tuple[Any, Any]:
      pair = state.flight.held, state.compression
      return collectives.varying(pair, self.axis)

    def received(state: SyncState) -> tuple[Any, Any]:
      return both(self._receive(step._replace(sync=state), sent).sync)

    def behind(updates: PyTree) -> tuple[Any, Any]:
      # Always true, and known to nobody before all updates are: at least one
      # step of the round has been taken.
      ends = [jnp.ravel(x)[-1] for x in jax.tree.leaves(updates) if x.size]
      unknown = jnp.isnan(sum(jnp.real(x).astype(jnp.float32) for x in ends))
      return jax.lax.cond(
        state.clock.round_step >= unknown.astype(jnp.int32),
        lambda: received(state),
        lambda: both(state),
      )

    held, memory = jax.lax.platform_dependent(
      step.updates, cpu=behind, default=lambda _: received(state)
    )
    flight = state.flight._replace(held=held)
    return step._replace(sync=state._replace(flight=flight, compression=memory))

  def _lost_unless_there(self, state: SyncState) -> SyncState:
    """Makes a mean NaN of which something has not arrived.

    Whoever ends a round says that all of it has been sent, which only the
    device knows: a mean of a part must not pass for the whole.
    """
    held = state.flight.held
    there = self._sender(state.anchor).complete(held)
    arrived = jax.tree.map(lambda x: jnp.where(there, x, jnp.nan), held.arrived)
    flight = state.flight._replace(held=held._replace(arrived=arrived))
    return state._replace(flight=flight)


def _unknown() -> jax.Array:
  return jnp.full((), jnp.nan, jnp.float32)


def ahead(state: SyncState) -> jax.Array:
  """Returns the places of the next two updates; see `rounds_ahead`."""
  if state.flight != ():
    return _delayed.look_ahead(state.clock, state.flight)
  rows = state.clock.ahead()
  return jnp.concatenate([rows[..., :1], rows[..., 1:], rows[..., :1]], -1)
