"""Arriving: a mean that moves the anchor within the next round.

`OneRoundLate` in `_delay` lets a message travel for a whole round, and all
that time the workers do not know of each other.  Here it arrives after a stated
number of steps, as soon as a link can deliver it, and the worker keeps what it
has done since:

    round's end         join    the progress is sent; nobody waits for it
    some steps later    meet    its mean moves the anchor and the worker

A round is over when its steps are taken and what was under way has arrived.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jdist.transforms.local import _clock, _delay, _sender

PyTree = Any
# A `LocalStepsState`.
State = Any


class StepsLate(_delay.OneRoundLate):
  """Meets `delay_steps` after a round's end, at the latest with the next one.

  A round that begins before the local step `after_step` is not delayed, and
  meets at its own end.
  """

  def __init__(self, *args: Any, delay_steps: int, **options: Any):
    """Takes what `OneRoundLate` takes, and the number of steps."""
    super().__init__(*args, **options)
    self.delay_steps = delay_steps

  def init(self, anchor: PyTree, remembered: Any) -> dict[str, Any]:
    """The fields of a state that say what is under way."""
    return super().init(anchor, remembered) | {"arrived_loss": _unknown()}

  def is_due(
    self, state: State, steps: int | None, complete: jax.Array
  ) -> jax.Array:
    """Whether the workers meet now, bool scalar.

    Args:
      state: after a step.
      steps: in how many the message is streamed; None if it is not.
      complete: whether all of what is streamed has arrived.
    """
    delay = jnp.minimum(self.delay_steps, state.interval)
    arrives = state.in_flight & (state.round_step >= delay)
    if steps is not None:
      arrives &= complete
    return jnp.where(
      self._is_late(state, steps), arrives, _clock.is_over(state)
    )

  def is_over(self, state: State) -> jax.Array:
    """Whether the round may end, bool scalar."""
    return _clock.is_over(state) & ~state.in_flight

  def meet(
    self, state: State, local: PyTree, steps: int | None
  ) -> tuple[PyTree, State]:
    """Moves the anchor by the mean of what was under way.

    Args:
      state: after a step.
      local: this worker's parameters after it, float32.
      steps: in how many the message was streamed; None if it was not, or not
        to its end.

    Returns:
      Where this worker goes, with what it has done in this round, and the
      state.
    """
    late = self._is_late(state, steps)
    progress = self.progress(state, local)
    present = _sender.Message(progress, _clock.loss(self._policy, state))
    (gradient, loss), remembered = self._make_sender(state.anchor).mean(
      state.pending, present, late, steps, state.reduction
    )
    state = self._outer.step(gradient, state._replace(reduction=remembered))
    # Without a delay the round's progress is in the anchor already.
    target = jax.tree.map(
      lambda a, p: a - jnp.where(late, p, 0.0), state.anchor, progress
    )
    return target, state._replace(
      in_flight=jnp.zeros_like(state.in_flight),
      kept=jnp.zeros_like(state.kept),
      arrived_loss=loss if self._policy.needs_loss else state.arrived_loss,
    )

  def join(
    self, state: State, local: PyTree, steps: int | None
  ) -> tuple[PyTree, Any, State]:
    """Ends a round in which the workers have met; sends what was done in it.

    Args:
      state: after the round's last step.
      local: this worker's parameters after it, float32.
      steps: in how many the message was streamed, or None.

    Returns:
      Where this worker goes, the mean loss that has arrived (NaN if none
      has), and the state.
    """
    present = _sender.Message(
      self.progress(state, local), _clock.loss(self._policy, state)
    )
    target, state = self._set_out(state, present, self._is_late(state, steps))
    loss = state.arrived_loss
    return target, loss, state._replace(arrived_loss=_unknown())

  def drain(self, state: State, local: PyTree, begun: jax.Array) -> State:
    """Brings into the anchor what was done, the oldest first."""
    state = super().drain(state, local, begun)
    return state._replace(arrived_loss=_unknown())


def _unknown() -> jax.Array:
  return jnp.full((), jnp.nan, jnp.float32)
