"""Parts by name, from this package, from others', and from own modules."""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jdist.cli import _options

# The registry of each kind of part, whose entry points are "jdist.methods" and
# so on, and the class of its entries if they have one.
_REGISTRIES = {
  "methods": ("methods", "registry", "Method"),
  "codecs": ("methods", "PARTS", ""), "reducers": ("methods", "PARTS", ""),
  "feedbacks": ("methods", "PARTS", ""), "rules": ("methods", "PARTS", ""),
  "protocols": ("server", "PROTOCOLS", ""),
  "tables": ("pipeline", "TABLES", "TableEntry"),
  "models": ("models", "MODELS", ""), "datasets": ("data", "DATASETS", ""),
}  # fmt: skip
# The kind of part that an option names, and words that name none.
_NAMED = {
  "method": "methods", "methods": "methods", "protocol": "protocols",
  "protocols": "protocols", "table": "tables", "tables": "tables",
  "model": "models", "dataset": "datasets", "codec": "codecs",
  "reducer": "reducers", "feedback": "feedbacks", "outer": "rules",
  "edge_codec": "codecs",
}  # fmt: skip
_WORDS = {"reducers": ("gather", "all_to_all"), "feedbacks": ("none",)}


def load(words: Sequence[str]) -> list[str]:
  """Imports the modules of `--import`, and all entry points.

  Returns the other words.
  """
  rest: list[str] = []
  _options.IMPORTS.clear()
  _options.OWN.clear()
  given = iter(words)
  for word in given:
    if word == "--import" or word.startswith("--import="):
      module = word.partition("=")[2] or next(given, "")
      _options.load("--import", module, "a module")
      _options.IMPORTS += ["--import", module]
    else:
      rest.append(word)
  for kind in _REGISTRIES:
    for point in importlib.metadata.entry_points(group=f"jdist.{kind}"):
      where = f"entry point {point.name!r} of {point.group!r}"
      _add(kind, point.name, _options.load(where, point.value, "a part"))
  return rest


def resolve(options: Mapping[str, Any]) -> None:
  """Adds what options name as MODULE:NAME to the registries."""
  for name, kind in _NAMED.items():
    found = options.get(name)
    option = _options.word(name)
    for one in found if isinstance(found, tuple) else (found,):
      # A form of a method as `ssgd:first` names no module.
      own = one and re.fullmatch(r"[\w.]+:\w+", one)
      if own and one.partition(":")[0] not in _registry(kind):
        part = _options.load(option, one, f"MODULE:NAME of one of its {kind}")
        _add(kind, one, part)
      if one is not None and _REGISTRIES[kind][1] == "PARTS":
        known = (*_WORDS.get(kind, ()), *_registry(kind))
        _options.check_name(option, one, known)


def _registry(kind: str) -> dict[str, Any]:
  room, name, _ = _REGISTRIES[kind]
  found: dict[str, Any] = getattr(
    importlib.import_module(f"jdist.{room}"), name
  )
  return found[kind] if name == "PARTS" else found


def _add(kind: str, name: str, part: Any) -> None:
  room, registry, entry = _REGISTRIES[kind]
  wanted = getattr(importlib.import_module(f"jdist.{room}"), entry or "__doc__")
  fits = part is not None if registry == "PARTS" else callable(part)
  if not (isinstance(part, wanted) if entry else fits):
    kinds = f"a `{room}.{entry}`" if entry else "callable"
    raise ValueError(
      f"{name!r} of {kind} must be {kinds}, got {type(part).__name__}."
    )
  try:
    _ = callable(part) and inspect.signature(part)
  except ValueError as error:
    raise ValueError(f"{name!r} of {kind} cannot be used: {error}.") from error
  if _registry(kind).setdefault(name, part) is not part:
    raise ValueError(
      f"{name!r} of {kind} must have another name: there is one already."
    )
