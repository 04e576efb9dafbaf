"""Methods whose workers go on while the mean is under way."""

import dataclasses

import jax
import optax

from jdist import checks, collectives, reducers, transforms
from jdist.methods import _local_sgd
from jdist.transforms import intervals


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
  keeps a part :math:`\rho` until the mean arrives, d steps into the next round:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_j
            \Delta_j^{(r)})

  Rounds have one step at first, and more as the learning rate falls
  (`intervals.growth`); the delay begins with the first round that is longer
  than it.  Long rounds at a high rate, and a delay from the start, each cost
  points of accuracy that they do not cost later (experiments/msdpu).

  With a stream the aggregation is split into sub-tensors, the next ones sent in
  every step of the round under its computation, of which a host says how many
  go in a step (`training.Trainer(stream_steps=)`).

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H_max, local steps of the longest round of the adaptive rule; or a
      policy that replaces the rule: `intervals.msdpu(8, learning_rate)`, which
      follows the loss, or `intervals.fixed(8)`.
    learning_rate: the optimizer's, a schedule of the local step; a number only
      with a policy.  The correction depends on it, too.
    axis: the workers' axis.
    correction: beta >= 0, 0 is none.
    warmup_steps: local steps in which every round has one step, without a
      delay; the adaptive rule needs none.
    rule: how a round ends; an Optax optimizer is the outer one, None applies
      the mean as it is.
    overlap: `transforms.Delayed(...)`; None is `Delayed(1, carry=None,
      after_step=None)`: one step late from the first round of two steps on; of
      its progress a worker keeps its own share 1/N until the mean arrives.
    compression: how to take the mean by fewer bytes, of sub-tensors with a
      stream; see `local_steps`.

  Returns:
    A transformation; `update` takes `loss=` if `interval` is a policy that
    needs it.

  Raises:
    ValueError: when an argument is wrong, or the adaptive rule is given a
      constant rate.

  References:
    Ju et al., "Multi-step delayed parameter update" (Journal of Harbin
    Institute of Technology 2025, doi 10.11918/202407052).  The abstract gives
    no formula: interval, correction, delay and carry-over are a reconstruction
    from QSR (arXiv 2310.14423), SSD-SGD (arXiv 2012.05396) and CoCoD-SGD
    (arXiv 1906.12043), which keeps all of its progress (rho = 1).

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
    checks.check_rate("learning_rate", learning_rate)
    if not callable(learning_rate) and not checks.is_traced(learning_rate):
      raise ValueError(
        "`learning_rate` must be a schedule for rounds that grow as it falls, "
        f"got {checks.show(learning_rate)}: every round would have one step. "
        f"Pass a policy, `intervals.fixed({interval})`, for a constant rate."
      )
    interval = intervals.growth(learning_rate, max_interval=interval)
  if overlap is None:
    overlap = transforms.Delayed(1, carry=None, after_step=None)
  if warmup_steps:
    interval = intervals.post_local(warmup_steps, interval)
    # Else refused below, or it begins with the first long round.
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
  r"""CoCoD-SGD: the last round's mean, with one's own progress on top.

  While the workers take the H steps of round r, the mean of the parameters
  with which they began it is under way.  At its end

  .. math:: w_i \leftarrow \tfrac1N \sum_j w_j^{\text{begin}} + (w_i -
            w_i^{\text{begin}})

  The anchor is that mean.  This is `overlap=Delayed(carry=1.0)`.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, or a policy.
    axis: the workers' axis.
    stream: how to split what is sent while the next round is computed; None
      sends it at the round's end, in a conditional, of the same bits.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  References:
    Shen et al., "Faster Distributed Deep Net Training: Computation and
    Communication Decoupled Stochastic Gradient Descent" (IJCAI 2019, arXiv
    1906.12043), algorithm 1.  Departures: what travels is the progress of the
    last round, whose mean moves the anchor to the same place up to rounding;
    workers of unequal speed, for whom the paper has other batch sizes, are not
    considered.
  """
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

  After the H-th step of round r, with the anchor z and what the workers held
  after the last round's pull,

  .. math:: v \leftarrow \mu v + \tfrac1N \sum_j w_j^{(r-1)} - z, \quad
            z \leftarrow z + v, \quad
            w_i^{(r)} \leftarrow (1 - \alpha) w_i + \alpha z

  The mean has had a whole round to travel.  Workers stand beside the anchor.
  A pull of 1 stands still: all that was done is thrown away.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, tau in the paper; or a policy.
    pull: alpha in [0, 1], the paper's 0.6; its authors' script has 0.2.
    momentum: mu in [0, 1] of the anchor; 0 makes z the mean.
    axis: the workers' axis.
    stream: how to split what is sent while the next round is computed; None
      sends it at the round's end, in a conditional.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  Returns:
    `local_steps` with the rule `PulledAnchor`; evaluate on the anchor, which is
    one round behind.

  References:
    Wang, Liang, Joshi, "Overlap Local-SGD: An Algorithmic Approach to Hide
    Communication Delays in Distributed SGD" (ICASSP 2020, arXiv 2002.09539).
    Departure: the momentum does not divide by the learning rate as the authors'
    script does, which differs while the rate changes.
  """
  rule = transforms.PulledAnchor(pull, momentum)
  late = transforms.Delayed(stream=stream)
  return _local_sgd.in_rounds(
    optimizer, interval, axis, rule, late, compression
  )


def od_sgd(
  optimizer: optax.GradientTransformation,
  local_learning_rate: optax.ScalarOrSchedule,
  *,
  axis: collectives.Axis,
  warmup_steps: int = 0,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""OD-SGD: gradients one step late, with a local update in between.

  .. math:: a \leftarrow a + \mathrm{optimizer}(\tfrac1N \sum_j
            g_j^{(t-1)}), \qquad w_i \leftarrow a - \eta_{loc} g_i^{(t)}

  It is `lead_step` with `optax.sgd(local_learning_rate)` as local optimizer.

  Args:
    optimizer: any Optax optimizer, for the anchor: the server's in the paper.
    local_learning_rate: of the worker's own step, a positive number or a
      schedule of the step after the warm-up; the paper tunes it beside the
      optimizer's.
    axis: the workers' axis.
    warmup_steps: synchronous steps at the beginning; see `lead_step`, which
      is without a warm-up the faster.
    compression: how to take the mean by fewer bytes.

  References:
    Xu et al., "OD-SGD: One-step Delay Stochastic Gradient Descent for
    Distributed Training" (ACM TACO 2020, arXiv 2005.06728). Departures: a mean
    among workers stands for the paper's server; the local step is plain SGD
    (the paper also compensates the delay as DC-ASGD does: `lead_step` takes any
    local optimizer); the warm-up goes over into the delayed phase at once.
  """
  checks.check_rate("local_learning_rate", local_learning_rate)
  return transforms.lead_step(
    optimizer,
    optax.sgd(local_learning_rate),
    axis=axis,
    warmup_steps=warmup_steps,
    compression=compression,
  )
