"""Methods whose workers continue to compute while a mean is communicated."""

import dataclasses

import jax
import optax

from jdist import checks, collectives, reducers, transforms
from jdist.methods import _local_sgd
from jdist.transforms import intervals

# MSDPU's own delay, which begins with the first round of two steps.
MSDPU_DELAY = transforms.Delayed(1, carry=None, after_step=None)


def msdpu(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis: collectives.Axis,
  correction: jax.typing.ArrayLike = 0.1,
  warmup_steps: int = 0,
  rule: transforms.SyncRule | optax.GradientTransformation | None = None,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""MSDPU: adaptive multi-step delayed updates, a reconstruction.

  In round r every worker takes H local steps with a pull towards the anchor,

  .. math:: w_i \leftarrow w_i + \mathrm{optimizer}(g_i +
            \tfrac{\beta}{H \eta}(w_i - a)),

  and starts the aggregation of its progress :math:`\Delta_i^{(r)}`, of which it
  keeps a part :math:`\rho` until the mean is applied, d steps into the next
  round:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_j
            \Delta_j^{(r)})

  Rounds become longer as the learning rate falls (`intervals.growth`), and
  their means are late by as many steps as the link needs, up to a third of a
  round:

  .. math:: H = \mathrm{clip}(\lfloor (c\, \eta_0 / \eta)^2 \rfloor,
            1, H_{max}), \qquad d = \min(\lceil s / t \rceil,
            \lfloor H / 3 \rfloor)

  where s are the seconds of a round's messages and t those of a step
  (`advice.Advice.delay_steps`); d is at least 1.  Such a mean allows two thirds
  of synchronous SGD's rate in rounds of two steps and 0.86 of it or more in
  longer ones; halfway or later a tenth may be left.  How far workers
  drift apart in long rounds at a high rate depends on the problem: c is chosen
  on validation data (experiments/msdpu, experiments/first_comparison).

  A stream splits the aggregation into sub-tensors.  Every step of the round
  sends some of them under its computation, and the host chooses how many
  (`training.Trainer(stream_steps=)`).

  Args:
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H_max, the local steps of the longest round of the adaptive rule;
      or a policy that replaces the rule: `intervals.msdpu(8, learning_rate)`,
      which follows the loss, or `intervals.fixed(8)`.
    learning_rate: The optimizer's rate, a schedule of the local step; a number
      only with a policy.  The correction depends on it, too.  Where Optax
      injects it, a round is sized by the rate as the round before it begins.
    axis: The axis of the workers.
    correction: beta >= 0; 0 is no correction.
    warmup_steps: The number of local steps in which every round has one step
      and no delay; the adaptive rule needs none.
    rule: A sync rule, or an Optax optimizer as the outer one; None applies the
      mean as it is.
    overlap: `transforms.Delayed(...)`; None is `Delayed(1, carry=None,
      after_step=None)`: one step late from the first round of two steps on,
      where a worker keeps its own share 1/N of its progress meanwhile.
    compression: A compression of the mean; see `local_steps`.

  Returns:
    A transformation; `update` takes `loss=` if `interval` is a policy that
    needs it.

  Raises:
    ValueError: If an argument is wrong, or the adaptive rule is given a
      constant rate.

  References:
    Ju et al., multi-step delayed parameter update (doi 10.11918/202407052).
    The abstract gives no formula: interval, correction, delay and carry-over
    are a reconstruction from QSR (arXiv 2310.14423), SSD-SGD (arXiv 2012.05396)
    and CoCoD-SGD (arXiv 1906.12043), which keeps all of its progress (rho = 1).

  >>> rate = optax.cosine_decay_schedule(0.1, 1000)
  >>> optimizer = msdpu(optax.sgd(rate), 16, rate, axis=None)
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  warmup_steps = checks.check_structural(
    "warmup_steps", warmup_steps, minimum=0
  )
  checks.check_continuous("correction", correction)
  if not isinstance(interval, intervals.IntervalPolicy):
    interval = checks.check_structural("interval", interval, minimum=1)
    # Under `optax.inject_hyperparams` it is an array, a schedule's value.
    if not callable(learning_rate) and not isinstance(learning_rate, jax.Array):
      checks.check_rate("learning_rate", learning_rate)
      raise ValueError(
        "`learning_rate` must be a schedule for rounds that grow as it falls, "
        f"got {checks.show(learning_rate)}: every round would have one step. "
        f"Pass a policy, `intervals.fixed({interval})`, for a constant rate."
      )
    interval = intervals.growth(learning_rate, max_interval=interval)
  if overlap is None:
    overlap = MSDPU_DELAY
  if warmup_steps:
    interval = intervals.post_local(warmup_steps, interval)
    # An `after_step` of None needs no change: the delay begins with the first
    # long round, after the warm-up.  Other kinds are refused by `local_steps`.
    if isinstance(overlap, transforms.Delayed) and (
      overlap.after_step is not None
    ):
      if overlap.after_step not in (0, warmup_steps):
        raise ValueError(
          "`overlap` must begin when the warm-up ends: `after_step` must be "
          f"left out or {warmup_steps}, as `warmup_steps`, got "
          f"{overlap.after_step}."
        )
      overlap = dataclasses.replace(overlap, after_step=warmup_steps)
  # The pull is added to the gradient, as the gradient of a penalty would be.
  corrected = optax.chain(
    transforms.pull_to_anchor(correction, learning_rate), optimizer
  )
  return _local_sgd.in_rounds(
    corrected, interval, axis, rule, overlap, compression
  )


