"""Files of the library, read without importing them."""

import ast
import collections
import functools
import io
import pathlib
import tokenize
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Source(NamedTuple):
  """A file of the library.

  Attributes:
    path: below jdist/, with slashes.
    text: its content.
    tree: its syntax tree.
  """

  path: str
  text: str
  tree: ast.Module

  @property
  def folder(self) -> str:
    """Returns the folder below jdist/, "." for jdist/ itself."""
    return str(pathlib.PurePosixPath(self.path).parent)

  @property
  def stem(self) -> str:
    """Returns the name without `.py` and without leading underscores."""
    stem = pathlib.PurePosixPath(self.path).stem
    return stem if stem.endswith("__") else stem.lstrip("_")

  @property
  def is_init(self) -> bool:
    """Returns whether the file is an `__init__.py`."""
    return self.stem == "__init__"


Sources = Mapping[str, Source]


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
  """Returns all nodes of a file, which several measures go through."""
  return tuple(ast.walk(tree))


def read_sources(tree: pathlib.Path) -> dict[str, Source]:
  """Reads all files of a tree's library, by their paths below jdist/."""
  package = tree / "jdist"
  files = sorted(package.rglob("*.py"))
  return parse_sources(
    {x.relative_to(package).as_posix(): x.read_text() for x in files}
  )


def parse_sources(texts: Mapping[str, str]) -> dict[str, Source]:
  """Parses files, given as texts by their paths below jdist/."""
  return {x: Source(x, text, ast.parse(text)) for x, text in texts.items()}


def by_folder(sources: Sources) -> dict[str, list[Source]]:
  """Groups files by their folders."""
  found: dict[str, list[Source]] = collections.defaultdict(list)
  for source in sources.values():
    found[source.folder].append(source)
  return dict(sorted(found.items()))


def find_file(module: str, sources: Sources) -> str | None:
  """Returns the file of a module, or of a name in one; None elsewhere."""
  parts = module.split(".")
  if parts[0] != "jdist":
    return None
  for end in (len(parts), len(parts) - 1):
    stem = "/".join(parts[1:end])
    for path in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
      if path in sources:
        return path
  return None


def imports(source: Source) -> Iterator[tuple[str, str]]:
  """Yields the dotted name of each import, and what it is called here."""
  for node in nodes(source.tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name, alias.asname or alias.name
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        yield f"{node.module}.{alias.name}", alias.asname or alias.name


def docstrings(source: Source) -> Iterator[tuple[str, str]]:
  """Yields path:line and text of each docstring, private ones included."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in nodes(source.tree):
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
      yield f"{source.path}:{getattr(node, 'lineno', 1)}", text


def comments(source: Source) -> Iterator[str]:
  """Yields the comments of a file."""
  lines = io.StringIO(source.text).readline
  for token in tokenize.generate_tokens(lines):
    if token.type == tokenize.COMMENT:
      yield token.string


def num_lines(source: Source) -> int:
  """Returns the number of a file's lines."""
  return len(source.text.splitlines())
