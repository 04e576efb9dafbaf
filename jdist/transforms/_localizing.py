"""Local steps: many updates of one worker's own, then a round's end together.

The *anchor* is the truth: the parameters on which all workers agree, in
float32, identical to the bit everywhere.  Local parameters leave it for a
round and come back to it.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives
from jdist.transforms import (
  _anchoring,
  _checking,
  _feeding,
  _reducing,
  _rounds,
  _sending,
  _streaming,
  intervals,
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
    pending: this worker's message of the last round, whose mean is applied at
      the end of this one: a `Message`, or when it is streamed a `StreamState`,
      with a reducer a `PartsState`; `()` without delay.
    in_flight: whether `pending` holds one, bool scalar; `()` without delay.
    kept: the part of the pending progress that is in this worker's
      parameters, and with which the round began, float32 scalar; `()` without
      delay.
    stream_steps: the interval of the round in which the next update is, and
      how many updates came before it in that round; and both for the update
      after it.  Four int32 scalars; the interval 0 for a round that is not
      delayed; `()` when nothing is streamed.
    reduction: what a mean by few bytes remembers, a `ReductionState`; `()`
      without a reducer.
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


def local_steps(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  outer: optax.GradientTransformation | None = None,
  delay_rounds: int = 0,
  carry: jax.typing.ArrayLike | None = 1.0,
  delay_after_step: int = 0,
  stream: _sending.Stream | None = None,
  reducer: collectives.Reducer | None = None,
  feedback: _feeding.Feedback | None = None,
  seed: int | None = None,
  specs: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes local steps with `inner`, and brings the workers together.

  Every worker i updates its own parameters with its own gradients,
  :math:`w_i \leftarrow w_i + \mathrm{inner}(g_i)`. After the H-th step of a
  round, with the anchor a from which the round began,

  .. math:: \Delta_i = a - w_i, \qquad
            a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i \Delta_i), \qquad
            w_i \leftarrow a

  where the mean :math:`\Delta` of the pseudo-gradients enters the outer
  optimizer as a gradient does.  Without an outer optimizer the anchor becomes
  the mean of the parameters.

  With `delay_rounds=1` the mean of a round's pseudo-gradients is applied one
  round later, so that it can travel under a whole round of computation; the
  worker keeps a part :math:`\rho` of what it has done since it sent:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i
            \Delta_i^{(r-1)}), \qquad w_i \leftarrow a - \rho \Delta_i^{(r)}

  where :math:`\Delta_i^{(r)}` is the local progress of round r alone.  The
  round's losses, where the interval needs them, travel with the progress and
  arrive as late; no loss that is known yet is NaN.

  The simple form sends it all in the step that ends the round, inside a
  conditional.  With `stream` the same mean is taken of a part in every step:
  no collective depends on the step's gradients, nor stands in a conditional,
  so a compiler can hide all of it.  `update` takes the static `stream_steps=`,
  the number of steps in which the whole is sent; it may change from step to
  step.  None sends nothing, and at the round's end, if not all has arrived,
  everything.  By default it is the interval if that is fixed (and
  `delay_after_step` 0), else None: a host then chooses it, see
  `transforms.stream_steps` and `training.Trainer`.  A streamed round
  lasts until everything has arrived, however late.  Both forms give the same
  bits where the order of summation does not depend on an element's place in
  its message (on CPU; on GPUs with two workers, or by the algorithm NCCL
  picks).

  With a reducer the mean of the pseudo-gradients, which are float32, is taken
  by fewer bytes, and with a feedback what was left out goes with the next
  round's.  All workers decode the same bytes, so anchors stay equal to the
  bit.  A worker's own progress, where it keeps some, is what it has really
  done.  The loss of an adaptive interval is averaged exactly.  The first state
  may depend on the number of workers: make it where the axis is bound.

  With `stream` and a reducer the message is cut into sub-tensors of one size,
  each with a reducer's state and random numbers of its own
  (`collectives.InParts`, which a reducer becomes by itself: of
  `stream.max_bytes` at the most, and as many as a multiple of the interval if
  it is fixed, else of 16).  `stream_steps` must divide their number, so that
  each goes once.  The feedback acts once a round on the whole tree.  The
  simple form with the same `InParts` gives the same bits.  An adaptive
  interval's loss, one exact number, goes in every step.  Beside the anchor a
  streamed worker holds two trees in float32; with a feedback four, and what
  the feedback holds.

  `update` with the static `drain=True` takes no local step, ignores the
  updates, and brings all that was done into the anchor; see `drain`.  With a
  reducer that is done with every bit, and brings in what a feedback holds,
  when a round was begun or under way; what then is left is for the next round.

  Inner schedules count local steps, outer schedules count rounds.  Extra
  arguments of `update` reach the inner optimizer, and with them
  `anchor` (float32) and `interval_steps` (int32 scalar).

  An Optax update is a difference, so after a round the local parameters equal
  the anchor up to rounding; `jdist.apply_updates` makes them equal to the
  bit.  Evaluate on the anchor: `jdist.anchor(state, params)`.

  Stands last in a chain: the anchor takes the updates as done, so that
  nothing may change them afterwards.

  Args:
    inner: any Optax optimizer, run by each worker for itself.
    interval: local steps of a round, or a policy from
      `jdist.transforms.intervals`.
    axis: the workers' axis: None, a name, or (inner, outer).
    outer: any Optax optimizer, fed with the mean pseudo-gradient once a
      round; `optax.sgd(1.0)` is parameter averaging.
    delay_rounds: 0, or 1 to apply every mean one round late.
    carry: rho in [0, 1]; used with a delay only.  None is 1/N: of the mean that
      is under way a worker knows its own share, and keeps that.
    delay_after_step: rounds that begin before this local step are not
      delayed: a synchronous warm-up.
    stream: how to cut what is delayed into sub-tensors; None for the simple
      form.  Needs `delay_rounds=1`.
    reducer: how to take the mean, for instance
      `collectives.carry(codecs.Quantize(4))`; None takes it exactly.  With
      `stream` it is one for vectors, or `collectives.InParts(reducer)`.
    feedback: what becomes of the part of the progress that is not sent, for
      instance `ErrorFeedback()`; None forgets it.
    seed: of the random numbers of codecs that draw some; None is 0.
    specs: for a reducer and workers that are themselves sharded, as of
      `average_gradients`; not with `stream`.

  Returns:
    A transformation; `update` takes `loss=` (this worker's, float32 scalar)
    when the interval policy needs it, and needs `params`.

  Raises:
    ValueError: when an argument is out of its range; at trace time, when
      `params`, or a needed `loss`, is missing.

  >>> optimizer = local_steps(optax.sgd(0.1), 2, axis=None)
  >>> w = jnp.array(1.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (1.0, 2.0):
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   w = optax.apply_updates(w, updates)
  >>> round(w.item(), 6), round(state.anchor.item(), 6), state.round.item()
  (0.7, 0.7, 1)

  References:
    Stich, Local SGD Converges Fast and Communicates Little (arXiv
    1805.09767); Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1: the
    pseudo-gradient and the outer optimizer; Wang et al., CoCoD-SGD (arXiv
    1906.12043): the delayed mean with one's own progress on top; Sarfi et
    al., SparseLoCo (arXiv 2508.15706): pseudo-gradients compressed, with
    feedback.
  """
  _checking.check_optimizer("inner", inner)
  if outer is not None:
    _checking.check_optimizer("outer", outer)
  collectives.check_axis(axis)
  policy = intervals.as_policy(interval)
  _checking.check_structural("delay_rounds", delay_rounds, minimum=0)
  if delay_rounds > 1:
    raise ValueError(
      f"`delay_rounds` must be 0 or 1, got {delay_rounds}. To delay by steps, "
      "see `delay_gradients`."
    )
  _checking.check_structural("delay_after_step", delay_after_step, minimum=0)
  if carry is not None:
    _checking.check_continuous("carry", carry, high=1.0)
  if delay_after_step and not delay_rounds:
    raise ValueError(
      "`delay_after_step` says when the delay begins and needs "
      f"`delay_rounds=1`, got {delay_rounds=}."
    )
  if stream is not None and not delay_rounds:
    raise ValueError(
      "`stream` cuts what is delayed and needs `delay_rounds=1`, got "
      f"{delay_rounds=}."
    )
  if reducer is not None and stream is not None:
    _streaming.check_whole_workers(specs, stream)
    reducer = _streaming.in_parts(stream, reducer, policy.constant)
  reduction = _reducing.make(axis, reducer, feedback, seed, specs)
  inner = optax.with_extra_args_support(inner)
  delayed = delay_rounds == 1
  streaming = stream is not None and not delay_after_step
  usual_steps = policy.constant if streaming else None

  def sender(anchor: PyTree) -> Any:
    """Made when the program is traced; of the anchor only shapes matter."""
    if stream is None:
      return _sending.AtOnce(axis)
    if reduction is not None:
      return _streaming.StreamingParts(reduction, axis, message(anchor))
    return _sending.Streaming(stream, axis, message(anchor))

  def message(progress: PyTree, loss: Any = None) -> _sending.Message:
    if not policy.needs_loss:
      return _sending.Message(progress, ())
    loss = jnp.full((), jnp.nan, jnp.float32) if loss is None else loss
    return _sending.Message(progress, loss)

  def init_fn(params: optax.Params) -> LocalStepsState:
    anchor = jax.tree.map(_anchoring.wide_copy, params)
    nothing = message(jax.tree.map(jnp.zeros_like, anchor))
    remembered = () if reduction is None else reduction.init(anchor)
    state = LocalStepsState(
      **_rounds.begin(policy),
      anchor=anchor,
      inner=inner.init(params),
      outer=() if outer is None else outer.init(anchor),
      pending=(
        sender(anchor).hold(nothing, None, remembered) if delayed else ()
      ),
      in_flight=jnp.asarray(False) if delayed else (),
      kept=jnp.zeros((), jnp.float32) if delayed else (),
      stream_steps=(),
      reduction=remembered,
    )
    return ahead(state)

  def ahead(state: LocalStepsState) -> LocalStepsState:
    if stream is None:
      return state
    return state._replace(
      stream_steps=_rounds.two_ahead(state, since_step=delay_after_step)
    )

  def update_fn(
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    stream_steps: int | Literal["usual"] | None = "usual",
    drain: bool | Literal["residuals"] = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `local_steps`: call "
        "`optimizer.update(grads, state, params)`."
      )
    if drain:
      return bring_all(state, params, residuals=drain == "residuals")
    collectives.check_local(updates, axis, what="`updates`")
    steps = usual_steps if stream_steps == "usual" else stream_steps
    sent: tuple[Any, ...] = ()
    if steps is not None:
      _sending.check_stream_steps(steps, stream)
      # From the state: it has to wait for nothing in this step.
      sent = sender(state.anchor).start(state.pending, steps, state.reduction)
    updates, state = _rounds.take_step(
      policy, inner, updates, state, params, extra_args
    )
    over = _rounds.is_over(state)
    if steps is not None:
      over &= sender(state.anchor).complete(state.pending, sent)
    updates, state = jax.lax.cond(
      collectives.agreed(over, axis),
      functools.partial(end_round, steps),
      go_on,
      sent,
      updates,
      state,
      params,
    )
    return updates, ahead(state)

  def finished(
    state: LocalStepsState, sent: tuple[Any, ...]
  ) -> LocalStepsState:
    if not sent:
      return state
    pending, remembered = sender(state.anchor).finish(
      state.pending, sent, state.reduction, state.in_flight
    )
    return state._replace(pending=pending, reduction=remembered)

  def go_on(
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    del params
    state = _rounds.go_on(finished(state, sent))
    return collectives.varying((updates, state), axis)

  def end_round(
    steps: int | None,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    state = finished(state, sent)
    local = jax.tree.map(_anchoring.moved, params, updates)
    if delayed:
      target, mean_loss, state = join_late(state, local, steps)
    else:
      target, mean_loss, state = join(state, local)
    updates = _anchoring.towards(updates, target, local)
    state = _rounds.end(policy, state, mean_loss)
    return collectives.varying((updates, state), axis)

  def join(
    state: LocalStepsState, local: PyTree
  ) -> tuple[PyTree, Any, LocalStepsState]:
    if outer is None and reduction is None:
      anchor, loss = collectives.mean(
        (local, _rounds.loss(policy, state)), axis
      )
      return anchor, loss, state._replace(anchor=anchor)
    present = message(own_progress(state, local), _rounds.loss(policy, state))
    if reduction is None:
      gradient, loss = collectives.mean(present, axis)
    else:
      (gradient, loss), state = reduced(reduction, present, state)
    state = outer_step(gradient, state)
    return state.anchor, loss, state

  def reduced(
    reduction: _reducing.Reduction,
    present: _sending.Message,
    state: LocalStepsState,
  ) -> tuple[_sending.Message, LocalStepsState]:
    """The mean by few bytes; of the loss, which is one number, exactly."""
    mean, remembered = reduction.mean(present.progress, state.reduction)
    loss = collectives.mean(present.loss, axis)
    return _sending.Message(mean, loss), state._replace(reduction=remembered)

  def join_late(
    state: LocalStepsState, local: PyTree, steps: int | None
  ) -> tuple[PyTree, Any, LocalStepsState]:
    send = sender(state.anchor)
    progress = own_progress(state, local)
    # Whether this round is one of the delayed ones.
    late = state.step - state.round_step >= delay_after_step
    if steps is not None:  # What was streamed is what there is.
      late = jnp.full_like(late, True)
    present = message(progress, _rounds.loss(policy, state))
    # In the first delayed round nothing has arrived yet. Nothing happens to
    # the anchor then: a momentum must not move it by a gradient of zero.
    arrived = state.in_flight | ~late
    if reduction is None:
      gradient, loss = send.mean(state.pending, present, late, steps)
    else:
      if stream is None:
        (gradient, loss), new = reduced(
          reduction, _anchoring.either(late, state.pending, present), state
        )
        remembered = new.reduction
      else:
        (gradient, loss), remembered = send.mean(
          state.pending, present, late, steps, state.reduction
        )
      # What was sent of nothing, a sign perhaps, is not applied either.
      state = state._replace(
        reduction=_anchoring.either(arrived, remembered, state.reduction)
      )
    state = outer_step_if(arrived, gradient, state)
    if policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    rho = 1 / collectives.size(axis) if carry is None else carry
    keep = jnp.where(late, _anchoring.scalar(rho), 0.0)
    # Without a delay the round's progress is in the anchor already.
    left = jax.tree.map(lambda p: jnp.where(late, p, 0.0), progress)
    target = jax.tree.map(lambda a, p: a - keep * p, state.anchor, left)
    pending = send.hold(
      present._replace(progress=left), state.pending, state.reduction
    )
    state = state._replace(pending=pending, in_flight=late, kept=keep)
    return target, loss, state

  def own_progress(state: LocalStepsState, local: PyTree) -> PyTree:
    """What this worker has done in this round."""
    if not delayed:
      return jax.tree.map(jnp.subtract, state.anchor, local)
    # The round began at anchor - kept * pending; of that the worker keeps
    # no copy, and what rounding adds to it is sent along as progress.
    held = sender(state.anchor).own(state.pending).progress
    return jax.tree.map(
      lambda a, p, w: (a - state.kept * p) - w, state.anchor, held, local
    )

  def bring_all(
    state: LocalStepsState, params: optax.Params, *, residuals: bool
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Ends everything that was begun, with no step of its own."""
    begun = _rounds.is_begun(state)
    if residuals and reduction is not None:
      begun = jnp.ones_like(begun)
    progress = own_progress(state, jax.tree.map(_anchoring.wide, params))
    held = sender(state.anchor).own(state.pending).progress if delayed else ()
    if reduction is None:
      progress, held = collectives.mean((progress, held), axis)
    else:
      progress, held, state = all_of_it(reduction, progress, held, state, begun)
    if delayed:
      state = outer_step_if(state.in_flight, held, state)
    state = outer_step_if(begun, progress, state)
    state = _rounds.cut_short(policy, state)
    if delayed:
      nothing = message(jax.tree.map(jnp.zeros_like, state.anchor))
      state = state._replace(
        pending=sender(state.anchor).hold(
          nothing, state.pending, state.reduction
        ),
        in_flight=jnp.zeros_like(state.in_flight),
        kept=jnp.zeros_like(state.kept),
      )
    updates = _anchoring.onto(state.anchor, params)
    return collectives.varying((updates, ahead(state)), axis)

  def all_of_it(
    reduction: _reducing.Reduction,
    progress: PyTree,
    held: PyTree,
    state: LocalStepsState,
    begun: jax.Array,
  ) -> tuple[PyTree, PyTree, LocalStepsState]:
    """Exact means, and of what a feedback holds; oldest first."""

    def kept(
      flag: jax.Array, mean: PyTree, remembered: Any
    ) -> tuple[PyTree, LocalStepsState]:
      remembered = _anchoring.either(flag, remembered, state.reduction)
      return mean, state._replace(reduction=remembered)

    if delayed and stream is not None:
      exact = sender(state.anchor).exact_mean(state.pending, state.reduction)
      held, state = kept(state.in_flight, *exact)
    elif delayed:
      exact = reduction.exact_mean(held, state.reduction)
      held, state = kept(state.in_flight, *exact)
    exact = reduction.exact_mean(progress, state.reduction)
    progress, state = kept(begun, *exact)
    return progress, held, state

  def outer_step(gradient: PyTree, state: LocalStepsState) -> LocalStepsState:
    anchor, outer_state = _anchoring.outer_step(
      outer, state.outer, gradient, state.anchor
    )
    return state._replace(anchor=anchor, outer=outer_state)

  def outer_step_if(
    flag: jax.Array, gradient: PyTree, state: LocalStepsState
  ) -> LocalStepsState:
    # A conditional and not a selection: a compiler cannot merge it with what
    # comes before, and so rounds alike in every form of the program.
    def both(state: LocalStepsState) -> PyTree:
      return collectives.varying((state.anchor, state.outer), axis)

    anchor, outer_state = jax.lax.cond(
      collectives.agreed(flag, axis),
      lambda: both(outer_step(gradient, state)),
      lambda: both(state),
    )
    return state._replace(anchor=anchor, outer=outer_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
