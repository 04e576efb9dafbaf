"""Tables of the figures, as text."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Rows = dict[str, list[str]]

_COLUMNS = {
  "files": "files",
  "lines": "lines",
  "comments": "comments/100",
  "floors": "floors",
  "imports": "imports",
  "most_mates": "most mates",
}


def make_tables(
  figures: Mapping[str, Any], limits: Mapping[str, Any]
) -> dict[str, tuple[list[str], Rows]]:
  """Returns each table's columns and its rows, by the name of the row."""
  folders = {
    name: [str(figures["folders"][name][key]) for key in _COLUMNS]
    for name in with_sub_rooms(sorted(figures["folders"]))
  }
  held = {
    name: [
      f"{limit.value:.4g}" if limit.value < 1000 else f"{limit.value:,.0f}",
      f"{'>=' if limit.at_least else '<='} {limit.bound:,g}",
      "" if limit.holds else "MISSED",
    ]
    for name, limit in limits.items()
  }
  return {
    "folder": (list(_COLUMNS.values()), folders),
    "figure": (["measured", "limit", ""], held),
  }


def draw_table(title: str, columns: list[str], rows: Rows) -> str:
  """Draws a table in plain text, the figures to the right."""
  cells = [[title, *columns], *([name, *row] for name, row in rows.items())]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return "\n".join(
    "  ".join(
      [row[0].ljust(widths[0])]
      + [x.rjust(width) for x, width in zip(row[1:], widths[1:], strict=True)]
    ).rstrip()
    for row in cells
  )


def with_sub_rooms(folders: Iterable[str]) -> list[str]:
  """Drops the whole rooms, such as "codecs/**", that have no sub-room."""
  names = list(folders)
  rooms = {x.split("/")[0] for x in names if "/" in x and x[-2:] != "**"}
  return [x for x in names if x[-2:] != "**" or x[:-3] in rooms]


def notes(
  figures: Mapping[str, Any], traces: Mapping[str, Any]
) -> Iterator[str]:
  """Yields the names behind the figures of the tables."""
  for name in with_sub_rooms(figures["folders"]):
    x = figures["folders"][name]
    for circle in x["circles"]:
      yield f"circle in {name}: {', '.join(circle)}"
    if x["floors"] > 6:
      yield f"floors of {name}: {' > '.join(x['longest_path'])}"
    if x["most_mates"] > 6:
      yield f"{x['most_mates_file']} imports {x['most_mates']} room-mates"
  for name in figures["unused"]:
    yield f"no user of {name}"
  ways = {"push": traces["push"], "codec option": traces["option"]}
  for name, way in {**traces["updates"], **ways}.items():
    yield f"{name} enters {', '.join(way['files'])}"
