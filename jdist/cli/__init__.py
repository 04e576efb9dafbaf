"""The command line: `python -m jdist ...`, or `jdist ...`."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from jdist.cli import _options

# Every command: its options and, in words, the module that runs it. Commands
# load when they are used: help and errors should not wait for JAX.
_COMMANDS: dict[str, tuple[type[_options.Common], str]] = {
  "train": (_options.Train, "train one model with one method"),
  "compare": (_options.Compare, "compare methods: one table, one picture"),
}

_HELP = """usage: jdist COMMAND [OPTIONS]

Trains where communication is dear: local steps, delayed updates and more, on
one device, many devices, or many hosts.

commands:
{commands}

examples:
  jdist compare                                   four methods on digits
  jdist compare --preset mnist --interval 16      longer rounds
  jdist train --method diloco --checkpoints ckpt  goes on where it stopped
  jdist train --help                              every option

presets ({presets}) set the defaults; any option changes them.
"""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a command.

  Args:
    arguments: the words after the program's name; `sys.argv` by default.

  Returns:
    The exit status: 0, or 2 for options that cannot be used; then one line on
    stderr says which, why, and what to do.
  """
  words = list(sys.argv[1:] if arguments is None else arguments)
  if not words or words[0] in ("-h", "--help", "help"):
    print(_help(), end="")
    return 0
  if words[0] in ("-V", "--version"):
    from jdist import _version

    print(f"jdist {_version.__version__}")
    return 0
  try:
    command, run = _command(words[0])
    options = _parse(words[0], command, words[1:])
    run(options)
  except (ValueError, ImportError) as error:
    # One line, whatever the error's own layout is.
    print(f"jdist: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  return 0


def _help() -> str:
  lines = [f"  {name:10}{told}" for name, (_, told) in _COMMANDS.items()]
  return _HELP.format(
    commands="\n".join(lines), presets=", ".join(_options.PRESETS)
  )


def _command(
  name: str,
) -> tuple[type[_options.Common], Callable[[Any], None]]:
  if name not in _COMMANDS:
    raise ValueError(
      f"the command must be one of {', '.join(_COMMANDS)}, got {name!r}. "
      "`jdist --help` explains them."
    )

  def run(options: Any) -> None:
    if name == "train":
      from jdist.cli import _train

      _train.train(options)
    else:
      from jdist.cli import _compare

      _compare.compare(options)

  return _COMMANDS[name][0], run


def _parse(
  name: str, command: type[_options.Common], words: list[str]
) -> _options.Common:
  import tyro

  defaults = _options.with_preset(command, _preset(words))
  return tyro.cli(
    command,
    prog=f"jdist {name}",
    description=command.__doc__,
    default=defaults,
    args=words,
  )


def _preset(words: list[str]) -> str:
  """The preset among the words, before the rest is parsed with it."""
  for number, word in enumerate(words):
    if word == "--preset" and number + 1 < len(words):
      return words[number + 1]
    if word.startswith("--preset="):
      return word.removeprefix("--preset=")
  return "digits"
