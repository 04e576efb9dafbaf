"""Joining: what the workers did in a round moves the anchor they share.

The end of a round of `local_steps`, in its forms:

- `AtRoundEnd`: the mean of the round's progress moves the anchor, and all
  workers go there.
- `OneRoundLate`: the mean of the progress of the round *before* moves it, and
  every worker keeps a part of what it has done since.  In `_late_arrival` it
  does so before the round has ended.

All have the same four functions:

    init       the fields of a state that say what is under way
    progress   what this worker has done in the round
    join       ends a round
    drain      ends everything that was begun

The fields that they read and write are those of `LocalStepsState`.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, reducers
from jdist.transforms import intervals
from jdist.transforms.local import _anchor, _clock, _sender

PyTree = Any
# A `LocalStepsState`.
State = Any


class Outer(NamedTuple):
  """Steps of the outer optimizer, which move the anchor.

  Attributes:
    optimizer: None goes all the way to the mean.
    axis: the workers' axis.
  """

  optimizer: optax.GradientTransformation | None
  axis: collectives.Axis

  def init(self, anchor: PyTree) -> PyTree:
    """The outer optimizer's first state."""
    return () if self.optimizer is None else self.optimizer.init(anchor)

  def step(self, gradient: PyTree, state: State) -> State:
    """Moves the anchor by a mean pseudo-gradient."""
    anchor, outer_state = _anchor.outer_step(
      self.optimizer, state.outer, gradient, state.anchor
    )
    return state._replace(anchor=anchor, outer=outer_state)

  def step_if(self, flag: jax.Array, gradient: PyTree, state: State) -> State:
    """The same, or nothing; `flag` is equal on all workers."""

    # A conditional and not a selection: a compiler cannot merge it with what
    # comes before, and so rounds alike in every form of the program.
    def both(state: State) -> PyTree:
      return collectives.varying((state.anchor, state.outer), self.axis)

    anchor, outer_state = jax.lax.cond(
      collectives.agreed(flag, self.axis),
      lambda: both(self.step(gradient, state)),
      lambda: both(state),
    )
    return state._replace(anchor=anchor, outer=outer_state)


class AtRoundEnd:
  """Ends a round with the mean of its own progress; nothing is under way."""

  def __init__(
    self,
    axis: collectives.Axis,
    policy: intervals.IntervalPolicy,
    outer: Outer,
    reduction: reducers.Reduction | None,
  ):
    """Takes the mean exactly, or by a reduction."""
    self._axis, self._policy, self._outer = axis, policy, outer
    self._averages_params = outer.optimizer is None and reduction is None
    self._sender = _sender.AtOnce(axis, reduction)

  def init(self, anchor: PyTree, remembered: Any) -> dict[str, Any]:
    """The fields of a state that say what is under way."""
    del anchor, remembered
    return {"pending": (), "in_flight": (), "kept": ()}

  def progress(self, state: State, local: PyTree) -> PyTree:
    """What this worker has done in this round, float32."""
    return jax.tree.map(jnp.subtract, state.anchor, local)

  def join(
    self, state: State, local: PyTree, steps: int | None
  ) -> tuple[PyTree, Any, State]:
    """Ends a round, on the anchor.

    Args:
      state: after the round's last step.
      local: this worker's parameters after it, float32.
      steps: ignored, since nothing is streamed.

    Returns:
      Where this worker goes, the workers' mean loss (`()` if none is needed),
      and the state.
    """
    del steps
    if self._averages_params:
      # Not by way of the progress, which would round once more.
      anchor, loss = collectives.mean(
        (local, _clock.loss(self._policy, state)), self._axis
      )
      return anchor, loss, state._replace(anchor=anchor)
    present = _sender.Message(
      self.progress(state, local), _clock.loss(self._policy, state)
    )
    (gradient, loss), remembered = self._sender.mean_now(
      present, state.reduction
    )
    state = self._outer.step(gradient, state._replace(reduction=remembered))
    return state.anchor, loss, state

  def drain(self, state: State, local: PyTree, begun: jax.Array) -> State:
    """Brings into the anchor what was done, and ends the round.

    Args:
      state: between two steps.
      local: this worker's parameters, float32.
      begun: whether there is anything to be brought in, bool scalar.
    """
    done = _sender.Message(self.progress(state, local), ())
    exact = self._sender.exact_mean(done, state.reduction)
    progress, state = _remembering_if(begun, exact, state)
    state = self._outer.step_if(begun, progress, state)
    return _clock.cut_short(self._policy, state)


