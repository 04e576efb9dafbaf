"""The public names of the library, by room, and what documents each of them.

A public name is an import `from ... import x as x` in the `__init__.py` of a
room.  A function or class is documented by its docstring, and data by the
comment at its definition.  Nothing here needs Sphinx or imports the library, so
that a quick test can check that every public name is documented.
"""

import ast
import functools
import importlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "jdist"
# Modules without a folder whose functions users call.
_SINGLE = ("conformance", "states")
_KINDS = ("function", "class", "data", "module")


class Name(NamedTuple):
  """A public name.

  Attributes:
    room: The module that exports it, for instance "jdist.transforms".
    name: The name in that module.
    source: The module that defines it.
    kind: "function", "class", "data" or "module".
    text: The docstring, or the comment of data; empty if there is none.
  """

  room: str
  name: str
  source: str
  kind: str
  text: str

  @property
  def path(self) -> str:
    """The dotted path under which users find the name."""
    return f"{self.room}.{self.name}"

  @property
  def value(self) -> Any:
    """The object itself."""
    return getattr(importlib.import_module(self.room), self.name)

  @property
  def sentence(self) -> str:
    """The first sentence of the text."""
    return self.text.strip().split("\n\n")[0].split("\n>>>")[0]


@functools.cache
def rooms() -> dict[str, tuple[Name, ...]]:
  """Returns the public names of each room that has some, sorted by kind."""
  found = {}
  for init in sorted(PACKAGE.rglob("__init__.py")):
    parts = init.parent.relative_to(PACKAGE.parent).parts
    names = [_name(".".join(parts), *x) for x in _exports(init)]
    if names:
      found[".".join(parts)] = tuple(sorted(names, key=_order))
  for room, names in list(found.items()):
    # A folder of a room whose names the room exports is not public itself.
    parent = room.rpartition(".")[0]
    above = {(x.source, x.name) for x in found.get(parent, ())}
    if parent != "jdist" and above & {(x.source, x.name) for x in names}:
      del found[room]
  for single in _SINGLE:
    room = f"jdist.{single}"
    names = [_name(room, room, x) for x in _definitions(_tree(room))]
    found[room] = tuple(sorted(names, key=_order))
  return found


@functools.cache
def _paths() -> dict[str, str]:
  """Maps every way to write a name to the path under which it is documented."""
  found: dict[str, set[str]] = {}
  for names in rooms().values():
    for name in names:
      path = name.path
      if name.kind == "module":
        path = f"{name.source}.{name.name}"
      elif not name.source.startswith(f"{name.room}.") or name.room == "jdist":
        # Names of other rooms.
        path = f"{_exporter(name)}.{name.name}"
      for way in {name.path, f"{name.source}.{name.name}"}:
        found.setdefault(way, set()).add(path)
      parts = path.split(".")
      for start in range(1, len(parts)):
        found.setdefault(".".join(parts[start:]), set()).add(path)
  return {way: paths.pop() for way, paths in found.items() if len(paths) == 1}


def find(way: str) -> str | None:
  """Returns where a name is documented, or None if it is not a public one.

  It may be written as in a program (`transforms.Delayed`), alone (`Delayed`) if
  no other room has the name, or by the module that defines it.
  """
  return _paths().get(way)


def _exporter(name: Name) -> str:
  """Returns the room of which `jdist` exports a name, too."""
  return next(
    room
    for room, names in rooms().items()
    if room != "jdist"
    for other in names
    if (other.source, other.name) == (name.source, name.name)
  )


@functools.cache
def arguments() -> frozenset[str]:
  """Returns the names of all arguments in the library."""
  return frozenset(
    node.arg
    for path in PACKAGE.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.arg)
  )


def undocumented() -> list[str]:
  """Returns the public names without a text of their own."""
  return [
    name.path for names in rooms().values() for name in names if not name.text
  ]


def _order(name: Name) -> tuple[int, str]:
  return _KINDS.index(name.kind), name.name.lower()


def _exports(init: pathlib.Path) -> Iterator[tuple[str, str]]:
  for node in ast.parse(init.read_text()).body:
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        if alias.asname == alias.name and not alias.name.startswith("__"):
          yield str(node.module), alias.name


def _definitions(tree: ast.Module) -> Iterator[str]:
  for node in tree.body:
    name = getattr(node, "name", "_")
    if not name.startswith("_"):
      yield str(name)


@functools.cache
def _lines(module: str) -> list[str]:
  path = PACKAGE.parent / module.replace(".", "/")
  file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
  return file.read_text().splitlines()


@functools.cache
def _tree(module: str) -> ast.Module:
  return ast.parse("\n".join(_lines(module)))


def _name(room: str, source: str, name: str) -> Name:
  if (PACKAGE.parent / source.replace(".", "/") / name).is_dir():
    text = ast.get_docstring(_tree(f"{source}.{name}")) or ""
    return Name(room, name, source, "module", text)
  source = _defining(source, name)
  nodes = {getattr(x, "name", None): x for x in _tree(source).body}
  node = nodes.get(name, nodes.get(_alias(source, name)))
  if isinstance(node, ast.ClassDef | ast.FunctionDef):
    kind = "class" if isinstance(node, ast.ClassDef) else "function"
    return Name(room, name, source, kind, ast.get_docstring(node) or "")
  return Name(room, name, source, "data", _comment(source, name))


def _alias(module: str, name: str) -> str | None:
  """Returns the other name of a class that has two in its module."""
  for node in _tree(module).body:
    targets = [getattr(x, "id", None) for x in getattr(node, "targets", [])]
    if targets == [name]:
      return getattr(node.value, "id", None)  # type: ignore[attr-defined]
  return None


def _defining(module: str, name: str) -> str:
  """Follows imports of a name from one module to the next."""
  for node in _tree(module).body:
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        if alias.asname == alias.name == name:
          return _defining(str(node.module), name)
  return module


def _comment(module: str, name: str) -> str:
  """Returns the comment above a constant, or the one at its line's end."""
  lines = _lines(module)
  for node in _tree(module).body:
    targets = [getattr(node, "target", None), *getattr(node, "targets", [])]
    if name not in [getattr(x, "id", None) for x in targets]:
      continue
    for number in (node.lineno, int(node.end_lineno or 0)):
      trailing = re.search(r"  # (?!fmt:)(.+)$", lines[number - 1])
      if trailing:
        return trailing[1]
    above: list[str] = []
    for line in reversed(lines[: node.lineno - 1]):
      if line.startswith("# "):
        above.insert(0, line.removeprefix("# "))
      # A comment may describe several constants, a line each.
      elif above or not re.match(r"[A-Z_]+ = ", line):
        break
    return " ".join(above)
  return ""
