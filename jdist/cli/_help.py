"""Help that teaches: options in groups, in the order in which one asks."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jdist.cli import _presets

_OVERVIEW = """usage: jdist COMMAND [OPTIONS]

Trains where communication is dear: local steps, delayed updates and more, on
one device, many devices, or many hosts.

commands:
{commands}

methods:
{methods}

examples:
  jdist compare
      four methods on handwritten digits, in minutes
  jdist compare --preset mnist --interval 16
      longer rounds, on MNIST
  jdist train --method diloco --checkpoints DIR
      one method; the same command again goes on where it stopped
  jdist train --preset tiny_shakespeare
      a transformer on a text; --text FILE for one's own
  jdist overlap --methods ssgd msdpu --topology 8xh200
      what a GPU does while it sends, read from the compiled program
  jdist bytes --methods ssgd dgc --workers 32
      what each worker sends
  jdist simulate CLUSTER.toml --protocols bsp asp dbs
      a parameter server on unequal machines, on a virtual clock
  jdist pipeline simulate 1f1b ours --stages 8
      schedules of a pipeline, on a virtual clock
  jdist launch -n 4 -- train --method diloco --checkpoints DIR
      in four processes, restarted when it fails; or for a cluster
  jdist train --help
      every option

presets: {presets}.
They set the defaults, and any option changes them.

exit status: 0 fine, 2 wrong options, 3 diverged, 143 ended by SIGTERM (saved
with --checkpoints), 75 another process was lost (run it again), 130
interrupted.
"""

_EXAMPLES = {
  "pipeline": """examples:
  jdist pipeline draw zb_h1 --stages 4 --microbatches 8
  jdist pipeline check mine.txt --sends blocking
  jdist pipeline simulate naive gpipe 1f1b ours --cluster cluster.toml
  jdist pipeline plan --costs layers.toml --cluster cluster.toml
  jdist pipeline train 1f1b --stages 2 --microbatches 8
""",
  "simulate": """examples:
  jdist simulate cluster.toml
  jdist simulate cluster.toml --protocols ssp --bound 1 --seconds 600
""",
  "train": """examples:
  jdist train --method local_sgd --interval 16
  jdist train --preset cifar10 --method diloco --checkpoints ckpt
  jdist train --stages 2 --table ours --window 2 --model cnn    a pipeline
  jdist train --preset tiny_shakespeare --stages 4 --method ssgd      on a text
  jdist train --preset tiny_shakespeare --text FILE           on one's own
  # two processes: the same on each, with its own number
  jdist train --coordinator-address host0:1234 --num-processes 2 --process-id 0
""",
  "launch": """examples:
  jdist launch -n 4 -- train --method diloco --checkpoints ckpt
  jdist launch -n 16 --print slurm --gpus-per-node 8 -- train --checkpoints ckpt
  jdist launch -n 4 --print kubernetes -- train --checkpoints /ckpt
""",
  "compare": """examples:
  jdist compare --methods ssgd diloco --seeds 0 1 2 3 4
  jdist compare --learning-rate 0.05 0.1 0.2      each method finds its best
  jdist compare --alpha 0.1                       workers with unlike data
""",
  "overlap": """examples:
  jdist overlap --methods msdpu --model resnet50 --topology 8xh200
  jdist overlap --methods ssgd local_sgd msdpu    one line each
  jdist overlap --topology 2x8xh100 --interval 32
  jdist overlap --methods ssgd --stages 4 --table gpipe       a pipeline's sends
""",
  "bytes": """examples:
  jdist bytes --methods ssgd topk_sgd powersgd --model resnet18 --workers 8
  jdist bytes --methods topk_sgd --workers 32      payloads are gathered
  jdist bytes --methods dgc one_bit_adam --warmup-steps 500   each phase
