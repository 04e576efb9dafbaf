"""Names of files and classes, and how docstrings open."""

import ast
import collections
from collections.abc import Iterable

from house import _sources

_HEADLESS = {"What", "Which", "Where", "Who", "How", "Whether", "When"}


def names_in_ing(sources: _sources.Sources) -> list[str]:
  """Lists the files below a room whose names end in -ing."""
  return [
    x.path for x in sources.values() if "/" in x.path and x.stem.endswith("ing")
  ]


def equal_names(sources: _sources.Sources) -> dict[str, list[str]]:
  """Finds names that files of several folders have.

  Files of `cli` are named by their commands and do not count.
  """
  files = [
    x
    for x in sources.values()
    if x.stem not in ("__init__", "__main__")
    and x.folder.split("/")[0] != "cli"
  ]
  return _twice((x.stem, x.path) for x in files)


def equal_classes(sources: _sources.Sources) -> dict[str, list[str]]:
  """Finds names that public classes of several files have."""
  return _twice(
    (node.name, x.path)
    for x in sources.values()
    for node in x.tree.body
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
  )


def _twice(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
  places: dict[str, list[str]] = collections.defaultdict(list)
  for name, place in found:
    places[name].append(place)
  return {name: x for name, x in sorted(places.items()) if len(x) > 1}


def is_headless(docstring: str) -> bool:
  """Returns whether a docstring opens with a clause that has no main clause."""
  return docstring.split()[0] in _HEADLESS
