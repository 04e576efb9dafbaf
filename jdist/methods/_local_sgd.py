"""Local SGD and its family: every worker takes part, with the same weight.

Where a paper samples workers, or weighs them by their data, that is a departure
and is not repeated at each.
"""

import jax
import optax

from jdist import checks, collectives, reducers, transforms
from jdist.transforms import intervals


def in_rounds(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  axis: collectives.Axis,
  rule: transforms.SyncRule | optax.GradientTransformation | None,
  overlap: transforms.Delayed | None,
  compression: reducers.Compression | None,
) -> optax.GradientTransformationExtraArgs:
  """`local_steps` of a method, whose errors say `optimizer`."""
  return transforms.local_steps(
    checks.check_optimizer("optimizer", optimizer),
    interval,
    axis=axis,
    rule=rule,
    overlap=overlap,
    compression=compression,
  )


def local_sgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Local SGD: parameters are averaged every H steps.

  .. math:: w_i \leftarrow w_i + \mathrm{optimizer}(g_i), \qquad
            \text{every } H \text{ steps: } w_i \leftarrow \tfrac1N
            \sum_j w_j

  The optimizer's state (momentum, moments) stays each worker's own.  Interval
  1 equals `ssgd` for optimizers linear in the gradient; with Adam or clipping
  it is another algorithm.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, or a policy from `jdist.transforms.intervals`.
    axis: the workers' axis.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  References:
    Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019, arXiv
    1805.09767), algorithm 1.
  """
  return in_rounds(optimizer, interval, axis, None, overlap, compression)


def post_local_sgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  switch_step: int,
  *,
  axis: collectives.Axis,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Post-local SGD: synchronous until a step, local steps from there on.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H of the local phase, or a policy.
    switch_step: the first local step of the local phase; in the paper the
      first decay of the learning rate, half-way or later.
    axis: the workers' axis.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  References:
    Lin et al., "Don't Use Large Mini-Batches, Use Local SGD" (ICLR 2020, arXiv
    1808.07217), post-local SGD.  Departure: the first phase averages parameters
    every step, which equals averaging gradients for optimizers linear in the
    gradient.
  """
  policy = intervals.post_local(switch_step, interval)
  return in_rounds(optimizer, policy, axis, None, overlap, compression)


def fed_prox(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  strength: jax.typing.ArrayLike = 0.01,
  *,
  axis: collectives.Axis,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""FedProx: Local SGD with a proximal term towards the round's beginning.

  .. math:: w_i \leftarrow w_i + \mathrm{optimizer}(g_i + \mu (w_i - a)),
            \qquad \text{every } H \text{ steps: } a \leftarrow \tfrac1N
            \sum_j w_j, \quad w_i \leftarrow a

  It is `local_steps` around `chain(proximal(strength), optimizer)`.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, or a policy from `jdist.transforms.intervals`.
    strength: mu >= 0; 0 is `local_sgd`. The paper tunes it in 0.001 ... 1,
      for each data set; the default is the middle of that grid.
    axis: the workers' axis.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  References:
    Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020,
    arXiv 1812.06127), algorithm 2.  Departures: all workers take the same
    number of steps (the paper lets each solve its problem as exactly as it
    can), and mu is not adapted.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  corrected = optax.chain(transforms.proximal(strength), optimizer)
  return in_rounds(corrected, interval, axis, None, overlap, compression)


def easgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  moving_rate: jax.typing.ArrayLike = 0.9,
  *,
  axis: collectives.Axis,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Elastic averaging: springs between every worker and a centre.

  Every worker updates its own parameters, :math:`w_i \leftarrow w_i +
  \mathrm{optimizer}(g_i)`.  After every H steps a spring pulls it and the
  centre a, the anchor, together, with :math:`\alpha = \beta / N`:

  .. math:: w_i \leftarrow w_i - \alpha (w_i - a), \qquad
            a \leftarrow a + \beta (\tfrac1N \sum_j w_j - a)

  with the old a and w on both right-hand sides, so that
  :math:`a + \sum_i w_i` stays what it was.  Workers never stand on the anchor:
  they explore on their own.  The momentum form, EAMSGD, is the same around
  `optax.sgd(rate, momentum, nesterov=True)`.  The rule is `Elastic`.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, tau in the paper, which takes 10; or a policy.
    moving_rate: beta in [0, 1], the paper's 0.9; 0 leaves all to themselves.
    axis: the workers' axis.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  References:
    Zhang, Choromanska, LeCun, "Deep Learning with Elastic Averaging SGD"
    (NeurIPS 2015, arXiv 1412.6651), equations 5 and 6 and algorithm 1.
    Departures: the synchronous form with a communication period, where
    algorithm 1 is asynchronous; the spring acts after the local step and with
    its result, where the paper's acts together with the gradient, at the point
    before; Nesterov's momentum in Optax's form.
  """
  rule = transforms.Elastic(moving_rate)
  return in_rounds(optimizer, interval, axis, rule, overlap, compression)


def scaffold(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  learning_rate: optax.ScalarOrSchedule,
  global_learning_rate: jax.typing.ArrayLike = 1.0,
  *,
  axis: collectives.Axis,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""SCAFFOLD: control variates against the drift of unequal workers.

  In every step, and after the H-th of a round,

  .. math:: w_i &\leftarrow w_i + \mathrm{optimizer}(g_i - c_i + c) \\
            c_i &\leftarrow c_i - c + \frac{a - w_i}{\sum_s \eta_s}, \qquad
            c \leftarrow \tfrac1N \sum_j c_j \\
            a &\leftarrow a + \eta_g (\tfrac1N \sum_j w_j - a), \qquad
            w_i \leftarrow a

  where :math:`\sum_s \eta_s` is that of the round's learning rates,
  :math:`H \eta` for a constant one.  Under plain SGD :math:`c_i` becomes the
  mean of the worker's gradients in the round.  A round sends twice the bytes
  of Local SGD's.  The rule is `ControlVariates`.

  Args:
    optimizer: an Optax optimizer, `optax.sgd(learning_rate)` in the paper.
      Behind a momentum m progress is up to 1/(1-m) times longer, and the
      control variates with it; give that multiple of the rate as
      `learning_rate` then.  With Adam they are no longer gradients.
    interval: H, K in the paper; or a policy.
    learning_rate: the optimizer's, a number or a schedule of the local step.
    global_learning_rate: eta_g > 0; 1 makes the anchor the mean.
    axis: the workers' axis.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes; see `local_steps`.

  References:
    Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning" (ICML 2020, arXiv 1910.06378), algorithm 1 with option II.
    Departures: the sum of the round's rates stands for K times the rate, and c
    is the mean of all c_j itself rather than moved by their changes, which is
    equal as long as all take part and keeps them from drifting apart in
    rounding.
  """
  rule = transforms.ControlVariates(learning_rate, global_learning_rate)
  return in_rounds(optimizer, interval, axis, rule, overlap, compression)


def slow_mo(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  learning_rate: optax.ScalarOrSchedule,
  slow_learning_rate: jax.typing.ArrayLike = 1.0,
  slow_momentum: jax.typing.ArrayLike = 0.5,
  *,
  axis: collectives.Axis,
  buffers: transforms.Buffers = "maintain",
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""SlowMo: a slow momentum around Local SGD.

  After every H steps :math:`w_i \leftarrow w_i + \mathrm{optimizer}(g_i)`,
  with the learning rate :math:`\gamma` of the last of them,

  .. math:: u \leftarrow \beta u + \frac1\gamma (a - \tfrac1N \sum_j w_j),
            \qquad a \leftarrow a - \alpha \gamma u, \qquad w_i \leftarrow a

  While the rate is constant it cancels, and this is `local_steps` with
  `rule=optax.sgd(alpha, momentum=beta)`; when it falls, u is scaled with it.
  The rule is `SlowMomentum`.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H, tau in the paper; or a policy.
    learning_rate: the optimizer's, a number or a schedule of the local step.
    slow_learning_rate: alpha > 0, the paper's 1.
    slow_momentum: beta in [0, 1]; 0.5 as in the authors' code, the paper tunes
      it in 0.4 ... 0.8.
    axis: the workers' axis.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes; see `local_steps`.
    buffers: what happens to the optimizer's own momentum after a round:
      "maintain" leaves each worker its own, "reset" begins anew, "average"
      takes the workers' mean, for the bytes of another round or more.

  References:
    Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with
    Slow Momentum" (ICLR 2020, arXiv 1910.00643), algorithm 1 around Local SGD.
    Departures: in the paper the rate is constant in a round, here that of its
    last step counts.  Reset and average treat all the optimizer's
    floating-point arrays, and leave counters alone: schedules go on, and so
    does Adam's bias correction, which then divides fresh moments by about one.
  """
  rule = transforms.SlowMomentum(
    learning_rate, slow_learning_rate, slow_momentum, buffers
  )
  return in_rounds(optimizer, interval, axis, rule, overlap, compression)
