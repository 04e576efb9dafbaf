"""Means that arrive within a round, some steps after it has begun."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import collectives
from jdist.transforms import _control, intervals
from jdist.transforms.local import (
  _anchor,
  _late_rounds,
  _round_state,
  _sender,
  _sync_rule,
)

PyTree = Any
Step: TypeAlias = _round_state.Step
SyncState: TypeAlias = _round_state.SyncState


@dataclasses.dataclass(frozen=True, eq=False)
class MidRoundSynchronizer(_late_rounds.LateSynchronizer):
  """Takes the mean of a round after `steps` of the next one."""

  steps: int = 1

  def init(self, params: optax.Params) -> SyncState:
    """Returns the state before the first step, with nothing under way."""
    state = super().init(params)
    flight = state.flight._replace(
      arrived_loss=_unknown(),
      due_after=jnp.asarray(self.steps, jnp.int32),
    )
    if self.after_step:
      device_before = jnp.asarray(self.after_step, jnp.int32)
      flight = flight._replace(device_before=device_before)
    return state._replace(flight=flight)

  def finish(
    self,
    step: Step,
    params: optax.Params,
    sent: tuple[Any, ...],
    control: _control.Control,
  ) -> Step:
    """Lets the mean arrive if it is due, and ends the round if it is over."""
    steps, ends = self.stream_steps(control), control.round_ends
    step = self.receive_last(step, sent)
    step = self._arrive_if_due(step, params, steps, control)
    if ends is None:
      over = step.sync.clock.is_over() & ~step.sync.flight.in_flight
      return jax.lax.cond(
        collectives.agreed(over, self.axis),
        lambda step, params: self.end_late(step, params, steps),
        lambda step, params: self.go_on(step),
        step,
        params,
      )
    return self.end_late(step, params, steps) if ends else self.go_on(step)

  def start(self, state: SyncState) -> PyTree:
    if self.mix is not None:
      kept = state.flight.in_flight.astype(jnp.float32)
      state = state._replace(kept=kept)
    return super().start(state)

  def late_mean(
    self,
    end: _sync_rule.Round,
    present: _sender.Contribution,
    late: jax.Array | bool,
    steps: int | None,
    state: SyncState,
  ) -> tuple[_sync_rule.Round, Any, SyncState]:
    """Returns the round as it is: the mean has arrived before."""
    del present, late, steps
    flight = state.flight._replace(arrived_loss=_unknown())
    loss = state.flight.arrived_loss
    if self.policy.needs_loss:
      loss = jnp.where(jnp.isfinite(loss), loss, jnp.nan)
    return end, loss, state._replace(memory=end.memory, flight=flight)

  def set_out(
    self,
    end: _sync_rule.Round,
    present: _sender.Contribution,
    late: jax.Array | bool,
    state: SyncState,
  ) -> tuple[PyTree, SyncState]:
    """Returns where the next round begins, and holds what it sends."""
    if self.mix is None:
      return super().set_out(end, present, late, state)
    keep = jnp.asarray(late, jnp.float32)
    return end.local, self.hold(present, late, keep, state)

  def place(self, end: _sync_rule.Round, after: _sync_rule.Round) -> PyTree:
    """Returns where it is: it moved when the mean arrived."""
    del after
    return end.local

  def is_long(self, interval: jax.Array) -> jax.Array:
    """Returns whether a mean arrives within a round and not at its end."""
    return interval > self.steps

  def uneven(self) -> str:
    reason, interval = super().uneven(), self.policy.constant
    if not reason and interval is not None and interval > self.steps:
      # All has arrived before the round's last steps.
      return f"the mean arrives {self.steps} steps into a longer round"
    return reason

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
      sender = self.sender(state.anchor)
      delay = jnp.minimum(state.flight.due_after, state.clock.interval)
      due = state.flight.in_flight & (state.clock.round_step >= delay)
      if steps is not None:
        due &= sender.complete(state.flight.held)
      late = self.is_late(state, steps)
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
      step = step._replace(sync=self.lost_unless_there(step.sync))
    return self._arrive(step, params, steps)

  def _mean_if(
    self, due: jax.Array, state: SyncState, steps: int | None
  ) -> Any:
    """Takes the mean of what is held, if it is due, or of nothing.

    In a conditional of its own, so that no collective waits for the step.
    """

    def mean(held: PyTree, memory: PyTree) -> Any:
      new = _sender.Contribution((), ())  # Not looked at: all rounds are late.
      found = self.sender(state.anchor).mean(held, new, True, steps, memory)
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
    late = self.is_late(state, steps)
    local = jax.tree.map(_anchor.moved, params, step.updates)
    end = self.round(step, params, local)
    mean, memory = arrived or self.sender(state.anchor).mean(
      state.flight.held, self.contribution(end, state), late, steps,
      state.compression,
    )  # fmt: skip
    after = self.rule.move(end, mean.message, (), self.relative)
    target = self.mixed(end, after)
    if target is not None:  # Without a delay the round ends on the anchor.
      target = _anchor.either(late, target, after.anchor)
    elif self.rule.beside:
      target = self.rule.place(end, after)
    else:
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


def _unknown() -> jax.Array:
  return jnp.full((), intervals.UNKNOWN_LOSS, jnp.float32)
