"""The rows of a comparison, by which no trial is run twice."""

import os
import pathlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from jdist import signatures
from jdist.training import _results, _run_metadata

Row: TypeAlias = dict[str, Any]
Purpose: TypeAlias = Literal["tuning", "comparison"]


def entry(row: Row, name: str) -> Any:
  """Returns an entry of a row; a ValueError names one that is missing."""
  if name not in row:
    known = ", ".join(map(repr, row))
    raise ValueError(f"`row` must have an entry {name!r}, got {known}.")
  return row[name]


class Trial(NamedTuple):
  """One run of a comparison.

  Attributes:
    purpose: "tuning" on held-out samples, or "comparison".
    variant: The variant's name, which is `method` in rows.
    learning_rate: The highest rate of the schedule.
    seed: The seed of parameters and batches.
  """

  purpose: Purpose
  variant: str
  learning_rate: float
  seed: int


Fit: TypeAlias = Callable[[Trial], Mapping[str, Any]]
"""Function that runs a trial and returns its measurements, with `accuracy`."""


@signatures.checked
class Rows:
  """A file of rows, to which the rows of missing trials are appended.

  A row belongs to a trial if purpose, variant, rate and seed are equal, and all
  options in which rows may not differ.

  Args:
    path: The file, which need not exist.
    config: The options of the comparison, by name.
    defaults: The defaults of these options, for rows that lack an option
      because it was added later.
    free: Options in which rows of one comparison may differ.
    ignores: A function of a variant that returns options on which its trials do
      not depend.
    tuning: Another file for the rows of tuning.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    free: Collection[str] = (),
    ignores: Callable[[str], Collection[str]] = lambda variant: (),
    tuning: str | os.PathLike[str] | None = None,
  ):
    self.paths: dict[Purpose, pathlib.Path] = {
      "comparison": pathlib.Path(path),
      "tuning": pathlib.Path(path if tuning is None else tuning),
    }
    self._ignores, self._free = ignores, frozenset(free)
    self.config = self._fixed(config)
    self._defaults = self._fixed({} if defaults is None else defaults)
    # Rows of tuning may stand in the same file, or in one of their own, whose
    # rows lack a purpose.
    self._rows: list[Row] = []
    for purpose, file in self.paths.items():
      if file.exists() and (tuning is not None or purpose == "comparison"):
        found = _results.read_rows(file)
        self._rows += [{"purpose": purpose} | row for row in found]

  def _fixed(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that must agree."""
    kept = {k: v for k, v in config.items() if k not in self._free}
    # JSON turns tuples into lists, as in the rows that were read from a file.
    return _run_metadata.as_json("config", kept)

  def __len__(self) -> int:
    """Counts the rows, including those of other comparisons in the file."""
    return len(self._rows)

  def find(self, trial: Trial) -> Row | None:
    """Returns a trial's row, None if it was not run yet."""
    # The first row of a trial counts, should a file hold it twice.
    return next((row for row in self._rows if self.is_of(row, trial)), None)

  def is_of(self, row: Row, trial: Trial) -> bool:
    """Returns whether a row belongs to a trial of this comparison."""
    # Rows were written before trials had variants, and call them methods.
    named = trial._asdict()
    named["method"] = named.pop("variant")
    if any(row.get(key) != value for key, value in named.items()):
      return False
    # A row that is older than an option was run with the option's default.
    config = self._defaults | row["config"]
    ignored = {*self._ignores(trial.variant), *self._free}
    keys = (config.keys() | self.config.keys()) - ignored
    # An option that one side lacks differs from every value, even from None.
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
