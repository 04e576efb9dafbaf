"""Synchronous methods that send gradients by fewer bytes.

Their first state may depend on the number of workers: make it where the axis is
bound, for instance `workers.jit(optimizer.init)(params)`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jdist import checks, codecs, collectives, reducers, transforms
from jdist.methods import _synchronous


def qsgd(
  optimizer: optax.GradientTransformation,
  bits: int = 4,
  block: int = 512,
  *,
  axis: collectives.Axis,
  wire: Literal["gather", "all_to_all"] = "gather",
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""QSGD: few-bit integers, rounded at random so that the mean is right.

  .. math:: g \leftarrow \tfrac1N \sum_i Q(g_i), \qquad
            Q(x) = \tfrac{\lVert x \rVert_2}{L} R(L x / \lVert x \rVert_2)

  block by block, where R rounds up with the probability of the distance to the
  lower integer, and :math:`L = 2^{b-1} - 1`.

  Args:
    optimizer: any Optax optimizer.
    bits: b, sign included; the paper's 4, of its 2, 4 and 8.
    block: entries that share a norm, the paper's bucket of 512.
    axis: the workers' axis.
    wire: `"gather"` sends every worker's integers to all, as in the paper: by
      N workers N - 1 payloads each.  `"all_to_all"` sends less than two,
      whatever N is, and rounds the mean once more.
    seed: of the rounding; None is 0.

  References:
    Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding" (NeurIPS 2017, arXiv 1610.02132), section 3.
    Departure: integers go in fixed width and not in Elias's code.
  """
  codec = codecs.Quantize(bits, block, "norm", "stochastic")
  reducer = reducers.compressed(codec, wire=wire)
  return _by_few_bytes(optimizer, axis, reducer, seed=seed)


