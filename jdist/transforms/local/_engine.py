"""Stepping: a round of `local_steps`, from its first step to its end.

    init                          on the anchor
    update ... update             a local step; the last one ends the round
    update(drain=True)            no step: the round ends where it is

How a round ends is in `_delay`; what travels in between, in `_sender`.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers
from jdist.transforms import intervals
from jdist.transforms.local import (
  _anchor,
  _clock,
  _delay,
  _late_arrival,
  _sender,
  _streaming,
)

PyTree = Any


class LocalStepsState(NamedTuple):
  """State of `local_steps`.

  Attributes:
    step: local steps so far, int32 scalar.
    round: rounds so far, int32 scalar.
    round_step: local steps so far in this round, int32 scalar.
    interval: local steps of this round, int32 scalar.
    next_interval: local steps of the next round, int32 scalar: a host that
      prepares for it can read it now.
    synchronized: whether the last update ended a round, bool scalar.
    anchor: the parameters all workers agree on, float32.
    inner: the inner optimizer's state, each worker its own.
    outer: the outer optimizer's state, or `()`.
    interval_state: the interval policy's state.
    round_loss: sum of this round's losses, float32 scalar, each worker its
      own; `()` when the interval needs no loss.
    pending: this worker's message of the last round, whose mean is applied in
      this one, by default at its end: a `Message`, or when it is streamed a
      `StreamState`, with a reducer a `PartsState`; `()` without delay.
    in_flight: whether `pending` holds one, bool scalar; `()` without delay.
    kept: the part of the pending progress that is in this worker's
      parameters, and with which the round began, float32 scalar; `()` without
      delay.
    stream_steps: the interval of the round in which the next update is, or the
      steps until a message is due if they are fewer, and how many updates came
      before it in that round; and both for the update after it.  Four int32
      scalars; the interval 0 for a round that is not delayed; `()` when nothing
      is streamed.
    reduction: what a mean by few bytes remembers, a `ReductionState`; `()`
      without a reducer.
    arrived_loss: the mean loss that arrived in this round, float32 scalar, NaN
      if none has; `()` where messages arrive at a round's end.
  """

  step: jax.Array
  round: jax.Array
  round_step: jax.Array
  interval: jax.Array
  next_interval: jax.Array
  synchronized: jax.Array
  anchor: PyTree
  inner: PyTree
  outer: PyTree
  interval_state: PyTree
  round_loss: Any
  pending: PyTree
  in_flight: Any
  kept: Any
  stream_steps: Any
  reduction: Any = ()
  arrived_loss: Any = ()


@dataclasses.dataclass(frozen=True, eq=False)
class LocalSteps:
  """The round of `local_steps`: its steps, and when it ends.

  How it ends is the joining's; what is sent before is the sender's.
  """

  inner: optax.GradientTransformationExtraArgs
  policy: intervals.IntervalPolicy
  axis: collectives.Axis
  outer: _delay.Outer
  joining: _delay.Joining
  reduction: reducers.Reduction | None
  stream: _streaming.Stream | None
  make_sender: _sender.MakeSender
  delay_after_step: int
  delay_steps: int | None

  def init(self, params: optax.Params) -> LocalStepsState:
    """The state before the first step, on the anchor."""
    anchor = jax.tree.map(_anchor.wide_copy, params)
    remembered = () if self.reduction is None else self.reduction.init(anchor)
    state = LocalStepsState(
      **_clock.begin(self.policy),
      anchor=anchor,
      inner=self.inner.init(params),
      outer=self.outer.init(anchor),
      **self.joining.init(anchor, remembered),
      stream_steps=(),
      reduction=remembered,
    )
    return self._looking_ahead(state)

  def update(
    self,
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    stream_steps: int | Literal["usual"] | None = "usual",
    round_ends: bool | None = None,
    drain: bool | Literal["residuals"] = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Takes a step, and ends the round if it is over, or as it is told."""
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `local_steps`: call "
        "`optimizer.update(grads, state, params)`."
      )
    if drain:
      return self._drain(state, params, residuals=drain == "residuals")
    collectives.check_local(updates, self.axis, what="`updates`")
    steps = self._usual_steps() if stream_steps == "usual" else stream_steps
    # First, and from the state: it has to wait for nothing in this step.
    sent = self._start(state, steps)
    updates, state = _clock.take_step(
      self.policy, self.inner, updates, state, params, extra_args
    )
    if isinstance(self.joining, _late_arrival.StepsLate):
      if round_ends is not None:
        raise ValueError(
          "`round_ends` must be None where a mean arrives within the next "
          f"round, which the device decides, got {round_ends!r}. Leave "
          "`delay_steps` out."
        )
      return self._go_until_met(
        self.joining, steps, sent, updates, state, params
      )
    if round_ends is not None:
      return self._go_as_told(round_ends, steps, sent, updates, state, params)
    over = _clock.is_over(state)
    if steps is not None:
      over &= self.make_sender(state.anchor).complete(state.pending, sent)
    return self._end_if(over, steps, sent, updates, state, params)

  def _end_if(
    self,
    over: jax.Array,
    steps: int | None,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    updates, state = jax.lax.cond(
      collectives.agreed(over, self.axis),
      functools.partial(self._end_round, steps),
      self._go_on,
      sent,
      updates,
      state,
      params,
    )
    return updates, self._looking_ahead(state)

  def _go_on(
    self,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    del params
    state = _clock.go_on(self._finish(state, sent))
    return collectives.varying((updates, state), self.axis)

  def _end_round(
    self,
    steps: int | None,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    state = self._finish(state, sent)
    local = jax.tree.map(_anchor.moved, params, updates)
    target, mean_loss, state = self.joining.join(state, local, steps)
    updates = _anchor.towards(updates, target, local)
    state = _clock.end(self.policy, state, mean_loss)
    return collectives.varying((updates, state), self.axis)

  def _drain(
    self, state: LocalStepsState, params: optax.Params, *, residuals: bool
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Ends everything that was begun, with no step of its own."""
    begun = _clock.is_begun(state)
    if residuals and self.reduction is not None:
      begun = jnp.ones_like(begun)
    local = jax.tree.map(_anchor.wide, params)
    state = self.joining.drain(state, local, begun)
    updates = _anchor.onto(state.anchor, params)
    state = self._looking_ahead(state)
    return collectives.varying((updates, state), self.axis)

  def _go_as_told(
    self,
    round_ends: bool,
    steps: int | None,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Ends the round, or does not; the device has nothing to decide."""
    if not isinstance(round_ends, bool):
      raise ValueError(
        "`round_ends` shapes the program and must be True, False or None, got "
        f"{round_ends!r}."
      )
    state = self._finish_last(state, sent, updates)
    if not round_ends:
      updates, state = self._go_on((), updates, state, params)
    else:
      if steps is not None:
        state = self._lost_unless_there(state)
      updates, state = self._end_round(steps, (), updates, state, params)
    return updates, self._looking_ahead(state)

  def _go_until_met(
    self,
    joining: _late_arrival.StepsLate,
    steps: int | None,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Meets if a mean is due, then ends the round if it is over."""
    state = self._finish_last(state, sent, updates)

    def meet(
      updates: optax.Updates, state: LocalStepsState
    ) -> tuple[optax.Updates, LocalStepsState]:
      local = jax.tree.map(_anchor.moved, params, updates)
      target, state = joining.meet(state, local, steps)
      updates = _anchor.towards(updates, target, local)
      return collectives.varying((updates, state), self.axis)

    complete = self.make_sender(state.anchor).complete(state.pending, ())
    updates, state = jax.lax.cond(
      collectives.agreed(joining.is_due(state, steps, complete), self.axis),
      meet,
      lambda *nothing: collectives.varying(nothing, self.axis),
      updates,
      state,
    )
    over = joining.is_over(state)
    return self._end_if(over, steps, (), updates, state, params)

  # What only the streamed form does.

  def _usual_steps(self) -> int | None:
    """In how many steps a message is sent where nobody chooses."""
    if self.stream is None:
      return None
    steps, after = self.policy.constant, self.delay_after_step
    if after:
      reason = f"the first {after} steps are not delayed"
    elif steps is None:
      reason = "the interval is not one number"
    elif steps > (self.delay_steps or steps):
      # All has arrived before the round's last steps.
      reason = f"the mean arrives {self.delay_steps} steps into a longer round"
    else:
      return steps
    # To send all at the round's end, in a conditional, would hide nothing, and
    # nobody would notice.
    raise ValueError(
      "`stream_steps` must be given to `update` of a streamed method whose "
      f"steps do not all send alike: here {reason}. Let the host choose: "
      "`jdist.training.Trainer(workers, step, stream_steps=(1, 2, 4, 8, 16))`, "
      "or in a loop of your own by `jdist.transforms.stream_steps`; None sends "
      "all that is left at the round's end."
    )

  def _start(
    self, state: LocalStepsState, steps: int | None
  ) -> tuple[Any, ...]:
    """Sends the next parts of what is under way."""
    if steps is None:
      return ()
    _streaming.check_stream_steps(steps, self.stream)
    sender = self.make_sender(state.anchor)
    return sender.start(state.pending, steps, state.reduction)

  def _finish(
    self, state: LocalStepsState, sent: tuple[Any, ...]
  ) -> LocalStepsState:
    """Writes down what has been sent in this step."""
    if not sent:
      return state
    pending, remembered = self.make_sender(state.anchor).finish(
      state.pending, sent, state.reduction, state.in_flight
    )
    return state._replace(pending=pending, reduction=remembered)

  def _finish_last(
    self, state: LocalStepsState, sent: tuple[Any, ...], updates: PyTree
  ) -> LocalStepsState:
    """Writes down what has been sent, on CPUs not before `updates` are there.

    XLA's CPU compiler gives memory that is free to what comes next, which then
    has to wait for it; so a message under way must keep its own until the
    computation that hides it has ended.  On GPUs copies run beside the
    kernels, and nothing need be done.
    """
    if not sent:
      return state

    def finish(state: LocalStepsState) -> tuple[Any, Any]:
      state = self._finish(state, sent)
      return collectives.varying((state.pending, state.reduction), self.axis)

    def behind(updates: PyTree) -> tuple[Any, Any]:
      # Always true, and known to nobody before all updates are: at least one
      # step of the round has been taken.
      ends = [jnp.ravel(x)[-1] for x in jax.tree.leaves(updates) if x.size]
      unknown = jnp.isnan(sum(jnp.real(x).astype(jnp.float32) for x in ends))
      return jax.lax.cond(
        state.round_step >= unknown.astype(jnp.int32),
        lambda: finish(state),
        lambda: collectives.varying(
          (state.pending, state.reduction), self.axis
        ),
      )

    pending, remembered = jax.lax.platform_dependent(
      updates, cpu=behind, default=lambda _: finish(state)
    )
    return state._replace(pending=pending, reduction=remembered)

  def _lost_unless_there(self, state: LocalStepsState) -> LocalStepsState:
    """Makes a mean NaN of which something has not arrived.

    Whoever ends a round says that all of it has been sent, which only the
    device knows: a mean of a part must not pass for the whole.
    """
    there = self.make_sender(state.anchor).complete(state.pending, ())
    arrived = jax.tree.map(
      lambda x: jnp.where(there, x, jnp.nan), state.pending.arrived
    )
    return state._replace(pending=state.pending._replace(arrived=arrived))

  def _looking_ahead(self, state: LocalStepsState) -> LocalStepsState:
    """Says for the next two steps what a host needs to choose a program."""
    if self.stream is None:
      return state
    return state._replace(
      stream_steps=_clock.two_ahead(
        state, since_step=self.delay_after_step, at_most=self.delay_steps
      )
    )
