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

from jdist import collectives
from jdist.transforms import _anchoring, _checking, _rounds, intervals

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
    kept: `()` when a round ends on the anchor; else one, float32 scalar: the
      workers stand beside it.
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
  """

  anchor: PyTree
  local: PyTree
  params: PyTree
  inner: PyTree
  outer: PyTree
  pending: PyTree
  round: jax.Array
  step: jax.Array


class Meeting(NamedTuple):
  """What a method does at the end of a round, for one worker.

  Attributes:
    begin: `anchor -> outer, pending`, their first values.
    message: `(round, inner) -> tree` whose mean over the workers is taken;
      `inner` is the inner optimizer.
    join: `(round, mean, inner) -> round, target`: the round with the new
      anchor, inner, outer and pending, and where this worker goes, float32.
    correct: `(gradients, outer, step) -> gradients, outer`, in every step.
    lands: whether the target is the anchor.
  """

  begin: Callable[[PyTree], tuple[PyTree, PyTree]]
  message: Callable[[Round, optax.GradientTransformation], PyTree]
  join: Callable[
    [Round, PyTree, optax.GradientTransformation], tuple[Round, PyTree]
  ]
  correct: Callable[[PyTree, PyTree, jax.Array], tuple[PyTree, PyTree]]
  lands: bool


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

  Args:
    inner: any Optax optimizer, run by each worker for itself.
    interval: local steps of a round, or a policy.
    meeting: what happens at the end of a round.
    axis: the workers' axis.
    method: the public name, for errors.
  """
  _checking.check_optimizer("optimizer", inner)
  collectives.check_axis(axis)
  policy = intervals.as_policy(interval)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: optax.Params) -> RoundsState:
    anchor = jax.tree.map(_anchoring.wide_copy, params)
    outer, pending = meeting.begin(anchor)
    # Each leaf a buffer of its own, because the state may be donated.
    outer, pending = jax.tree.map(jnp.copy, (outer, pending))
    return RoundsState(
      **_rounds.begin(policy),
      anchor=anchor,
      inner=inner.init(params),
      outer=outer,
      pending=pending,
      kept=() if meeting.lands else jnp.ones((), jnp.float32),
    )

  def update_fn(
    updates: optax.Updates,
    state: RoundsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, RoundsState]:
    if params is None:
      raise ValueError(
        f"`params` must be given to `update` of `{method}`: call "
        "`optimizer.update(grads, state, params)`."
      )
    collectives.check_local(updates, axis, what="`updates`")
    updates, outer = meeting.correct(updates, state.outer, state.step)
    updates, state = _rounds.take_step(
      policy, inner, updates, state._replace(outer=outer), params, extra_args
    )
    return jax.lax.cond(
      collectives.agreed(_rounds.is_over(state), axis),
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
    return collectives.varying((updates, _rounds.go_on(state)), axis)

  def end_round(
    updates: optax.Updates, state: RoundsState, params: optax.Params
  ) -> tuple[optax.Updates, RoundsState]:
    local = jax.tree.map(_anchoring.moved, params, updates)
    ended = Round(
      anchor=state.anchor,
      local=local,
      params=params,
      inner=state.inner,
      outer=state.outer,
      pending=state.pending,
      round=state.round,
      step=state.step - 1,
    )
    mean, mean_loss = collectives.mean(
      (meeting.message(ended, inner), _rounds.loss(policy, state)), axis
    )
    ended, target = meeting.join(ended, mean, inner)
    # A worker that goes nowhere keeps its inner update to the bit.
    updates = _anchoring.towards(updates, target, local)
    state = _rounds.end(policy, state, mean_loss)._replace(
      anchor=ended.anchor,
      inner=ended.inner,
      outer=ended.outer,
      pending=ended.pending,
    )
    return collectives.varying((updates, state), axis)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
