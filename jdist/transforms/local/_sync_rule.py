"""Rounds of local steps that end in a meeting of any kind.

`local_steps` ends a round by moving an anchor and putting the workers on it.
Other methods meet differently: workers stay beside the anchor, send control
variates too, or treat the inner optimizer's momentum.  Here is the round that
they share; what a method does at its end is a `Meeting`, pure functions that
speak to nobody: the one mean of a round is taken here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives
from jdist.transforms import _control, intervals
from jdist.transforms.local import _anchor, _clock

PyTree = Any


class RoundsState(NamedTuple):
  """State of the methods whose rounds end in a meeting.

  Attributes:
    step: local steps so far, int32 scalar.
    round: rounds so far, int32 scalar.
    round_step: local steps so far in this round, int32 scalar.
    interval: local steps of this round, int32 scalar.
    next_interval: local steps of the next round, int32 scalar.
    synchronized: whether the last update ended a round, bool scalar.
    anchor: the parameters all workers agree on, float32.
    inner: the inner optimizer's state, each worker its own.
    outer: what the method remembers between meetings, a NamedTuple of its
      own or `()`.
    pending: what this worker sends at the next meeting, float32; `()` when
      everything is sent at once.
    interval_state: the interval policy's state.
    round_loss: sum of this round's losses, float32 scalar, each worker its
      own; `()` when the interval needs no loss.
    kept: `()` when a round ends on the anchor; else whether the workers stood
      beside it when the round began, 1, or on it after a `drain`, 0; float32
      scalar.
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
  pending: PyTree
  interval_state: PyTree
  round_loss: Any
  kept: Any


class Round(NamedTuple):
  """A round at its end, as a meeting sees it.

  Attributes:
    anchor: the anchor of the round, float32.
    local: this worker's parameters after its last step, float32.
    params: its parameters before that step, in their dtypes.
    inner: the inner optimizer's state.
    outer: what the method remembers.
    pending: what this worker wanted to send.
    round: the number of the round, int32 scalar, from 0.
    step: the number of its last local step, int32 scalar, from 0.
    begun: whether it has had a step, bool scalar; false in a `drain` only.
  """

  anchor: PyTree
  local: PyTree
  params: PyTree
  inner: PyTree
  outer: PyTree
  pending: PyTree
  round: jax.Array
  step: jax.Array
  begun: jax.Array


class Ending(NamedTuple):
  """How a round ends, for one worker.

  Attributes:
    message: `(round, inner) -> tree` whose mean over the workers is taken;
      `inner` is the inner optimizer.
    join: `(round, mean, inner) -> round, target`: the round with the new
      anchor, inner, outer and pending, and where this worker goes, float32.
  """

  message: Callable[[Round, optax.GradientTransformation], PyTree]
  join: Callable[
    [Round, PyTree, optax.GradientTransformation], tuple[Round, PyTree]
  ]


class Meeting(NamedTuple):
  """What a method does, for one worker.

  Attributes:
    begin: `anchor -> outer, pending`, their first values.
    ending: how its rounds end.
    correct: `(gradients, outer, step) -> gradients, outer`, in every step.
    last: the ending that `drain` takes, whose target is the anchor; None when
      that of `ending` is.
  """

  begin: Callable[[PyTree], tuple[PyTree, PyTree]]
  ending: Ending
  correct: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]
  last: Ending | None


def uncorrected(
  updates: PyTree, outer: PyTree, step: jax.Array
) -> tuple[PyTree, PyTree]:
  """Leaves gradients alone."""
  del step
  return updates, outer


