"""Tables and curves of rows."""

import argparse
import math
import pathlib
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from jdist.training import comparison

Key = TypeVar("Key", bound=Hashable)


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


def filled(page: str, parts: Mapping[str, str]) -> str:
  r"""Returns a page with new text between the markers of each part.

  Args:
    page: A page with lines `<!-- rows: NAME -->` and `<!-- end: NAME -->`.
    parts: The text of each part, by its name.

  >>> page = "<!-- rows: a -->\nold\n<!-- end: a -->"
  >>> filled(page, {"a": "new"}).splitlines()[1]
  'new'
  """
  for name, text in parts.items():
    first, last = f"<!-- rows: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = page.partition(first)
    inside, found, after = rest.partition(last)
    if not found:
      raise ValueError(f"`page` must have {first} and {last}.")
    del inside
    page = f"{before}{first}\n{text}\n{last}{after}"
  return page


def group(
  rows: Iterable[comparison.Row], key: Callable[[comparison.Row], Key]
) -> dict[Key, list[comparison.Row]]:
  """Returns the rows by a key of each, in the order of first appearance.

  >>> group([{"n": 1}, {"n": 2}, {"n": 3}], lambda row: row["n"] % 2)
  {1: [{'n': 1}, {'n': 3}], 0: [{'n': 2}]}
  """
  found: dict[Key, list[comparison.Row]] = {}
  for row in rows:
    found.setdefault(key(row), []).append(row)
  return found


def loss(row: comparison.Row) -> float:
  """Returns a row's test loss; a diverged run, null in rows, has infinity."""
  return math.inf if row["test_loss"] is None else float(row["test_loss"])


def mean_curve(
  rows: Sequence[comparison.Row], y: str = "accuracy", x: str = "step"
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
  def average(points: Sequence[comparison.Row], name: str) -> float:
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


def write(
  pages: Mapping[pathlib.Path, Mapping[str, str]], *, check: bool = False
) -> bool:
  """Fills pages, each with its own parts; see `filled`.

  Args:
    pages: The parts of each page, by its path.
    check: Whether to leave the pages as they are.

  Returns:
    True if a page differed from its parts.
  """
  differs = False
  for path, parts in pages.items():
    old = path.read_text()
    new = filled(old, parts)
    differs |= new != old
    if not check and new != old:
      path.write_text(new)
  return differs


def publish(
  pages: Mapping[pathlib.Path, Mapping[str, str]], draw: Callable[[], object]
) -> None:
  """Runs a report's command: prints the parts, fills the pages, and draws.

  With `--check` it changes nothing.

  Args:
    pages: The parts of each page, by its path.
    draw: Draws the pictures.

  Raises:
    SystemExit: With `--check`, if a page differs from its parts.
  """
  parser = argparse.ArgumentParser(description="Fills pages from their rows.")
  parser.add_argument(
    "--check", action="store_true", help="only fails if a page differs"
  )
  check = parser.parse_args().check
  print("\n\n".join(x for parts in pages.values() for x in parts.values()))
  differs = write(pages, check=check)
  if not check:
    draw()
  elif differs:
    raise SystemExit("A page differs from what the rows say.")
