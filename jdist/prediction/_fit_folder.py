"""The directory that keeps the state of a predictor's training."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jdist.storage import array_files, hashes

PyTree = Any
_WHAT = "predictor fit"


class FitFolder:
  """A directory for one training; without a directory nothing is kept."""

  def __init__(
    self,
    directory: str | os.PathLike[str] | None,
    predictor: Mapping[str, Any],
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
  ):
    """Refuses a directory with other arrays, before anything is trained.

    Args:
      directory: The directory, or None.
      predictor: The predictor that is trained, as JSON values.
      settings: The settings of the training, JSON values by name.
      data: The arrays that it uses, by the names of arguments.
    """
    self._directory = directory
    if directory is None:
      return
    array_files.refuse_others(directory, _WHAT)
    self._settings = dict(settings)
    self._data = {name: hashes.fingerprint(x) for name, x in data.items()}
    self._body = {
      "what": _WHAT,
      "fit": self._settings,
      "predictor": dict(predictor),
      "data": self._data,
    }

  def restore(
    self, like: PyTree, check_predictor: Callable[[dict[str, Any]], None]
  ) -> tuple[PyTree, dict[str, Any]] | None:
    """Returns the state and the numbers of the last `save`, if any.

    Args:
      like: A tree with the structure of the state.
      check_predictor: A function that raises an error for other predictors.

    Raises:
      ValueError: If they are of other settings or data.
    """
    if self._directory is None or not array_files.is_there(self._directory):
      return None
    arrays, body = array_files.load_arrays(self._directory, what=_WHAT)
    check_predictor(body["predictor"])
    rule = "`directory` holds the state of a training with other"
    for name, mine in self._settings.items():
      # Neither the order of samples nor the rate depends on `num_epochs`, so
      # that a finished training may be continued.
      if name != "num_epochs" and (found := body["fit"].get(name)) != mine:
        raise ValueError(
          f"{rule} settings: `{name}` is {found} there, got {mine}. Take "
          "another directory, or the same settings."
        )
    for name, mine in self._data.items():
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