""",
}

# Options that are given without their names.
_POSITIONAL = {
  ("simulate", "cluster"): "CLUSTER.toml",
  ("pipeline", "action"): "draw|check|simulate|plan",
  ("pipeline", "tables"): "TABLE [TABLE ...]",
}
# The title of a command's own options.
_OWN = "Of this command"


def overview(commands: Mapping[str, str]) -> str:
  """Returns the help of `jdist` itself, with a line for each command."""
  from jdist.cli import _methods

  return _OVERVIEW.format(
    commands="\n".join(_table(commands)),
    methods="\n".join(_table(_methods.summaries())),
    presets=", ".join(_presets.PRESETS),
  )


def _table(told: Mapping[str, str]) -> Iterator[str]:
  column = max(map(len, told)) + 2
  for name, text in told.items():
    yield f"  {name:{column}}{text}"


def options(name: str, defaults: Any) -> str:
  """Returns the help of a command, under the preset that was given."""
  from jdist.cli import _methods

  width = max(60, min(100, shutil.get_terminal_size().columns))
  told = " ".join((type(defaults).__doc__ or "").split())
  parts = [
    f"usage: jdist {name} [OPTIONS]\n",
    f"{textwrap.fill(told, width)}\n",
    _EXAMPLES[name],
  ]
  hints = typing.get_type_hints(type(defaults), include_extras=True)
  for title, documents in groups(type(defaults)).items():
    parts.append(f"{title}:")
    for field, told in documents.items():
      value = getattr(defaults, field)
      word = field.replace("_", "-")
      if (name, field) in _POSITIONAL:
        parts.append(_entry(_POSITIONAL[name, field], told, None, width))
        continue
      kind = f"| --no-{word}" if hints[field] is bool else _kind(hints[field])
      parts.append(_entry(f"--{word} {kind}", told, value, width))
    parts.append("")
  what, listed = "methods", _methods.summaries()
  if name == "simulate":
    from jdist import server

    what = "protocols"
    listed = {key: entry.meaning for key, entry in server.PROTOCOLS.items()}
  elif name == "pipeline":
    from jdist import pipeline

    what = "tables"
    listed = {key: entry.meaning for key, entry in pipeline.TABLES.items()}
  if name != "launch":
    parts += [f"{what} in one line each:", *_table(listed)]
  return "\n".join(parts) + "\n"


def _entry(option: str, told: str, value: Any, width: int) -> str:
  column = 30
  if value is not None:
    told = f"{told} [{_shown(value)}]"
  lines = textwrap.wrap(
    told, width - column, break_long_words=False, break_on_hyphens=False
  )
  first = f"  {option}"
  if len(first) + 2 > column:
    lines = [first, *(" " * column + line for line in lines)]
  else:
    rest = [" " * column + line for line in lines[1:]]
    lines = [f"{first:{column}}{lines[0]}", *rest]
  return "\n".join(lines)


def _shown(value: Any) -> str:
  if isinstance(value, tuple):
    return " ".join(map(_shown, value))
  return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(hint: Any) -> str:
  """Returns the form of an option's value."""
  arguments = typing.get_args(hint)
  if typing.get_origin(hint) is typing.Annotated:
    return str(arguments[1].metavar)
  if typing.get_origin(hint) is typing.Literal:
    return "|".join(map(str, arguments))
  if arguments:  # What may also be missing.
    return _kind(next(a for a in arguments if a is not type(None)))
  return {int: "INT", float: "NUMBER", str: "NAME"}[hint]


def fields(command: type[Any]) -> dict[str, str]:
  """The options of a command and what their docstrings say."""
  found: dict[str, str] = {}
  for documents in groups(command).values():
    found |= documents
  return found


def groups(command: type[Any]) -> dict[str, dict[str, str]]:
  """The options of a command by group, its own ones first."""
  found: dict[str, dict[str, str]] = {}
  for owner in (command, *reversed(command.__mro__)):
    own = _own_fields(owner) if dataclasses.is_dataclass(owner) else {}
    title = _OWN if owner is command else str(owner.__doc__).rstrip(".")
    if own:
      found.setdefault(title, own)
  return found


def _own_fields(owner: type[Any]) -> dict[str, str]:
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
