"""Published methods, each as one chain.

All take the optimizer of a worker first, any Optax chain, and the workers'
axis by name.
"""

from typing import Any

import jax
import optax

from jdist import checks, collectives, reducers, transforms
from jdist.transforms import intervals


def ssgd(
  optimizer: optax.GradientTransformation, *, axis: collectives.Axis
) -> optax.GradientTransformationExtraArgs:
  r"""Synchronous SGD: every step averages the workers' gradients.

  .. math:: w \leftarrow w + \mathrm{optimizer}(\tfrac1N \sum_i g_i)

  Args:
    optimizer: any Optax optimizer; as `loss` and as `value` it gets the
      workers' mean of what is given, for which 4 bytes more are sent where it
      uses that.
    axis: the workers' axis: None, a name, or (inner, outer).

  Returns:
    `chain(average_gradients(axis), optimizer)`.

  >>> optimizer = ssgd(optax.adam(1e-3), axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  return optax.chain(
    transforms.average_gradients(axis),
    transforms.with_mean_loss(optimizer, axis),
  )


def local_sgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
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

  References:
    Stich, Local SGD Converges Fast and Communicates Little (arXiv
    1805.09767), algorithm 1.

  >>> optimizer = local_sgd(optax.sgd(0.1), 8, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  return transforms.local_steps(optimizer, interval, axis=axis)


def post_local_sgd(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  switch_step: int,
  *,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  """Post-local SGD: synchronous until a step, local steps from there on.

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H of the local phase, or a policy.
    switch_step: the first local step of the local phase; in the paper the
      first decay of the learning rate, half-way or later.
    axis: the workers' axis.

  References:
    Lin et al., Don't Use Large Mini-Batches, Use Local SGD (arXiv
    1808.07217), post-local SGD.  Departure: the first phase averages
    parameters every step, which equals averaging gradients for optimizers
    linear in the gradient.

  >>> optimizer = post_local_sgd(optax.sgd(0.1), 8, 1000, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  policy = intervals.post_local(switch_step, interval)
  return transforms.local_steps(optimizer, policy, axis=axis)


def diloco(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  outer_learning_rate: jax.typing.ArrayLike = 0.7,
  outer_momentum: jax.typing.ArrayLike = 0.9,
  *,
  axis: collectives.Axis,
  reducer: reducers.Reducer | None = None,
  feedback: reducers.Feedback | None = None,
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""DiLoCo: the mean progress of a round is a gradient for outer Nesterov.

  .. math:: \Delta = a - \tfrac1N \sum_i w_i, \quad m \leftarrow \mu m +
            \Delta, \quad a \leftarrow a - \eta_{out} (\mu m + \Delta), \quad
            w_i \leftarrow a

  Args:
    optimizer: the inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H; 500 in the paper, for language models.
    outer_learning_rate: a positive number, or a schedule of the rounds; the
      paper's 0.7.
    outer_momentum: mu in [0, 1]; the paper's 0.9.
    axis: the workers' axis.
    reducer: how to take the mean by fewer bytes, see `local_steps`: with
      `reducers.compressed(codecs.Quantize(4))` and the feedback
      `ErrorFeedback()` four bits a parameter and round.
    feedback: what becomes of what is not sent.
    seed: of the random numbers of codecs that draw some; None is 0.

  References:
    Douillard et al., DiLoCo: Distributed Low-Communication Training of
    Language Models (arXiv 2311.08105), algorithm 1 and table 5.

  >>> optimizer = diloco(optax.adamw(1e-3), 100, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  checks.check_rate("outer_learning_rate", outer_learning_rate)
  checks.check_continuous("outer_momentum", outer_momentum, high=1.0)
  rate = _float(outer_learning_rate)
  outer = optax.sgd(rate, momentum=_float(outer_momentum), nesterov=True)
  return transforms.local_steps(
    optimizer,
    interval,
    axis=axis,
    outer=outer,
    reducer=reducer,
    feedback=feedback,
    seed=seed,
  )


def msdpu(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis: collectives.Axis,
  correction: jax.typing.ArrayLike = 0.1,
  carry: jax.typing.ArrayLike | None = None,
  delay_steps: int | None = None,
  warmup_steps: int = 0,
  max_interval: int = 16,
  outer: optax.GradientTransformation | None = None,
  stream: transforms.Stream | None = None,
  reducer: reducers.Reducer | None = None,
  feedback: reducers.Feedback | None = None,
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""MSDPU: adaptive multi-step delayed updates, a reconstruction.

  In round r every worker takes H local steps with a pull towards the anchor,

  .. math:: w_i \leftarrow w_i + \mathrm{optimizer}(g_i +
            \tfrac{\beta}{H \eta}(w_i - a)),

  then joins the aggregation that round r-1 started, keeps its own progress on
  top, and starts the aggregation of its progress :math:`\Delta_i^{(r)}`:

  .. math:: a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_j
            \Delta_j^{(r-1)}), \qquad w_i \leftarrow a - \rho
            \Delta_i^{(r)}

  and the interval follows the loss (`intervals.msdpu`).  With `stream` the
  aggregation is split into sub-tensors, the next ones sent in every step of
  the round under its computation, of which a host says how many go in a step
  (`training.Trainer(stream_steps=)`); without it, it is one mean at the end of
  a round, with the same result (see `local_steps`).

  Args:
    optimizer: any Optax optimizer; its schedules count local steps.
    interval: H_0 of the adaptive rule, at most `max_interval`, or a policy
      that replaces the rule: `intervals.fixed(8)`, for instance.
    learning_rate: the optimizer's, a number or a schedule of the local step;
      the correction and the interval depend on it.
    axis: the workers' axis.
    correction: beta >= 0, 0 is none.
    carry: rho in [0, 1], how much of a round's progress is kept until the mean
      of it arrives; None is 1/N, the share that is this worker's in that mean.
      (On CIFAR-10 1 costs several points, see experiments/msdpu.)
    delay_steps: after how many steps of the next round the mean is applied;
      None is a whole round, the reconstruction's.  See `local_steps`.
    warmup_steps: local steps of synchronous, undelayed warm-up.
    max_interval: H_max of the adaptive rule, the reconstruction's 16.
    outer: an outer optimizer; None applies the mean as it is.
    stream: how to split into sub-tensors; None for the simple form.
    reducer: how to take the mean by fewer bytes, of sub-tensors with `stream`;
      see `local_steps`.
    feedback: what becomes of what is not sent.
    seed: of the random numbers of codecs that draw some; None is 0.

  Returns:
    A transformation; `update` takes `loss=` unless `interval` is a policy
    that needs none.

  References:
    Ju et al., multi-step delayed parameter update (2025, doi
    10.11918/202407052).  The abstract gives no formula: interval,
    correction, delay and carry-over are a reconstruction from AdaComm (arXiv
    1810.08313), SSD-SGD (arXiv 2012.05396) and CoCoD-SGD (arXiv 1906.12043),
    which keeps all of its progress (rho = 1).

  >>> optimizer = msdpu(optax.sgd(0.1), 8, 0.1, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  checks.check_structural("warmup_steps", warmup_steps, minimum=0)
  checks.check_continuous("correction", correction)
  if not isinstance(interval, intervals.IntervalPolicy):
    checks.check_structural("interval", interval, minimum=1)
    intervals.check_first(
      "interval", interval, intervals.longest(max_interval, 1)
    )
    interval = intervals.msdpu(
      interval, learning_rate, max_interval=max_interval
    )
  if warmup_steps:
    interval = intervals.post_local(warmup_steps, interval)
  corrected = optax.chain(
    transforms.pull_to_anchor(correction, learning_rate), optimizer
  )
  return transforms.local_steps(
    corrected,
    interval,
    axis=axis,
    outer=outer,
    delay_rounds=1,
    carry=carry,
    delay_steps=delay_steps,
    delay_after_step=warmup_steps,
    stream=stream,
    reducer=reducer,
    feedback=feedback,
    seed=seed,
  )


def _float(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
  """Injected hyper-parameters come in the parameters' dtype; anchors do not."""
  return x.astype("float32") if isinstance(x, jax.Array) else x


def mp2(
  optimizer: optax.GradientTransformation,
  cut: transforms.Cut,
  predict: transforms.Predict,
  predictor_params: Any,
  interval: int | intervals.IntervalPolicy = 1,
  *,
  axis: collectives.Axis,
  reducer: reducers.Reducer | None = None,
  feedback: reducers.Feedback | None = None,
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""MP²: the front layers are trained and averaged, the others predicted.

  With the front f of the network and a trained predictor,

  .. math:: f_i \leftarrow f + \mathrm{optimizer}(g_i), \qquad
            f \leftarrow \tfrac1N \sum_i f_i, \qquad
            r \leftarrow \mathrm{predict}(\theta, f)

  which is `predict_rest(local_steps(optimizer, interval), ...)`.  For other
  ways of training the front, such as `diloco` or `msdpu`, and for a residual
  by which the rest learns too, call `predict_rest`.

  Args:
    optimizer: of the front, each worker its own state; Adam in the paper.
    cut: where the network is cut, `jdist.prediction.published_cut(name)`.
    predict: the predictor, `jdist.prediction.Predictor.apply`.
    predictor_params: its trained parameters.
    interval: H, or a policy; 1 (default) as in the paper.
    axis: the workers' axis.
    reducer: how to take the front's mean by fewer bytes, see `local_steps`.
    feedback: what becomes of what is not sent of the front.
    seed: of the random numbers of codecs that draw some; None is 0.

  Returns:
    A transformation; `update` needs `params`, and `loss=` where the interval's
    policy does. `jdist.anchor` gives the whole network: evaluate on it.

  Raises:
    ValueError: when an argument is of another kind or out of its range; when
      the state is made, and `predict` does not give the rest of these
      parameters; at trace time, when `params`, or a needed `loss`, is missing
      or does not suit the cut.

  References:
    Model parameter prediction (MP²).  Departure: there a server predicts, and
    sends all parameters to the workers; here all workers predict the same, so
    that no rest travels in any direction.  `jdist.prediction.Server` is the
    published protocol.

  >>> class Halves:
  ...   split = staticmethod(lambda tree: (tree[0], tree[1]))
  ...   join = staticmethod(lambda front, rest: (front, rest))
  >>> optimizer = mp2(
  ...   optax.adam(1e-3), Halves, lambda theta, f: theta * f, 2.0, axis=None
  ... )
  """
  checks.check_optimizer("optimizer", optimizer)
  front = transforms.local_steps(
    optimizer,
    interval,
    axis=axis,
    reducer=reducer,
    feedback=feedback,
    seed=seed,
  )
  return transforms.predict_rest(
    front, cut, predict, predictor_params, axis=axis
  )
