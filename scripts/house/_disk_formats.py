"""Formats in which the library's files write to and read from disk."""

import ast
import collections
import re
from collections.abc import Iterator

from house import _sources

# Formats in which a run keeps what it resumes from.
KEPT = ("orbax", "arrays", "json")
_OWNERS = {
  "storage/array_files.py": "arrays",
  "storage/sealed_json.py": "json",
  "storage/json_lines.py": "json",
  "storage/lease.py": "json",
  # Own files of users are read.
  "data/_files.py": "input",
}
_MODULES = {
  "pickle": "pickle",
  "cloudpickle": "pickle",
  "dill": "pickle",
  "joblib": "pickle",
  "marshal": "pickle",
  "shelve": "pickle",
  "orbax": "orbax",
  "safetensors": "export",
  "tomllib": "input",
}
_FUNCTIONS = {
  "array_files": ("arrays", ("save_arrays", "load_arrays")),
  "sealed_json": ("json", ("write", "read")),
  "json_lines": ("json", ("append", "write", "read")),
}
# By the last name of a call, whatever it is a method of.
_CALLS = {
  "create_rows": "arrays",
  "open_rows": "arrays",
  "fromfile": "raw",
  "load": "npy",
  "memmap": "raw",
  "open_memmap": "npy",
  "read_bytes": "input",
  "read_text": "input",
  "save": "npy",
  "savefig": "export",
  "savez": "npz",
  "savez_compressed": "npz",
  "tofile": "raw",
  "write_bytes": "raw",
  "write_text": "export",
  "write_whole": "raw",
}
# Names that many objects have, and that matter on these alone.
_NUMPY_ONLY = ("fromfile", "load", "memmap", "save")


def disk_formats(sources: _sources.Sources) -> dict[str, list[str]]:
  """Returns the files that use each format, by the format's name.

  "orbax", "arrays" and "json" keep the state of runs, the last two by the room
  `storage`.  "export" is written for other programs and people (figures, text,
  safetensors), "input" is text or bytes of the user.  "pickle", "npy", "npz"
  and "raw" stand for every other way.

  Args:
    sources: Files of the library.
  """
  found: dict[str, set[str]] = collections.defaultdict(set)
  for path, source in sources.items():
    for format_ in _formats(source):
      # The room that owns a format may use NumPy and open files.
      owned = format_ in ("npy", "raw") and path in _OWNERS
      found[_OWNERS[path] if owned else format_].add(path)
  return {name: sorted(paths) for name, paths in sorted(found.items())}


def _formats(source: _sources.Source) -> Iterator[str]:
  for name, _ in _sources.imports(source):
    if (top := name.split(".")[0]) in _MODULES:
      yield _MODULES[top]
  for node in _sources.nodes(source.tree):
    if isinstance(node, ast.Call):
      yield from _formats_of_call(node)


def _formats_of_call(call: ast.Call) -> Iterator[str]:
  *owner, name = ast.unparse(call.func).split(".")
  texts = [
    x.value
    for x in call.args
    if isinstance(x, ast.Constant) and isinstance(x.value, str)
  ]
  if name == "import_extra" and texts:
    # Extras are imported by their names where they are used.
    top = texts[0].split(".")[0]
    if top in _MODULES:
      yield _MODULES[top]
  if any(
    x.arg == "allow_pickle"
    and isinstance(x.value, ast.Constant)
    and x.value.value is not False
    for x in call.keywords
  ):
    yield "pickle"
  if name == "open" and any(
    re.fullmatch("[rbt]*[wax+][bt+]*", x) for x in texts
  ):
    yield "raw"
  format_, functions = _FUNCTIONS.get(owner[-1] if owner else "", ("", ()))
  if name in functions:
    yield format_
  elif name in _CALLS and (name not in _NUMPY_ONLY or owner == ["np"]):
    yield _CALLS[name]