def in_rounds(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  meeting: Meeting,
  *,
  axis: collectives.Axis,
  method: str,
) -> optax.GradientTransformationExtraArgs:
  """Takes local steps with `inner`, and ends every round with a meeting.

  Extra arguments of `update` reach the inner optimizer, and with them
  `anchor` (float32) and `interval_steps` (int32 scalar), as in `local_steps`.
  `update` with the static `drain=True` takes no local step, ignores the
  updates, and ends the round where it is; see `drain`.

  Args:
    inner: any Optax optimizer, run by each worker for itself.
    interval: local steps of a round, or a policy.
    meeting: what happens at the end of a round.
    axis: the workers' axis.
    method: the public name, for errors.
  """
  checks.check_optimizer("optimizer", inner)
  collectives.check_axis(axis)
  policy = intervals.as_policy(interval)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: optax.Params) -> RoundsState:
    anchor = jax.tree.map(_anchor.wide_copy, params)
    outer, pending = meeting.begin(anchor)
    # Each leaf a buffer of its own, because the state may be donated.
    outer, pending = jax.tree.map(jnp.copy, (outer, pending))
    return RoundsState(
      **_clock.begin(policy),
      anchor=anchor,
      inner=inner.init(params),
      outer=outer,
      pending=pending,
      kept=() if meeting.last is None else jnp.ones((), jnp.float32),
    )

  def update_fn(
    updates: optax.Updates,
    state: RoundsState,
    params: optax.Params | None = None,
    *,
    drain: bool = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, RoundsState]:
    if params is None:
      raise ValueError(
        f"`params` must be given to `update` of `{method}`: call "
        "`optimizer.update(grads, state, params)`."
      )
    if drain:
      return bring_all(state, params)
    _control.check_told(f"`{method}`", extra_args, state.inner)
    collectives.check_local(updates, axis, what="`updates`")
    updates, outer = meeting.correct(updates, state.outer, state.step)
    updates, state = _clock.take_step(
      policy, inner, updates, state._replace(outer=outer), params, extra_args
    )
    return jax.lax.cond(
      collectives.agreed(_clock.is_over(state), axis),
      end_round,
      go_on,
      updates,
      state,
      params,
    )

  def go_on(
    updates: optax.Updates, state: RoundsState, params: optax.Params
  ) -> tuple[optax.Updates, RoundsState]:
    del params
    return collectives.varying((updates, _clock.go_on(state)), axis)

  def end_round(
    updates: optax.Updates, state: RoundsState, params: optax.Params
  ) -> tuple[optax.Updates, RoundsState]:
    local = jax.tree.map(_anchor.moved, params, updates)
    ended = seen(state, local, params)
    mean, mean_loss = collectives.mean(
      (meeting.ending.message(ended, inner), _clock.loss(policy, state)), axis
    )
    ended, target = meeting.ending.join(ended, mean, inner)
    # A worker that goes nowhere keeps its inner update to the bit.
    updates = _anchor.towards(updates, target, local)
    state = written(_clock.end(policy, state, mean_loss), ended)
    if meeting.last is not None:
      state = state._replace(kept=jnp.ones_like(state.kept))
    return collectives.varying((updates, state), axis)

  def bring_all(
    state: RoundsState, params: optax.Params
  ) -> tuple[optax.Updates, RoundsState]:
    """Ends the round where it is, with the workers on the anchor."""
    last = meeting.ending if meeting.last is None else meeting.last
    local = jax.tree.map(_anchor.wide, params)
    ended = seen(state, local, params)
    apart = ended.begun
    if meeting.last is not None:
      apart = apart | (state.kept > 0)

    def meet() -> Round:
      mean = collectives.mean(last.message(ended, inner), axis)
      return collectives.varying(last.join(ended, mean, inner)[0], axis)

    ended = jax.lax.cond(
      collectives.agreed(apart, axis),
      meet,
      lambda: collectives.varying(ended, axis),
    )
    state = written(_clock.cut_short(policy, state), ended)
    if meeting.last is not None:
      state = state._replace(kept=jnp.zeros_like(state.kept))
    updates = _anchor.onto(state.anchor, params)
    return collectives.varying((updates, state), axis)

  def seen(state: RoundsState, local: PyTree, params: optax.Params) -> Round:
    return Round(
      anchor=state.anchor,
      local=local,
      params=params,
      inner=state.inner,
      outer=state.outer,
      pending=state.pending,
      round=state.round,
      step=state.step - 1,
      begun=_clock.is_begun(state),
    )

  def written(state: RoundsState, ended: Round) -> RoundsState:
    return state._replace(
      anchor=ended.anchor,
      inner=ended.inner,
      outer=ended.outer,
      pending=ended.pending,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
