"""Training of weight nowcasters on the tracks of ordinary runs.

A track follows one entry of the parameters from epoch to epoch.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import nowcasters
import numpy as np
import optax

from jdist.storage import array_files

PyTree: TypeAlias = Any
# Tracks by kind, float32 [entries, epochs].
Tracks: TypeAlias = dict[nowcasters.Kind, np.ndarray]
# The number of histories at a time in an evaluation.
_PART = 1 << 16


class Tracker:
  """Follows some entries of each kind through a run.

  The entries are drawn once from all entries of a kind with equal chances.

  >>> params = {"dense": {"bias": np.zeros(2), "kernel": np.ones((3, 2))}}
  >>> tracker = Tracker(params, entries_per_kind=4)
  >>> for _ in range(3):
  ...   tracker.record(params)
  >>> {kind: track.shape for kind, track in tracker.tracks().items()}
  {'dense': (4, 3), 'bias': (2, 3)}
  """

  def __init__(self, like: PyTree, *, entries_per_kind: int = 2000):
    """Draws the entries; `like` is one worker's parameters."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(like)]
    # For each kind its leaves, and the chosen places in all of them together.
    self._chosen: dict[nowcasters.Kind, tuple[list[int], np.ndarray]] = {}
    self._values: dict[nowcasters.Kind, list[np.ndarray]] = {}
    kinds = list(map(nowcasters.kind_of, shapes))
    for number, kind in enumerate(nowcasters.KINDS):
      own = [i for i, found in enumerate(kinds) if found == kind]
      size = sum(math.prod(shapes[i]) for i in own)
      if not size:
        continue
      draw = np.random.default_rng([0, number])
      count = min(entries_per_kind, size)
      places = np.sort(draw.choice(size, count, replace=False))
      self._chosen[kind] = own, places
      self._values[kind] = [np.zeros((len(places), 0), np.float32)]

  def record(self, params: PyTree) -> None:
    """Keeps the values of one worker's parameters at the end of an epoch."""
    leaves = jax.tree.leaves(params)
    for kind, (own, places) in self._chosen.items():
      whole = [np.ravel(leaves[i]).astype(np.float32) for i in own]
      self._values[kind].append(np.concatenate(whole)[places, None])

  def tracks(self) -> Tracks:
    """Returns the values so far, float32 [entries, epochs]."""
    return {kind: np.hstack(values) for kind, values in self._values.items()}


@dataclasses.dataclass(frozen=True)
class NowcastFit:
  """Settings for the training of a nowcaster.

  The published code trains with the mean absolute error and Adam; the numbers
  here are a reconstruction.

  Attributes:
    num_steps: The number of mini-batches, a multiple of `evaluate_every`.
    batch_size: Histories in a mini-batch, drawn with replacement.
    learning_rate: The rate of Adam, decayed to zero along a cosine.
    horizon: Epochs between the last value that the network sees and the one
      that it predicts.
    evaluate_every: Steps between two evaluations on the held-out tracks.
    seed: The seed of the first parameters and of the mini-batches.
  """

  num_steps: int = 4000
  batch_size: int = 1024
  learning_rate: float = 1e-3
  horizon: int = 5
  evaluate_every: int = 500
  seed: int = 0


class Fitted(NamedTuple):
  """A trained network at its best evaluation.

  Errors are mean absolute ones on the held-out tracks, in units of weights;
  `repeat_error` is the error of repeating the last value.  The curve has step
  and error of every evaluation, beginning with the untrained network.
  """

  params: dict[str, Any]
  step: int
  error: float
  repeat_error: float
  curve: tuple[tuple[int, float], ...]


def fit_nowcaster(
  tracks: Sequence[np.ndarray],
  held_out: Sequence[np.ndarray],
  fit: NowcastFit,
) -> Fitted:
  r"""Trains one network, and keeps the parameters of its best evaluation.

  It minimizes the mean of :math:`|\hat w - w|` by Adam.  The error is that of
  the weights themselves and not of the normalized ones, a reconstruction: an
  entry that has hardly moved would dominate the latter.
  """
  train = _scaled(*windows(tracks, fit.horizon))
  test = windows(held_out, fit.horizon)
  begin, key = jax.random.split(jax.random.key(fit.seed))
  params = nowcasters.init_nowcaster(begin)
  training = {"params": params, "optimizer": _optimizer(fit).init(params)}
  best, best_step = params, 0
  curve = [(0, _error(params, *test))]
  for step in range(0, fit.num_steps, fit.evaluate_every):
    training = _take_steps(fit, training, train, key, step)
    error = _error(training["params"], *test)
    if not math.isfinite(error):
      raise FloatingPointError(
        f"The prediction after step {step + fit.evaluate_every} is not finite. "
        f"Lower `learning_rate`, now {fit.learning_rate:g}."
      )
    if error < min(e for _, e in curve):
      best, best_step = training["params"], step + fit.evaluate_every
    curve.append((step + fit.evaluate_every, error))
  repeat = float(np.abs(test[1] - test[0][:, -1]).mean(dtype=np.float64))
  return Fitted(best, best_step, dict(curve)[best_step], repeat, tuple(curve))


