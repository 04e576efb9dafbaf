"""The rows of a comparison: each trial is run once, and found again."""

import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from jdist.training import _results

Row: TypeAlias = dict[str, Any]
Purpose: TypeAlias = Literal["tuning", "comparison"]


class Trial(NamedTuple):
  """One run of a comparison.

  Attributes:
    purpose: "tuning" on held-out samples, or "comparison".
    variant: its name, `method` in rows.
    learning_rate: the highest of its schedule.
    seed: of parameters and batches.
  """

  purpose: Purpose
  variant: str
  learning_rate: float
  seed: int


Fit: TypeAlias = Callable[[Trial], Mapping[str, Any]]
"""Runs a trial and returns its measurements: at least `accuracy`."""


def _ignores_nothing(variant: str) -> Collection[str]:
  del variant
  return ()


class Rows:
  """A file of rows, to which trials that it lacks are appended.

  A row is a trial's if it names the same purpose, variant, rate and seed, and
  its config is the same in everything that matters.

  Args:
    path: of the file; it need not be there.
    config: the options of the comparison, by name.
    defaults: of these options; rows older than an option had its default.
    free: options in which rows of one comparison may differ.
    ignores: options that a variant's trials do not depend on.
    tuning: another file for the rows of tuning.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    free: Collection[str] = (),
    ignores: Callable[[str], Collection[str]] = _ignores_nothing,
    tuning: str | os.PathLike[str] | None = None,
  ):
    self.paths: dict[Purpose, pathlib.Path] = {
      "comparison": pathlib.Path(path),
      "tuning": pathlib.Path(path if tuning is None else tuning),
    }
    self._ignores, self._free = ignores, frozenset(free)
    self.config = self._fixed(config)
    self._defaults = self._fixed({} if defaults is None else defaults)
    self._rows: list[Row] = []
    for purpose, file in self.paths.items():
      if file.exists() and (tuning is not None or purpose == "comparison"):
        found = _results.read_rows(file)
        self._rows += [{"purpose": purpose} | row for row in found]

  def _fixed(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that must agree, as rows have them: lists."""
    kept = {k: v for k, v in config.items() if k not in self._free}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found

  def __len__(self) -> int:
    """Counts the rows, also those of other comparisons."""
    return len(self._rows)

  def find(self, trial: Trial) -> Row | None:
    """Returns a trial's row, if there is one."""
    return next((row for row in self._rows if self.is_of(row, trial)), None)

  def is_of(self, row: Row, trial: Trial) -> bool:
    """Returns whether a row is a trial's, and of this comparison."""
    named = trial._asdict()
    named["method"] = named.pop("variant")
    if any(row.get(key) != value for key, value in named.items()):
      return False
    config = self._defaults | row["config"]
    ignored = {*self._ignores(trial.variant), *self._free}
    keys = (config.keys() | self.config.keys()) - ignored
    missing = object()
    return all(
      config.get(key, missing) == self.config.get(key, missing) for key in keys
    )

  def add(self, trial: Trial, measured: Mapping[str, Any]) -> Row:
    """Appends the row of a trial that has been run."""
    row = _results.make_row(
      self.config,
      trial.seed,
      purpose=trial.purpose,
      method=trial.variant,
      learning_rate=trial.learning_rate,
      **measured,
    )
    _results.append_rows(self.paths[trial.purpose], [row])
    self._rows.append(row)
    return row
