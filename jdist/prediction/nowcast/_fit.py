"""Training of weight nowcasters on the tracks of ordinary runs."""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks
from jdist.prediction import _fit_folder
from jdist.prediction.nowcast import _model, _tracks
from jdist.storage import array_files

PyTree: TypeAlias = Any
# Histories at a time in an evaluation.
_PART = 1 << 16


@dataclasses.dataclass(frozen=True)
class NowcastFit:
  """Settings for the training of a nowcaster.

  The published code trains with the mean absolute error and Adam; the numbers
  here are a reconstruction.

  Attributes:
    num_steps: mini-batches.
    batch_size: histories of a mini-batch, drawn with replacement.
    learning_rate: of Adam, decayed to zero along a cosine.
    horizon: epochs between the last value that the network sees and the one it
      predicts: those that a nowcast may save.
    evaluate_every: steps between two evaluations on the held-out tracks.
    seed: of the first parameters and of the mini-batches.
  """

  num_steps: int = 4000
  batch_size: int = 1024
  learning_rate: float = 1e-3
  horizon: int = 5
  evaluate_every: int = 500
  seed: int = 0

  def __post_init__(self) -> None:
    sizes = ("num_steps", "batch_size", "horizon", "evaluate_every")
    # As JSON can hold them, and not NumPy's.
    vars(self).update(
      {name: checks.check_int(name, getattr(self, name), 1) for name in sizes},
      learning_rate=checks.check_number(
        "learning_rate", self.learning_rate, open_low=True
      ),
      seed=checks.check_seed(self.seed),
    )
    if self.num_steps % self.evaluate_every:
      raise ValueError(
        "`num_steps` must be a multiple of `evaluate_every`, got "
        f"{self.num_steps} and {self.evaluate_every}."
      )


class Fitted(NamedTuple):
  """A trained network at its best evaluation.

  Errors are mean absolute ones on the held-out tracks, in units of weights;
  `repeat_error` is that of repeating the last value.  The curve has step and
  error of every evaluation, and of the beginning.
  """

  params: dict[str, Any]
  step: int
  error: float
  repeat_error: float
  curve: tuple[tuple[int, float], ...]


def fit_nowcaster(
  tracks: Sequence[np.ndarray],
  held_out: Sequence[np.ndarray],
  fit: NowcastFit | None = None,
  *,
  directory: str | os.PathLike[str] | None = None,
) -> Fitted:
  r"""Trains one network, and keeps the parameters of its best evaluation.

  It minimizes the mean of :math:`|\hat w - w|`, by Adam.  The error is that of
  the weights themselves and not of the normalized ones, a reconstruction: an
  entry that has hardly moved would dominate the latter.  `tracks` and
  `held_out` are of one kind, float32 [entries, epochs] each.
  """
  fit = NowcastFit() if fit is None else fit
  checks.check_type("fit", fit, NowcastFit, "a `NowcastFit` or None")
  tracks = _finite_tracks("tracks", tracks)
  held_out = _finite_tracks("held_out", held_out)
  train = _scaled(*_tracks.windows(tracks, fit.horizon))
  test = _tracks.windows(held_out, fit.horizon, "held_out")
  data = {"tracks": tracks, "held_out": held_out}
  kept = _fit_folder.FitFolder(
    directory, "nowcast fit", dataclasses.asdict(fit), data
  )
  begin, key = jax.random.split(jax.random.key(fit.seed))
  params = _model.init_nowcaster(begin)
  training = {"params": params, "optimizer": _optimizer(fit).init(params)}
  best, best_step, step = params, 0, 0
  found = kept.restore((training, best))
  if found is None:
    curve = [(0, _error(params, *test))]
  else:
    (training, best), body = found
    step, best_step = body["step"], body["best_step"]
    curve = [tuple(point) for point in body["curve"]]
  while step < fit.num_steps:
    training = _take_steps(fit, training, train, key, step)
    step += fit.evaluate_every
    error = _error(training["params"], *test)
    if not math.isfinite(error):
      raise FloatingPointError(
        f"The prediction after step {step} is not finite. Lower "
        f"`learning_rate`, now {fit.learning_rate:g}."
      )
    if error < min(e for _, e in curve):
      best, best_step = training["params"], step
    curve.append((step, error))
    kept.save((training, best), step=step, best_step=best_step, curve=curve)
  repeat = float(np.abs(test[1] - test[0][:, -1]).mean(dtype=np.float64))
  return Fitted(best, best_step, dict(curve)[best_step], repeat, tuple(curve))