def terngrad(
  optimizer: optax.GradientTransformation,
  deviations: jax.typing.ArrayLike = 2.5,
  *,
  axis: collectives.Axis,
  wire: Literal["gather", "all_to_all"] = "gather",
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""TernGrad: every entry is -1, 0 or 1 times the largest of its leaf.

  .. math:: g \leftarrow \tfrac1N \sum_i s_i \, \mathrm{sign}(g_i) \, b_i,
            \qquad b_i \sim \mathrm{Bernoulli}(|g_i| / s_i)

  of gradients that are clipped at c standard deviations of their leaf, which
  keeps the largest, s, small.

  Args:
    optimizer: any Optax optimizer.
    deviations: c, the paper's 2.5.
    axis: the workers' axis.
    wire: see `qsgd`.
    seed: of the coins; None is 0.

  References:
    Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in
    Distributed Deep Learning" (NeurIPS 2017, arXiv 1705.07878), equations 2 to
    4 and section 4. Departures: every worker has a scale of its own, where the
    paper's share the largest; the mean is not made ternary again.
  """
  reducer = reducers.compressed(codecs.Ternary(), wire=wire)
  return transforms.only_floats(
    optax.chain(
      transforms.clip_deviations(deviations),
      _by_few_bytes(optimizer, axis, reducer, seed=seed),
    )
  )


def signsgd(
  optimizer: optax.GradientTransformation,
  momentum: float = 0.0,
  *,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes a vote on the signs: a bit from each worker, a bit to each.

  .. math:: m_i \leftarrow \mu m_i + (1 - \mu) g_i, \qquad
            g \leftarrow \mathrm{sign}\left(\sum_i \mathrm{sign}(m_i)\right)

  Without feedback it goes wrong where the noise is not symmetric: see
  `ef_signsgd`.

  Args:
    optimizer: any Optax optimizer; what it gets is -1 or 1 (also for a tie and
      for zeros), so the learning rate is a distance, as for Adam.
    momentum: mu in [0, 1), of each worker's own; 0 is signSGD, the papers' 0.9
      is Signum.
    axis: the workers' axis.

  References:
    Bernstein et al., "signSGD with Majority Vote is Communication Efficient and
    Fault Tolerant" (ICLR 2019, arXiv 1810.05291), algorithm 1, Signum, after
    Bernstein et al., signSGD (arXiv 1802.04434), algorithm 3.  Departures:
    those of `reducers.MajorityVote`.
  """
  checks.check_continuous("momentum", momentum, high=1.0)
  if not checks.is_traced(momentum) and float(momentum) == 1:
    raise ValueError(
      f"`momentum` must be below 1, got {momentum}: gradients would not count."
    )
  momenta = reducers.Smoothing(momentum)
  return _by_few_bytes(optimizer, axis, reducers.MajorityVote(), momenta)


def ef_signsgd(
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  wire: Literal["gather", "all_to_all"] = "all_to_all",
) -> optax.GradientTransformationExtraArgs:
  r"""EF-signSGD: signs, a scale for each leaf, and feedback.

  .. math:: p_i = g_i + e_i, \qquad
            s_i = \tfrac{\lVert p_i \rVert_1}{d} \mathrm{sign}(p_i), \qquad
            g \leftarrow \tfrac1N \sum_i s_i, \qquad e_i \leftarrow p_i - s_i

  Args:
    optimizer: any Optax optimizer.
    axis: the workers' axis.
    wire: `"all_to_all"` makes signs of the mean again, at the owner of each
      part, who has a residual of its own; `"gather"` sends every worker's
      signs to all, as the paper has it.

  References:
    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes" (ICML 2019, arXiv 1901.09847), algorithm 2; for more
    workers and the all-to-all Zheng et al., dist-EF-SGD (arXiv 1905.10936),
    algorithm 2, with a server for each part.  Departures: residuals are in
    units of gradients, see `ErrorFeedback`; in an all-to-all a scale is of one
    part of a leaf.
  """
  reducer = reducers.compressed(codecs.Sign(), wire=wire)
  return _by_few_bytes(optimizer, axis, reducer, reducers.ErrorFeedback())


def one_bit_adam(
  learning_rate: optax.ScalarOrSchedule,
  warmup_steps: int,
  *,
  axis: collectives.Axis,
  b1: jax.typing.ArrayLike = 0.9,
  b2: jax.typing.ArrayLike = 0.999,
  eps: jax.typing.ArrayLike = 1e-8,
  weight_decay: jax.typing.ArrayLike = 0.0,
) -> optax.GradientTransformationExtraArgs:
  """1-bit Adam: Adam, then signs of its momentum over a frozen variance.

  Signs go to the owner of each part and from there to all, with feedback at
  both ends; see `scale_by_frozen_adam`.

  Args:
    learning_rate: a number or a schedule of the step.
    warmup_steps: steps of exact Adam; the paper's 15 to 20 % of the run.
    axis: the workers' axis.
    b1: decay of the momentum.
    b2: decay of the variance.
    eps: added to the root of the variance.
    weight_decay: decoupled, as in AdamW.

  References:
    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed" (ICML 2021, arXiv 2102.02888), algorithm 1.
    Departures: those of `scale_by_frozen_adam`; a scale is of one part of a
    leaf, where the authors' code has one for all parameters in a row.
  """
  checks.check_rate("learning_rate", learning_rate)
  weight_decay = checks.check_continuous("weight_decay", weight_decay)
  adam = optax.chain(
    transforms.scale_by_frozen_adam(
      warmup_steps,
      axis,
      reducers.Compression(codecs.Sign(scale="l2"), reducers.ErrorFeedback()),
      b1=b1,
      b2=b2,
      eps=eps,
    ),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )
  return transforms.only_floats(adam)


def topk_sgd(
  optimizer: optax.GradientTransformation,
  ratio: float = 0.01,
  *,
  axis: collectives.Axis,
  feedback: bool = True,
) -> optax.GradientTransformationExtraArgs:
  r"""Top-k: the largest entries of each leaf, and what was not sent later.

  .. math:: p_i = g_i + e_i, \qquad g \leftarrow \tfrac1N \sum_i
            \mathrm{top}_k(p_i), \qquad e_i \leftarrow p_i - \mathrm{top}_k(p_i)

  Args:
    optimizer: any Optax optimizer.
    ratio: k as a part of the leaf, in (0, 1].
    axis: the workers' axis.
    feedback: whether the rest is kept; without it, it is lost, and small
      gradients never move anything.

  References:
    Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018, arXiv
    1809.07599), algorithm 1; Aji and Heafield, Sparse Communication for
    Distributed Gradient Descent (arXiv 1704.05021).  Departure: residuals in
    units of gradients, see `ErrorFeedback`.
  """
  checks.check_choice("feedback", feedback, (True, False))
  kept = reducers.ErrorFeedback() if feedback else None
  return _by_few_bytes(optimizer, axis, codecs.TopK(ratio), kept)


def powersgd(
  optimizer: optax.GradientTransformation,
  rank: int = 2,
  *,
  axis: collectives.Axis,
  seed: int | None = None,
  factors: reducers.Reducer | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""PowerSGD: a mean of low rank, by one step of power iteration.

  .. math:: M_i = g_i + e_i, \quad P = \mathrm{orth}(\tfrac1N \sum_i M_i Q),
            \quad Q \leftarrow \tfrac1N \sum_i M_i^T P, \quad
            g \leftarrow P Q^T, \quad e_i \leftarrow M_i - g

  The momentum stands behind it, in the optimizer: that is what the paper
  calls post-compression momentum, and all workers have the same.

  Args:
    optimizer: any Optax optimizer, for instance
      `optax.sgd(0.1, momentum=0.9)`.
    rank: of the mean; the paper's 1, 2 and 4.
    axis: the workers' axis.
    seed: of the first Q; None is 0.
    factors: what carries P and Q; None, the paper's exact sums.  Ours:
      `reducers.compressed(codecs.Quantize(4, 64), owner_feedback="own_share")`
      has thrice the rank in fewer bytes than `rank=2` in float32.

  References:
    Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient
    Compression for Distributed Optimization" (NeurIPS 2019, arXiv 1905.13727),
    algorithms 1 and 2; the departures of `reducers.PowerSGD`.
  """
  reducer = reducers.PowerSGD(rank, 0 if seed is None else seed, factors)
  return _by_few_bytes(optimizer, axis, reducer, reducers.ErrorFeedback())


def dgc(
  optimizer: optax.GradientTransformation,
  ratio: float = 0.001,
  momentum: float = 0.9,
  *,
  axis: collectives.Axis,
  nesterov: bool = False,
  threshold: jax.typing.ArrayLike | None = None,
  steps_per_phase: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Deep Gradient Compression: a thousandth of the entries, with momentum.

  Local clipping, momentum correction with factor masking, and the largest
  entries of each leaf, of which a smaller part is sent in every phase of a
  warm-up: 25, 6.25, 1.5625, 0.4 and 0.1 %.  Leaves of one dimension (biases,
  scales) go whole.

  Args:
    optimizer: plain SGD: the momentum is the workers' own and stands before
      the mean.  Weight decay belongs here, behind the mean.
    ratio: the part of a leaf's entries that is sent after the warm-up; the
      paper's 0.001.
    momentum: m; the paper's 0.9.
    axis: the workers' axis.
    nesterov: whether it is Nesterov's.
    threshold: of the norm of the gradients' sum, of which each worker clips
      its own to the part :math:`N^{-1/2}`; None does not clip.
    steps_per_phase: steps of each of the warm-up's four phases, an epoch in
      the paper; None has no warm-up.

  References:
    Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training" (ICLR 2018, arXiv 1712.01887), algorithms 1 to 4,
    and the authors' code.  Departures: those of `codecs.SampledTopK` and
    `MomentumCorrection`; clipping is of the norm of the whole gradient.
  """
  checks.check_continuous("ratio", ratio, high=1.0, open_low=True)

  def sparse(ratio: float) -> reducers.Reducer:
    largest = reducers.compressed(codecs.SampledTopK(ratio))
    return reducers.PerLeaf((reducers.Rule(largest, min_ndim=2),))

  reducer = (
    sparse(ratio)
    if steps_per_phase is None
    else reducers.warm_up(sparse, steps_per_phase, ratio)
  )
  feedback = reducers.MomentumCorrection(momentum, nesterov)
  chain = _by_few_bytes(optimizer, axis, reducer, feedback)
  if threshold is None:
    return chain
  clipped = optax.chain(transforms.clip_local(threshold, axis), chain)
  return transforms.only_floats(clipped)


def demo(
  optimizer: optax.GradientTransformation,
  decay: float = 0.999,
  chunk: int = 64,
  k: int = 32,
  *,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""DeMo: decoupled momentum, of which the fastest components are shared.

  .. math:: m_i \leftarrow \beta m_i + g_i, \qquad q_i = \mathrm{DCT}^{-1}
            \mathrm{top}_k \mathrm{DCT}(m_i), \qquad m_i \leftarrow m_i - q_i,
            \qquad g \leftarrow \mathrm{sign}(\tfrac1N \sum_i q_i)

  A momentum that loses what it sends is a decayed residual: this is
  `ErrorFeedback(decay)` around a codec of cosines.

  Args:
    optimizer: plain SGD, with decoupled weight decay if any; what it gets is
      -1, 0 or 1, so the learning rate is a distance.
    decay: beta; the authors' 0.999.
    chunk: the longest side of a block of the transform; the authors' 64.
    k: coefficients of each block; the authors' 32.
    axis: the workers' axis.

  References:
    Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization" (2024,
    arXiv 2411.19870), algorithm 1.  Departures: those of `codecs.DCTTopK`; a
    coefficient that a part of the workers sends counts by its mean over all of
    them, as in the algorithm, and not over the senders, as in the authors'
    code.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  signs = optax.stateless(lambda mean, params: jax.tree.map(jnp.sign, mean))
  return _by_few_bytes(
    optax.chain(signs, optimizer),
    axis,
    codecs.DCTTopK(chunk, k),
    reducers.ErrorFeedback(decay),
  )


def _by_few_bytes(
  optimizer: optax.GradientTransformation,
  axis: collectives.Axis,
  reducer: Any,
  feedback: reducers.Feedback | None = None,
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Synchronous SGD whose means a reducer, or a codec, takes."""
  compression = reducers.Compression(reducer, feedback, seed=seed)
  return _synchronous.ssgd(optimizer, axis=axis, compression=compression)
