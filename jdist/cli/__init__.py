"""The command line: `python -m jdist ...`, or `jdist ...`."""

import contextlib
import dataclasses
import difflib
import importlib
import io
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jdist import channel
from jdist.cli import (
  _commands,
  _help,
  _interrupts,
  _options,
  _output,
  _parts,
  _run_end,
)

# The options of each command, the function that runs it, and a line of help.
# The function is loaded when it is used, because help and errors should not
# wait for Flax.
_COMMANDS: dict[str, tuple[type[Any], str, str]] = {
  "train": (_commands.Train, "_train.train",
            "train one model with one method"),
  "compare": (_commands.Compare, "_compare.compare",
              "compare methods: one table, one page"),
  "advise": (_commands.Advise, "programs._advise.advise",
             "whether communicating less pays on a link"),
  "overlap": (_commands.Overlap, "programs._overlap.overlap",
              "what hides communication on GPUs"),
  "bytes": (_commands.Bytes, "programs._bytes.count",
            "what a worker sends, counted in three ways"),
  "simulate": (_commands.Simulate, "servers._simulate.simulate",
               "a parameter server on unequal machines"),
  "pipeline": (_commands.Pipeline, "pipelines._pipeline.run",
               "draw, check, simulate or plan a pipeline's table"),
  "report": (_commands.Report, "report._page.report",
             "one page of a directory's runs"),
  "launch": (_commands.Launch, "launch._launch.launch",
             "start a run in several processes, here or on a cluster"),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs a command, by default that of `sys.argv`.

  Returns the exit status: 0, 2 for options that cannot be used, 3 for a run
  that has diverged, 141 in silence where nothing reads the output, 143 for one
  that SIGTERM has ended, or 75 where the same command may succeed later, for
  instance after a process was lost or the disk was full; then one line on
  stderr says which, why, and how to continue.
  """
  words = list(sys.argv[1:] if arguments is None else arguments)
  # A shell closes them by `>&-`; the next open file would take their place.
  sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
  sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
  try:
    with _interrupts.kept(), _output.warnings_in_a_line():
      status, line = _status(words)
  except BaseException as error:
    if own := _options.raised_in(error):
      print(f"jdist: error: {own}", file=sys.stderr)
    if own and isinstance(error, SystemExit):
      # Python prints nothing, and its status is none of the list above.
      traceback.print_exc()
      return 1
    if not _among_processes():
      raise
    from jdist import collectives

    # This error may follow from another process: its status then decides.
    if lifeline := collectives.lifeline():
      lifeline.await_verdict()
    traceback.print_exc()
    status, line = 1, ""
    reason = traceback.format_exception_only(error)[-1].splitlines()[0]
  else:
    reason = line.partition("\n")[0]
  if line:
    print(f"jdist: {line}", file=sys.stderr)
  if status and _among_processes():
    # An ordinary exit would wait for the other processes, which wait for this
    # one in a collective.
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    from jdist import collectives

    if lifeline := collectives.lifeline():
      lifeline.leave(status, reason)
    os._exit(status)
  return status


def _among_processes() -> bool:
  jax = sys.modules.get("jax")
  return jax is not None and bool(jax.distributed.is_initialized())


def _status(words: list[str]) -> tuple[int, str]:
  """Runs a command and returns its exit status and its last line."""
  try:
    status = _run(words)
    sys.stdout.flush()  # Python would report a full disk only when it ends.
    return status, ""
  except (ValueError, ImportError, OSError, _run_end.LostError) as error:
    if isinstance(error, OSError) and _output.is_unread(error):
      return _run_end.UNREAD, ""
    again = _run_end.passes(error)
    if not again and not _is_ours(error):
      raise  # It is a bug and no bad option: its traceback is needed.
    # A message becomes one line; a picture keeps its layout.
    text = " ".join(str(getattr(error, "problem", error)).split())
    picture = getattr(error, "picture", "")
    status = _run_end.AGAIN if again else 2
    return status, f"error: {text}" + (f"\n{picture}" if picture else "")
  except TypeError as error:
    # Calls of jdist's own parts fit: this is one of the user's.
    if not _options.OWN or not _is_ours(error):
      raise
    return 2, f"error: {' or '.join(_options.OWN.values())} failed: {error}."
  except SystemExit as error:  # Rich ends a process whose output is not read.
    if not isinstance(error.__context__, BrokenPipeError):
      raise
    return _run_end.UNREAD, ""
  except RuntimeError as error:  # Of JAX, which advises JAX_PLATFORMS.
    if not str(error).startswith("Unable to initialize backend"):
      raise
    return 2, f"error: {error}"
  except _run_end.DivergedError as error:
    return _run_end.DIVERGED, f"diverged: {error}"
  except _run_end.TerminatedError as error:
    return _run_end.TERMINATED, f"SIGTERM: {error}"
  except KeyboardInterrupt as stop:  # A shell's status is 128 + SIGINT, too.
    return 130, f"interrupted: {stop}" if stop.args else "interrupted."


def _run(words: list[str]) -> int:
  """Runs a command and returns its exit status."""
  if not words or words[0] in ("-h", "--help", "help"):
    summaries = {name: summary for name, (_, _, summary) in _COMMANDS.items()}
    print(_help.overview(summaries), end="")
    return 0
  if words[0] in ("-V", "--version"):
    from jdist import _version

    print(f"jdist {_version.__version__}")
    return 0
  if wrong := [x for x in words if x != x.encode(errors="ignore").decode()]:
    raise ValueError(f"names must be UTF-8, got {wrong[0]!r}. Rename it.")
  words = _expand(words)
  if words[0] not in _COMMANDS:
    raise ValueError(
      f"the command must be one of {', '.join(_COMMANDS)}, got {words[0]!r}. "
      "`jdist --help` explains them."
    )
  if (options := _parse(words[0], words[1:])) is None:
    return 0
  served = getattr(options, "driver", None) is not None
  path = "servers._server_run.train" if served else _COMMANDS[words[0]][1]
  if getattr(options, "runtime", None) == "processes":
    path = "pipelines._process_run.train"
    if options.coordinator_address is None and options.stages > 1:
      # They are not started again: that is what `launch` is for.
      path = _COMMANDS["launch"][1]
      options = _commands.Launch(options.stages, 0, command=tuple(words),
                                 train=options)  # fmt: skip
  # The module is imported only now, with everything that it needs.
  file, _, function = path.rpartition(".")
  module = importlib.import_module(f"jdist.cli.{file}")
  return getattr(module, function)(options) or 0


def _expand(words: list[str]) -> list[str]:
  """Turns `pipeline train TABLE ...` into `train --table TABLE ...`."""
  if words[:2] != ["pipeline", "train"]:
    return words
  given = words[2:]
  if given and not given[0].startswith("-"):
    if any(x.split("=")[0] == "--table" for x in given):
      raise ValueError(
        "`--table` must be left out where `jdist pipeline train` is given a "
        f"table first, got it and {given[0]!r}. Name one of them."
      )
    given = ["--table", *given]
  # Without stages `train` would put a whole model on each device.
  if not any(x.split("=")[0] in ("--stages", "-h", "--help") for x in given):
    given = ["--stages", "4", *given]
  return ["train", *given]


def _is_ours(error: BaseException) -> bool:
  """Returns whether jdist itself has raised an error, and no library below it.

  A file that cannot be opened counts, too, because the user has named it. The
  error of a collective that has lost a process does not.
  """
  if isinstance(error, OSError) and error.filename is not None:
    return True
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  package = pathlib.Path(__file__).parent.parent
  inside = pathlib.Path(frame.f_code.co_filename).is_relative_to(package)
  return inside and not channel.lost_process(error)


def _parse(name: str, words: list[str]) -> Any:
  """Returns the checked options of a command; None after printing its help."""
  if name != "launch":
    return _parse_own(name, words)
  # The words behind `--` are a command of their own, with its own options.
  cut = words.index("--") if "--" in words else len(words)
  others = [x for x in words[:cut] if x in _COMMANDS]
  if cut == len(words) and others:
    raise ValueError(
      f"`{others[0]}` must stand behind `--`: jdist launch -n 4 -- {others[0]} "
      "..."
    )
  if (options := _parse_own(name, words[:cut])) is None:
    return None
  inner = _expand(words[cut + 1 :])
  if {"-h", "--help"} & set(inner):
    raise ValueError(f"`--help` must stand alone: jdist {inner[0]} --help.")
  # Its options are checked here once, and not by every process at its start.
  train = _parse_own("train", inner[1:]) if inner[:1] == ["train"] else None
  return dataclasses.replace(options, command=tuple(inner), train=train)


def _parse_own(name: str, words: list[str]) -> Any:
  """Returns the checked options of one command, without those behind `--`."""
  command = _COMMANDS[name][0]
  # Processes that `launch` starts import what its command names.
  words = _parts.load(words) if name != "launch" else words
  defaults = _options.with_preset(command, _preset(words))
  if {"-h", "--help"} & set(words):
    print(_help.options(name, defaults), end="")
    return None
  _check_known(name, command, words)
  # The import takes long, and the help above does not need it.
  import tyro

  # tyro prints an error in a box with much help, and exits.
  box = io.StringIO()
  try:
    with contextlib.redirect_stderr(box):
      options = tyro.cli(
        command, prog=f"jdist {name}", default=defaults, args=words
      )
  except SystemExit:
    raise ValueError(
      f"{_message(box.getvalue())} `jdist {name} --help` explains the options."
    ) from None
  options = _options.with_driver(options)
  _parts.resolve(vars(options))
  _options.check(options)
  return options


def _check_known(name: str, command: type[Any], words: list[str]) -> None:
  known = [_options.word(field) for field in _help.fields(command)]
  known += [
    _options.word(f"no_{field}")
    for field, entry in command.__dataclass_fields__.items()
    if entry.type is bool
  ]
  for word in words:
    # Like tyro, which accepts `--batch_size=8`.
    option = word.split("=")[0].replace("_", "-")
    if not word.startswith("--") or option in known:
      continue
    near = difflib.get_close_matches(option, known, n=1)
    raise ValueError(
      f"there is no option `{word.split('=')[0]}`"
      f"{f', did you mean `{near[0]}`?' if near else '.'} "
      f"`jdist {name} --help` lists all."
    )


def _message(box: str) -> str:
  """Returns tyro's message without colours, frame, help and types of unions."""
  plain = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", "", box)
  # A title, the message and help; an ASCII terminal has a line of hyphens.
  parts = re.split("[─-]{4,}", plain)
  message = " ".join(" ".join(parts[1:2] or parts).split())
  message = re.sub(r"no type matching .* - <class '\w+'>: ", "", message)
  return message if message.endswith(".") else f"{message}."


def _preset(words: list[str]) -> str:
  """Returns the last preset of the words, whose defaults the parser needs."""
  found = re.findall(r"(?:^| )--preset[ =](\S*)", " ".join(words))
  return found[-1] if found else "digits"
