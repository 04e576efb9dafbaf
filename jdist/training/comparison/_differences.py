"""Means over rows, and paired differences between variants."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdist import signatures
from jdist.training.comparison import _rows

Value = str | Callable[[_rows.Row], float]


def _values(rows: Sequence[_rows.Row], value: Value) -> list[float]:
  if not rows:
    raise ValueError("`rows` must be one at least, got none.")
  if isinstance(value, str):
    return [_rows.entry(row, value) for row in rows]
  return [value(row) for row in rows]


@signatures.checked
def mean(rows: Sequence[_rows.Row], value: Value) -> float:
  """Returns the mean over rows of an entry or of a function of the row."""
  return statistics.mean(_values(rows, value))


@signatures.checked
def mean_and_spread(
  rows: Sequence[_rows.Row], value: Value
) -> tuple[float, float]:
  """Returns the mean over rows and the standard deviation.

  The deviation is 0 for a single row and where a value is infinite.
  """
  found = _values(rows, value)
  # The deviation of a single value, or of infinity, is not defined.
  if len(found) < 2 or math.inf in found:
    return statistics.mean(found), 0.0
  return statistics.mean(found), statistics.stdev(found)


@signatures.checked
def accuracy(row: _rows.Row) -> float:
  """Returns a row's test accuracy in percent."""
  return 100 * float(_rows.entry(row, "accuracy"))


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

  def interval(self, digits: int = 2) -> str:
    """Writes the mean and both ends.

    >>> Difference(1.0, 0.5, 1.5, 3).interval(1)
    '+1.0 (+0.5 to +1.5)'
    """
    return (
      f"{self.mean:+.{digits}f} ({self.low:+.{digits}f} to "
      f"{self.high:+.{digits}f})"
    )

  def plus_minus(self, digits: int = 2) -> str:
    """Writes the mean and half of the interval.

    >>> Difference(1.0, 0.5, 1.5, 3).plus_minus(1)
    '+1.0 ± 0.5'
    """
    return f"{self.mean:+.{digits}f} ± {self.high - self.mean:.{digits}f}"


@signatures.checked
def paired_difference(
  rows: Sequence[_rows.Row],
  base: Sequence[_rows.Row],
  *,
  value: Callable[[_rows.Row], float] = accuracy,
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

  if not 0 < confidence < 1:
    raise ValueError(
      f"`confidence` must be between 0 and 1, got {confidence}: 0.95 is 95 %."
    )
  for name, given in (("rows", rows), ("base", base)):
    seeds = [row["seed"] for row in given]
    if len(set(seeds)) < len(seeds):
      raise ValueError(
        f"`{name}` must have one row for each seed, got seeds {seeds}. Take "
        "the rows of one setting, each trial once."
      )
  # Seeds that only one variant was run with are left out of the pairs.
  others = {row["seed"]: row for row in base}
  found = [
    value(row) - value(others[row["seed"]])
    for row in rows
    if row["seed"] in others
  ]
  if len(found) < 2:
    return None
  mean, n = statistics.mean(found), len(found)
  # With few seeds Student's quantile is far above the normal one: 4.3 for three
  # seeds instead of 1.96.
  t = float(special.stdtrit(n - 1, (1 + confidence) / 2))
  half = t * statistics.stdev(found) / n**0.5
  return Difference(mean, mean - half, mean + half, n)
