"""Public names of the library, and those that nothing outside uses."""

import ast
import collections
import pathlib
import re
from collections.abc import Iterator

from house import _sources

# A fenced block of Python or of shell on a page, and a name in one.
_BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A call in a line of text, as the table of methods writes it.
_CALL = re.compile(r"`[\w.]*\.(\w+)\(")

_GROUND = ("checks", "states", "storage", "_version", "__main__")


def public_names(sources: _sources.Sources) -> dict[str, str]:
  """Returns the file that defines each name which an `__init__.py` exports.

  An export is an import `from ... import x as x` in an `__init__.py`, or a
  function, class or constant without leading underscore in a public module
  such as `collectives/axis.py`.  The keys are "room.name"; a name that several
  folders of a room export counts once.  `checks`, `states` and `storage` serve
  the library itself and do not count.
  """
  found: dict[str, str] = {}
  for source in sources.values():
    if _room(source.path) in _GROUND:
      continue
    if source.is_init:
      for module, name in _exports(source):
        path = _sources.find_file(module, sources)
        if path is not None and _is_counted(path, sources):
          found.setdefault(f"{_room(path)}.{name}", path)
    elif not source.path.split("/")[-1].startswith("_"):
      for name in _definitions(source):
        found.setdefault(f"{_room(source.path)}.{name}", source.path)
  return found


def _is_counted(path: str, sources: _sources.Sources) -> bool:
  return not sources[path].is_init and _room(path) not in _GROUND


def _exports(source: _sources.Source) -> Iterator[tuple[str, str]]:
  for node in source.tree.body:
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        if alias.asname == alias.name:
          yield f"{node.module}.{alias.name}", alias.name


def _definitions(source: _sources.Source) -> Iterator[str]:
  for node in source.tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      if not node.name.startswith("_"):
        yield node.name
    elif isinstance(node, ast.Assign):
      for target in node.targets:
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
          yield target.id


def _room(path: str) -> str:
  return path.split("/")[0].removesuffix(".py")


def unused_names(tree: pathlib.Path, sources: _sources.Sources) -> list[str]:
  """Returns the public names that only tests or their own room use.

  A use is the name as an attribute or an imported name in another room of the
  library, in experiments or scripts, in a Python block or a call on a page, or
  in the signature (annotations, base classes) of another public name of its
  room: a user who calls a function may need the class of its argument.
  """
  names = public_names(sources)
  used: dict[str, set[str]] = collections.defaultdict(set)
  for source in sources.values():
    # The imports of an `__init__.py` export names, and its code uses some.
    code = [x for x in source.tree.body if not isinstance(x, ast.ImportFrom)]
    module = ast.Module(code, []) if source.is_init else source.tree
    for name in _mentioned(module):
      used[name].add(_room(source.path))
  scripts = [
    *tree.glob("experiments/**/*.py"),
    *tree.glob("scripts/**/*.py"),
  ]
  for path in scripts:
    for name in _mentioned(ast.parse(path.read_text())):
      used[name].add("outside")
  pages = [*tree.glob("*.md"), *tree.glob("docs/**/*.md")]
  for page in [*pages, *tree.glob("experiments/**/*.md")]:
    for name in _CALL.findall(page.read_text()):
      used[name].add("outside")
    for block in _BLOCK.findall(page.read_text()):
      for name in re.findall(r"\w+", block):
        used[name].add("outside")
  public = {path: set() for path in names.values()}
  for key, path in names.items():
    public[path].add(key.split(".")[1])
  for path, own in public.items():
    for name in _in_signatures(sources[path].tree, own):
      used[name].add("signature")
  return sorted(
    key for key in names if not used[key.split(".")[1]] - {key.split(".")[0]}
  )


def _mentioned(tree: ast.AST) -> Iterator[str]:
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      yield node.attr
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        yield alias.name
    elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
      # Names stand in quotes in annotations and in tables.
      yield str(node.value)


def _in_signatures(tree: ast.Module, public: set[str]) -> Iterator[str]:
  """Yields the names in annotations and bases of a file's public names."""
  for node in tree.body:
    if getattr(node, "name", None) not in public:
      continue
    parts: list[ast.AST | None] = []
    for inner in ast.walk(node):
      if isinstance(inner, ast.FunctionDef):
        arguments = inner.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parts += [x.annotation for x in every] + [inner.returns]
      elif isinstance(inner, ast.AnnAssign):
        parts.append(inner.annotation)
      elif isinstance(inner, ast.ClassDef):
        parts += inner.bases
    for part in parts:
      for name in ast.walk(part) if part is not None else ():
        if isinstance(name, ast.Attribute):
          yield name.attr
        elif isinstance(name, ast.Name):
          yield name.id
