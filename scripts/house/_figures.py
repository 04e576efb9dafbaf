"""All figures of a tree."""

import pathlib
import re
import subprocess
import sys
from typing import Any

from house import _graphs, _later_features, _names, _sources, _updates

# Counted in docstrings and comments, whatever their case.
_WORDS = {
  "tell, told": r"\b(tell|tells|told|telling)\b",
  "meet": r"meet",
  "remember": r"\bremember",
  "arrive": r"\barrive[sd]?\b",
  "staleness": r"\bstaleness\b",
  "bucket": r"\bbuckets?\b",
  "all-reduce": r"\ball-reduce",
}


def measure(tree: pathlib.Path) -> dict[str, Any]:
  """Measures all figures of a tree."""
  sources = _sources.read_sources(tree)
  folders = {
    name: _folder_figures(files, _graphs.folder_graph(name, sources))
    for name, files in _sources.by_folder(sources).items()
  }
  for room in sorted({x.split("/")[0] for x in folders if x != "."}):
    files = [x for x in sources.values() if x.path.startswith(f"{room}/")]
    figures = _folder_figures(files, _graphs.room_graph(room, sources))
    folders[f"{room}/**"] = figures
  texts = [text for x in sources.values() for _, text in _sources.docstrings(x)]
  headless = [
    place
    for x in sources.values()
    for place, text in _sources.docstrings(x)
    if _names.is_headless(text)
  ]
  prose = "\n".join(
    [*texts, *(c for x in sources.values() for c in _sources.comments(x))]
  )
  commit = subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"],
    cwd=tree,
    capture_output=True,
    text=True,
  )
  return {
    "commit": commit.stdout.strip(),
    "python": ".".join(map(str, sys.version_info[:2])),
    "folders": dict(sorted(folders.items())),
    "files": len(sources),
    "lines": sum(_sources.num_lines(x) for x in sources.values()),
    "names_in_ing": _names.names_in_ing(sources),
    "equal_names": _names.equal_names(sources),
    "equal_classes": _names.equal_classes(sources),
    "docstrings": len(texts),
    "headless": headless,
    "words": {
      word: len(re.findall(pattern, prose, re.IGNORECASE))
      for word, pattern in _WORDS.items()
    },
    "same_features": _later_features.same_features(sources),
    "updates": _updates.trace_updates(tree),
  }


def _folder_figures(
  files: list[_sources.Source], graph: _graphs.Graph
) -> dict[str, Any]:
  floors = _graphs.find_floors(graph)
  number, importer = _graphs.most_mates(graph)
  return {
    "files": len(files),
    "lines": sum(map(_sources.num_lines, files)),
    "floors": floors.number,
    "longest_path": floors.path,
    "circles": floors.circles,
    "imports": sum(map(len, graph.values())),
    "most_mates": number,
    "most_mates_file": importer,
    "names_in_ing": sum(x.stem.endswith("ing") for x in files if "/" in x.path),
  }
