"""Tables of the figures, as text."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from house import _updates

Rows = dict[str, list[str]]


def make_tables(
  figures: Mapping[str, Any],
) -> dict[str, tuple[list[str], Rows]]:
  """Returns each table's columns and its rows, by the name of the row."""
  columns = {
    "files": "files",
    "lines": "lines",
    "floors": "floors",
    "circles": "circles",
    "imports": "imports",
    "most_mates": "most mates",
    "names_in_ing": "-ing",
  }
  folders = {
    name: [str(len(x[key]) if key == "circles" else x[key]) for key in columns]
    for name, x in figures["folders"].items()
  }
  percent = 100 * len(figures["headless"]) / max(figures["docstrings"], 1)
  library = {
    "files": figures["files"],
    "lines": figures["lines"],
    "files named in -ing": len(figures["names_in_ing"]),
    "file names of several folders": len(figures["equal_names"]),
    "public class names that occur twice": len(figures["equal_classes"]),
    "docstrings": figures["docstrings"],
    "headless docstrings, %": f"{percent:.1f}",
    **{f'"{word}"': n for word, n in figures["words"].items()},
  }
  updates = {}
  for name, x in figures["updates"].items():
    files, others = x["files"], _updates.besides(x["files"], "collectives")
    ideas = _updates.besides(others, "codecs", "checks")
    counts = [
      len(files),
      x["hops"],
      len(files) - len(others),
      len(others),
      len(ideas),
      len(_updates.besides(ideas, "reducers")),
    ]
    updates[name] = list(map(str, counts))
  rooms = ["collectives", "others", "-codecs -checks", "-reducers"]
  return {
    "folder": (list(columns.values()), folders),
    "library": ([""], {name: [str(x)] for name, x in library.items()}),
    "same features": (["lines"], _summed(figures["same_features"])),
    "traced update": (["files", "hops", *rooms], updates),
  }


def _summed(lines: Mapping[str, int]) -> Rows:
  rows = {**lines, "all": sum(lines.values())}
  return {name: [str(x)] for name, x in rows.items()}


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


def put_beside(rows: Rows, before: Rows) -> Rows:
  """Puts the cells of another tree before those of this one."""
  width = len(next(iter({**before, **rows}.values())))
  none = ["-"] * width
  return {
    name: [
      f"{old} -> {new}"
      for old, new in zip(
        before.get(name, none), rows.get(name, none), strict=True
      )
    ]
    for name in [*rows, *(x for x in before if x not in rows)]
  }


def with_sub_rooms(folders: Iterable[str]) -> list[str]:
  """Drops the whole rooms, such as "codecs/**", that have no sub-room."""
  names = list(folders)
  rooms = {x.split("/")[0] for x in names if "/" in x and x[-2:] != "**"}
  return [x for x in names if x[-2:] != "**" or x[:-3] in rooms]


def notes(figures: Mapping[str, Any]) -> Iterator[str]:
  """Yields what the tables count, by name."""
  for name in with_sub_rooms(figures["folders"]):
    x = figures["folders"][name]
    for circle in x["circles"]:
      yield f"circle in {name}: {', '.join(circle)}"
    if x["floors"] > 6:
      yield f"floors of {name}: {' > '.join(x['longest_path'])}"
    if x["most_mates"] > 6:
      yield f"{x['most_mates_file']} imports {x['most_mates']} room-mates"
  for kind in ("equal_names", "equal_classes"):
    for name, places in figures[kind].items():
      yield f"{name}: {', '.join(places)}"
  for name, x in figures["updates"].items():
    found = _updates.besides(x["files"], "collectives")
    yield f"{name} enters {', '.join(found)}"
