"""Directories that keep the state of a training, to go on from there."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from jdist.storage import array_files, hashes

PyTree = Any


class FitFolder:
  """A directory for one training; without one it keeps nothing."""

  def __init__(
    self,
    directory: str | os.PathLike[str] | None,
    what: str,
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
  ):
    """Refuses a directory with other arrays, before anything is trained.

    The data are arrays by the names of arguments; of a list all together.
    """
    self._directory = directory
    self._body: dict[str, Any] = {"what": what, "fit": dict(settings)}
    if directory is not None:
      array_files.refuse_others(directory, what)
      self._body["data"] = {
        name: hashes.fingerprint(*(x if isinstance(x, list) else [x]))
        for name, x in data.items()
      }

  def restore(
    self,
    like: PyTree,
    *,
    free: str = "",
    check: Callable[[dict[str, Any]], None] | None = None,
  ) -> tuple[PyTree, dict[str, Any]] | None:
    """Returns the state and the numbers of the last `save`, or None.

    Refuses those of other settings, but for `free`, and of other data; `check`
    raises an error for numbers that do not fit.
    """
    if self._directory is None or not array_files.is_there(self._directory):
      return None
    what = self._body["what"]
    arrays, body = array_files.load_arrays(self._directory, what=what)
    if check is not None:
      check(body)
    rule = "`directory` holds the state of a training with other"
    for name, mine in self._body["fit"].items():
      if name != free and (found := body["fit"].get(name)) != mine:
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
    """Replaces the last state; `numbers` are anything that JSON can hold."""
    if self._directory is not None:
      array_files.save_arrays(self._directory, state, self._body | numbers)
