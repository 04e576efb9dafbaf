"""Local steps: many updates of one worker's own, then a round's end together.

The *anchor* is the truth: the parameters on which all workers agree, in
float32, identical to the bit everywhere.  Local parameters leave it for a
round and come back to it.

Here is what it is and what it takes.  A round is in `_engine`, how it ends in
`_delay`, and how what was done in it travels in `_sender`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist import checks, collectives, reducers
from jdist.transforms import intervals
from jdist.transforms.local import (
  _chunked_stream,
  _delay,
  _engine,
  _late_arrival,
  _streaming,
)

PyTree = Any


def local_steps(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  outer: optax.GradientTransformation | None = None,
  delay_rounds: int = 0,
  delay_steps: int | None = None,
  carry: jax.typing.ArrayLike | None = 1.0,
  delay_after_step: int = 0,
  stream: _streaming.Stream | None = None,
  reducer: reducers.Reducer | None = None,
  feedback: reducers.Feedback | None = None,
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

  A whole round is long: meanwhile workers do not know of each other.  With
  `delay_steps=d` the mean arrives after d steps of the next round (at its end,
  if that comes first), and the worker keeps all that it has done since it
  set out from :math:`s_i = a - \rho \Delta_i^{(r)}`:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i
            \Delta_i^{(r)}), \qquad w_i \leftarrow a - (s_i - w_i)

  With d = H it is the same as without.  Take as many steps as the link needs.

  The simple form sends it all in the step that ends the round (or in which it
  arrives), inside a conditional.  With `stream` the same mean is taken of a
  part in every step: no collective depends on the step's gradients, nor stands
  in a conditional, so a compiler can hide all of it.  `update` takes the static
  `stream_steps=`, the number of steps in which the whole is sent; it may change
  from step to step.  None sends nothing, and where the mean is due, if not all
  has arrived, everything.  By default it is the interval if that is fixed (with
  `delay_after_step` 0 and no shorter `delay_steps`); else it must be given: a
  host chooses it, see `transforms.stream_steps` and `training.Trainer`.  A
  streamed round lasts until everything has arrived, however late.  Both forms
  give the same bits where the order of summation does not depend on an
  element's place in its message (on CPU; on GPUs with two workers, or by the
  algorithm NCCL picks).

  With a reducer the mean of the pseudo-gradients, which are float32, is taken
  by fewer bytes, and with a feedback what was left out goes with the next
  round's.  All workers decode the same bytes, so anchors stay equal to the
  bit.  A worker's own progress, where it keeps some, is what it has really
  done.  The loss of an adaptive interval is averaged exactly.  The first state
  may depend on the number of workers: make it where the axis is bound.

  With `stream` and a reducer the message is cut into sub-tensors of one size,
  each with a reducer's state and random numbers of its own
  (`reducers.Chunked`, which a reducer becomes by itself: of
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

  Whether a step ends its round is decided on the device, in a conditional,
  around which compilers copy and in which nothing overlaps.  A host that
  knows it (`transforms.rounds_ahead`) gives the static `round_ends=`: False
  is a step within a round, which sends nothing but a streamed round's parts;
  True ends the round, and what the simple form sends then is as free to
  overlap as the mean of synchronous SGD.  Neither has a conditional around a
  round's end.  What the host says holds, also for a round that is shorter or
  longer then; but of a streamed one that ends before everything has arrived
  the mean is NaN.  `training.Trainer(..., host_rounds=True)` does it.

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
    delay_steps: with a delay, the steps of the next round after which the mean
      is applied, at least 1; None for all of them.  A host cannot tell rounds
      then (`round_ends`).
    carry: rho in [0, 1]; used with a delay only.  None is 1/N: of the mean that
      is under way a worker knows its own share, and keeps that.
    delay_after_step: rounds that begin before this local step are not
      delayed: a synchronous warm-up.
    stream: how to cut what is delayed into sub-tensors; None for the simple
      form.  Needs `delay_rounds=1`.
    reducer: how to take the mean, for instance
      `reducers.compressed(codecs.Quantize(4))`; None takes it exactly.  With
      `stream` it is one for vectors, or `reducers.Chunked(reducer)`.
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

  >>> import jax.numpy as jnp
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
  checks.check_optimizer("inner", inner)
  if outer is not None:
    checks.check_optimizer("outer", outer)
  collectives.check_axis(axis)
  policy = intervals.as_policy(interval)
  _check_delay(delay_rounds, delay_steps, carry, delay_after_step, stream)
  sent_in = policy.constant
  if sent_in is not None and delay_steps is not None:
    sent_in = min(sent_in, delay_steps)
  if reducer is not None and stream is not None:
    _chunked_stream.check_whole_workers(specs, stream)
    reducer = _chunked_stream.in_parts(stream, reducer, sent_in)
  reduction = reducers.make(axis, reducer, feedback, seed, specs)
  make_sender = _chunked_stream.make_sender(axis, policy, stream, reduction)
  outer_steps = _delay.Outer(outer, axis)
  joining: _delay.Joining
  if not delay_rounds:
    joining = _delay.AtRoundEnd(axis, policy, outer_steps, reduction)
  else:
    late: Callable[..., _delay.OneRoundLate] = _delay.OneRoundLate
    if delay_steps is not None:
      late = functools.partial(_late_arrival.StepsLate, delay_steps=delay_steps)
    joining = late(
      axis, policy, outer_steps, reduction, make_sender,
      carry=carry, after_step=delay_after_step,
    )  # fmt: skip
  steps = _engine.LocalSteps(
    inner=optax.with_extra_args_support(inner),
    policy=policy,
    axis=axis,
    outer=outer_steps,
    joining=joining,
    reduction=reduction,
    stream=stream,
    make_sender=make_sender,
    delay_after_step=delay_after_step,
    delay_steps=delay_steps,
  )
  return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def _check_delay(
  delay_rounds: int,
  delay_steps: int | None,
  carry: jax.typing.ArrayLike | None,
  delay_after_step: int,
  stream: _streaming.Stream | None,
) -> None:
  checks.check_structural("delay_rounds", delay_rounds, minimum=0)
  if delay_rounds > 1:
    raise ValueError(
      f"`delay_rounds` must be 0 or 1, got {delay_rounds}. To delay by steps, "
      "see `delay_gradients`."
    )
  checks.check_structural("delay_after_step", delay_after_step, minimum=0)
  if delay_steps is not None:
    checks.check_structural("delay_steps", delay_steps, minimum=1)
    if not delay_rounds:
      raise ValueError(
        "`delay_steps` says how late a mean arrives and needs "
        f"`delay_rounds=1`, got {delay_rounds=}."
      )
  if carry is not None:
    checks.check_continuous("carry", carry, high=1.0)
  if delay_after_step and not delay_rounds:
    raise ValueError(
      "`delay_after_step` says when the delay begins and needs "
      f"`delay_rounds=1`, got {delay_rounds=}."
    )
  if stream is not None and not isinstance(stream, _streaming.Stream):
    raise ValueError(
      "`stream` must be a `transforms.Stream`, for instance "
      f"`stream=Stream()`, or None for the simple form, got {stream!r}."
    )
  if stream is not None and not delay_rounds:
    raise ValueError(
      "`stream` cuts what is delayed and needs `delay_rounds=1`, got "
      f"{delay_rounds=}."
    )