def cocod(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  stream: transforms.Stream | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""CoCoD-SGD: the last round's mean plus the worker's own progress.

  While the workers take the H steps of round r, the mean of the parameters
  with which they began it is communicated.  At its end

  .. math:: w_i \leftarrow \tfrac1N \sum_j w_j^{\text{begin}} + (w_i -
            w_i^{\text{begin}})

  The anchor is that mean.

  Args:
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H, or a policy.
    axis: The axis of the workers.
    stream: A split of the message over the steps of the next round; None sends
      it at the round's end, in a conditional, and computes the same bits.
    compression: A compression of the mean; see `local_steps`.

  References:
    Shen et al., CoCoD-SGD (arXiv 1906.12043), algorithm 1.  Departures: the
    progress of the last round is sent, whose mean moves the anchor to the same
    point up to rounding; the paper's batch sizes for workers of unequal speed
    are left out.
  """
  # A carry of 1 keeps all of the own progress while its mean is late.
  late = transforms.Delayed(carry=1.0, stream=stream)
  return _local_sgd.in_rounds(
    optimizer, interval, axis, None, late, compression
  )


def overlap_local_sgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  pull: jax.typing.ArrayLike = 0.6,
  momentum: jax.typing.ArrayLike = 0.0,
  *,
  axis: collectives.Axis,
  stream: transforms.Stream | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Overlap-Local-SGD: a pull towards a mean that is one round late.

  After the H-th step of round r, with the anchor z and the parameters that the
  workers held after the last round's pull,

  .. math:: v \leftarrow \mu v + \tfrac1N \sum_j w_j^{(r-1)} - z, \quad
            z \leftarrow z + v, \quad
            w_i^{(r)} \leftarrow (1 - \alpha) w_i + \alpha z

  The mean has a whole round to travel.  Workers are not on the anchor.
  A pull of 1 makes no progress: it discards every local step.

  Args:
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H, called tau in the paper; or a policy.
    pull: alpha in [0, 1]; the paper's value is 0.6, its authors' script has
      0.2.
    momentum: mu in [0, 1] of the anchor; 0 makes z the mean.
    axis: The axis of the workers.
    stream: A split of the message over the steps of the next round; None sends
      it at the round's end, in a conditional.
    compression: A compression of the mean; see `local_steps`.

  Returns:
    `local_steps` with the rule `PulledAnchor`; evaluate on the anchor, which is
    one round behind.

  References:
    Wang, Liang, Joshi, Overlap Local-SGD (arXiv 2002.09539).  Departure: the
    momentum does not divide by the learning rate as the authors' script does,
    which differs while the rate changes.
  """
  rule = transforms.PulledAnchor(pull, momentum)
  # The mean of a round is communicated during the whole next one.
  late = transforms.Delayed(stream=stream)
  return _local_sgd.in_rounds(
    optimizer, interval, axis, rule, late, compression
  )
