"""DiLoCo and its family: the mean progress of a round is an outer gradient."""

from typing import Any

import jax
import optax

from jdist import checks, codecs, collectives, reducers, transforms
from jdist.methods import _local_sgd
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
    optimizer: the inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H; 500 in the paper, for language models.
    outer_learning_rate: a positive number, or a schedule of the rounds; the
      paper's 0.7.
    outer_momentum: mu in [0, 1]; the paper's 0.9.
    axis: the workers' axis.
    rule: how a round ends, in place of the outer Nesterov momentum, whose
      arguments are then left out; an Optax optimizer is the outer one, for
      instance `optax.adam(0.01)`.
    overlap: `transforms.Delayed(...)` for a late mean; see `local_steps`.
    compression: how to take the mean by fewer bytes:
      `Compression(codecs.Quantize(4), ErrorFeedback())` sends four bits a
      parameter and round.

  References:
    Douillard et al., "DiLoCo: Distributed Low-Communication Training of
    Language Models" (2023, arXiv 2311.08105), algorithm 1 and table 5.
  """
  rule = _outer(rule, outer_learning_rate, outer_momentum)
  return _local_sgd.in_rounds(
    optimizer, interval, axis, rule, overlap, compression
  )


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

  `fragment_steps` with Nesterov's momentum outside: fragment p is sent every
  H steps, arrives :math:`\tau` steps later, and is mixed with what the worker
  has by then,

  .. math:: \Delta = \tfrac1N \sum_i (a_p - w_{i,p})^{(t-\tau)}, \quad
            m_p \leftarrow \mu m_p + \Delta, \quad
            a_p \leftarrow a_p - \eta_{out} (\mu m_p + \Delta), \quad
            w_{i,p} \leftarrow \alpha w_{i,p} + (1-\alpha) a_p

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
    rule: how a fragment's round ends, in place of the outer Nesterov
      momentum, whose arguments are then left out; an Optax optimizer is the
      outer one.
    delay_steps: tau, at most interval - 1.
    mix: alpha in [0, 1], the worker's own part; the paper's 0.5.
    stream: how to split what is sent in the `delay_steps`, of which a host says
      which step sends what (`training.Trainer`); None sends a fragment in the
      step in which it arrives.
    compression: how to take the mean by fewer bytes; the paper's four bits are
      `Compression(codecs.Quantize(4), ErrorFeedback())`.

  References:
    Douillard et al., "Streaming DiLoCo with overlapping communication: Towards
    a Distributed Free Lunch" (2025, arXiv 2501.18512), algorithm 2.
    Departures: fragments are runs of leaves in the order of the tree unless a
    function says otherwise (the paper's are strided layers of a transformer);
    the paper's four bits are a float type, without feedback.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  delay_steps = checks.check_structural("delay_steps", delay_steps, minimum=0)
  rule = _outer(rule, outer_learning_rate, outer_momentum)
  return transforms.fragment_steps(
    optimizer,
    interval,
    fragments,
    axis=axis,
    rule=rule,
    overlap=transforms.Delayed(delay_steps, mix=mix, stream=stream),
    compression=compression,
  )


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
  r"""SparseLoCo: rounds of which the largest few changes are sent.

  .. math:: p_i = \Delta_i + \beta e_i, \qquad s_i = Q(\mathrm{top}_k(p_i)),
            \qquad e_i \leftarrow p_i - s_i, \qquad
            a \leftarrow a - \eta_{out} \tfrac1N \sum_i s_i

  with the progress :math:`\Delta_i` of a round.  The decayed residual is in
  place of an outer momentum: it holds what the last rounds have not sent.

  Args:
    optimizer: the inner optimizer, AdamW in the paper; its schedules count
      local steps.
    interval: H; the paper's 15 to 250.
    density: the part of each chunk that is sent; the paper's 1 to 3 %, here 64
      of 4096.
    outer_learning_rate: a positive number, or a schedule of the rounds; the
      paper's 1.
    axis: the workers' axis.
    decay: beta; the paper's 0.95.
    bits: of each value that is sent; the paper's 2.
    chunk: entries of which the largest are chosen; the paper's 4096.

  References:
    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo"
    (2025, arXiv 2508.15706), algorithm 1.  Departures: chunks are neighbours of
    the flat leaf, where the paper's are tiles of 64 by 64; the values' levels
    are four at equal distances between the least and the greatest of 256.
  """
  checks.check_rate("outer_learning_rate", outer_learning_rate)
  checks.check_continuous("density", density, high=1.0, open_low=True)
  values = codecs.Quantize(bits, 256, "min_max")
  codec = codecs.TopK(density, chunk=chunk, values=values)
  compression = reducers.Compression(codec, reducers.ErrorFeedback(decay))
  outer = optax.sgd(as_float(outer_learning_rate))
  return _local_sgd.in_rounds(
    optimizer, interval, axis, outer, None, compression
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
    learning_rate: of Muon (and of Adam, which it uses for what is no matrix),
      a number or a schedule of the local step.
    interval: H; the paper's 30.
    outer_learning_rate: of the outer Nesterov momentum, in rounds.
    outer_momentum: of the outer Nesterov momentum.
    axis: the workers' axis.
    bits: of each entry of the progress, with feedback; the paper's 2, 4 and 8.
    momentum: Muon's.
    weight_decay: decoupled, of both.

  References:
    Therien et al., "MuLoCo: Muon is a practical inner optimizer for DiLoCo"
    (2025, arXiv 2505.23725), algorithm 1.  Muon is Optax's `contrib.muon`.
    Departures: levels are at equal distances between the least and the greatest
    of 256 entries; the outer rate and momentum are DiLoCo's, where the paper
    tunes them.
  """
  checks.check_rate("learning_rate", learning_rate)
  checks.check_continuous("momentum", momentum, high=1.0)
  weight_decay = checks.check_continuous("weight_decay", weight_decay)
  inner = _leniently(
    optax.contrib.muon(
      learning_rate,
      beta=momentum,
      weight_decay=weight_decay,
      adam_weight_decay=weight_decay,
    )
  )
  return diloco(
    inner,
    interval,
    outer_learning_rate,
    outer_momentum,
    axis=axis,
    compression=reducers.Compression(
      codecs.Quantize(bits, 256, "min_max"), reducers.ErrorFeedback()
    ),
  )


