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
from jdist.transforms import _checking, _sending, intervals

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
      the end of this one: a `Message`, or a `StreamState` when it is streamed;
      `()` without delay.
    in_flight: whether `pending` holds one, bool scalar; `()` without delay.
    kept: the part of the pending progress that is in this worker's
      parameters, and with which the round began, float32 scalar; `()` without
      delay.
    stream_steps: the interval of the round in which the next update is, and
      how many updates came before it in that round; and both for the update
      after it.  Four int32 scalars; the interval 0 for a round that is not
      delayed; `()` when nothing is streamed.
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


def local_steps(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  outer: optax.GradientTransformation | None = None,
  delay_rounds: int = 0,
  carry: jax.typing.ArrayLike = 1.0,
  delay_after_step: int = 0,
  stream: _sending.Stream | None = None,
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

  `update` with the static `drain=True` takes no local step, ignores the
  updates, and brings all that was done into the anchor; see `drain`.

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
    carry: rho in [0, 1]; used with a delay only.
    delay_after_step: rounds that begin before this local step are not
      delayed: a synchronous warm-up.
    stream: how to cut what is delayed into sub-tensors; None for the simple
      form.  Needs `delay_rounds=1`.

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
    1906.12043): the delayed mean with one's own progress on top.
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
  inner = optax.with_extra_args_support(inner)
  delayed = delay_rounds == 1
  streaming = stream is not None and not delay_after_step
  usual_steps = policy.constant if streaming else None

  def sender(anchor: PyTree) -> _sending.Sender:
    """Made when the program is traced; of the anchor only shapes matter."""
    if stream is None:
      return _sending.AtOnce(axis)
    return _sending.Streaming(stream, axis, message(anchor))

  def message(progress: PyTree, loss: Any = None) -> _sending.Message:
    if not policy.needs_loss:
      return _sending.Message(progress, ())
    loss = jnp.full((), jnp.nan, jnp.float32) if loss is None else loss
    return _sending.Message(progress, loss)

  def init_fn(params: optax.Params) -> LocalStepsState:
    interval_state = policy.init()
    zero = jnp.zeros((), jnp.int32)
    first, interval_state = policy.next(interval_state, zero, None)
    second, interval_state = policy.next(interval_state, first, None)
    anchor = jax.tree.map(_wide_copy, params)
    # Each leaf a buffer of its own, because the state may be donated.
    first, second, interval_state = jax.tree.map(
      jnp.copy, (first, second, interval_state)
    )
    state = LocalStepsState(
      step=zero,
      round=jnp.copy(zero),
      round_step=jnp.copy(zero),
      interval=first,
      next_interval=second,
      synchronized=jnp.asarray(True),  # All workers begin alike.
      anchor=anchor,
      inner=inner.init(params),
      outer=() if outer is None else outer.init(anchor),
      interval_state=interval_state,
      round_loss=jnp.zeros((), jnp.float32) if policy.needs_loss else (),
      pending=sender(anchor).hold(message(jax.tree.map(jnp.zeros_like, anchor)))
      if delayed
      else (),
      in_flight=jnp.asarray(False) if delayed else (),
      kept=jnp.zeros((), jnp.float32) if delayed else (),
      stream_steps=(),
    )
    return ahead(state)

  def ahead(state: LocalStepsState) -> LocalStepsState:
    """Looks two updates ahead, for a host that chooses programs."""
    if stream is None:
      return state
    start = state.step - state.round_step
    ends = state.round_step + 1 >= state.interval
    following = jnp.where(ends, state.step + 1, start)
    steps = jnp.where(ends, state.next_interval, state.interval)
    return state._replace(
      stream_steps=(
        jnp.where(start >= delay_after_step, state.interval, 0),
        jnp.copy(state.round_step),
        jnp.where(following >= delay_after_step, steps, 0),
        jnp.where(ends, 0, state.round_step + 1),
      )
    )

  def update_fn(
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    stream_steps: int | Literal["usual"] | None = "usual",
    drain: bool = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LocalStepsState]:
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `local_steps`: call "
        "`optimizer.update(grads, state, params)`."
      )
    if drain:
      return bring_all(state, params)
    collectives.check_local(updates, axis, what="`updates`")
    steps = usual_steps if stream_steps == "usual" else stream_steps
    sent: tuple[Any, ...] = ()
    if steps is not None:
      _check_stream_steps(steps, stream)
      # From the state: it has to wait for nothing in this step.
      sent = sender(state.anchor).start(state.pending, steps)
    extra_args |= {
      "anchor": state.anchor,
      "interval_steps": state.interval,
    }
    updates, inner_state = inner.update(
      updates, state.inner, params, **extra_args
    )
    state = state._replace(
      step=optax.safe_increment(state.step),
      round_step=optax.safe_increment(state.round_step),
      inner=inner_state,
    )
    if policy.needs_loss:
      loss = _given_loss(extra_args.get("loss"))
      state = state._replace(round_loss=state.round_loss + loss)
    over = state.round_step >= state.interval
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
    pending = sender(state.anchor).finish(state.pending, sent)
    return state._replace(pending=pending)

  def go_on(
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    del params
    state = finished(state, sent)
    state = state._replace(synchronized=jnp.asarray(False))
    return collectives.varying((updates, state), axis)

  def end_round(
    steps: int | None,
    sent: tuple[Any, ...],
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params,
  ) -> tuple[optax.Updates, LocalStepsState]:
    state = finished(state, sent)
    local = jax.tree.map(_moved, params, updates)
    if delayed:
      anchor, target, mean_loss, state = join_late(state, local, steps)
    else:
      anchor, mean_loss, state = join(state, local)
      target = anchor
    # Not `target - params`: where the workers agree with the mean, this is
    # the inner update to the bit, as for one worker.
    updates = jax.tree.map(
      lambda u, t, w: (_wide(u) + (t - w)).astype(u.dtype),
      updates, target, local,
    )  # fmt: skip
    start = state.step + state.next_interval
    following, interval_state = policy.next(
      state.interval_state, start, mean_loss if policy.needs_loss else None
    )
    state = state._replace(
      round=optax.safe_increment(state.round),
      round_step=jnp.zeros_like(state.round_step),
      interval=state.next_interval,
      next_interval=following,
      synchronized=jnp.asarray(True),
      anchor=anchor,
      interval_state=interval_state,
    )
    if policy.needs_loss:
      state = state._replace(round_loss=jnp.zeros_like(state.round_loss))
    return collectives.varying((updates, state), axis)

  def join(
    state: LocalStepsState, local: PyTree
  ) -> tuple[PyTree, Any, LocalStepsState]:
    if outer is None:
      anchor, loss = collectives.mean((local, round_loss(state)), axis)
      return anchor, loss, state
    progress = jax.tree.map(jnp.subtract, state.anchor, local)
    gradient, loss = collectives.mean((progress, round_loss(state)), axis)
    anchor, outer_state = outer_step(gradient, state)
    return anchor, loss, state._replace(outer=outer_state)

  def join_late(
    state: LocalStepsState, local: PyTree, steps: int | None
  ) -> tuple[PyTree, PyTree, Any, LocalStepsState]:
    send = sender(state.anchor)
    progress = own_progress(state, local)
    # Whether this round is one of the delayed ones.
    late = state.step - state.round_step >= delay_after_step
    if steps is not None:  # What was streamed is what there is.
      late = jnp.full_like(late, True)
    present = message(progress, round_loss(state))
    gradient, loss = send.mean(state.pending, present, late, steps)
    # In the first delayed round nothing has arrived yet. Nothing happens to
    # the anchor then: a momentum must not move it by a gradient of zero.
    arrived = state.in_flight | ~late
    anchor, outer_state = outer_step_if(arrived, gradient, state)
    if policy.needs_loss:
      loss = jnp.where(arrived, loss, jnp.nan)
    keep = jnp.where(late, _scalar(carry), 0.0)
    # Without a delay the round's progress is in the anchor already.
    left = jax.tree.map(lambda p: jnp.where(late, p, 0.0), progress)
    target = jax.tree.map(lambda a, p: a - keep * p, anchor, left)
    pending = send.hold(present._replace(progress=left), state.pending)
    state = state._replace(
      outer=outer_state, pending=pending, in_flight=late, kept=keep
    )
    return anchor, target, loss, state

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
    state: LocalStepsState, params: optax.Params
  ) -> tuple[optax.Updates, LocalStepsState]:
    """Ends everything that was begun, with no step of its own."""
    local = jax.tree.map(_wide, params)
    progress, held = own_progress(state, local), ()
    if delayed:
      held = sender(state.anchor).own(state.pending).progress
    progress, held = collectives.mean((progress, held), axis)
    if delayed:
      anchor, outer_state = outer_step_if(state.in_flight, held, state)
      state = state._replace(anchor=anchor, outer=outer_state)
    begun = state.round_step > 0
    anchor, outer_state = outer_step_if(begun, progress, state)
    # A decision without a loss, as at the very beginning.
    start = state.step + state.next_interval
    following, interval_state = policy.next(state.interval_state, start, None)
    state = state._replace(
      round=state.round + begun.astype(jnp.int32),
      round_step=jnp.zeros_like(state.round_step),
      interval=jnp.where(begun, state.next_interval, state.interval),
      next_interval=jnp.where(begun, following, state.next_interval),
      synchronized=jnp.asarray(True),
      anchor=anchor,
      outer=outer_state,
      interval_state=_either(begun, interval_state, state.interval_state),
    )
    if policy.needs_loss:
      state = state._replace(round_loss=jnp.zeros_like(state.round_loss))
    if delayed:
      nothing = message(jax.tree.map(jnp.zeros_like, anchor))
      state = state._replace(
        pending=sender(anchor).hold(nothing, state.pending),
        in_flight=jnp.zeros_like(state.in_flight),
        kept=jnp.zeros_like(state.kept),
      )
    state = ahead(state)
    updates = jax.tree.map(
      lambda a, w, p: (a - w).astype(p.dtype), anchor, local, params
    )
    return collectives.varying((updates, state), axis)

  def outer_step(
    gradient: PyTree, state: LocalStepsState
  ) -> tuple[PyTree, PyTree]:
    if outer is None:
      return jax.tree.map(jnp.subtract, state.anchor, gradient), ()
    updates, outer_state = outer.update(gradient, state.outer, state.anchor)
    return jax.tree.map(_moved, state.anchor, updates), outer_state

  def outer_step_if(
    flag: jax.Array, gradient: PyTree, state: LocalStepsState
  ) -> tuple[PyTree, PyTree]:
    # A conditional and not a selection: a compiler cannot merge it with what
    # comes before, and so rounds alike in every form of the program.
    return jax.lax.cond(
      collectives.agreed(flag, axis),
      lambda: collectives.varying(outer_step(gradient, state), axis),
      lambda: collectives.varying((state.anchor, state.outer), axis),
    )

  def round_loss(state: LocalStepsState) -> Any:
    if not policy.needs_loss:
      return ()
    return state.round_loss / state.round_step.astype(jnp.float32)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _wide(x: jax.Array) -> jax.Array:
  """At least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def _wide_copy(x: jax.Array) -> jax.Array:
  # A copy, because parameters and state may both be donated.
  return jnp.array(_wide(jnp.asarray(x)), copy=True)


def _moved(params: jax.Array, updates: jax.Array) -> jax.Array:
  """Where `optax.apply_updates` takes the parameters, in float32."""
  moved = _wide(params) + _wide(updates)
  # The cast is what the worker really holds afterwards.
  return _wide(moved.astype(params.dtype))


def _scalar(x: jax.typing.ArrayLike) -> jax.Array:
  # Injected hyper-parameters come in the parameters' dtype.
  return jnp.asarray(x).astype(jnp.float32)


def _given_loss(loss: Any) -> jax.Array:
  if loss is None:
    raise ValueError(
      "`loss` must be given to `update` when the interval is adaptive: call "
      "`optimizer.update(grads, state, params, loss=loss)`."
    )
  if jnp.shape(loss) != ():
    raise ValueError(
      "`loss` must be a scalar, the mean over this worker's batch, got shape "
      f"{jnp.shape(loss)}."
    )
  return _scalar(loss)


def _either(which: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
  return jax.tree.map(lambda y, n: jnp.where(which, y, n), yes, no)


def _check_stream_steps(steps: Any, stream: Any) -> None:
  _checking.check_structural("stream_steps", steps, minimum=1)
  if stream is None:
    raise ValueError(
      "`stream_steps` must be given to a streamed form only: build "
      "`local_steps` with `delay_rounds=1, stream=Stream()`."
    )
