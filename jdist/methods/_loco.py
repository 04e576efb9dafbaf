"""Published methods with rounds, whose progress goes by few bytes."""

from typing import Any

import jax
import optax

from jdist import checks, codecs, collectives, reducers, transforms
from jdist.methods import _chains
from jdist.transforms import intervals


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
    Sarfi et al., SparseLoCo (arXiv 2508.15706), algorithm 1.  Departures:
    chunks are neighbours of the flat leaf, where the paper's are tiles of 64
    by 64; the values' levels are four at equal distances between the least and
    the greatest of 256.

  >>> optimizer = sparse_loco(optax.adamw(1e-3), 30, axis=None)
  """
  checks.check_optimizer("optimizer", optimizer)
  checks.check_rate("outer_learning_rate", outer_learning_rate)
  values = codecs.Quantize(bits, 256, "min_max")
  codec = codecs.TopK(density, chunk=chunk, values=values)
  return transforms.local_steps(
    optimizer,
    interval,
    axis=axis,
    outer=optax.sgd(_chains._float(outer_learning_rate)),
    reducer=reducers.compressed(codec),
    feedback=reducers.ErrorFeedback(decay),
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
    Therien et al., MuLoCo (arXiv 2505.23725), algorithm 1.  Muon is Optax's
    `contrib.muon`.  Departures: levels are at equal distances between the
    least and the greatest of 256 entries; the outer rate and momentum are
    DiLoCo's, where the paper tunes them.

  >>> optimizer = muloco(0.02, 30, axis=None)
  """
  checks.check_rate("learning_rate", learning_rate)
  inner = _leniently(
    optax.contrib.muon(
      learning_rate,
      beta=momentum,
      weight_decay=weight_decay,
      adam_weight_decay=weight_decay,
    )
  )
  return _chains.diloco(
    inner,
    interval,
    outer_learning_rate,
    outer_momentum,
    axis=axis,
    reducer=reducers.compressed(codecs.Quantize(bits, 256, "min_max")),
    feedback=reducers.ErrorFeedback(),
  )


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
