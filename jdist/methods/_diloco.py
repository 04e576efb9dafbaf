"""DiLoCo and its family: the mean progress of a round is an outer gradient."""

from typing import Any

import jax
import optax

from jdist import checks, codecs, collectives, reducers, transforms
from jdist.transforms import intervals


def diloco(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  outer_learning_rate: jax.typing.ArrayLike = 0.7,
  outer_momentum: jax.typing.ArrayLike = 0.9,
  *,
  axis: collectives.Axis,
  rule: transforms.SyncRule | optax.GradientTransformation | None = None,
  overlap: transforms.Delayed | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""DiLoCo: the mean progress of a round is a gradient for outer Nesterov.

  .. math:: \Delta = a - \tfrac1N \sum_i w_i, \quad m \leftarrow \mu m +
            \Delta, \quad a \leftarrow a - \eta_{out} (\mu m + \Delta), \quad
            w_i \leftarrow a

  Args:
    optimizer: The inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H; the paper takes 500, for language models.
    outer_learning_rate: A positive number or a schedule of the rounds; the
      paper's value is 0.7.
    outer_momentum: mu in [0, 1); the paper's value is 0.9.
    axis: The axis of the workers.
    rule: A sync rule or an outer Optax optimizer, for instance
      `optax.adam(0.01)`, that replaces the outer Nesterov momentum; leave its
      arguments out then.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: A compression of the mean:
      `Compression(codecs.Quantize(4), ErrorFeedback())` sends four bits per
      parameter and round.

  References:
    Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1 and table 5.
  """
  return transforms.local_steps(
    checks.check_optimizer("optimizer", optimizer), interval, axis=axis,
    rule=_outer(rule, outer_learning_rate, outer_momentum), overlap=overlap,
    compression=compression,
  )  # fmt: skip


def streaming_diloco(
  optimizer: optax.GradientTransformation,
  interval: int,
  fragments: transforms.Fragments,
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  outer_momentum: jax.typing.ArrayLike = 0.9,
  *,
  axis: collectives.Axis,
  rule: transforms.SyncRule | optax.GradientTransformation | None = None,
  delay_steps: int = 1,
  mix: jax.typing.ArrayLike = 0.5,
  stream: transforms.Stream | None = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Streaming DiLoCo: fragments, sent at staggered steps, applied late.

  Fragment p is sent every H steps, and its mean is applied :math:`\tau` steps
  later, mixed with the worker's own parameters of that step:

  .. math:: \Delta = \tfrac1N \sum_i (a_p - w_{i,p})^{(t-\tau)}, \quad
            m_p \leftarrow \mu m_p + \Delta, \quad
            a_p \leftarrow a_p - \eta_{out} (\mu m_p + \Delta), \quad
            w_{i,p} \leftarrow \alpha w_{i,p} + (1-\alpha) a_p

  Args:
    optimizer: The inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H.
    fragments: P, at most the interval, or a function from a leaf's path to its
      fragment; see `fragment_steps`.
    outer_learning_rate: A positive number or a schedule of the fragment's
      rounds; DiLoCo's value is 0.7.
    outer_momentum: mu in [0, 1); DiLoCo's value is 0.9.
    axis: The axis of the workers.
    rule: A sync rule or an outer Optax optimizer for a fragment's round; see
      `diloco`.
    delay_steps: tau, at most interval - 1.
    mix: alpha in [0, 1], the worker's own part; the paper's value is 0.5.
    stream: A split of the message over the `delay_steps`; the host chooses the
      part of each step (`training.Trainer`).  None sends a fragment in the step
      that applies it.
    compression: A compression of the mean; the paper's four bits are
      `Compression(codecs.Quantize(4), ErrorFeedback())`.

  References:
    Douillard et al., Streaming DiLoCo (arXiv 2501.18512), algorithm 2.
    Departures: fragments are runs of leaves in the order of the tree unless a
    function says otherwise (the paper's are strided layers of a transformer);
    the paper's four bits are a float type, without feedback.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  # `Delayed` takes None for a whole round, which fragments do not have.
  delay_steps = checks.check_structural("delay_steps", delay_steps, minimum=0)
  rule = _outer(rule, outer_learning_rate, outer_momentum)
  # Each fragment has an outer state of its own, which counts its own rounds.
  return transforms.fragment_steps(
    optimizer, interval, fragments, axis=axis, rule=rule,
    overlap=transforms.Delayed(delay_steps, mix=mix, stream=stream),
    compression=compression,
  )  # fmt: skip


def sparse_loco(
  optimizer: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  density: float = 1 / 64,
  outer_learning_rate: jax.typing.ArrayLike = 1.0,
  *,
  axis: collectives.Axis,
  decay: float = 0.95,
  bits: int = 2,
  chunk: int = 4096,
) -> optax.GradientTransformationExtraArgs:
  r"""SparseLoCo: rounds that send the largest few changes.

  .. math:: p_i = \Delta_i + \beta e_i, \qquad s_i = Q(\mathrm{top}_k(p_i)),
            \qquad e_i \leftarrow p_i - s_i, \qquad
            a \leftarrow a - \eta_{out} \tfrac1N \sum_i s_i

  with the progress :math:`\Delta_i` of a round.  The decayed residual replaces
  an outer momentum: it holds the unsent changes of recent rounds.

  Args:
    optimizer: The inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H; the paper takes 15 to 250.
    density: The part of each chunk that is sent; the paper takes 1 to 3 %, the
      default is 64 of 4096.
    outer_learning_rate: A positive number or a schedule of the rounds; the
      paper's value is 1.
    axis: The axis of the workers.
    decay: beta; the paper's value is 0.95.
    bits: The bits of each sent value; the paper's value is 2.
    chunk: The number of entries among which the largest are chosen; the paper's
      value is 4096.

  References:
    Sarfi et al., SparseLoCo (arXiv 2508.15706), algorithm 1.  Departures:
    chunks are neighbours of the flat leaf, where the paper's are tiles of 64 by
    64; the four levels of the values are equally spaced between the least and
    the greatest of 256.
  """
  checks.check_continuous("density", density, high=1.0, open_low=True)
  # The largest entries are far from zero: levels between their least and their
  # greatest value waste no code on the gap around zero.
  values = codecs.Quantize(bits, 256, "min_max")
  codec = codecs.TopK(density, chunk=chunk, values=values)
  compression = reducers.Compression(codec, reducers.ErrorFeedback(decay))
  # No outer momentum: the decayed residual takes its place.
  outer = transforms.outer_sgd(outer_learning_rate, None)
  return diloco(
    optimizer, interval, axis=axis, rule=outer, compression=compression
  )


def muloco(
  learning_rate: optax.ScalarOrSchedule,
  interval: int | intervals.IntervalPolicy,
  outer_learning_rate: jax.typing.ArrayLike = 0.7,
  outer_momentum: jax.typing.ArrayLike = 0.9,
  *,
  axis: collectives.Axis,
  bits: int = 2,
  momentum: float = 0.95,
  weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
  """MuLoCo: DiLoCo with Muon inside, whose progress survives two bits.

  Args:
    learning_rate: The rate of Muon, and of Adam, which replaces Muon for leaves
      that are no matrices; a number or a schedule of the local step.
    interval: H; the paper's value is 30.
    outer_learning_rate: The rate of the outer Nesterov momentum.
    outer_momentum: The outer Nesterov momentum.
    axis: The axis of the workers.
    bits: The bits of each entry of the progress, with feedback; the paper takes
      2, 4 and 8.
    momentum: The momentum of Muon.
    weight_decay: The decoupled weight decay of both optimizers.

  References:
    Therien et al., MuLoCo (arXiv 2505.23725), algorithm 1.  Muon is Optax's
    `contrib.muon`.  Departures: levels are equally spaced between the least and
    the greatest of 256 entries; the outer rate and momentum are DiLoCo's, where
    the paper tunes them.
  """
  learning_rate = checks.check_rate("learning_rate", learning_rate)
  checks.check_continuous("momentum", momentum, high=1.0, open_high=True)
  weight_decay = checks.check_continuous("weight_decay", weight_decay)

  # Muon's updates are orthogonal matrices, without large entries, so that two
  # bits of a round's progress lose little. It divides by the sides of matrices.
  matrix = optax.contrib.MuonDimensionNumbers()
  inner = _leniently(
    optax.contrib.muon(
      learning_rate, beta=momentum, weight_decay=weight_decay,
      adam_weight_decay=weight_decay,
      muon_weight_dimension_numbers=lambda params: jax.tree.map(
        lambda x: matrix if x.ndim == 2 and x.size else None, params
      ),
    )
  )  # fmt: skip
  codec = codecs.Quantize(bits, 256, "min_max")
  return diloco(
    inner, interval, outer_learning_rate, outer_momentum, axis=axis,
    compression=reducers.Compression(codec, reducers.ErrorFeedback()),
  )  # fmt: skip


def _outer(
  rule: transforms.SyncRule | optax.GradientTransformation | None,
  learning_rate: optax.ScalarOrSchedule,
  momentum: jax.typing.ArrayLike,
) -> transforms.SyncRule | optax.GradientTransformation:
  """Returns the given rule, or Nesterov's momentum with the given arguments."""
  if rule is None:
    return transforms.outer_sgd(learning_rate, momentum)
  given = {"outer_learning_rate": (learning_rate, 0.7),
           "outer_momentum": (momentum, 0.9)}  # fmt: skip
  for name, (value, default) in given.items():
    # Under `optax.inject_hyperparams` the defaults are arrays, too.
    if not isinstance(value, jax.Array) and value != default:
      raise ValueError(
        f"`{name}` is of the outer Nesterov momentum and must be left out "
        f"where `rule` is given, got {checks.show(value)}. Put it into the "
        "rule, for instance `optax.sgd(0.7, 0.9, nesterov=True)`."
      )
  return rule


def _leniently(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Lets Optax mix dtypes, which JAX's strict promotion would refuse."""

  def update_fn(
    updates: optax.Updates, state: Any, params: optax.Params | None = None
  ) -> tuple[optax.Updates, Any]:
    # Muon multiplies bfloat16 momenta by float32 coefficients.
    with jax.numpy_dtype_promotion("standard"):
      new, state = optimizer.update(updates, state, params)
    return jax.tree.map(lambda n, u: n.astype(u.dtype), new, updates), state

  return optax.GradientTransformation(optimizer.init, update_fn)
