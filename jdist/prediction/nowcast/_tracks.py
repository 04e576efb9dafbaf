"""Tracks: sampled entries of the parameters, followed from epoch to epoch."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.prediction.nowcast import _model
from jdist.storage import array_files

PyTree: TypeAlias = Any
# Of each kind float32 [entries, epochs].
Tracks: TypeAlias = dict[_model.Kind, np.ndarray]


class Tracker:
  """Follows some entries of each kind through a run.

  The entries are drawn once, of all entries of a kind with equal chances, and
  their values are kept at the ends of epochs.

  >>> params = {"dense": {"bias": np.zeros(2), "kernel": np.ones((3, 2))}}
  >>> tracker = Tracker(params, entries_per_kind=4)
  >>> for _ in range(3):
  ...   tracker.record(params)
  >>> {kind: track.shape for kind, track in tracker.tracks().items()}
  {'dense': (4, 3), 'bias': (2, 3)}
  """

  def __init__(
    self, like: PyTree, *, entries_per_kind: int = 2000, seed: int = 0
  ):
    """Draws the entries.

    Args:
      like: one worker's parameters, or their shapes.
      entries_per_kind: entries to follow of each kind, all if there are fewer;
        default 2000, 0.4 MB for 50 epochs.
      seed: of the choice, integer >= 0.

    Raises:
      ValueError: when an argument is out of its range, or `like` does not hold
        floating arrays.
    """
    count = checks.check_int("entries_per_kind", entries_per_kind, 1)
    seed = checks.check_seed(seed)
    self._structure: Any = jax.tree.structure(like)
    self._shapes = _float_shapes(like)
    # Of each kind its leaves, and the chosen places in all of them together.
    self._chosen: dict[_model.Kind, tuple[list[int], np.ndarray]] = {}
    self._values: dict[_model.Kind, list[np.ndarray]] = {}
    kinds = list(map(_model.kind_of, self._shapes))
    for number, kind in enumerate(_model.KINDS):
      own = [i for i, found in enumerate(kinds) if found == kind]
      size = sum(math.prod(self._shapes[i]) for i in own)
      if not size:
        continue
      draw = np.random.default_rng([seed, number])
      places = np.sort(draw.choice(size, min(count, size), replace=False))
      self._chosen[kind] = own, places
      self._values[kind] = [np.zeros((len(places), 0), np.float32)]

  def record(self, params: PyTree) -> None:
    """Keeps the values at the end of an epoch.

    Args:
      params: one worker's, of the shapes given at first; with several workers
        `workers.view(params)`.

    Raises:
      ValueError: when they are of other shapes.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = [np.shape(leaf) for leaf in leaves]
    if structure != self._structure or shapes != self._shapes:
      raise ValueError(
        "`params` must have the shapes that the tracker was made for, "
        f"{self._shapes}, got {shapes}. With several workers give one's: "
        "`workers.view(params)`."
      )
    for kind, (own, places) in self._chosen.items():
      whole = [np.ravel(leaves[i]).astype(np.float32) for i in own]
      self._values[kind].append(np.concatenate(whole)[places, None])

  def tracks(self) -> Tracks:
    """Returns the recorded tracks: of each kind float32 [entries, epochs]."""
    return {kind: np.concatenate(x, 1) for kind, x in self._values.items()}


def _float_shapes(like: PyTree) -> list[tuple[int, ...]]:
  leaves = jax.tree.leaves(like)
  for leaf in leaves:
    if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating):
      raise ValueError(
        "`like` must hold arrays of floats, or their shapes, got "
        f"{checks.show(leaf)}. Give the parameters that are trained."
      )
  if not leaves:
    raise ValueError(
      "`like` must hold an array at least, got none. Give the parameters that "
      "are trained."
    )
  return [np.shape(leaf) for leaf in leaves]


def save_tracks(
  directory: str | os.PathLike[str],
  runs: Sequence[Tracks],
  about: dict[str, Any] | None = None,
) -> None:
  """Saves the tracks of runs, as .npy files and a manifest with hashes.

  Args:
    directory: used for nothing else; earlier tracks are replaced.  On several
      processes, save on one.
    runs: tracks, which may be of different models and lengths; saved as
      float32.
    about: anything that JSON can hold.
  """
  runs = check_runs("runs", runs)
  arrays = {
    f"run_{number:03d}_{kind}": np.asarray(track, np.float32)
    for number, run in enumerate(runs)
    for kind, track in run.items()
  }
  array_files.save_arrays(
    directory, arrays, {"what": "tracks", "runs": len(runs), "about": about}
  )


def load_tracks(directory: str | os.PathLike[str]) -> list[Tracks]:
  """Loads the tracks of each run, in the order of `save_tracks`.

  Raises:
    FileNotFoundError: when there is nothing.
    ValueError: when it is damaged, or something else.
  """
  arrays, body = array_files.load_arrays(directory, what="tracks")
  runs: list[Tracks] = [{} for _ in range(body["runs"])]
  for name, array in arrays.items():
    _, number, kind = name.split("_")
    runs[int(number)][kind] = array  # type: ignore[index]
  return runs


def check_runs(argument: str, runs: Any) -> list[Tracks]:
  """Returns the tracks of runs as a list; a ValueError if one is none."""
  remedy = "as of `Tracker.tracks`"
  runs = checks.check_list(argument, runs, f"the tracks of each run, {remedy}")
  for number, run in enumerate(runs):
    name = f"{argument}[{number}]"
    if not isinstance(run, Mapping) or not set(run) <= set(_model.KINDS):
      given = list(run) if isinstance(run, Mapping) else checks.show(run)
      raise ValueError(
        f"`{name}` must be a dict with tracks of some of "
        f"{', '.join(_model.KINDS)}, {remedy}, got {given}."
      )
    for kind, track in run.items():
      if not (
        isinstance(track, np.ndarray | jax.Array)
        and track.ndim == 2
        and jnp.issubdtype(track.dtype, jnp.floating)
      ):
        raise ValueError(
          f"`{name}[{kind!r}]` must be a track, floats [entries, epochs], "
          f"{remedy}, got {checks.show(track)}."
        )
  return runs


def windows(
  tracks: Sequence[np.ndarray], horizon: int, argument: str = "tracks"
) -> tuple[np.ndarray, np.ndarray]:
  """Returns all histories of five in the tracks, and the later values."""
  length = _model.HISTORY_LENGTH
  shortest = min((track.shape[1] for track in tracks), default=0)
  if shortest < length + horizon:
    raise ValueError(
      f"`{argument}` must be of {length + horizon} epochs at least, {length} "
      f"and the horizon of {horizon}, got {shortest}. Record longer runs, or "
      "leave this one out."
    )
  found = [
    np.lib.stride_tricks.sliding_window_view(
      np.asarray(track, np.float32), length + horizon, axis=1
    ).reshape(-1, length + horizon)
    for track in tracks
  ]
  together = np.concatenate(found)
  return together[:, :length], together[:, -1]
