"""Late means: a round's mean is applied during, or after, the next round."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jdist import collectives
from jdist.states import PyTree
from jdist.transforms import _control, intervals
from jdist.transforms.intervals import _policy
from jdist.transforms.local import _anchor, _delayed, _round, _sync_state

Round: TypeAlias = _round.Round
Step: TypeAlias = _sync_state.Step
SyncState: TypeAlias = _sync_state.SyncState


@dataclasses.dataclass(frozen=True, eq=False)
class LateMean:
  """Holds a round's message, and applies its mean later.

  The synchronizer decides when a round ends; this updates the
  anchor and the worker then, and sends messages in between.

  Attributes:
    delay: How late a mean is, as the user gave it.
    sender: The holder of the message, a `Sender` or a `ChunkedStream`.
    rule: The sync rule.
    policy: The interval policy.
    axis: The workers' axis.
    relative: Whether messages are differences from the common anchor.
  """

  delay: _delayed.Delayed
  sender: Any
  rule: _round.SyncRule
  policy: intervals.IntervalPolicy
  axis: collectives.Axis
  relative: bool

  def init(self, state: SyncState) -> SyncState:
    """Returns the first state, with an empty message."""
    delay, clock = self.delay, state.clock
    within = delay.steps is not None
    # Where the host ends rounds, it must know which ones the device decides.
    counts = delay.stream is not None or within
    device_before = jnp.asarray(
      (delay.after_step or 0) if counts else 0, jnp.int32
    )
    if delay.after_step is None:
      long = self._is_long(clock.interval)
      device_before = jnp.where(long, 0, _sync_state.NEVER).astype(jnp.int32)
    flight = _sync_state.Flight(
      held=self._hold_nothing(state),
      in_flight=jnp.asarray(False),
      arrived_loss=_unknown_loss() if within else (),
      due_after=jnp.asarray(delay.steps or 0, jnp.int32),
      device_before=device_before,
    )
    return state._replace(flight=flight, kept=jnp.zeros((), jnp.float32))

  def start(self, state: SyncState) -> PyTree:
    """Returns where this worker's round began.

    That is anchor - kept * pending.  The worker keeps no copy of it, and the
    rounding error of its parameters is sent along as progress.
    """
    if self.rule.apart:
      return state.anchor
    kept = state.kept
    if self.delay.mix is not None:
      kept = state.flight.in_flight.astype(jnp.float32)
    held = self.sender.own(state).message
    return _anchor.behind(state.anchor, kept, self.rule.progress_in(held))

  def end(
    self, end: Round, state: SyncState, steps: int | None
  ) -> tuple[Round, PyTree, Any, SyncState]:
    """Ends a round, whose predecessor's message was streamed in `steps`.

    Returns:
      The round after the rule has moved it, where the worker starts the next
      one, the mean loss, and the state.
    """
    # The message is taken before the rule's state departs, and the mean of the
    # round before moves the anchor before the next round is placed on it.
    late = self._is_late(state, steps)
    present = self._contribution(end, state)
    end = end._replace(memory=self.rule.depart(end))
    if self.delay.steps is None:
      after, loss, state = self._move(end, present, late, steps, state)
    else:
      # The mean was applied within the round.
      after, loss, flight = end, state.flight.arrived_loss, state.flight
      if self.policy.needs_loss:
        loss = jnp.where(jnp.isfinite(loss), loss, jnp.nan)
      flight = flight._replace(arrived_loss=_unknown_loss())
      state = state._replace(memory=end.memory, flight=flight)
    target, state = self._set_out(end, present, late, state)
    if self.delay.after_step is None:
      state = self._begin_delay(state)
    return after, target, loss, state

  def _move(
    self,
    end: Round,
    present: _delayed.Contribution,
    late: jax.Array | bool,
    steps: int | None,
    state: SyncState,
  ) -> tuple[Round, Any, SyncState]:
    """Moves the anchor by the mean of the round before; returns its loss."""
    flight = state.flight
    # In the first delayed round there is no mean yet, and the anchor stays: a
    # momentum must not move it by a gradient of zero.  A codec may have sent
    # something for an empty message, a sign perhaps; it must not stay in a
    # residual either.
    arrived = flight.in_flight
    if late is not True:
      arrived |= ~late
    mean, memory = self.sender.mean(state, present, late, steps)
    memory = _anchor.either(arrived, memory, state.compression)
    after = self._move_if(arrived, end, mean.message)
    loss = mean.exact
    if self.policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    state = state._replace(
      compression=memory, anchor=after.anchor, memory=after.memory
    )
    return after, loss, state

  def _set_out(
    self,
    end: Round,
    present: _delayed.Contribution,
    late: jax.Array | bool,
    state: SyncState,
  ) -> tuple[PyTree, SyncState]:
    """Returns the next round's first parameters, and holds its message."""
    rule, delay = self.rule, self.delay
    # Workers that stay apart send the position at which they are placed, as
    # Overlap-Local-SGD does.
    if rule.apart:
      after = end._replace(anchor=state.anchor, memory=state.memory)
      # Within a round the rule has placed the worker when the mean was known.
      within = delay.steps is not None
      target = end.local if within else rule.place(end, after)
      here = after._replace(local=target)
      present = present._replace(message=rule.message(here, self.relative))
      return target, self._hold(present, late, jnp.ones((), jnp.float32), state)
    if delay.mix is not None:
      keep = jnp.asarray(late, jnp.float32)
      return end.local, self._hold(present, late, keep, state)
    rho = delay.carry
    if rho is None:
      rho = 1 / collectives.size(self.axis)
    keep = jnp.where(late, _anchor.scalar(rho), 0.0)
    # Without a delay the round's progress is in the anchor already.
    left = jax.tree.map(lambda p: jnp.where(late, p, 0.0), present.message)
    target = _anchor.behind(state.anchor, keep, rule.progress_in(left))
    return target, self._hold(present._replace(message=left), late, keep, state)

  def arrive(
    self, end: Round, state: SyncState, steps: int | None, found: Any = None
  ) -> tuple[Round, PyTree, SyncState]:
    """Moves anchor and worker within a round, by the mean that is now due.

    The mean and the compression's state are `found`, where they are known.
    """
    late = self._is_late(state, steps)
    mean, memory = found or self.sender.mean(
      state, self._contribution(end, state), late, steps
    )
    after = self.rule.move(end, mean.message, (), self.relative)
    kept = state.kept
    if self.delay.mix is not None:
      target = mixed(self.delay.mix, end.local, after.anchor)
      # Without a delay the round ends on the anchor.
      target = _anchor.either(late, target, after.anchor)
    elif self.rule.apart:
      target = self.rule.place(end, after)
    else:
      # Without a delay the round's progress is in the anchor already.
      target = jax.tree.map(
        lambda a, p: a - jnp.where(late, p, 0.0), after.anchor, end.progress
      )
      kept = jnp.zeros_like(kept)
    flight = state.flight._replace(
      in_flight=jnp.zeros_like(state.flight.in_flight)
    )
    if self.policy.needs_loss:
      flight = flight._replace(arrived_loss=mean.exact)
    state = state._replace(
      anchor=after.anchor, memory=after.memory, kept=kept, compression=memory,
      flight=flight,
    )  # fmt: skip
    return after, target, state

  def is_due(self, state: SyncState, steps: int | None) -> jax.Array:
    """Returns whether the mean is to be applied within the round, now."""
    flight, clock = state.flight, state.clock
    delay = jnp.minimum(flight.due_after, clock.interval)
    due = flight.in_flight & (clock.round_step >= delay)
    if steps is not None:
      due &= self.sender.complete(state)
    return jnp.where(self._is_late(state, steps), due, clock.is_over())

  def mean_if(self, due: jax.Array, state: SyncState, steps: int | None) -> Any:
    """Takes the held message's mean, if it is due; None if it may not be late.

    It stands in a conditional of its own, which reads the state alone, so that
    no collective waits for the step.
    """
    if self._is_late(state, steps) is not True:
      return None

    def mean() -> Any:
      new = _delayed.Contribution((), ())  # Not read, because all are late.
      found = self.sender.mean(state, new, True, steps)
      return collectives.varying(found, self.axis)

    shapes, _ = jax.eval_shape(mean)

    def nothing() -> Any:
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
      return collectives.varying((zeros, state.compression), self.axis)

    return jax.lax.cond(due, mean, nothing)

  def flush(self, end: Round, state: SyncState) -> tuple[Round, SyncState]:
    """Moves the anchor by the exact mean of the message that is held."""
    begun = state.flight.in_flight
    mean, memory = self.sender.flush(state)
    memory = _anchor.either(begun, memory, state.compression)
    end = self._move_if(begun, end, mean)
    return end, state._replace(compression=memory)

  def clear(self, state: SyncState) -> SyncState:
    """Returns the state with an empty message."""
    flight = state.flight._replace(
      held=self._hold_nothing(state),
      in_flight=jnp.zeros_like(state.flight.in_flight),
      arrived_loss=_unknown_loss() if self.delay.steps is not None else (),
    )
    return state._replace(flight=flight)

  def _contribution(
    self, end: Round, state: SyncState
  ) -> _delayed.Contribution:
    """Returns this worker's part of the round's mean."""
    message = self.rule.message(end, self.relative)
    return _delayed.Contribution(message, state.clock.mean_loss())

  def _move_if(self, flag: jax.Array, end: Round, mean: PyTree) -> Round:
    def move(end: Round) -> Round:
      return self.rule.move(end, mean, (), self.relative)

    return change_if(flag, end, move, self.axis)

  def _hold(
    self,
    present: _delayed.Contribution,
    late: jax.Array | bool,
    keep: jax.Array,
    state: SyncState,
  ) -> SyncState:
    """Holds the next round's message, of which a part was kept."""
    held = self.sender.hold(present, state)
    flight = state.flight._replace(held=held, in_flight=jnp.asarray(late))
    return state._replace(flight=flight, kept=keep)

  def _hold_nothing(self, state: SyncState) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, self.rule.like(state.anchor))
    loss = _unknown_loss() if self.policy.needs_loss else ()
    return self.sender.hold(_delayed.Contribution(zeros, loss), state)

  def _is_late(self, state: SyncState, steps: int | None) -> jax.Array | bool:
    """Returns whether this round is a delayed one; True if all are."""
    after_step = self.delay.after_step
    # Only delayed rounds are streamed.
    if steps is not None or after_step == 0:
      return True
    begins = state.clock.step - state.clock.round_step
    return begins >= (
      state.flight.device_before if after_step is None else after_step
    )

  def _is_long(self, interval: jax.Array) -> jax.Array:
    """Returns whether a round is at least thrice as long as its delay."""
    # One step late is stable from rounds of two steps on.
    steps = self.delay.steps or 1
    return interval >= (3 * steps if steps > 1 else 2)

  def _begin_delay(self, state: SyncState) -> SyncState:
    """Delays all rounds from the next one on, if it is the first long one."""
    clock, flight = state.clock, state.flight
    first = self._is_long(clock.next_interval) & (
      flight.device_before == _sync_state.NEVER
    )
    # The clock still counts the round that ends now.
    begins = jnp.where(first, clock.step, flight.device_before)
    return state._replace(flight=flight._replace(device_before=begins))

  # Streams.

  def stream_steps(self, control: _control.Control) -> int | None:
    """Returns in how many steps the present message is streamed."""
    delay, constant = self.delay, self.policy.constant
    if control.stream_steps != "fixed":
      return control.stream_steps
    if delay.after_step is None:
      reason = "the delay begins with the first long round"
    elif delay.after_step:
      reason = f"the first {delay.after_step} steps are not delayed"
    elif constant is None:
      reason = "the interval is not one number"
    elif delay.steps is not None and constant > delay.steps:
      # All was received before the round's last steps.
      reason = f"the mean arrives {delay.steps} steps into a longer round"
    else:
      return constant
    # Sending all at the round's end, in a conditional, would hide nothing, and
    # a user would not notice.
    raise ValueError(
      "`stream_steps` must be given to `update`, in its `control`, by a "
      f"streamed method whose steps do not all send alike: here {reason}. Let "
      "the host choose: `jdist.training.Trainer(workers, step, "
      "stream_steps=(1, 2, 4, 8, 16))`, or in a loop of your own by "
      "`jdist.transforms.rounds_ahead`; None sends all that is left at the "
      "round's end."
    )

  def receive_last(self, step: Step, sent: Any) -> Step:
    """Stores the message, on CPUs not before the updates are computed.

    XLA's CPU compiler gives free memory to the next computation, which then
    waits for it; so a message that is sent must keep its own memory until
    the computation that hides it has ended.  On GPUs copies run at the same
    time as kernels, and nothing need be done.
    """
    if sent is None:
      return step

    def parts(state: SyncState) -> tuple[Any, Any]:
      pair = state.flight.held, state.compression
      return collectives.varying(pair, self.axis)

    def received(write_back: bool) -> tuple[Any, Any]:
      state = self.sender.receive(step.sync, sent, write_back=write_back)
      return parts(state)

    def behind(updates: PyTree) -> tuple[Any, Any]:
      return jax.lax.cond(
        _known_after(updates, step.sync.clock),
        lambda: received(write_back=True),
        lambda: parts(step.sync),
      )

    found = jax.lax.platform_dependent(
      step.updates, cpu=behind, default=lambda _: received(write_back=False)
    )
    return _with_held(step, *found)

  def move_last(self, step: Step) -> Step:
    """Lets the anchor move, on CPUs, not before the updates are computed.

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

  def lost_unless_there(self, step: Step) -> Step:
    """Replaces a mean by NaN if some of it was not received.

    A host that ends a round claims that all was sent, which only the device
    knows: the mean of a part must not pass for the whole.
    """
    held = step.sync.flight.held
    there = self.sender.complete(step.sync)
    arrived = jax.tree.map(lambda x: jnp.where(there, x, jnp.nan), held.arrived)
    return _with_held(
      step, held._replace(arrived=arrived), step.sync.compression
    )


def change_if(
  flag: jax.Array,
  end: Round,
  change: Callable[[Round], Round],
  axis: collectives.Axis,
) -> Round:
  """Applies a change, or nothing; `flag` is equal on all workers."""

  # A conditional and not a selection: a compiler cannot merge it with
  # earlier operations, and so rounds alike in every form of the program.
  def moving(end: Round) -> PyTree:
    parts = end.anchor, end.memory, end.inner
    return collectives.varying(parts, axis)

  anchor, memory, inner = jax.lax.cond(
    collectives.agreed(flag, axis),
    lambda: moving(change(end)),
    lambda: moving(end),
  )
  return end._replace(anchor=anchor, memory=memory, inner=inner)


def mixed(mix: jax.typing.ArrayLike, local: PyTree, anchor: PyTree) -> PyTree:
  """Returns a part of the worker's own and the rest of the anchor."""
  own = _anchor.scalar(mix)

  def one(w: jax.Array, a: jax.Array) -> jax.Array:
    alpha = own.astype(a.dtype)
    return alpha * w + (1 - alpha) * a

  return jax.tree.map(one, local, anchor)


def _with_held(step: Step, held: Any, memory: Any) -> Step:
  flight = step.sync.flight._replace(held=held)
  return step._replace(
    sync=step.sync._replace(flight=flight, compression=memory)
  )


def _known_after(updates: PyTree, clock: _round.RoundClock) -> jax.Array:
  """Returns True, which no compiler knows before all updates are computed."""
  ends = [jnp.ravel(x)[-1] for x in jax.tree.leaves(updates) if x.size]
  unknown = jnp.isnan(sum(jnp.real(x).astype(jnp.float32) for x in ends))
  # At least one step of the round has been taken.
  return clock.round_step >= unknown.astype(jnp.int32)


def _unknown_loss() -> jax.Array:
  """Returns the loss of no round: infinite."""
  return jnp.full((), _policy.UNKNOWN_LOSS, jnp.float32)