def _outer(
  rule: transforms.SyncRule | optax.GradientTransformation | None,
  learning_rate: optax.ScalarOrSchedule,
  momentum: jax.typing.ArrayLike,
) -> transforms.SyncRule | optax.GradientTransformation:
  """The rule that is given, or Nesterov's momentum by DiLoCo's arguments."""
  if rule is None:
    return nesterov(learning_rate, momentum)
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


def nesterov(
  learning_rate: optax.ScalarOrSchedule, momentum: jax.typing.ArrayLike
) -> transforms.OuterStep:
  """DiLoCo's outer optimizer, checked."""
  checks.check_rate("outer_learning_rate", learning_rate)
  checks.check_continuous("outer_momentum", momentum, high=1.0)
  return transforms.OuterStep(
    optax.sgd(as_float(learning_rate), as_float(momentum), nesterov=True)
  )


def as_float(x: Any) -> Any:
  """Injected hyper-parameters come in the parameters' dtype; anchors do not."""
  if isinstance(x, jax.Array):
    return x.astype("float32")
  return float(x) if isinstance(x, int) else x


def _leniently(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Lets Optax mix dtypes, which JAX's strict promotion would refuse."""

  def update_fn(
    updates: optax.Updates, state: Any, params: optax.Params | None = None
  ) -> tuple[optax.Updates, Any]:
    with jax.numpy_dtype_promotion("standard"):
      new, state = optimizer.update(updates, state, params)
    return jax.tree.map(lambda n, u: n.astype(u.dtype), new, updates), state

  return optax.GradientTransformation(optimizer.init, update_fn)
