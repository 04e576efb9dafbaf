"""The family of methods that go on while the mean is under way.

As published, with what is late in each: as in `_federated`, all take the
optimizer of a worker first and the workers' axis by name, and every worker
takes part in every round with the same weight.
"""

import jax
import optax

from jdist import checks, collectives, transforms
from jdist.methods import _chains
from jdist.transforms import intervals


def overlap_local_sgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  pull: jax.typing.ArrayLike = 0.6,
  momentum: jax.typing.ArrayLike = 0.0,
  *,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""Overlap-Local-SGD: a pull towards a mean that is one round late.

  After the H-th step of round r, with the anchor z and what the workers held
  after the last round's pull,

  .. math:: v \leftarrow \mu v + \tfrac1N \sum_j w_j^{(r-1)} - z, \quad
            z \leftarrow z + v, \quad
            w_i^{(r)} \leftarrow (1 - \alpha) w_i + \alpha z

  The mean has had a whole round to travel.  Workers stand beside the anchor.
  A pull of 1 stands still: all that was done is thrown away.

  `drain` lets the late mean arrive, and then, with the same momentum, that of
  where the workers are now; all go to the anchor.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, tau in the paper; or a policy.
    pull: alpha in [0, 1], the paper's 0.6; its authors' script has 0.2.
    momentum: mu in [0, 1] of the anchor; 0 makes z the mean.
    axis: the workers' axis.

  Returns:
    A transformation whose state is a `RoundsState`; evaluate on the anchor,
    which is one round behind.

  Raises:
    ValueError: when an argument is out of its range; at trace time, when
      `params` is missing or gradients are already summed.

  References:
    Wang, Liang, Joshi, Overlap Local-SGD (arXiv 2002.09539).  Departures: the
    momentum does not divide by the learning rate as the authors' script does,
    which differs while the rate changes; the late mean is taken of what lies
    in the state, but in the conditional at the round's end, where a compiler
    hides nothing of it: the arithmetic is the paper's, the overlap is not.

  >>> optimizer = overlap_local_sgd(optax.sgd(0.1), 8, axis=None)
  """
  checks.check_continuous("pull", pull, high=1.0)
  checks.check_continuous("momentum", momentum, high=1.0)
  return transforms.in_rounds(
    optimizer,
    interval,
    transforms.late_anchor(pull, momentum),
    axis=axis,
    method="overlap_local_sgd",
  )


def cocod(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""CoCoD-SGD: the last round's mean, with one's own progress on top.

  While the workers take the H steps of round r, the mean of the parameters
  with which they began it is under way.  At its end

  .. math:: w_i \leftarrow \tfrac1N \sum_j w_j^{\text{begin}} + (w_i -
            w_i^{\text{begin}})

  The anchor is that mean.  It is taken at the end of the round, in a
  conditional, where a compiler hides nothing of it.  The form that sends it
  under the computation, to the same bits, is
  `local_steps(optimizer, interval, axis=axis, delay_rounds=1, carry=1.0,
  stream=Stream())`.

  `drain` lets the last round's mean arrive, and then that of this round's
  progress.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, or a policy.
    axis: the workers' axis.

  Returns:
    `local_steps` with `delay_rounds=1` and `carry=1.0`.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    Shen et al., Faster Distributed Deep Net Training: Computation and
    Communication Decoupled SGD (arXiv 1906.12043), algorithm 1.  Departures:
    what travels is the progress of the last round, whose mean moves the
    anchor to the same place up to rounding; workers of unequal speed, for
    whom the paper has other batch sizes, are not considered.

  >>> optimizer = cocod(optax.sgd(0.1), 8, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  return transforms.local_steps(
    optimizer, interval, axis=axis, delay_rounds=1, carry=1.0
  )


def od_sgd(
  optimizer: optax.GradientTransformation,
  local_learning_rate: optax.ScalarOrSchedule,
  *,
  axis: collectives.Axis,
  warmup_steps: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""OD-SGD: gradients one step late, with a local update in between.

  .. math:: a \leftarrow a + \mathrm{optimizer}(\tfrac1N \sum_j
            g_j^{(t-1)}), \qquad w_i \leftarrow a - \eta_{loc} g_i^{(t)}

  `drain` lets the last mean gradient arrive, and puts the workers on the
  anchor.

  Args:
    optimizer: any Optax optimizer, for the anchor: the server's in the paper.
    local_learning_rate: of the worker's own step, a positive number or a
      schedule of the step after the warm-up; the paper tunes it beside the
      optimizer's.
    axis: the workers' axis.
    warmup_steps: synchronous steps at the beginning; see `lead_step`, which
      is without a warm-up the faster.

  Returns:
    `lead_step` with `optax.sgd(local_learning_rate)` as the local optimizer.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    Xu et al., OD-SGD: One-step Delay Stochastic Gradient Descent for
    Distributed Training (ACM TACO 17(4), 2020; arXiv 2005.06728).
    Departures: a mean among workers stands for the paper's server; the local
    step is plain SGD (the paper also compensates the delay as DC-ASGD does:
    `lead_step` takes any local optimizer); the warm-up goes over into the
    delayed phase at once.

  >>> optimizer = od_sgd(optax.sgd(0.1, momentum=0.9), 0.1, axis=None)
  """
  checks.check_rate("local_learning_rate", local_learning_rate)
  return transforms.lead_step(
    optimizer,
    optax.sgd(local_learning_rate),
    axis=axis,
    warmup_steps=warmup_steps,
  )


