"""Help that teaches: options in groups, in the order in which one asks."""

import ast
import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from jdist.cli import _options

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
  jdist schedule --method ssgd msdpu --topology 8xh200
      what a GPU does while it sends, read from the compiled program
  jdist bytes --method ssgd dgc --workers 32
      what each worker sends
  jdist train --help
      every option

presets: {presets}.
They set the defaults, and any option changes them.
"""

_EXAMPLES = {
  "train": """examples:
  jdist train --method local_sgd --interval 16
  jdist train --preset cifar10 --method diloco --checkpoints ckpt
  # two processes: the same on each, with its own number
  jdist train --coordinator-address host0:1234 --num-processes 2 --process-id 0
""",
  "compare": """examples:
  jdist compare --methods ssgd diloco --seeds 0 1 2 3 4
  jdist compare --learning-rate 0.05 0.1 0.2      each method finds its best
  jdist compare --alpha 0.1                       workers with unlike data
""",
  "schedule": """examples:
  jdist schedule --method msdpu --model resnet50 --topology 8xh200
  jdist schedule --method ssgd local_sgd msdpu    one line each
  jdist schedule --topology 2x8xh100 --interval 32
""",
  "bytes": """examples:
  jdist bytes --method ssgd topk_sgd powersgd --model resnet18 --workers 8
  jdist bytes --method topk_sgd --workers 32      payloads are gathered
  jdist bytes --method dgc one_bit_adam --warmup-steps 500   each phase
""",
}

# Titles, and the fields under them; a command shows those that it has.
_GROUPS: dict[str, tuple[str, ...]] = {
  "what is trained": (
    "preset",
    "dataset",
    "model",
    "image_size",
    "length",
    "norm",
    "dtype",
  ),
  "methods": (
    "method",
    "methods",
    "interval",
    "interval_policy",
    "outer_learning_rate",
    "outer_momentum",
    "correction",
    "carry",
    "delay_steps",
    "stream",
    "host_rounds",
    "bits",
    "ratio",
    "rank",
    "predictor",
    "nowcasters",
    "nowcast_steps",
    "cut",
  ),
  "GPUs and compiler": (
    "topology",
    "tell_compiler",
    "message_mb",
    "pending",
    "in_flight",
    "combine_mb",
  ),
  "stated rates": (
    "bandwidth_gbit_per_s",
    "latency_us",
    "tflop_per_s",
    "memory_gb_per_s",
    "launch_us",
  ),
  "workers and their data": (
    "workers",
    "substrate",
    "batch_size",
    "accumulate",
    "alpha",
    "augment",
  ),
  "budget and each worker's optimizer": (
    "epochs",
    "steps",
    "learning_rate",
    "schedule",
    "warmup_epochs",
    "warmup_steps",
    "optimizer",
    "momentum",
    "weight_decay",
  ),
  "seeds and results": (
    "seed",
    "seeds",
    "evaluate_every_epochs",
    "output",
    "bandwidth_mbit_per_s",
    "latency_ms",
  ),
  "checkpoints": ("checkpoints", "checkpoint_every_epochs"),
  "several processes": (
    "coordinator_address",
    "num_processes",
    "process_id",
  ),
}


def overview(commands: Mapping[str, str]) -> str:
  """The help of `jdist` itself.

  Args:
    commands: what each does.
  """
  return _OVERVIEW.format(
    commands="\n".join(_table(commands)),
    methods="\n".join(_table(_options.METHODS)),
    presets=", ".join(_options.PRESETS),
  )


def _table(told: Mapping[str, str]) -> Iterator[str]:
  column = max(map(len, told)) + 2
  for name, text in told.items():
    yield f"  {name:{column}}{text}"


def options(name: str, defaults: _options.Options) -> str:
  """The help of a command.

  Args:
    name: of the command.
    defaults: the options under the preset that was given.
  """
  width = max(60, min(100, shutil.get_terminal_size().columns))
  told = " ".join((type(defaults).__doc__ or "").split())
  parts = [
    f"usage: jdist {name} [OPTIONS]\n",
    f"{textwrap.fill(told, width)}\n",
    _EXAMPLES[name],
  ]
  documents = fields(type(defaults))
  hints = typing.get_type_hints(type(defaults), include_extras=True)
  for title, names in _GROUPS.items():
    shown = [field for field in names if field in documents]
    if shown:
      parts.append(f"{title}:")
    for field in shown:
      value = getattr(defaults, field)
      word = field.replace("_", "-")
      kind = f"| --no-{word}" if hints[field] is bool else _kind(hints[field])
      option = f"--{word} {kind}"
      parts.append(_entry(option, documents[field], value, width))
    if shown:
      parts.append("")
  parts.append("methods in one line each:")
  parts.extend(_table(_options.METHODS))
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
  """What to write behind an option."""
  arguments = typing.get_args(hint)
  if typing.get_origin(hint) is typing.Annotated:
    return str(arguments[1].metavar)
  if typing.get_origin(hint) is typing.Literal:
    return "|".join(map(str, arguments))
  if arguments:  # What may also be missing.
    return _kind(next(a for a in arguments if a is not type(None)))
  return {int: "INT", float: "NUMBER", str: "NAME"}[hint]


def fields(command: type[_options.Options]) -> dict[str, str]:
  """The options of a command and what their docstrings say."""
  found: dict[str, str] = {}
  for owner in reversed(command.__mro__):
    if not dataclasses.is_dataclass(owner):
      continue
    (tree,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    name = ""
    for node in tree.body:
      if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        name = node.target.id
      elif name and isinstance(node, ast.Expr):
        found[name] = " ".join(str(ast.literal_eval(node.value)).split())
        name = ""
  return found