class OneRoundLate:
  """Ends a round with the mean of the progress of the round before.

  A round that begins before the local step `after_step` is not delayed, and
  ends as with `AtRoundEnd`.
  """

  def __init__(
    self,
    axis: collectives.Axis,
    policy: intervals.IntervalPolicy,
    outer: Outer,
    reduction: reducers.Reduction | None,
    make_sender: _sender.MakeSender,
    *,
    carry: jax.typing.ArrayLike | None,
    after_step: int,
  ):
    """Keeps the part `carry` of a round's progress; None is 1/N."""
    self._axis, self._policy, self._outer = axis, policy, outer
    self._at_once = _sender.AtOnce(axis, reduction)
    self._make_sender = make_sender
    self._carry, self._after_step = carry, after_step

  def init(self, anchor: PyTree, remembered: Any) -> dict[str, Any]:
    """The fields of a state that say what is under way."""
    return {
      "pending": self._hold_nothing(anchor, None, remembered),
      "in_flight": jnp.asarray(False),
      "kept": jnp.zeros((), jnp.float32),
    }

  def progress(self, state: State, local: PyTree) -> PyTree:
    """What this worker has done in this round, float32."""
    # The round began at anchor - kept * pending; of that the worker keeps
    # no copy, and what rounding adds to it is sent along as progress.
    held = self._make_sender(state.anchor).own(state.pending).progress
    return jax.tree.map(
      lambda a, p, w: (a - _anchor.rounded(state.kept * p)) - w,
      state.anchor,
      held,
      local,
    )

  def join(
    self, state: State, local: PyTree, steps: int | None
  ) -> tuple[PyTree, Any, State]:
    """Ends a round, beside the anchor.

    Args:
      state: after the round's last step.
      local: this worker's parameters after it, float32.
      steps: in how many the message was streamed; None if it was not, or not
        to its end.

    Returns:
      Where this worker goes, the workers' mean loss (`()` if none is needed,
      NaN if none has arrived), and the state.
    """
    sender = self._make_sender(state.anchor)
    progress = self.progress(state, local)
    late = self._is_late(state, steps)
    present = _sender.Message(progress, _clock.loss(self._policy, state))
    # In the first delayed round nothing has arrived yet. Nothing happens to
    # the anchor then: a momentum must not move it by a gradient of zero. What
    # was sent of nothing, a sign perhaps, is not remembered either.
    arrived = state.in_flight | ~late
    (gradient, loss), state = _remembering_if(
      arrived,
      sender.mean(state.pending, present, late, steps, state.reduction),
      state,
    )
    state = self._outer.step_if(arrived, gradient, state)
    if self._policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    target, state = self._set_out(state, present, late)
    return target, loss, state

  def _is_late(self, state: State, steps: int | None) -> jax.Array:
    """Whether this round is one of the delayed ones."""
    late = state.step - state.round_step >= self._after_step
    if steps is not None:  # What was streamed is what there is.
      late = jnp.full_like(late, True)
    return late

  def _set_out(
    self, state: State, present: _sender.Message, late: jax.Array
  ) -> tuple[PyTree, State]:
    """Where the next round begins, and what is sent in it."""
    rho = self._carry
    if rho is None:
      rho = 1 / collectives.size(self._axis)
    keep = jnp.where(late, _anchor.scalar(rho), 0.0)
    # Without a delay the round's progress is in the anchor already.
    left = jax.tree.map(lambda p: jnp.where(late, p, 0.0), present.progress)
    target = jax.tree.map(
      lambda a, p: a - _anchor.rounded(keep * p), state.anchor, left
    )
    pending = self._make_sender(state.anchor).hold(
      present._replace(progress=left), state.pending, state.reduction
    )
    return target, state._replace(pending=pending, in_flight=late, kept=keep)

  def drain(self, state: State, local: PyTree, begun: jax.Array) -> State:
    """Brings into the anchor what was done, the oldest first.

    Args:
      state: between two steps.
      local: this worker's parameters, float32.
      begun: whether there is more than what is under way, bool scalar.
    """
    done = _sender.Message(self.progress(state, local), ())
    sender, in_flight = self._make_sender(state.anchor), state.in_flight
    exact = sender.exact_mean(state.pending, state.reduction)
    held, state = _remembering_if(in_flight, exact, state)
    exact = self._at_once.exact_mean(done, state.reduction)
    progress, state = _remembering_if(begun, exact, state)
    state = self._outer.step_if(in_flight, held, state)
    state = self._outer.step_if(begun, progress, state)
    state = _clock.cut_short(self._policy, state)
    return state._replace(
      pending=self._hold_nothing(state.anchor, state.pending, state.reduction),
      in_flight=jnp.zeros_like(state.in_flight),
      kept=jnp.zeros_like(state.kept),
    )

  def _hold_nothing(self, anchor: PyTree, before: Any, remembered: Any) -> Any:
    nothing = _sender.Message(
      jax.tree.map(jnp.zeros_like, anchor), _clock.no_loss(self._policy)
    )
    return self._make_sender(anchor).hold(nothing, before, remembered)


Joining: TypeAlias = AtRoundEnd | OneRoundLate


def _remembering_if(
  flag: jax.Array, reduced: tuple[Any, Any], state: State
) -> tuple[Any, State]:
  """A mean, and the state with what the reduction remembers of it."""
  mean, remembered = reduced
  remembered = _anchor.either(flag, remembered, state.reduction)
  return mean, state._replace(reduction=remembered)
