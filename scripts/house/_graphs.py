"""Graphs of the imports among files, and the floors in which files stand."""

import ast
import collections
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from house import _sources

Graph = Mapping[str, set[str]]


def folder_graph(folder: str, sources: _sources.Sources) -> Graph:
  """Returns which of its room-mates each file of a folder imports."""
  mates = {x.path for x in sources.values() if x.folder == folder}

  def imported(path: str) -> set[str | None]:
    return {
      _sources.find_file(x, sources) for x, _ in _sources.imports(sources[path])
    }

  return {path: (mates & imported(path)) - {path} for path in sorted(mates)}


def room_graph(room: str, sources: _sources.Sources) -> Graph:
  """Returns which files of a room and its sub-rooms each of them imports.

  An `__init__.py` is no file of this graph: a name that is imported from one
  counts as imported from the file that defines it.
  """
  mates = {
    x.path
    for x in sources.values()
    if x.path.startswith(f"{room}/") and not x.is_init
  }
  return {
    path: (mates & _definitions(sources[path], sources)) - {path}
    for path in sorted(mates)
  }


def _definitions(
  source: _sources.Source, sources: _sources.Sources
) -> set[str | None]:
  """Returns the files that define the names which a file imports."""
  attributes: dict[str, set[str]] = collections.defaultdict(set)
  for node in _sources.nodes(source.tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      attributes[node.value.id].add(node.attr)
  found: set[str | None] = set()
  for module, name in _sources.imports(source):
    path = _sources.find_file(module, sources)
    if path is None or not sources[path].is_init:
      found.add(path)
    elif path == _sources.find_file(f"{module}.__init__", sources):
      # The folder itself is imported: its names are used as attributes.
      found |= {_defining_file(path, x, sources) for x in attributes[name]}
    else:
      found.add(_defining_file(path, module.split(".")[-1], sources))
  return found


def _defining_file(
  init: str, name: str, sources: _sources.Sources
) -> str | None:
  """Returns the file that defines a name of an `__init__.py`."""
  for module, alias in _sources.imports(sources[init]):
    path = _sources.find_file(module, sources)
    if alias == name and path not in (None, init):
      if not sources[path].is_init:
        return path
      return _defining_file(path, module.split(".")[-1], sources)
  return None


class Floors(NamedTuple):
  """The floors of a graph of imports.

  Attributes:
    number: of files on the longest path, a circle counted once.
    path: that path, from the highest file to the lowest.
    circles: the files that import each other, one list a circle.
  """

  number: int
  path: list[str]
  circles: list[list[str]]


def find_floors(graph: Graph) -> Floors:
  """Counts the floors of a graph and finds its circles."""
  reached = {x: set(graph[x]) for x in graph}
  for middle, x in itertools.product(graph, graph):
    if middle in reached[x]:
      reached[x] |= reached[middle]
  circle = {
    x: sorted({y for y in reached[x] if x in reached[y]} | {x}) for x in graph
  }
  paths: dict[str, list[str]] = {}

  def longest(x: str) -> list[str]:
    x = circle[x][0]
    if x not in paths:
      below = {y for z in circle[x] for y in graph[z]} - set(circle[x])
      paths[x] = [x, *max(map(longest, sorted(below)), key=len, default=[])]
    return paths[x]

  path = max(map(longest, graph), key=len, default=[])
  found = {tuple(x) for x in circle.values() if len(x) > 1}
  return Floors(len(path), path, sorted(map(list, found)))


def most_mates(graph: Graph) -> tuple[int, str]:
  """Returns the most room-mates that one file imports, and which file."""
  files = [x for x in graph if not x.endswith("__init__.py")]
  return max(((len(graph[x]), x) for x in files), default=(0, ""))