def fit_nowcasters(
  run: Tracks, held_out: Tracks, fit: NowcastFit
) -> dict[nowcasters.Kind, Fitted]:
  """Trains a network for each kind of which there are tracks."""
  return {
    kind: fit_nowcaster([run[kind]], [held_out[kind]], fit)
    for kind in nowcasters.KINDS
    if kind in run
  }


def save_nowcasters(
  folder: pathlib.Path, networks: nowcasters.Networks
) -> None:
  """Saves trained networks as arrays with a manifest."""
  body = {"what": "nowcasters", "kinds": sorted(networks)}
  array_files.save_arrays(folder, networks, body)


def load_nowcasters(folder: pathlib.Path) -> nowcasters.Networks:
  """Loads networks that `save_nowcasters` has written."""
  arrays, body = array_files.load_arrays(folder, what="nowcasters")
  like = jax.eval_shape(nowcasters.init_nowcaster, jax.random.key(0))
  return array_files.tree_of(arrays, dict.fromkeys(body["kinds"], like))


def windows(
  tracks: Sequence[np.ndarray], horizon: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns all histories of five in the tracks, and the later values."""
  length = nowcasters.HISTORY_LENGTH
  shortest = min(track.shape[1] for track in tracks)
  if shortest < length + horizon:
    raise ValueError(
      f"`tracks` must have at least {length + horizon} epochs, {length} and "
      f"the horizon of {horizon}, got {shortest}. Record longer runs."
    )
  found = [
    np.lib.stride_tricks.sliding_window_view(
      track, length + horizon, axis=1
    ).reshape(-1, length + horizon)
    for track in tracks
  ]
  together = np.concatenate(found)
  return together[:, :length], together[:, -1]


def _optimizer(fit: NowcastFit) -> optax.GradientTransformation:
  return optax.adam(
    optax.cosine_decay_schedule(fit.learning_rate, fit.num_steps)
  )


def _scaled(
  histories: np.ndarray, targets: np.ndarray
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Moves both to the device once, with the mean change of the targets.

  Weights change by little.  In units of this change the epsilon of Adam matters
  as little as for any error.
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
    predicted = nowcasters.nowcast_entries(params, histories[rows])
    return jnp.abs(predicted - targets[rows]).mean() / unit

  def one(training: dict[str, Any], step: jax.Array) -> tuple[Any, None]:
    draw = jax.random.fold_in(key, step)
    rows = jax.random.randint(draw, (fit.batch_size,), 0, len(targets))
    gradients = jax.grad(loss)(training["params"], rows)
    # Optax's Adam mixes floats with its integer count.
    with jax.numpy_dtype_promotion("standard"):
      updates, state = optimizer.update(gradients, training["optimizer"])
    params = optax.apply_updates(training["params"], updates)
    return {"params": params, "optimizer": state}, None

  return jax.lax.scan(one, training, first + jnp.arange(fit.evaluate_every))[0]


_nowcast_batch = jax.jit(nowcasters.nowcast_entries)


def _error(params: PyTree, histories: np.ndarray, targets: np.ndarray) -> float:
  """Returns the mean absolute error; infinite for a NaN."""
  total = 0.0
  for start in range(0, len(targets), _PART):
    rows = histories[start : start + _PART]
    short = min(_PART, len(targets)) - len(rows)
    # Padding to one shape compiles one program.
    predicted = _nowcast_batch(params, np.pad(rows, ((0, short), (0, 0))))
    error = np.asarray(predicted)[: len(rows)] - targets[start : start + _PART]
    total += float(np.abs(error).sum(dtype=np.float64))
  return total / len(targets) if np.isfinite(total) else float("inf")
