"""Means over the rows of a comparison."""

import math
import statistics
from collections.abc import Callable, Sequence

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
