"""The help pages: options in groups, from the general to the special."""

import ast
import dataclasses
import functools
import inspect
import pathlib
import shutil
import textwrap
import tomllib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jdist.cli import _options

_TEXTS = tomllib.loads(
  (pathlib.Path(__file__).parent / "help.toml").read_text()
)
_EXAMPLES: dict[str, str] = _TEXTS["examples"]

_COLUMN = 30
_IMPORT = (
  "Module of your own, also in the current directory, that is imported first; "
  "any number of times. It adds parts to the registries."
)


def overview(commands: Mapping[str, str]) -> str:
  """Returns the help of `jdist` itself, with a line for each command."""
  return str(_TEXTS["overview"]).format(
    commands="\n".join(_lines(commands)),
    methods="\n".join(_lines(_listed("train")[1])),
    # The first example of each command has no options of special use.
    examples="\n".join(x.splitlines()[0] for x in _EXAMPLES.values()),
    presets=", ".join(_options.PRESETS),
  )


def options(name: str, defaults: Any) -> str:
  """Returns the help of a command, with the defaults of a preset."""
  # Longer lines are hard to read, and shorter ones have no place for a column.
  width = max(60, min(100, shutil.get_terminal_size().columns))
  text = " ".join((type(defaults).__doc__ or "").split())
  parts = [
    f"usage: jdist {name} [OPTIONS]\n\n{textwrap.fill(text, width)}\n",
    f"examples:\n{_EXAMPLES[name]}",
  ]
  # Annotations are strings or aliases until they are resolved.
  hints = typing.get_type_hints(type(defaults), include_extras=True)
  for title, documents in groups(type(defaults)).items():
    parts.append(f"{title}:")
    if title == "options" and name != "launch":
      parts.append(_entry("--import MODULE", _IMPORT, width))
    for field, text in documents.items():
      form = _options.POSITIONAL.get((name, field))
      if form is None:
        form = f"{_options.word(field)} {_kind(hints[field], field)}"
        text += _need(type(defaults).__dataclass_fields__, field)
        if (value := getattr(defaults, field)) not in (None, ()):
          text = f"{text} [{_shown(value)}]"
      parts.append(_entry(form, text, width))
    parts.append("")
  if name not in ("launch", "report"):
    kind, listed = _listed(name)
    parts += [f"{kind}:", *_lines(listed)]
  return "\n".join(parts) + "\n"


def _listed(command: str) -> tuple[str, dict[str, str]]:
  """Returns the kind of parts that a command names, with a line for each."""
  # Each import takes a second, and a command needs only one of them.
  if command == "simulate":
    from jdist import server

    return "protocols", {
      x: str(inspect.getdoc(y)).partition("\n")[0]
      for x, y in server.PROTOCOLS.items()
    }
  if command == "pipeline":
    from jdist import pipeline

    return "tables", {x: y.meaning for x, y in pipeline.TABLES.items()}
  from jdist import methods

  return "methods", {x: y.summary for x, y in methods.registry.items()}


def _need(fields: Mapping[str, Any], field: str) -> str:
  """Returns a sentence about the option that another one needs."""
  entry = fields[field].metadata.get("option")
  need, *values = entry.needs if entry and entry.needs else ("",)
  # The texts of options that depend on `action` name the actions themselves.
  if need not in fields or need == "action":
    return ""
  rule = "Not with" if None in values else "Needs"
  words = [_options.word(need), "|".join(filter(None, values))]
  return f" {rule} `{' '.join(words).strip()}`."


def _lines(texts: Mapping[str, str]) -> Iterator[str]:
  column = max(map(len, texts)) + 4
  for name, text in texts.items():
    first = f"  {name}".ljust(column)
    yield textwrap.fill(
      text, 80, initial_indent=first, subsequent_indent=" " * column
    )


def _entry(form: str, text: str, width: int) -> str:
  lines = textwrap.wrap(
    text, width - _COLUMN, break_long_words=False, break_on_hyphens=False
  )
  first = f"  {form}"
  # A long option has a line of its own above its text.
  if len(first) + 2 <= _COLUMN:
    first = f"{first:{_COLUMN}}{lines.pop(0)}"
  return "\n".join([first, *(" " * _COLUMN + line for line in lines)])


def _shown(value: Any) -> str:
  if isinstance(value, tuple):
    return " ".join(map(_shown, value))
  if isinstance(value, bool):
    return "on" if value else "off"
  return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(hint: Any, field: str) -> str:
  """Returns the form of an option's value."""
  arguments = typing.get_args(hint)
  if hint is bool:
    return f"| --no-{field.replace('_', '-')}"
  # An alias such as `Directory` brings its own word for the value.
  if typing.get_origin(hint) is typing.Annotated:
    return str(arguments[1].metavar)
  if typing.get_origin(hint) is typing.Literal:
    return "|".join(map(str, arguments))
  if typing.get_origin(hint) is tuple:
    return "{0} [{0} ...]".format(_kind(arguments[0], field))
  if arguments:  # A type or None.
    return _kind(next(a for a in arguments if a is not type(None)), field)
  return {int: "INT", float: "NUMBER", str: "NAME"}[hint]


def fields(command: type[Any]) -> dict[str, str]:
  """Returns the options of a command with their help."""
  return functools.reduce(dict.__or__, groups(command).values())


def groups(command: type[Any]) -> dict[str, dict[str, str]]:
  """Returns the options of a command by group, its own ones first."""
  found: dict[str, dict[str, str]] = {}
  # The last base comes first, as for the fields of a dataclass; a command's own
  # options are on top, because they are the reason for the command.
  for owner in (command, *reversed(command.__mro__)):
    own = _own_fields(owner) if dataclasses.is_dataclass(owner) else {}
    title = str(owner.__doc__).partition("\n")[0].rstrip(".")
    if own:  # A class that only joins groups has no options of its own.
      found.setdefault("options" if owner is command else title, own)
  return found


def _own_fields(owner: type[Any]) -> dict[str, str]:
  # Python drops the strings below fields: only the source still has them.
  (tree,) = ast.parse(inspect.getsource(owner)).body
  assert isinstance(tree, ast.ClassDef)
  found, name = {}, ""
  for node in tree.body:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      name = node.target.id
    elif name and isinstance(node, ast.Expr):
      found[name] = " ".join(str(ast.literal_eval(node.value)).split())
      name = ""
  return found
