"""Training weight nowcasters on the tracks of ordinary runs."""

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
from jdist.prediction.nowcast import _nowcaster, _tracks
from jdist.storage import array_files, hashes

PyTree: TypeAlias = Any
_FIT = "nowcast fit"


@dataclasses.dataclass(frozen=True)
class NowcastFit:
  """How a nowcaster is trained.

  The published code trains with the mean absolute error and Adam; the numbers
  here are a reconstruction.

  Attributes:
    num_steps: mini-batches.
    batch_size: histories of a mini-batch, drawn with replacement.
    learning_rate: of Adam, decayed to zero along a cosine.
    horizon: epochs between the last value that the network sees and the one it
      predicts; those are the epochs that a nowcast may save.
    evaluate_every: steps between two evaluations on what is held out.
    seed: of the first parameters and of the mini-batches.
  """

  num_steps: int = 4000
  batch_size: int = 1024
  learning_rate: float = 1e-3
  horizon: int = 5
  evaluate_every: int = 500
  seed: int = 0

  def __post_init__(self) -> None:
    for name in ("num_steps", "batch_size", "horizon", "evaluate_every"):
      value = checks.check_int(name, getattr(self, name), 1)
      # As JSON can hold it, and not NumPy's.
      object.__setattr__(self, name, value)
    rate = checks.check_number(
      "learning_rate", self.learning_rate, open_low=True
    )
    object.__setattr__(self, "learning_rate", rate)
    object.__setattr__(self, "seed", checks.check_seed(self.seed))
    if self.num_steps % self.evaluate_every:
      raise ValueError(
        "`num_steps` must be a multiple of `evaluate_every`, got "
        f"{self.num_steps} and {self.evaluate_every}."
      )


class Fitted(NamedTuple):
  """What training one network gave.

  Attributes:
    params: of the best evaluation.
    step: when that was.
    error: mean absolute error on what is held out, in units of weights.
    repeat_error: that of repeating the last value.
    curve: (step, error) of every evaluation, and of the beginning.
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
  entry that has hardly moved would dominate the latter.

  Args:
    tracks: of one kind, float32 [entries, epochs] each.
    held_out: likewise, of other runs.
    fit: how; default `NowcastFit()`.
    directory: where to keep the state after every evaluation; a run that was
      cut off goes on from there, to the bit. On several processes, train on
      one.

  Returns:
    The best parameters and their error.

  Raises:
    ValueError: when an argument does not fit, the tracks are too short or not
      finite, or `directory` holds the state of a training with other settings
      or tracks, or other arrays.
    FloatingPointError: when what is predicted is not finite any more. The state
      is not kept then.
  """
  fit = NowcastFit() if fit is None else fit
  checks.check_type("fit", fit, NowcastFit, "a `NowcastFit` or None")
  if directory is not None:
    array_files.refuse_others(directory, _FIT)
  tracks = _checked_tracks("tracks", tracks)
  held_out = _checked_tracks("held_out", held_out)
  train = _scaled(_tracks.windows(tracks, fit.horizon))
  test = _tracks.windows(held_out, fit.horizon, "held_out")
  repeat = float(np.abs(test[1] - test[0][:, -1]).mean(dtype=np.float64))
  optimizer = _optimizer(fit)
  begin, key = jax.random.split(jax.random.key(fit.seed))
  params = _nowcaster.init_nowcaster(begin)
  training = {"params": params, "optimizer": optimizer.init(params)}
  best, best_step, step = params, 0, 0
  curve = [(0, _error(params, test))]
  about = {
    "what": _FIT,
    "fit": dataclasses.asdict(fit),
    "data": {"tracks": _bits(tracks), "held_out": _bits(held_out)},
  }
  if directory is not None and array_files.is_there(directory):
    (training, best), body = _restored(directory, (training, best), about)
    step, best_step = body["step"], body["best_step"]
    curve = [tuple(point) for point in body["curve"]]
  while step < fit.num_steps:
    training = _take_steps(fit, training, train, key, step)
    step += fit.evaluate_every
    error = _error(training["params"], test)
    if not math.isfinite(error):
      raise FloatingPointError(
        f"What is predicted after step {step} is not finite. Lower "
        f"`learning_rate`, now {fit.learning_rate:g}."
      )
    if error < min(e for _, e in curve):
      best, best_step = training["params"], step
    curve.append((step, error))
    if directory is not None:
      body = {"step": step, "best_step": best_step, "curve": curve}
      _save(directory, (training, best), about | body)
  return Fitted(best, best_step, dict(curve)[best_step], repeat, tuple(curve))


def fit_nowcasters(
  runs: Sequence[_tracks.Tracks],
  held_out: Sequence[_tracks.Tracks],
  fit: NowcastFit | None = None,
  *,
  directory: str | os.PathLike[str] | None = None,
) -> dict[_nowcaster.Kind, Fitted]:
  """Trains a network for each kind that the runs have entries of.

  Args:
    runs: tracks of ordinary runs.
    held_out: tracks of other runs, with entries of the same kinds.
    fit: how; default `NowcastFit()`.
    directory: where to keep what is needed to go on, see `fit_nowcaster`.

  Returns:
    What training gave, by kind.  `nowcast` takes
    `{kind: fitted.params for kind, fitted in ...}`.

  Raises:
    ValueError: when there are no tracks, or of unknown kinds, or `held_out` has
      others than `runs`; and as `fit_nowcaster`.
  """
  runs = _tracks.check_runs("runs", runs)
  held_out = _tracks.check_runs("held_out", held_out)
  found: dict[_nowcaster.Kind, Fitted] = {}
  for kind in _nowcaster.KINDS:
    tracks = _tracks.of_kind(runs, kind)
    others = _tracks.of_kind(held_out, kind)
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
      f"{', '.join(_nowcaster.KINDS)}, got none. Record some with `Tracker`."
    )
  return found


