"""Saving and loading of trained predictors, and of trainings to resume."""

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdist import checks, signatures
from jdist.prediction import _cut, _predictor
from jdist.states import PyTree
from jdist.storage import array_files, hashes

_PREDICTOR = "predictor"
_FIT = "predictor fit"
# The fields of a predictor next to its cut.
_OPTIONS = ("rank", "grid", "dense_from")


def describe(predictor: _predictor.Predictor) -> dict[str, Any]:
  """Returns a predictor as JSON values."""
  options = {name: getattr(predictor, name) for name in _OPTIONS}
  return {"cut": predictor.cut.describe()} | options


def refuse_other_predictor(
  description: dict[str, Any], ours: _predictor.Predictor
) -> None:
  """Raises a ValueError unless a directory holds such a predictor."""
  # The cut is compared first: its message names the leaf that differs.
  theirs = _cut.Cut.from_description(description["cut"])
  _cut.refuse_other_cut("directory", theirs, ours.cut)
  for name in _OPTIONS:
    if description[name] != getattr(ours, name):
      raise ValueError(
        f"`directory` must hold a predictor with {name}="
        f"{getattr(ours, name)!r}, got one with {description[name]!r}."
      )


@signatures.checked
def save_predictor(
  directory: str | os.PathLike[str],
  predictor: _predictor.Predictor,
  params: PyTree,
  about: dict[str, Any] | None = None,
) -> None:
  """Saves a trained predictor, as .npy files and a manifest with hashes.

  Args:
    directory: A directory for this predictor alone; an earlier one is replaced
      at the end.  With several processes, save on one.
    predictor: The predictor.
    params: The trained parameters, float32 and finite.
    about: JSON values about it, for instance the data and the accuracy.
  """
  # A predictor with a NaN, or of another shape, would fail when it is used.
  predictor.check_params(params)
  _check_trained("params", params)
  body = {"what": _PREDICTOR, "about": about, "predictor": describe(predictor)}
  array_files.save_arrays(directory, params, body)


@signatures.checked
def load_predictor(
  directory: str | os.PathLike[str], cut: _cut.Cut | None = None
) -> tuple[_predictor.Predictor, PyTree]:
  """Loads a predictor and its parameters.

  Args:
    directory: The directory of `save_predictor`.
    cut: The cut of the network whose rear is predicted; a predictor of another
      network or cut is refused.

  Raises:
    FileNotFoundError: If the directory holds nothing.
    ValueError: If it is damaged, something else, or of another cut.
  """
  arrays, body = array_files.load_arrays(directory, what=_PREDICTOR)
  found = body["predictor"]
  theirs = _cut.Cut.from_description(found["cut"])
  if cut is not None:
    _cut.refuse_other_cut("directory", theirs, cut)
  predictor = _predictor.Predictor(theirs, *(found[x] for x in _OPTIONS))
  # The file only names arrays; their structure follows from the predictor.
  like = jax.eval_shape(predictor.init, jax.random.key(0))
  return predictor, array_files.tree_of(arrays, like)


def _check_trained(name: str, params: Any) -> None:
  """Raises a ValueError unless all leaves are float32 and finite."""
  for leaf, value in checks.named_leaves(params).items():
    array = np.asarray(value)
    if array.dtype != np.float32:
      raise ValueError(
        f"`{name}` must be float32, as they are trained, but {leaf} is "
        f"{array.dtype}. Make it so with `.astype(jnp.float32)`."
      )
    if not np.isfinite(array).all():
      raise ValueError(
        f"`{name}` must be finite, but {leaf} holds a NaN or an infinity: they "
        "are of a training that has diverged. Train with a lower rate."
      )


class FitFolder:
  """A directory for one training; without a directory nothing is kept."""

  def __init__(
    self,
    directory: str | os.PathLike[str] | None,
    predictor: _predictor.Predictor,
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
  ):
    """Refuses a directory with other arrays, before anything is trained.

    The training has settings, JSON values by name, and data, arrays by the
    names of arguments.
    """
    self._directory = directory
    if directory is None:
      return
    array_files.refuse_others(directory, _FIT)
    self._predictor = predictor
    self._body: dict[str, Any] = {
      "what": _FIT, "fit": dict(settings), "predictor": describe(predictor),
      "data": {name: hashes.fingerprint(x) for name, x in data.items()},
    }  # fmt: skip

  def restore(self, like: PyTree) -> tuple[PyTree, dict[str, Any]] | None:
    """Returns the state and the numbers of the last `save`, if any."""
    if self._directory is None or not array_files.is_there(self._directory):
      return None
    arrays, body = array_files.load_arrays(self._directory, what=_FIT)
    refuse_other_predictor(body["predictor"], self._predictor)
    rule = "`directory` holds the state of a training with other"
    for name, mine in self._body["fit"].items():
      # Neither the order of samples nor the rate depends on `num_epochs`, so
      # that a finished training may be continued.
      if name != "num_epochs" and (found := body["fit"].get(name)) != mine:
        raise ValueError(
          f"{rule} settings: `{name}` is {found} there, got {mine}. Take "
          "another directory, or the same settings."
        )
    for name, mine in self._body["data"].items():
      if body["data"].get(name) != mine:
        raise ValueError(
          f"{rule} data: `{name}` differ. Take another directory, or the same "
          "data."
        )
    return array_files.tree_of(arrays, like), body

  def save(self, state: PyTree, **numbers: Any) -> None:
    """Replaces the last state; `numbers` are JSON values."""
    if self._directory is not None:
      array_files.save_arrays(self._directory, state, self._body | numbers)
