"""All figures of a tree, and the limits that they keep."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from house import (
  _codec_option,
  _disk_formats,
  _graphs,
  _prose,
  _public,
  _server_push,
  _sources,
  _updates,
)


class Limit(NamedTuple):
  """A figure and the bound that a test holds it to.

  Attributes:
    value: as measured.
    bound: the limit.
    at_least: whether the bound is a lower one.
  """

  value: float
  bound: float
  at_least: bool = False

  @property
  def holds(self) -> bool:
    """Returns whether the figure keeps the limit."""
    if self.at_least:
      return self.value >= self.bound
    return self.value <= self.bound


# The files that a traced update enters, `collectives` included, and its hops.
_MAX_UPDATES = {
  "local_sgd": (6, 27),
  "diloco": (6, 30),
  "diloco int4 + feedback": (12, 90),
  "msdpu streamed": (10, 95),
  "msdpu streamed int8 + feedback": (14, 120),
}
# The files and hops of a push from a worker to the merged model, and the files
# and calls of a codec option from the command line to the wire.
_MAX_PUSH, _MAX_OPTION = (10, 20), (12, 50)
# The library never has more lines again than the 59,163 that it began with; the
# limit follows what it has, so that nothing grows unseen.
_MAX_FLOORS, _MAX_LINES, _MAX_NAMES = 6, 59_163, 430
_MIN_COMMENTS, _MAX_OF = 6.0, 0.3

_PAGES = ("README.md", "CHANGELOG.md")


def measure(tree: pathlib.Path) -> dict[str, Any]:
  """Measures the figures that files alone tell."""
  sources = _sources.read_sources(tree)
  folders = {
    name: _folder_figures(files, _graphs.folder_graph(name, sources))
    for name, files in _sources.by_folder(sources).items()
  }
  for room in rooms(sources):
    files = [x for x in sources.values() if x.path.startswith(f"{room}/")]
    figures = _folder_figures(files, _graphs.room_graph(room, sources))
    folders[f"{room}/**"] = figures
  prose = [x for y in sources.values() for x in _prose.sentences(y)]
  opened = sum(map(_prose.opens_with_of, prose))
  return {
    "folders": dict(sorted(folders.items())),
    "files": len(sources),
    "lines": sum(_sources.num_lines(x) for x in sources.values()),
    "comments": _comments(list(sources.values())),
    "of": 100 * opened / max(len(prose), 1),
    "public": sorted(_public.public_names(sources)),
    "unused": _public.unused_names(tree, sources),
    "formats": sorted(_disk_formats.disk_formats(sources)),
    "pages": {
      name: (tree / name).stat().st_size
      for name in ("README.md", "CHANGELOG.md")
    },
  }


def rooms(sources: _sources.Sources) -> list[str]:
  """Returns the names of the library's rooms that are folders."""
  return sorted({x.split("/")[0] for x in sources if "/" in x})


_TRACERS = {
  "updates": _updates.trace_updates,
  "push": _server_push.trace_push,
  "option": _codec_option.trace_option,
}


def trace(
  tree: pathlib.Path, names: Iterable[str] = tuple(_TRACERS)
) -> dict[str, Any]:
  """Follows updates, a push and a codec option through a tree's library."""
  return {name: _TRACERS[name](tree) for name in names}


def file_limits(figures: Mapping[str, Any]) -> dict[str, Limit]:
  """Returns the figures of `measure` that have a limit, by their names."""
  found = {
    "lines of the library": Limit(figures["lines"], _MAX_LINES),
    "public names": Limit(len(figures["public"]), _MAX_NAMES),
    "public names without a user": Limit(len(figures["unused"]), 0),
    "comment lines per 100 lines of code": Limit(
      figures["comments"], _MIN_COMMENTS, at_least=True
    ),
    'sentences that open with "Of", %': Limit(figures["of"], _MAX_OF),
    "formats of kept files": Limit(
      len(set(figures["formats"]) - {"export", "input"}),
      len(_disk_formats.KEPT),
    ),
    "bytes of README": Limit(figures["pages"]["README.md"], 8_000),
    "bytes of CHANGELOG": Limit(figures["pages"]["CHANGELOG.md"], 5_000),
  }
  for name, folder in figures["folders"].items():
    if name.endswith("/**"):
      found[f"floors of {name}"] = Limit(folder["floors"], _MAX_FLOORS)
  return found


def trace_limits(traces: Mapping[str, Any]) -> dict[str, Limit]:
  """Returns the figures of `trace` that have a limit, by their names."""
  ways = {
    f"traced {name}": (way, "hops", _MAX_UPDATES[name])
    for name, way in traces.get("updates", {}).items()
    if name in _MAX_UPDATES
  }
  if "push" in traces:
    ways["push"] = (traces["push"], "hops", _MAX_PUSH)
  if "option" in traces:
    ways["codec option"] = (traces["option"], "frames", _MAX_OPTION)
  found = {}
  for name, (way, unit, (files, calls)) in ways.items():
    found[f"files of a {name}"] = Limit(len(way["files"]), files)
    found[f"{unit} of a {name}"] = Limit(way[unit], calls)
  return found


def _folder_figures(
  files: list[_sources.Source], graph: _graphs.Graph
) -> dict[str, Any]:
  floors = _graphs.find_floors(graph)
  number, importer = _graphs.most_mates(graph)
  return {
    "files": len(files),
    "lines": sum(map(_sources.num_lines, files)),
    "comments": round(_comments(files), 1),
    "floors": floors.number,
    "longest_path": floors.path,
    "circles": floors.circles,
    "imports": sum(map(len, graph.values())),
    "most_mates": number,
    "most_mates_file": importer,
  }


def _comments(files: list[_sources.Source]) -> float:
  """Returns the comment lines per 100 lines of code."""
  counted = list(map(_prose.count_lines, files))
  code = sum(code for _, code in counted)
  return 100 * sum(comments for comments, _ in counted) / max(code, 1)
