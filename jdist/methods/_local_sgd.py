"""Local SGD and its family: every worker takes part, with the same weight.

Papers that sample workers, or weight them by their data, are departed from in
this respect, which the references below do not repeat.
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
  """Calls `local_steps` for a method, whose users know `optimizer`."""
  return transforms.local_steps(
    # `local_steps` calls it `inner`, a name that a method's error must not use.
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
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H, or a policy from `jdist.transforms.intervals`.
    axis: The axis of the workers.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean; see `local_steps`.

  References:
    Stich, Local SGD (arXiv 1805.09767), algorithm 1.
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
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H of the local phase, or a policy.
    switch_step: The first local step of the local phase.  The paper takes the
      first decay of the learning rate, halfway or later.
    axis: The axis of the workers.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean; see `local_steps`.

  References:
    Lin et al., post-local SGD (arXiv 1808.07217).  Departure: the first phase
    averages parameters in every step, which equals averaging gradients for
    optimizers linear in the gradient.
  """
  # Rounds of one step keep one program for both phases, where a switch from
  # `ssgd` would change the state of the optimizer.
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

  Args:
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H, or a policy from `jdist.transforms.intervals`.
    strength: mu >= 0; 0 equals `local_sgd`.  The paper tunes it in 0.001 to 1
      for each data set; the default is the middle of that grid.
    axis: The axis of the workers.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean; see `local_steps`.

  References:
    Li et al., FedProx (arXiv 1812.06127), algorithm 2.  Departures: all workers
    take the same number of steps (the paper lets each solve its problem as
    exactly as it can), and mu is not adapted.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  # The term precedes the optimizer, which must see the pull as a gradient.
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

  Both right-hand sides use the old a and w, so that :math:`a + \sum_i w_i` is
  conserved.  Workers never reach the anchor: they explore on their own.  The
  momentum form, EAMSGD, is the same around `optax.sgd(rate, momentum,
  nesterov=True)`.

  Args:
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H, called tau in the paper, which takes 10; or a policy.
    moving_rate: beta in [0, 1]; the paper's value is 0.9, and 0 decouples the
      workers.
    axis: The axis of the workers.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean; see `local_steps`.

  References:
    Zhang, Choromanska, LeCun, EASGD (arXiv 1412.6651), equations 5 and 6 and
    algorithm 1.  Departures: the synchronous form with a communication period,
    where algorithm 1 is asynchronous; the spring acts after the local step and
    on its result, where the paper's acts together with the gradient, on the
    point before; Nesterov's momentum in Optax's form.
  """
  # The rule divides beta by the number of workers, which only the axis knows.
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

  where :math:`\sum_s \eta_s` is the sum of the round's learning rates,
  :math:`H \eta` for a constant one.  Under plain SGD :math:`c_i` becomes the
  mean of the worker's gradients in the round.  A round sends twice the bytes
  of a round of Local SGD.

  Args:
    optimizer: An Optax optimizer, `optax.sgd(learning_rate)` in the paper.
      With a momentum m progress is up to 1/(1-m) times longer, and the control
      variates with it; give that multiple of the rate as `learning_rate` then.
      With Adam they are no longer gradients.
    interval: H, called K in the paper; or a policy.
    learning_rate: The optimizer's rate, a number or a schedule of the local
      step.
    global_learning_rate: eta_g > 0; 1 makes the anchor the mean.
    axis: The axis of the workers.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean; see `local_steps`.

  References:
    Karimireddy et al., SCAFFOLD (arXiv 1910.06378), algorithm 1 with option II.
    Departures: the sum of the round's rates stands for K times the rate, and c
    is the mean of all c_j itself instead of being moved by their changes.  Both
    are equal as long as all workers take part; the mean cannot drift by
    rounding.
  """
  # The rule sums the rates of a round itself, as its length may change.
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

  Args:
    optimizer: Any Optax optimizer; its schedules count local steps.
    interval: H, called tau in the paper; or a policy.
    learning_rate: The optimizer's rate, a number or a schedule of the local
      step.
    slow_learning_rate: alpha > 0; the paper's value is 1.
    slow_momentum: beta in [0, 1); 0.5 as in the authors' code, the paper tunes
      it in 0.4 to 0.8.
    axis: The axis of the workers.
    buffers: The treatment of the optimizer's own momentum when a round's mean
      is applied:
      "maintain" keeps each worker's, "reset" clears it, "average" takes the
      workers' mean, for the bytes of another round or more.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean; see `local_steps`.

  References:
    Wang et al., SlowMo (arXiv 1910.00643), algorithm 1 around Local SGD.
    Departures: the rate of a round's last step counts, where the paper's is
    constant in a round.  Reset and average treat all floating-point arrays of
    the optimizer and leave counters alone: schedules continue, and so does
    Adam's bias correction, which then divides fresh moments by about one.
  """
  # Unlike an outer SGD, u is in units of gradients: a rate that falls within a
  # run does not leave it too large.
  rule = transforms.SlowMomentum(
    learning_rate, slow_learning_rate, slow_momentum, buffers
  )
  return in_rounds(optimizer, interval, axis, rule, overlap, compression)
