"""The rows of a comparison, their means, and paired differences of variants."""

import functools
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jdist import checks, signatures
from jdist.training import _checkpoint_directory, _results

Row: TypeAlias = dict[str, Any]  # A result by the names of its fields.
Purpose: TypeAlias = Literal["tuning", "comparison"]
Value = str | Callable[[Row], float]


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


@signatures.explained
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
    return dict(_checkpoint_directory.as_json("config", kept))

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

  def make_row(self, trial: Trial, measured: Mapping[str, Any]) -> Row:
    """Returns the row of a trial, which may be unfinished."""
    return _results.make_row(
      self.config, trial.seed, purpose=trial.purpose, method=trial.variant,
      learning_rate=trial.learning_rate, **measured,
    )  # fmt: skip

  def add(self, trial: Trial, measured: Mapping[str, Any]) -> Row:
    """Appends the row of a trial that has been run."""
    row = self.make_row(trial, measured)
    _results.append_rows(self.paths[trial.purpose], [row])
    self._rows.append(row)
    return row


def _values(rows: Sequence[Row], value: Value) -> list[float]:
  if not rows:
    raise ValueError("`rows` must be one at least, got none.")
  if isinstance(value, str):
    value = functools.partial(entry, name=value)
  found = [value(row) for row in rows]  # Infinite where a run never came.
  if wrong := [x for x in found if not checks.is_number(x)]:
    raise ValueError(f"`value` must be a number, got {checks.show(wrong[0])}.")
  return found


@signatures.checked
def mean(rows: Sequence[Row], value: Value) -> float:
  """Returns the mean over rows of an entry or of a function of the row."""
  return statistics.mean(_values(rows, value))


@signatures.checked
def mean_and_spread(rows: Sequence[Row], value: Value) -> tuple[float, float]:
  """Returns the mean over rows and the standard deviation.

  The deviation is 0 for a single row and where a value is not finite.
  """
  found = _values(rows, value)
  return statistics.mean(found), _deviation(found)


def _deviation(found: list[float]) -> float:
  # That of a single value, or of one that is not finite, is not defined.
  defined = len(found) > 1 and all(map(math.isfinite, found))
  return statistics.stdev(found) if defined else 0.0


@signatures.checked
def accuracy(row: Row) -> float:
  """Returns a row's test accuracy in percent."""
  return 100 * _values([row], "accuracy")[0]


@signatures.explained
class Difference(NamedTuple):
  """The mean of paired differences and its confidence interval.

  Attributes:
    mean: The mean of the differences.
    low: The lower end of the interval.
    high: The upper end of the interval.
    num_pairs: The number of pairs.
  """

  mean: float
  low: float
  high: float
  num_pairs: int

  def interval(self, digits: signatures.NonNegativeInt = 2) -> str:
    """Writes the mean and both ends.

    >>> Difference(1.0, 0.5, 1.5, 3).interval(1)
    '+1.0 (+0.5 to +1.5)'
    """
    return (
      f"{self.mean:+.{digits}f} ({self.low:+.{digits}f} to "
      f"{self.high:+.{digits}f})"
    )

  def plus_minus(self, digits: signatures.NonNegativeInt = 2) -> str:
    """Writes the mean and half of the interval.

    >>> Difference(1.0, 0.5, 1.5, 3).plus_minus(1)
    '+1.0 ± 0.5'
    """
    return f"{self.mean:+.{digits}f} ± {self.high - self.mean:.{digits}f}"


@signatures.checked
def paired_difference(
  rows: Sequence[Row],
  base: Sequence[Row],
  *,
  value: Callable[[Row], float] = accuracy,
  confidence: float = 0.95,
) -> Difference | None:
  """Compares two variants by the seeds that both were run with.

  With differences d of n seeds the interval is mean(d) ± t std(d) / sqrt(n),
  with t of Student's distribution with n - 1 degrees of freedom. Runs of one
  seed share initial parameters and batches, whose influence cancels.

  Args:
    rows: The rows of the variant.
    base: The rows of the other variant.
    value: A function of a row: the value that is compared.
    confidence: The two-sided confidence of the interval, between 0 and 1.

  Returns:
    None with fewer than two seeds in common.

  Raises:
    ValueError: If a seed has several rows of a variant, which are no
      independent pairs, or if `confidence` is out of range.

  >>> rows = [{"seed": s, "accuracy": a} for s, a in ((0, 0.91), (1, 0.93))]
  >>> base = [{"seed": s, "accuracy": 0.9} for s in (0, 1, 2)]
  >>> paired_difference(rows, base).mean.__round__(3)
  2.0
  """
  from scipy import special

  checks.check_number(
    "confidence", confidence, high=1, open_low=True, open_high=True
  )
  for name, given in (("rows", rows), ("base", base)):
    seeds = [entry(row, "seed") for row in given]
    if len(set(seeds)) < len(seeds):
      raise ValueError(
        f"`{name}` must have one row for each seed, got seeds {seeds}. Take "
        "the rows of one setting, each trial once."
      )
  # Seeds that only one variant was run with are left out of the pairs.
  others = {row["seed"]: row for row in base}
  mine = [row for row in rows if row["seed"] in others]
  if len(mine) < 2:
    return None
  theirs = _values([others[row["seed"]] for row in mine], value)
  found = [a - b for a, b in zip(_values(mine, value), theirs, strict=True)]
  mean, n = statistics.mean(found), len(found)
  # With few seeds Student's quantile is far above the normal one: 4.3 for three
  # seeds instead of 1.96.
  t = float(special.stdtrit(n - 1, (1 + confidence) / 2))
  half = t * _deviation(found) / n**0.5
  return Difference(mean, mean - half, mean + half, n)
