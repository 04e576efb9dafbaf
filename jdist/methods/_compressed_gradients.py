"""Synchronous SGD, and methods that send its gradients by fewer bytes.

A first state may depend on the number of workers: make it where the axis is
bound, for instance `workers.jit(optimizer.init)(params)`.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jdist import checks, codecs, collectives, reducers, transforms


def ssgd(
  optimizer: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Synchronous SGD: every step averages the workers' gradients.

  .. math:: w \leftarrow w + \mathrm{optimizer}(\tfrac1N \sum_i g_i)

  Args:
    optimizer: Any Optax optimizer.  It receives the workers' mean as `loss` and
      as `value`, for which 4 bytes more are sent if it uses them.  A line
      search uses `grad` and `value_fn`, which stay each worker's own, and is
      refused.
    axis: The axis of the workers: None, a name, or (inner, outer).
    compression: A compression of the mean; see `local_steps`.

  Returns:
    `chain(average_gradients(axis, compression), optimizer)`.
  """
  return transforms.only_floats(
    optax.chain(
      transforms.average_gradients(axis, compression),
      # The optimizer must see one loss on all workers, or a plateau schedule
      # would drive their parameters apart.
      transforms.with_mean_loss(optimizer, axis),
    )
  )


def qsgd(
  optimizer: optax.GradientTransformation,
  bits: int = 4,
  block: int = 512,
  *,
  axis: collectives.Axis,
  wire: Literal["gather", "all_to_all"] = "gather",
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""QSGD: few-bit integers, rounded at random so that the mean is unbiased.

  .. math:: g \leftarrow \tfrac1N \sum_i Q(g_i), \qquad
            Q(x) = \tfrac{\lVert x \rVert_2}{L} R(L x / \lVert x \rVert_2)

  block by block, where R rounds up with the probability of the distance to the
  lower integer, and :math:`L = 2^{b-1} - 1`.

  Args:
    optimizer: Any Optax optimizer.
    bits: b, including the sign; the paper takes 2, 4 and 8.
    block: The number of entries that share a norm, the paper's bucket of 512.
    axis: The axis of the workers.
    wire: `"gather"` sends every worker's integers to all, as in the paper, so
      that each of N workers sends N - 1 payloads.  `"all_to_all"` sends less
      than two, for any N, and rounds the mean once more.
    seed: The seed of the rounding; None is 0.

  References:
    Alistarh et al., QSGD (arXiv 1610.02132), section 3.  Departure: integers
    have a fixed width instead of Elias's code.
  """
  # Stochastic rounding makes Q unbiased, so that QSGD needs no feedback.
  codec = codecs.Quantize(bits, block, "norm", "stochastic")
  reducer = reducers.compressed(codec, wire=wire)
  return _compressed(optimizer, axis, reducer, seed=seed)


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
  keeps the largest entry, s, small.

  Args:
    optimizer: Any Optax optimizer.
    deviations: c; the paper's value is 2.5.
    axis: The axis of the workers.
    wire: The route of the payloads; see `qsgd`.
    seed: The seed of the coins; None is 0.

  References:
    Wen et al., TernGrad (arXiv 1705.07878), equations 2 to 4 and section 4.
    Departures: every worker has a scale of its own, where the paper's workers
    share the largest; the mean is not made ternary again.
  """
  reducer = reducers.compressed(codecs.Ternary(), wire=wire)
  # Clipping precedes the codec: an outlier would be the scale of its leaf, and
  # nearly all other entries would be rounded to zero.
  return transforms.only_floats(
    optax.chain(
      transforms.clip_deviations(deviations),
      _compressed(optimizer, axis, reducer, seed=seed),
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

  Without feedback it fails if the noise is not symmetric: see `ef_signsgd`.

  Args:
    optimizer: Any Optax optimizer; its input is -1 or 1 (also for a tie and for
      zeros), so the learning rate is a distance, as for Adam.
    momentum: mu in [0, 1) of each worker's own momentum; 0 is signSGD, the
      papers' 0.9 is Signum.
    axis: The axis of the workers.

  References:
    Bernstein et al., signSGD with majority vote (arXiv 1810.05291), algorithm
    1, Signum, after Bernstein et al., signSGD (arXiv 1802.04434), algorithm 3.
    Departures: those of `reducers.MajorityVote`.
  """
  # A momentum of 1 is in the range of `Smoothing`, which averages states too.
  checks.check_continuous("momentum", momentum, high=1.0, open_high=True)
  # Each worker votes with its own momentum.  A momentum behind the vote would
  # smooth signs, which have lost the size of the noise.
  momenta = reducers.Smoothing(momentum)
  return _compressed(optimizer, axis, reducers.MajorityVote(), momenta)


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
    optimizer: Any Optax optimizer.
    axis: The axis of the workers.
    wire: `"all_to_all"` encodes the mean again at the owner of each part, who
      has a residual of its own; `"gather"` sends every worker's signs to all,
      as in the paper.

  References:
    Karimireddy et al., error feedback (arXiv 1901.09847), algorithm 2; for more
    workers and the all-to-all Zheng et al., dist-EF-SGD (arXiv 1905.10936),
    algorithm 2, with a server for each part.  Departures: residuals are in
    units of gradients, see `ErrorFeedback`; in an all-to-all each part of a
    leaf has a scale.
  """
  # A scale for each leaf, the mean magnitude, makes the signs a contraction,
  # which the proof of error feedback needs.
  reducer = reducers.compressed(codecs.Sign(), wire=wire)
  return _compressed(optimizer, axis, reducer, reducers.ErrorFeedback())


def topk_sgd(
  optimizer: optax.GradientTransformation,
  ratio: float = 0.01,
  *,
  axis: collectives.Axis,
  feedback: bool = True,
) -> optax.GradientTransformationExtraArgs:
  r"""Top-k: sends the largest entries of each leaf, and the rest later.

  .. math:: p_i = g_i + e_i, \qquad g \leftarrow \tfrac1N \sum_i
            \mathrm{top}_k(p_i), \qquad e_i \leftarrow p_i - \mathrm{top}_k(p_i)

  Args:
    optimizer: Any Optax optimizer.
    ratio: k as a part of the leaf, in (0, 1].
    axis: The axis of the workers.
    feedback: Whether the rest is kept.  Without feedback it is lost, and small
      gradients never move anything.

  References:
    Stich, Cordonnier, Jaggi, sparsified SGD with memory (arXiv 1809.07599),
    algorithm 1; Aji and Heafield, sparse communication (arXiv 1704.05021).
    Departure: residuals are in units of gradients, see `ErrorFeedback`.
  """
  checks.check_choice("feedback", feedback, (True, False))
  kept = reducers.ErrorFeedback() if feedback else None
  return _compressed(optimizer, axis, codecs.TopK(ratio), kept)


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

  The momentum belongs to the optimizer, behind the mean.  The paper calls it
  post-compression momentum, and all workers have the same.

  Args:
    optimizer: Any Optax optimizer, for instance
      `optax.sgd(0.1, momentum=0.9)`.
    rank: The rank of the mean; the paper takes 1, 2 and 4.
    axis: The axis of the workers.
    seed: The seed of the first Q; None is 0.
    factors: A reducer for P and Q; None takes the paper's exact sums.  Ours,
      `reducers.compressed(codecs.Quantize(4, 64), owner_feedback="own_share")`,
      sends three times the rank in fewer bytes than `rank=2` in float32.

  References:
    Vogels, Karimireddy, Jaggi, PowerSGD (arXiv 1905.13727), algorithms 1 and 2;
    the departures of `reducers.PowerSGD`.
  """
  # A mean of low rank is biased: without feedback, directions outside of it
  # would be lost for good.
  reducer = reducers.PowerSGD(rank, 0 if seed is None else seed, factors)
  return _compressed(optimizer, axis, reducer, reducers.ErrorFeedback())


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

  .. math:: u_i \leftarrow m u_i + g_i, \quad v_i \leftarrow v_i + u_i, \quad
            g \leftarrow \tfrac1N \sum_i \mathrm{top}_k(v_i), \quad
            u_i, v_i \leftarrow 0 \text{ where sent}

  A warm-up sends 25, 6.25, 1.5625 and 0.4 %; vectors are always sent whole.

  Args:
    optimizer: Plain SGD: the momentum is the workers' own and precedes the
      mean.  Weight decay belongs here, behind the mean.
    ratio: The part of a leaf's entries that is sent after the warm-up; the
      paper's value is 0.001.
    momentum: m; the paper's value is 0.9.
    axis: The axis of the workers.
    nesterov: Whether the momentum is Nesterov's.
    threshold: A limit for the norm of the gradients' sum; each worker clips its
      own gradient to the part :math:`N^{-1/2}` of it.  None does not clip.
    steps_per_phase: The length of each of the warm-up's four phases, an epoch
      in the paper; None is no warm-up.

  References:
    Lin et al., Deep Gradient Compression (arXiv 1712.01887), algorithms 1 to 4,
    and the authors' code.  Departures: those of `codecs.SampledTopK` and
    `MomentumCorrection`; clipping uses the norm of the whole gradient.
  """
  checks.check_continuous("ratio", ratio, high=1.0, open_low=True)

  def sparse(ratio: float) -> reducers.Reducer:
    largest = reducers.compressed(codecs.SampledTopK(ratio))
    # A leaf of one dimension is too small to be worth its indices.
    return reducers.PerLeaf((reducers.Rule(largest, min_ndim=2),))

  reducer = sparse(ratio)
  if steps_per_phase is not None:
    reducer = reducers.warm_up(sparse, steps_per_phase, ratio)
  # Momenta accumulate in front of the choice of entries, so that an entry that
  # waits several steps keeps the momentum it would have had (section 3.1).
  feedback = reducers.MomentumCorrection(momentum, nesterov)
  chain = _compressed(optimizer, axis, reducer, feedback)
  if threshold is None:
    return chain
  # Clipping precedes the residual, which must not hold unclipped gradients.
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

  Args:
    optimizer: Plain SGD, with decoupled weight decay if any; its input is -1, 0
      or 1, so the learning rate is a distance.
    decay: beta; the authors' value is 0.999.
    chunk: The longest side of a block of the transform; the authors' value is
      64.
    k: The number of coefficients of each block; the authors' value is 32.
    axis: The axis of the workers.

  References:
    Peng, Quesnelle, Kingma, DeMo (arXiv 2411.19870), algorithm 1.  Departures:
    those of `codecs.DCTTopK`; a coefficient that only some workers send counts
    by its mean over all of them, as in the algorithm, and not over the senders,
    as in the authors' code.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  # The sign is taken of the mean, which all workers have decoded alike.
  signs = optax.stateless(lambda mean, params: jax.tree.map(jnp.sign, mean))
  chain = optax.chain(signs, optimizer)
  # A momentum that loses the part it sends is a decayed residual.
  feedback = reducers.ErrorFeedback(decay)
  return _compressed(chain, axis, codecs.DCTTopK(chunk, k), feedback)


def _compressed(
  optimizer: optax.GradientTransformation,
  axis: collectives.Axis,
  reducer: Any,
  feedback: reducers.Feedback | None = None,
  seed: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Builds synchronous SGD whose means a reducer, or a codec, takes."""
  compression = reducers.Compression(reducer, feedback, seed=seed)
  return ssgd(optimizer, axis=axis, compression=compression)
