"""Local steps, synchronized at the end of a round, and DiLoCo's outer step."""

from typing import Any

import jax
import optax

from jdist import checks, collectives, reducers
from jdist.transforms import intervals
from jdist.transforms.local import (
  _anchor,
  _iterates,
  _round,
  _sync_state,
  _synchronizer,
)


def local_steps(
  inner: optax.GradientTransformation,
  interval: int | intervals.IntervalPolicy,
  *,
  axis: collectives.Axis,
  rule: _round.SyncRule | optax.GradientTransformation | None = None,
  overlap: Any = None,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Takes local steps with `inner`, and synchronizes the workers in rounds.

  Every worker i updates its own parameters with its own gradients,
  :math:`w_i \leftarrow w_i + \mathrm{inner}(g_i)`.  After the H-th step of a
  round the sync rule moves the anchor a, the parameters on which all workers
  agree, and places each worker; with an outer optimizer

  .. math:: \Delta_i = a - w_i, \qquad
            a \leftarrow a + \mathrm{outer}(\tfrac1N \sum_i \Delta_i), \qquad
            w_i \leftarrow a

  The mean of the messages (the pseudo-gradients :math:`\Delta_i`) is taken at
  the round's end, or with `overlap` while the next round is computed.  With
  `compression` all workers decode the same bytes, so that anchors stay equal to
  the bit.  The loss of an adaptive interval is averaged exactly.  With a
  compression the first state may depend on the number of workers: make it where
  the axis is bound.

  The device decides whether a step ends its round, in a conditional, in which
  nothing overlaps.  The host can decide instead, by the static `control=` of
  `update` (`transforms.rounds_ahead`), as `training.Trainer` does.  If it ends
  a streamed round before everything was received, the mean is NaN.

  Inner schedules count local steps, outer schedules count rounds.  Extra
  arguments of `update` reach the inner optimizer, and with them `anchor`
  (float32) and `interval_steps` (int32 scalar).  It must be the last
  transformation of a chain, because the anchor assumes that its updates are
  applied unchanged.

  An Optax update is a difference, so after a round the local parameters equal
  the anchor up to rounding; `jdist.apply_updates` makes them equal to the bit.
  Evaluate on the anchor: `jdist.anchor(state, params)`.

  Args:
    inner: Any Optax optimizer, which each worker runs with its own gradients.
    interval: The number of local steps in a round, or a policy from
      `jdist.transforms.intervals`.
    axis: The workers' axis: None, a name, or (inner, outer).
    rule: How a round ends, a `transforms.SyncRule`.  An Optax optimizer becomes
      the outer optimizer, which gets the mean pseudo-gradient once a round;
      None averages parameters.
    overlap: a `transforms.Delayed` for a mean that is late, streamed or not;
      None for a mean at the round's end.
    compression: a `jdist.Compression`; None takes the mean exactly.

  Returns:
    A transformation; `update` needs `params`, and takes `loss=` (this worker's,
    float32 scalar) when the interval policy needs it.

  Raises:
    ValueError: If two arguments cannot be combined; at trace time, if `params`,
      or a `loss` that the interval needs, is missing.

  >>> import jax.numpy as jnp
  >>> optimizer = local_steps(optax.sgd(0.1), 2, axis=None)
  >>> w = jnp.array(1.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (1.0, 2.0):
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   w = optax.apply_updates(w, updates)
  >>> round(w.item(), 6), round(state.anchor.item(), 6)
  (0.7, 0.7)
  >>> state.clock.round.item()
  1

  References:
    Stich, Local SGD Converges Fast and Communicates Little (arXiv
    1805.09767); Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1: the
    pseudo-gradient and the outer optimizer; Sarfi et al., SparseLoCo (arXiv
    2508.15706): pseudo-gradients compressed, with feedback.
  """
  sync = _synchronizer.make_synchronizer(
    inner, interval, axis, rule, overlap, compression
  )

  def init_fn(params: optax.Params) -> _sync_state.LocalStepsState:
    inner_state = _iterates.own_keys(sync.optimizer.init(params), axis)
    first = sync.init(params, inner_state)
    return _sync_state.LocalStepsState(inner_state, first)

  chain = optax.GradientTransformationExtraArgs(init_fn, sync.update)
  return _synchronizer.RoundTransformation.of(
    _anchor.only_floats(chain), sync, overlap
  )


def outer_sgd(
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  outer_momentum: jax.typing.ArrayLike | None = 0.9,
) -> optax.GradientTransformation:
  r"""Returns DiLoCo's outer optimizer, SGD with Nesterov's momentum.

  .. math:: m \leftarrow \mu m + \Delta, \qquad
            a \leftarrow a - \eta_{out} (\mu m + \Delta)

  Args:
    outer_learning_rate: A positive number or a schedule of the rounds; the
      paper's value is 0.7.
    outer_momentum: mu in [0, 1); the paper's value is 0.9.  None is plain SGD.

  References:
    Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1 and table 5.
  """
  rate = checks.check_rate("outer_learning_rate", outer_learning_rate)
  if outer_momentum is not None:
    outer_momentum = checks.check_continuous(
      "outer_momentum", _as_float(outer_momentum), high=1.0, open_high=True
    )
  return optax.sgd(_as_float(rate), outer_momentum, nesterov=True)


def _as_float(x: Any) -> Any:
  """Returns an array as float32; a number or a schedule stays as it is."""
  # `optax.inject_hyperparams` casts to the dtype of the parameters, but the
  # anchors that an outer optimizer moves are float32.
  return x.astype("float32") if isinstance(x, jax.Array) else x