def streaming_diloco(
  optimizer: optax.GradientTransformation,
  interval: int,
  fragments: transforms.Fragments,
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  outer_momentum: jax.typing.ArrayLike = 0.9,
  *,
  axis: collectives.Axis,
  delay_steps: int = 1,
  mix: jax.typing.ArrayLike = 0.5,
) -> optax.GradientTransformationExtraArgs:
  r"""Streaming DiLoCo: fragments, sent at staggered steps, applied late.

  `fragment_steps` with Nesterov's momentum outside: fragment p is sent every
  H steps, arrives :math:`\tau` steps later, and is mixed with what the worker
  has by then,

  .. math:: \Delta = \tfrac1N \sum_i (a_p - w_{i,p})^{(t-\tau)}, \quad
            m_p \leftarrow \mu m_p + \Delta, \quad
            a_p \leftarrow a_p - \eta_{out} (\mu m_p + \Delta), \quad
            w_{i,p} \leftarrow \alpha w_{i,p} + (1-\alpha) a_p

  `drain` lets what is under way arrive, and then brings each fragment's
  progress since it was sent into its anchor, unmixed.

  Args:
    optimizer: the inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H.
    fragments: P at most the interval, or a function from a leaf's path to its
      fragment; see `fragment_steps`.
    outer_learning_rate: a positive number, or a schedule of a fragment's
      meetings; 0.7 is DiLoCo's.
    outer_momentum: mu in [0, 1]; 0.9 is DiLoCo's.
    axis: the workers' axis.
    delay_steps: tau, at most interval - 1.
    mix: alpha in [0, 1], the worker's own part; the paper's 0.5.

  Returns:
    A transformation whose state is a `FragmentsState`.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    Douillard et al., Streaming DiLoCo with overlapping communication (arXiv
    2501.18512), algorithm 2.  Departures: fragments are runs of leaves in the
    order of the tree unless a function says otherwise (the paper's are
    strided layers of a transformer); progress is sent in float32, not in four
    bits; the mean of a fragment is taken of what lies in the state, but in
    the conditional of the step in which it arrives, where a compiler hides
    nothing of it.

  >>> optimizer = streaming_diloco(optax.adamw(1e-3), 100, 4, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  checks.check_rate("outer_learning_rate", outer_learning_rate)
  checks.check_continuous("outer_momentum", outer_momentum, high=1.0)
  outer = optax.sgd(
    _chains._float(outer_learning_rate),
    momentum=_chains._float(outer_momentum),
    nesterov=True,
  )
  return transforms.fragment_steps(
    optimizer,
    interval,
    fragments,
    axis=axis,
    outer=outer,
    delay_steps=delay_steps,
    mix=mix,
  )
