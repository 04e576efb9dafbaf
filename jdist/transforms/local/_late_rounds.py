"""Late rounds: a mean that arrives at the end of the next round."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import collectives
from jdist.transforms import _control, intervals
from jdist.transforms.local import (
  _anchor,
  _chunked_stream,
  _local_steps,
  _round_state,
  _sender,
  _sync_rule,
)

PyTree = Any
Step: TypeAlias = _round_state.Step
SyncState: TypeAlias = _round_state.SyncState


@dataclasses.dataclass(frozen=True, eq=False)
class LateSynchronizer(_local_steps.Synchronizer):
  """Takes the mean of a round at the end of the next one."""

  carry: jax.typing.ArrayLike | None = 1.0
  after_step: int | None = 0
  stream: Any = None

  @property
  def relative(self) -> bool:
    return self.compression is not None or not self.rule.beside

  def init(self, params: optax.Params) -> SyncState:
    """Returns the state before the first step, with nothing under way."""
    state = super().init(params)
    device_before = jnp.asarray(
      (self.after_step or 0) if self.stream is not None else 0, jnp.int32
    )
    if self.after_step is None:
      long = self.is_long(state.clock.interval)
      device_before = jnp.where(long, 0, _round_state.NEVER).astype(jnp.int32)
    flight = _round_state.Flight(
      held=self._hold_nothing(state, None),
      in_flight=jnp.asarray(False),
      arrived_loss=(),
      due_after=jnp.zeros((), jnp.int32),
      device_before=device_before,
    )
    return state._replace(flight=flight, kept=jnp.zeros((), jnp.float32))

  def send(
    self, state: SyncState, control: _control.Control
  ) -> tuple[Any, ...]:
    """Starts the next parts of what is under way.

    First in a step, and from the state: nothing waits for the step's gradients,
    and they wait for nothing.
    """
    if self.stream is None:
      return super().send(state, control)
    steps = self.stream_steps(control)
    if steps is None:
      return ()
    return self.sender(state.anchor).send(
      state.flight.held, steps, state.compression
    )

  def finish(
    self,
    step: Step,
    params: optax.Params,
    sent: tuple[Any, ...],
    control: _control.Control,
  ) -> Step:
    """Ends the round if it is over, with the mean of the one before."""
    steps, ends = self.stream_steps(control), control.round_ends
    if ends is None:
      over = step.sync.clock.is_over()
      if steps is not None:
        sender = self.sender(step.sync.anchor)
        over &= sender.complete(step.sync.flight.held, sent)
      return jax.lax.cond(
        collectives.agreed(over, self.axis),
        lambda step, sent, params: self.end_late(
          self._receive(step, sent), params, steps
        ),
        lambda step, sent, params: self.go_on(self._receive(step, sent)),
        step,
        sent,
        params,
      )
    step = self.receive_last(step, sent)
    if not ends:
      return self.go_on(step)
    if steps is not None:
      step = step._replace(sync=self.lost_unless_there(step.sync))
    elif self.stream is None:
      step = self._move_last(step)
    return self.end_late(step, params, steps)

  def drain(
    self, inner: PyTree, state: SyncState, params: optax.Params, residuals: bool
  ) -> Step:
    """Brings in everything that was begun, the oldest first; no step."""
    begun = self._begun(state, residuals)
    local = jax.tree.map(_anchor.wide, params)
    end = self.round(Step((), inner, state), params, local)
    sender, in_flight = self.sender(state.anchor), state.flight.in_flight
    mean, memory = sender.flush(state.flight.held, state.compression)
    memory = _anchor.either(in_flight, memory, state.compression)
    state = state._replace(compression=memory)
    end = self._move_if(in_flight, end, mean)
    # Only now: what has arrived is a part of what a rule measures it by.
    message = self.rule.message(end, self.relative)
    end, state = self.settle(begun, end, message, self.relative, state)
    state = state._replace(
      clock=state.clock.cut_short(self.policy),
      anchor=end.anchor,
      memory=end.memory,
      kept=jnp.zeros_like(state.kept),
    )
    flight = state.flight._replace(
      held=self._hold_nothing(state, state.flight.held),
      in_flight=jnp.zeros_like(in_flight),
      arrived_loss=jax.tree.map(
        lambda x: jnp.full_like(x, intervals.UNKNOWN_LOSS),
        state.flight.arrived_loss,
      ),
    )
    state = state._replace(flight=flight)
    updates = _anchor.onto(state.anchor, params)
    return collectives.varying(Step(updates, end.inner, state), self.axis)

  def start(self, state: SyncState) -> PyTree:
    """Returns where this worker's round began.

    At anchor - kept * pending; of that the worker keeps no copy, and what
    rounding adds to it is sent along as progress.
    """
    if self.rule.beside:
      return state.anchor
    kept = state.kept
    held = self.sender(state.anchor).own(state.flight.held).message
    return jax.tree.map(
      lambda a, p: a - _anchor.rounded(kept * p),
      state.anchor, self.rule.progress_in(held),
    )  # fmt: skip

  def end_late(
    self, step: Step, params: optax.Params, steps: int | None
  ) -> Step:
    """Ends a round; its message was streamed in `steps`, if it was."""
    state = step.sync
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self.round(step, params, local)
    late = self.is_late(state, steps)
    present = self.contribution(end, state)
    departed = end._replace(memory=self.rule.depart(end))
    after, loss, state = self.late_mean(departed, present, late, steps, state)
    target, state = self.set_out(end, present, late, state)
    if self.after_step is None:
      state = self._begin_delay(state)
    state = state._replace(clock=state.clock.end(self.policy, loss))
    updates = _anchor.towards(step.updates, target, local)
    return collectives.varying(Step(updates, after.inner, state), self.axis)

  def late_mean(
    self,
    end: _sync_rule.Round,
    present: _sender.Contribution,
    late: jax.Array | bool,
    steps: int | None,
    state: SyncState,
  ) -> tuple[_sync_rule.Round, Any, SyncState]:
    """Moves the anchor by the mean of the round before; returns its loss."""
    flight = state.flight
    # In the first delayed round nothing has arrived yet. Nothing happens to
    # the anchor then: a momentum must not move it by a gradient of zero. What
    # was sent of nothing, a sign perhaps, does not stay in a residual either.
    arrived = flight.in_flight
    if late is not True:
      arrived |= ~late
    mean, memory = self.sender(state.anchor).mean(
      flight.held, present, late, steps, state.compression
    )
    memory = _anchor.either(arrived, memory, state.compression)
    state = state._replace(compression=memory)
    after = self._move_if(arrived, end, mean.message)
    loss = mean.exact
    if self.policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    return after, loss, state._replace(anchor=after.anchor, memory=after.memory)

  def set_out(
    self,
    end: _sync_rule.Round,
    present: _sender.Contribution,
    late: jax.Array | bool,
    state: SyncState,
  ) -> tuple[PyTree, SyncState]:
    """Returns where the next round begins, and holds what it sends."""
    rule = self.rule
    if rule.beside:
      after = end._replace(anchor=state.anchor, memory=state.memory)
      target = self.place(end, after)
      here = after._replace(local=target)
      present = present._replace(message=rule.message(here, self.relative))
      return target, self.hold(present, late, jnp.ones((), jnp.float32), state)
    rho = self.carry
    if rho is None:
      rho = 1 / collectives.size(self.axis)
    keep = jnp.where(late, _anchor.scalar(rho), 0.0)
    # Without a delay the round's progress is in the anchor already.
    left = jax.tree.map(lambda p: jnp.where(late, p, 0.0), present.message)
    target = jax.tree.map(
      lambda a, p: a - _anchor.rounded(keep * p),
      state.anchor, rule.progress_in(left),
    )  # fmt: skip
    present = present._replace(message=left)
    return target, self.hold(present, late, keep, state)

  def place(self, end: _sync_rule.Round, after: _sync_rule.Round) -> PyTree:
    """Returns where a worker beside the anchor goes on from."""
    return self.rule.place(end, after)

  def hold(
    self,
    present: _sender.Contribution,
    late: jax.Array | bool,
    keep: jax.Array,
    state: SyncState,
  ) -> SyncState:
    """Holds what the next round sends, of which a part was kept."""
    held = self.sender(state.anchor).hold(
      present, state.flight.held, state.compression
    )
    flight = state.flight._replace(held=held, in_flight=jnp.asarray(late))
    return state._replace(flight=flight, kept=keep)

  def contribution(
    self, end: _sync_rule.Round, state: SyncState
  ) -> _sender.Contribution:
    """Returns this worker's part of the round's mean."""
    message = self.rule.message(end, self.relative)
    return _sender.Contribution(message, state.clock.mean_loss())

  def _move_if(
    self, flag: jax.Array, end: _sync_rule.Round, mean: PyTree
  ) -> _sync_rule.Round:
    return self.change_if(
      flag, end, lambda end: self.rule.move(end, mean, (), self.relative)
    )

  def is_late(self, state: SyncState, steps: int | None) -> jax.Array | bool:
    """Returns whether this round is a delayed one; True if all are."""
    # What was streamed is what there is.
    if steps is not None or self.after_step == 0:
      return True
    begins = state.clock.step - state.clock.round_step
    if self.after_step is None:
      return begins >= state.flight.device_before
    return begins >= self.after_step

  def is_long(self, interval: jax.Array) -> jax.Array:
    """Returns whether a mean could arrive within a round, not at its end."""
    return interval > 1

  def _begin_delay(self, state: SyncState) -> SyncState:
    """Delays all rounds from the next one on, if it is the first long one."""
    clock, flight = state.clock, state.flight
    first = self.is_long(clock.next_interval) & (
      flight.device_before == _round_state.NEVER
    )
    begins = jnp.where(first, clock.step, flight.device_before)
    return state._replace(flight=flight._replace(device_before=begins))

  def _hold_nothing(self, state: SyncState, before: Any) -> Any:
    nothing = _sender.Contribution(
      jax.tree.map(jnp.zeros_like, self.rule.like(state.anchor)),
      self.unknown_loss,
    )
    return self.sender(state.anchor).hold(nothing, before, state.compression)

  def sender(self, anchor: PyTree) -> Any:
    """Makes the sender; of the anchor only shapes matter."""
    if self.stream is None:
      return _sender.Sender(self.axis, self.compression)
    like = _sender.Contribution(self.rule.like(anchor), self.unknown_loss)
    if self.compression is not None:
      return _chunked_stream.ChunkedStream(self.compression, self.axis, like)
    return self.stream.sender(self.axis, like)

  # What only a stream does.

  def stream_steps(self, control: _control.Control) -> int | None:
    """Returns in how many steps the message is sent of which this is one."""
    if self.stream is None:
      return None
    if control.stream_steps != "fixed":
      return control.stream_steps
    reason = self.uneven()
    if not reason:
      return self.policy.constant
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

  def uneven(self) -> str:
    """Says why a streamed method's steps do not all send alike, if so."""
    if self.after_step is None:
      return "the delay begins with the first long round"
    if self.after_step:
      return f"the first {self.after_step} steps are not delayed"
    if self.policy.constant is None:
      return "the interval is not one number"
    return ""

  def _receive(
    self, step: Step, sent: tuple[Any, ...], *, write_back: bool = True
  ) -> Step:
    """Stores what has been sent in this step."""
    if not sent:
      return step
    state = step.sync
    held, memory = self.sender(state.anchor).receive(
      state.flight.held,
      sent,
      state.compression,
      state.flight.in_flight,
      write_back=write_back,
    )
    flight = state.flight._replace(held=held)
    return step._replace(sync=state._replace(flight=flight, compression=memory))

  def receive_last(self, step: Step, sent: tuple[Any, ...]) -> Step:
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

    def received(state: SyncState, write_back: bool) -> tuple[Any, Any]:
      step_now = step._replace(sync=state)
      return both(self._receive(step_now, sent, write_back=write_back).sync)

    def behind(updates: PyTree) -> tuple[Any, Any]:
      return jax.lax.cond(
        _known_after(updates, state.clock),
        lambda: received(state, write_back=True),
        lambda: both(state),
      )

    held, memory = jax.lax.platform_dependent(
      step.updates,
      cpu=behind,
      default=lambda _: received(state, write_back=False),
    )
    flight = state.flight._replace(held=held)
    return step._replace(sync=state._replace(flight=flight, compression=memory))

  def _move_last(self, step: Step) -> Step:
    """Has the anchor move, on CPUs, not before the updates are there.

    It needs none of them, and XLA's CPU compiler would move it among the
    gradients' operations, fewer of which then run at once.
    """
    state = step.sync
    in_flight = jax.lax.platform_dependent(
      step.updates,
      cpu=lambda u: state.flight.in_flight & _known_after(u, state.clock),
      default=lambda _: collectives.varying(state.flight.in_flight, self.axis),
    )
    flight = state.flight._replace(in_flight=in_flight)
    return step._replace(sync=state._replace(flight=flight))

  def lost_unless_there(self, state: SyncState) -> SyncState:
    """Makes a mean NaN of which something has not arrived.

    Whoever ends a round says that all of it has been sent, which only the
    device knows: a mean of a part must not pass for the whole.
    """
    held = state.flight.held
    there = self.sender(state.anchor).complete(held)
    arrived = jax.tree.map(lambda x: jnp.where(there, x, jnp.nan), held.arrived)
    flight = state.flight._replace(held=held._replace(arrived=arrived))
    return state._replace(flight=flight)


def _known_after(updates: PyTree, clock: _round_state.RoundClock) -> jax.Array:
  """Returns True, which no compiler knows before all updates are there."""
  ends = [jnp.ravel(x)[-1] for x in jax.tree.leaves(updates) if x.size]
  unknown = jnp.isnan(sum(jnp.real(x).astype(jnp.float32) for x in ends))
  # At least one step of the round has been taken.
  return clock.round_step >= unknown.astype(jnp.int32)
