"""Late rounds: a mean that arrives while the next round is computed."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, states
from jdist.transforms import _control
from jdist.transforms.local import (
  _anchor,
  _chunked_stream,
  _clock,
  _local_steps,
  _sender,
  _sync_rule,
)

PyTree = Any
Step: TypeAlias = _local_steps.Step
SyncState: TypeAlias = _local_steps.SyncState
# A step that no training reaches.
_NEVER = 2**30


@states.declare(
  shared=("in_flight", "arrived_loss", "due_after", "device_before")
)
class Flight(NamedTuple):
  """A message under way, part of the state of local steps.

  Attributes:
    held: this worker's message of the last round, as its sender holds it.
    in_flight: whether `held` holds one, bool scalar.
    arrived_loss: the mean loss that arrived in this round, float32 scalar, NaN
      if none has; `()` where a mean arrives at a round's end.
    due_after: the steps of a round after which the mean of the last one is due,
      0 for all of them, int32 scalar, constant.
    device_before: rounds that begin before this step the device ends, int32
      scalar; it changes only where the first long round begins the delay.
  """

  held: PyTree
  in_flight: jax.Array
  arrived_loss: Any
  due_after: jax.Array
  device_before: jax.Array

  def ahead(self, clock: _clock.RoundClock) -> jax.Array:
    """Returns the places of the next two updates; see `rounds_ahead`."""
    rows = clock.ahead()
    interval, offset = rows[..., 0], rows[..., 1]
    begins = jnp.stack([clock.step, clock.step + 1], -1) - offset
    late = begins >= self.device_before[..., None]
    # The second of the two updates may be in a new round, and the message under
    # way then is that of the present one.
    sends = (offset[..., 1] == 0) & late[..., 0]
    flying = jnp.stack([self.in_flight, self.in_flight | sends], -1)
    due = self.due_after[..., None]
    window = jnp.minimum(interval, due)
    window = jnp.where(flying | (offset >= window), window, 0)
    window = jnp.where(due > 0, window, interval)
    return jnp.stack([jnp.where(late, window, -1), offset, interval], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class LateSynchronizer(_local_steps.Synchronizer):
  """Takes the mean of a round in the next one, at its end or within it."""

  steps: int | None = None
  carry: jax.typing.ArrayLike | None = 1.0
  after_step: int | None = 0
  stream: Any = None

  @property
  def relative(self) -> bool:
    """Returns whether a message is a difference to something that all know."""
    return self.compression is not None or not self.rule.beside

  def init(self, params: optax.Params) -> SyncState:
    """Returns the state before the first step, with nothing under way."""
    state = super().init(params)
    decides = self.steps is not None or self.stream is not None
    device_before = jnp.asarray(
      (self.after_step or 0) if decides else 0, jnp.int32
    )
    if self.after_step is None:
      long = self._is_long(state.clock.interval)
      device_before = jnp.where(long, 0, _NEVER).astype(jnp.int32)
    flight = Flight(
      held=self._hold_nothing(state, None),
      in_flight=jnp.asarray(False),
      arrived_loss=() if self.steps is None else _unknown(),
      due_after=jnp.asarray(self.steps or 0, jnp.int32),
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
    """Lets the mean arrive that is due, and ends the round if it is over."""
    steps, ends = self._stream_steps(control), control.round_ends
    if self.steps is not None or ends is not None:
      step, sent = self._receive_last(step, sent), ()
    if self.steps is not None:
      step = self._arrive_if_due(step, params, steps, control)
    if ends is None:
      over = step.sync.clock.is_over()
      if self.steps is not None:
        over &= ~step.sync.flight.in_flight
      elif steps is not None:
        sender = self._sender(step.sync.anchor)
        over &= sender.complete(step.sync.flight.held, sent)
      return jax.lax.cond(
        collectives.agreed(over, self.axis),
        lambda step, sent, params: self._end(
          self._receive(step, sent), params, steps
        ),
        lambda step, sent, params: self.go_on(self._receive(step, sent)),
        step,
        sent,
        params,
      )
    if not ends:
      return self.go_on(step)
    if steps is not None and self.steps is None:
      step = step._replace(sync=self._lost_unless_there(step.sync))
    return self._end(step, params, steps)

  def drain(
    self, inner: PyTree, state: SyncState, params: optax.Params, residuals: bool
  ) -> Step:
    """Brings in everything that was begun, the oldest first; no step."""
    begun = self._begun(state, residuals)
    local = jax.tree.map(_anchor.wide, params)
    end = self.round(Step((), inner, state), params, local)
    message = self.rule.message(end, self.relative)
    sender, in_flight = self._sender(state.anchor), state.flight.in_flight
    mean, memory = sender.flush(state.flight.held, state.compression)
    state = self._select_memory(in_flight, memory, state)
    end = self._move_if(in_flight, end, mean)
    if self.rule.beside:  # Where it is, seen from the new anchor.
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
      arrived_loss=() if self.steps is None else _unknown(),
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
    if self.mix is not None:
      kept = state.flight.in_flight.astype(jnp.float32)
    held = self._sender(state.anchor).own(state.flight.held).message
    return jax.tree.map(
      lambda a, p: a - _anchor.rounded(kept * p),
      state.anchor, self.rule.progress_in(held),
    )  # fmt: skip

  def _end(self, step: Step, params: optax.Params, steps: int | None) -> Step:
    state = step.sync
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self.round(step, params, local)
    late = self._is_late(state, steps)
    present = self._contribution(end, state)
    departed = end._replace(memory=self.rule.depart(end))
    if self.steps is None:
      after, loss, state = self._late_mean(
        departed, present, late, steps, state
      )
    else:  # It has arrived before.
      after, loss = departed, state.flight.arrived_loss
      state = state._replace(
        memory=departed.memory,
        flight=state.flight._replace(arrived_loss=_unknown()),
      )
    target, state = self._set_out(end, present, late, state)
    if self.after_step is None:
      state = self._begin_delay(state)
    state = state._replace(clock=state.clock.end(self.policy, loss))
    updates = _anchor.towards(step.updates, target, local)
    return collectives.varying(Step(updates, after.inner, state), self.axis)

  def _late_mean(
    self,
    end: _sync_rule.Round,
    present: _sender.Contribution,
    late: jax.Array | bool,
    steps: int | None,
    state: SyncState,
  ) -> tuple[_sync_rule.Round, Any, SyncState]:
    """Moves the anchor by the mean of the round before."""
    flight = state.flight
    # In the first delayed round nothing has arrived yet. Nothing happens to
    # the anchor then: a momentum must not move it by a gradient of zero. What
    # was sent of nothing, a sign perhaps, does not stay in a residual either.
    arrived = flight.in_flight
    if late is not True:
      arrived |= ~late
    mean, memory = self._sender(state.anchor).mean(
      flight.held, present, late, steps, state.compression
    )
    state = self._select_memory(arrived, memory, state)
    after = self._move_if(arrived, end, mean.message)
    loss = mean.exact
    if self.policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    return after, loss, state._replace(anchor=after.anchor, memory=after.memory)

  def _set_out(
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
      target = end.local if self.steps is not None else rule.place(end, after)
      here = after._replace(local=target)
      present = present._replace(message=rule.message(here, self.relative))
      keep = jnp.ones((), jnp.float32)
    elif self.mix is not None:
      target, keep = end.local, jnp.ones((), jnp.float32)
    else:
      rho = self.carry
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
      in_flight=jnp.asarray(late),
    )
    return target, state._replace(flight=flight, kept=keep)

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
      delay = jnp.minimum(state.flight.due_after, state.clock.interval)
      due = state.flight.in_flight & (state.clock.round_step >= delay)
      if steps is not None:
        due &= sender.complete(state.flight.held)
      late = self._is_late(state, steps)
      due = jnp.where(late, due, state.clock.is_over())
      due = collectives.agreed(due, self.axis)
      mean = self._mean_if(due, state, steps) if late is True else None
      return jax.lax.cond(
        due,
        lambda step, params: self._arrive(step, params, steps, mean),
        lambda step, params: collectives.varying(step, self.axis),
        step,
        params,
      )
    if not arrives:
      return step
    if steps is not None:
      step = step._replace(sync=self._lost_unless_there(step.sync))
    return self._arrive(step, params, steps)

  def _mean_if(
    self, due: jax.Array, state: SyncState, steps: int | None
  ) -> Any:
    """Takes the mean of what is held, if it is due, or of nothing.

    In a conditional of its own, so that no collective waits for the step.
    """

    def mean(held: PyTree, memory: PyTree) -> Any:
      new = _sender.Contribution((), ())  # Not looked at: all rounds are late.
      found = self._sender(state.anchor).mean(held, new, True, steps, memory)
      return collectives.varying(found, self.axis)

    operands = state.flight.held, state.compression
    shapes = jax.eval_shape(mean, *operands)

    def nothing(held: PyTree, memory: PyTree) -> Any:
      del held
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
      return collectives.varying((zeros, memory), self.axis)

    return jax.lax.cond(due, mean, nothing, *operands)

  def _arrive(
    self,
    step: Step,
    params: optax.Params,
    steps: int | None,
    arrived: Any = None,
  ) -> Step:
    """Moves the anchor by the mean of what was under way."""
    state = step.sync
    late = self._is_late(state, steps)
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self.round(step, params, local)
    mean, memory = arrived or self._sender(state.anchor).mean(
      state.flight.held, self._contribution(end, state), late, steps,
      state.compression,
    )  # fmt: skip
    after = self.rule.move(end, mean.message, (), self.relative)
    target = self.mixed(end, after)
    if target is None and self.rule.beside:
      target = self.rule.place(end, after)
    elif target is None:
      # Without a delay the round's progress is in the anchor already.
      target = jax.tree.map(
        lambda a, p: a - jnp.where(late, p, 0.0), after.anchor, end.progress
      )
    kept = state.kept
    if self.mix is None and not self.rule.beside:
      kept = jnp.zeros_like(kept)
    flight = state.flight._replace(
      in_flight=jnp.zeros_like(state.flight.in_flight),
      arrived_loss=mean.exact if self.policy.needs_loss else (
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

  def _contribution(
    self, end: _sync_rule.Round, state: SyncState
  ) -> _sender.Contribution:
    message = self.rule.message(end, self.relative)
    return _sender.Contribution(message, state.clock.mean_loss())

  def _move_if(
    self, flag: jax.Array, end: _sync_rule.Round, mean: PyTree
  ) -> _sync_rule.Round:
    return self.change_if(
      flag, end, lambda end: self.rule.move(end, mean, (), self.relative)
    )

  def _select_memory(
    self, flag: jax.Array, memory: PyTree, state: SyncState
  ) -> SyncState:
    memory = _anchor.either(flag, memory, state.compression)
    return state._replace(compression=memory)

  def _is_late(self, state: SyncState, steps: int | None) -> jax.Array | bool:
    """Returns whether this round is a delayed one; True if all are."""
    # What was streamed is what there is.
    if steps is not None or self.after_step == 0:
      return True
    begins = state.clock.step - state.clock.round_step
    if self.after_step is None:
      return begins >= state.flight.device_before
    return begins >= self.after_step

  def _is_long(self, interval: jax.Array) -> jax.Array:
    """Returns whether a mean arrives within a round and not at its end."""
    return interval > (self.steps or 1)

  def _begin_delay(self, state: SyncState) -> SyncState:
    """Delays all rounds from the next one on, if it is the first long one."""
    clock, flight = state.clock, state.flight
    first = self._is_long(clock.next_interval) & (
      flight.device_before == _NEVER
    )
    begins = jnp.where(first, clock.step, flight.device_before)
    return state._replace(flight=flight._replace(device_before=begins))

  def _hold_nothing(self, state: SyncState, before: Any) -> Any:
    nothing = _sender.Contribution(
      jax.tree.map(jnp.zeros_like, self.rule.like(state.anchor)),
      _clock.unknown_loss(self.policy),
    )
    return self._sender(state.anchor).hold(nothing, before, state.compression)

  def _sender(self, anchor: PyTree) -> Any:
    """Makes the sender; of the anchor only shapes matter."""
    if self.stream is None:
      return _sender.Sender(self.axis, self.compression)
    like = _sender.Contribution(
      self.rule.like(anchor), _clock.unknown_loss(self.policy)
    )
    if self.compression is not None:
      return _chunked_stream.ChunkedStream(self.compression, self.axis, like)
    return self.stream.sender(self.axis, like)

  # What only a stream does.

  def _stream_steps(self, control: _control.Control) -> int | None:
    """Returns in how many steps the message is sent of which this is one."""
    if self.stream is None:
      return None
    if control.stream_steps != "fixed":
      return control.stream_steps
    steps, after = self.policy.constant, self.after_step
    if after is None:
      reason = "the delay begins with the first long round"
    elif after:
      reason = f"the first {after} steps are not delayed"
    elif steps is None:
      reason = "the interval is not one number"
    elif steps > (self.steps or steps):
      # All has arrived before the round's last steps.
      reason = f"the mean arrives {self.steps} steps into a longer round"
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

  def _receive(
    self, step: Step, sent: tuple[Any, ...], *, write_back: bool = True
  ) -> Step:
    """Stores what has been sent in this step."""
    if not sent:
      return step
    state = step.sync
    held, memory = self._sender(state.anchor).receive(
      state.flight.held,
      sent,
      state.compression,
      state.flight.in_flight,
      write_back=write_back,
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

    def received(state: SyncState, write_back: bool) -> tuple[Any, Any]:
      step_now = step._replace(sync=state)
      return both(self._receive(step_now, sent, write_back=write_back).sync)

    def behind(updates: PyTree) -> tuple[Any, Any]:
      # Always true, and known to nobody before all updates are: at least one
      # step of the round has been taken.
      ends = [jnp.ravel(x)[-1] for x in jax.tree.leaves(updates) if x.size]
      unknown = jnp.isnan(sum(jnp.real(x).astype(jnp.float32) for x in ends))
      return jax.lax.cond(
        state.clock.round_step >= unknown.astype(jnp.int32),
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
