"""Markdown tables of rows, and the means that stand in them."""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from jdist.training.comparison import _rows

Key = TypeVar("Key", bound=Hashable)
Value = str | Callable[[_rows.Row], float]


def table(titles: str, lines: Iterable[str | Iterable[object]]) -> str:
  """Returns a Markdown table.

  Args:
    titles: The titles of the columns, with " | " between them.
    lines: The cells of each line, as a sequence or as one text like the titles.

  >>> print(table("n | square", [(2, 4), "3 | 9"]))
  | n | square |
  |---|---|
  | 2 | 4 |
  | 3 | 9 |
  """
  rule = "|" + "---|" * (titles.count(" | ") + 1)
  rows = (
    cells if isinstance(cells, str) else " | ".join(map(str, cells))
    for cells in lines
  )
  return "\n".join([f"| {titles} |", rule, *(f"| {row} |" for row in rows)])


def group(
  rows: Iterable[_rows.Row], key: Callable[[_rows.Row], Key]
) -> dict[Key, list[_rows.Row]]:
  """Returns the rows by a key of each, in the order of first appearance.

  >>> group([{"n": 1}, {"n": 2}, {"n": 3}], lambda row: row["n"] % 2)
  {1: [{'n': 1}, {'n': 3}], 0: [{'n': 2}]}
  """
  found: dict[Key, list[_rows.Row]] = {}
  for row in rows:
    found.setdefault(key(row), []).append(row)
  return found


def _values(rows: Sequence[_rows.Row], value: Value) -> list[float]:
  if isinstance(value, str):
    return [row[value] for row in rows]
  return [value(row) for row in rows]


def mean(rows: Sequence[_rows.Row], value: Value) -> float:
  """Returns the mean over rows of an entry or of a function of the row."""
  return statistics.mean(_values(rows, value))


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


def accuracy(row: _rows.Row) -> float:
  """Returns a row's test accuracy in percent."""
  return 100 * float(row["accuracy"])


def loss(row: _rows.Row) -> float:
  """Returns a row's test loss; a diverged run, null in rows, has infinity."""
  return math.inf if row["test_loss"] is None else float(row["test_loss"])


def mean_curve(
  rows: Sequence[_rows.Row], y: str = "accuracy", x: str = "step"
) -> list[tuple[float, float]]:
  """Returns the points (x, y) of the rows' mean curve; NaN stands for null.

  Args:
    rows: Rows of one variant, evaluated at the same steps.
    y: The entry of the curve's points that is averaged.
    x: The other entry, averaged too.

  >>> curves = [{"curve": [{"step": 10, "loss": x}]} for x in (1.0, 3.0)]
  >>> mean_curve(curves, "loss")
  [(10, 2.0)]
  """

  # A diverged run has null in its curve; NaN leaves a gap in a picture.
  def average(points: Sequence[_rows.Row], name: str) -> float:
    values = (math.nan if p[name] is None else p[name] for p in points)
    return statistics.mean(values)

  return [
    (average(points, x), average(points, y))
    for points in zip(*(row["curve"] for row in rows), strict=True)
  ]


def reached_at(
  curve: Iterable[tuple[float, float]], level: float
) -> float | None:
  """Returns where a curve first reaches a level, None where it never does.

  The curve begins at (0, 0), and is a straight line between its points.

  >>> reached_at([(10, 0.4), (20, 0.8)], 0.6)
  15.0
  """
  before_x, before_y = 0.0, 0.0
  for x, y in curve:
    if y >= level:
      # A vertical step would divide by zero.
      share = (level - before_y) / max(y - before_y, 1e-12)
      return before_x + share * (x - before_x)
    before_x, before_y = x, y
  return None