def save_nowcasters(
  directory: str | os.PathLike[str],
  params: dict[_nowcaster.Kind, dict[str, Any]],
  about: dict[str, Any] | None = None,
) -> None:
  """Writes trained networks, as .npy files and a manifest with hashes.

  Args:
    directory: for nothing else; networks that were saved there are replaced.
      On several processes, save on one.
    params: a network for each kind.
    about: anything that JSON can hold.

  Raises:
    ValueError: when these are no networks, none at all, not float32 or not
      finite, or the directory holds something else.
  """
  _nowcaster.check_nowcasters(params)
  if not params:
    raise ValueError(
      "`params` must hold a network at least, got none. Take those of "
      "`fit_nowcasters`."
    )
  checks.check_trained("params", params)
  body = {"what": "nowcasters", "kinds": sorted(params), "about": about}
  array_files.save_arrays(directory, checks.named_leaves(params), body)


def load_nowcasters(
  directory: str | os.PathLike[str],
) -> dict[_nowcaster.Kind, dict[str, Any]]:
  """Reads what `save_nowcasters` wrote.

  Args:
    directory: where it is.

  Returns:
    A network for each kind that was saved, for `nowcast` and
    `nowcast_weights`.

  Raises:
    FileNotFoundError: when there is nothing.
    ValueError: when it is damaged, or something else.
  """
  arrays, body = array_files.load_arrays(directory, what="nowcasters")
  like = jax.eval_shape(_nowcaster.init_nowcaster, jax.random.key(0))
  return array_files.tree_of(arrays, dict.fromkeys(body["kinds"], like))


def _checked_tracks(name: str, given: Any) -> list[np.ndarray]:
  tracks = []
  for number, one in enumerate(
    checks.check_list(name, given, "arrays [entries, epochs]")
  ):
    track = np.asarray(one)
    real = any(
      jnp.issubdtype(track.dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
    if track.ndim != 2 or not len(track) or not real:
      raise ValueError(
        f"`{name}[{number}]` must be floats [entries, epochs] of an entry at "
        f"least, got {track.dtype}{list(track.shape)}. Give a list of arrays, "
        "one for each run."
      )
    with np.errstate(over="ignore"):  # What is too large is told below.
      track = track.astype(np.float32)
    checks.check_finite(f"{name}[{number}]", track)
    tracks.append(track)
  return tracks


def _optimizer(fit: NowcastFit) -> optax.GradientTransformation:
  return optax.adam(
    optax.cosine_decay_schedule(fit.learning_rate, fit.num_steps)
  )


def _scaled(pairs: tuple[np.ndarray, np.ndarray]) -> tuple[Any, Any]:
  """On the device once; the unit is the mean change of the targets.

  Adam does not care about the unit of an error, but for its epsilon, and
  weights change by little.
  """
  histories, targets = pairs
  change = np.abs(targets - histories[:, -1]).mean(dtype=np.float64)
  unit = np.float32(max(change, 1e-12))
  return (jnp.asarray(histories), jnp.asarray(targets)), jnp.asarray(unit)


@functools.partial(jax.jit, static_argnums=0)
def _take_steps(
  fit: NowcastFit,
  training: dict[str, Any],
  train: Any,
  key: jax.Array,
  first: int,
) -> dict[str, Any]:
  (histories, targets), unit = train
  optimizer = _optimizer(fit)

  def loss(params: PyTree, rows: jax.Array) -> jax.Array:
    predicted = _nowcaster.nowcast_entries(params, histories[rows])
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


_nowcast_batch = jax.jit(_nowcaster.nowcast_entries)


def _error(params: PyTree, test: tuple[np.ndarray, np.ndarray]) -> float:
  """The mean absolute error, a part at a time; infinite for a NaN."""
  histories, targets = test
  total, size = 0.0, 1 << 16
  for start in range(0, len(targets), size):
    rows = histories[start : start + size]
    short = min(size, len(targets)) - len(rows)
    # One shape, one program.
    predicted = _nowcast_batch(params, np.pad(rows, ((0, short), (0, 0))))
    error = np.asarray(predicted)[: len(rows)] - targets[start : start + size]
    total += float(np.abs(error).sum(dtype=np.float64))
  return total / len(targets) if np.isfinite(total) else float("inf")


def _bits(tracks: Sequence[np.ndarray]) -> str:
  # As they enter the windows.
  return hashes.fingerprint(
    *(np.asarray(track, np.float32) for track in tracks)
  )


def _save(
  directory: str | os.PathLike[str], state: PyTree, body: dict[str, Any]
) -> None:
  array_files.save_arrays(directory, checks.named_leaves(state), body)


def _restored(
  directory: str | os.PathLike[str], like: PyTree, about: dict[str, Any]
) -> tuple[PyTree, dict[str, Any]]:
  arrays, body = array_files.load_arrays(directory, what=_FIT)
  if body["fit"] != about["fit"]:
    raise ValueError(
      f"`directory` holds the state of another training, {body['fit']}, got "
      f"{about['fit']}. Take another directory, or the same settings."
    )
  hashes.refuse_other_data(body.get("data"), about["data"])
  return array_files.tree_of(arrays, like), body