def fit_nowcasters(
  runs: Sequence[_tracks.Tracks],
  held_out: Sequence[_tracks.Tracks],
  fit: NowcastFit | None = None,
  *,
  directory: str | os.PathLike[str] | None = None,
) -> dict[_model.Kind, Fitted]:
  """Trains a network for each kind that the runs have entries of.

  Args:
    runs: tracks of ordinary runs.
    held_out: tracks of other runs, with entries of the same kinds.
    fit: settings; default `NowcastFit()`.
    directory: keeps the states after every evaluation, each in a folder of its
      own; a run that was cut off goes on from there, to the bit.  On several
      processes, train on one.

  Returns:
    The trained networks by kind.  `nowcast` takes
    `{kind: fitted.params for kind, fitted in ...}`.

  Raises:
    ValueError: when an argument does not fit, tracks are too short or not
      finite, `held_out` has other kinds than `runs`, or `directory` holds a
      training with other settings or tracks, or other arrays.
    FloatingPointError: when a prediction is not finite any more.  The state is
      not kept then.
  """
  runs = _tracks.check_runs("runs", runs)
  held_out = _tracks.check_runs("held_out", held_out)
  found: dict[_model.Kind, Fitted] = {}
  for kind in _model.KINDS:
    tracks, others = (
      [run[kind] for run in each if kind in run] for each in (runs, held_out)
    )
    if bool(tracks) != bool(others):
      raise ValueError(
        "`held_out` must have entries of the kinds that `runs` has, but "
        f"{kind!r} is in one of them only."
      )
    if tracks:
      own = None if directory is None else array_files.folder(directory) / kind
      found[kind] = fit_nowcaster(tracks, others, fit, directory=own)
  if not found:
    raise ValueError(
      f"`runs` must have tracks of one kind at least of "
      f"{', '.join(_model.KINDS)}, got none. Record some with `Tracker`."
    )
  return found


def save_nowcasters(
  directory: str | os.PathLike[str],
  params: dict[_model.Kind, dict[str, Any]],
  about: dict[str, Any] | None = None,
) -> None:
  """Saves trained networks, as .npy files and a manifest with hashes.

  Args:
    directory: used for nothing else; earlier networks are replaced.  On several
      processes, save on one.
    params: a network for each kind.
    about: anything that JSON can hold.
  """
  _model.check_nowcasters(params, some=True)
  checks.check_trained("params", params)
  body = {"what": "nowcasters", "kinds": sorted(params), "about": about}
  array_files.save_arrays(directory, params, body)


def load_nowcasters(
  directory: str | os.PathLike[str],
) -> dict[_model.Kind, dict[str, Any]]:
  """Loads a network for each kind, for `nowcast` and `nowcast_weights`.

  Raises:
    FileNotFoundError: when there is nothing.
    ValueError: when it is damaged, or something else.
  """
  arrays, body = array_files.load_arrays(directory, what="nowcasters")
  like = jax.eval_shape(_model.init_nowcaster, jax.random.key(0))
  return array_files.tree_of(arrays, dict.fromkeys(body["kinds"], like))


def _finite_tracks(name: str, given: Sequence[np.ndarray]) -> list[np.ndarray]:
  tracks = []
  for number, track in enumerate(given):
    if not len(track):
      raise ValueError(
        f"`{name}[{number}]` must be of an entry at least, got none."
      )
    with np.errstate(over="ignore"):  # An infinity is refused below.
      tracks.append(np.asarray(track).astype(np.float32))
    checks.check_finite(f"{name}[{number}]", tracks[-1])
  return tracks


def _optimizer(fit: NowcastFit) -> optax.GradientTransformation:
  return optax.adam(
    optax.cosine_decay_schedule(fit.learning_rate, fit.num_steps)
  )


def _scaled(
  histories: np.ndarray, targets: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Puts both on the device once, with the mean change of the targets.

  In that unit Adam's epsilon matters as little as for any error: weights
  change by little.
  """
  change = np.abs(targets - histories[:, -1]).mean(dtype=np.float64)
  unit = np.float32(max(change, 1e-12))
  return jnp.asarray(histories), jnp.asarray(targets), jnp.asarray(unit)


@functools.partial(jax.jit, static_argnums=0)
def _take_steps(
  fit: NowcastFit,
  training: dict[str, Any],
  train: tuple[jax.Array, jax.Array, jax.Array],
  key: jax.Array,
  first: int,
) -> dict[str, Any]:
  histories, targets, unit = train
  optimizer = _optimizer(fit)

  def loss(params: PyTree, rows: jax.Array) -> jax.Array:
    predicted = _model.nowcast_entries(params, histories[rows])
    return jnp.abs(predicted - targets[rows]).mean() / unit

  def one(training: dict[str, Any], step: jax.Array) -> tuple[Any, None]:
    # By the step's number: the same batches after a resume.
    draw = jax.random.fold_in(key, step)
    rows = jax.random.randint(draw, (fit.batch_size,), 0, len(targets))
    gradients = jax.grad(loss)(training["params"], rows)
    # Optax's Adam mixes floats with its integer count.
    with jax.numpy_dtype_promotion("standard"):
      updates, state = optimizer.update(gradients, training["optimizer"])
    params = optax.apply_updates(training["params"], updates)
    return {"params": params, "optimizer": state}, None

  return jax.lax.scan(one, training, first + jnp.arange(fit.evaluate_every))[0]


_nowcast_batch = jax.jit(_model.nowcast_entries)


def _error(params: PyTree, histories: np.ndarray, targets: np.ndarray) -> float:
  """Returns the mean absolute error; infinite for a NaN."""
  total = 0.0
  for start in range(0, len(targets), _PART):
    rows = histories[start : start + _PART]
    short = min(_PART, len(targets)) - len(rows)
    # One shape, one program.
    predicted = _nowcast_batch(params, np.pad(rows, ((0, short), (0, 0))))
    error = np.asarray(predicted)[: len(rows)] - targets[start : start + _PART]
    total += float(np.abs(error).sum(dtype=np.float64))
  return total / len(targets) if np.isfinite(total) else float("inf")
