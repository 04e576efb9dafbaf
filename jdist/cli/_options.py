"""Presets of options, and the checks of the table of options."""

import dataclasses
import importlib
import math
import os
import pathlib
import shlex
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

from jdist import checks
from jdist.cli import _groups

Options = TypeVar("Options")

# Arguments that are given without the name of the option.
POSITIONAL = {
  ("simulate", "cluster"): "CLUSTER.toml",
  ("report", "folder"): "DIR",
  ("pipeline", "action"): "draw|check|simulate|plan",
  ("pipeline", "tables"): "TABLE [TABLE ...]",
}
PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
  (pathlib.Path(__file__).parent / "presets.toml").read_text()
)


def with_preset(command: type[Options], name: str) -> Options:
  """Returns the defaults of a command under a preset."""
  fields = command.__dataclass_fields__  # type: ignore[attr-defined]
  if "preset" not in fields:
    return command()
  check_name("--preset", name, PRESETS)
  # Commands lack some of a preset's options: `train` tunes nothing.
  changes = {key: x for key, x in PRESETS[name].items() if key in fields}
  if rates := changes.get("learning_rate"):
    one = isinstance(fields["learning_rate"].default, float)
    changes["learning_rate"] = rates[0] if one else tuple(rates)
  return command(**{"preset": name, **changes})


def given(options: Any) -> list[str]:
  """Returns the options whose values differ from the preset's."""
  usual = with_preset(type(options), getattr(options, "preset", "digits"))
  return [x for x, value in vars(usual).items() if getattr(options, x) != value]


def identity(options: Any, elsewhere: Iterable[str]) -> dict[str, object]:
  """Returns the options that must be the same when a run is resumed."""
  # The data set's name contains a hash of own files, wherever they are.
  free = {"output", "preset", "text", "files", *elsewhere}
  found: dict[str, Any] = {
    # JSON, in which a checkpoint keeps it, has no tuples.
    name: list(value) if isinstance(value, tuple) else value
    for name, value in dataclasses.asdict(options).items()
    if name not in free
  }
  # A file may change between two runs, or stand elsewhere for the second one.
  for name in found.keys() & {"table", "cluster"}:
    if (path := pathlib.Path(found[name] or "")).is_file():
      found[name] = checks.read_text(path)
  return found


def word(name: str) -> str:
  """Returns an option as it is typed."""
  return f"--{name.replace('_', '-')}"


IMPORTS: list[str] = []  # The words `--import MODULE` of this command.
_UNUSABLE = (ImportError, AttributeError, ValueError, SyntaxError, SystemExit)
OWN: dict[str, str] = {}  # Modules of the user's own, and what names them.


def command_line(options: Any, output: object = None) -> str:
  """Returns the command of some options, with a directory for its output."""
  chosen = {name: getattr(options, name) for name in given(options)}
  words = ["jdist"]
  # `launch` gives each process of one machine its place.
  if chosen.get("coordinator_address", "").startswith("127."):
    words += ["launch", "-n", str(chosen.get("num_processes")), "--"]
    for name in _groups.ProcessOptions.__dataclass_fields__:
      chosen.pop(name, None)
  if {"text", "files"} & {*chosen}:
    chosen.pop("dataset", None)  # It is the name and hash of these.
  chosen |= {} if output is None else {"output": output}
  if getattr(options, "preset", "digits") != "digits":
    chosen = {"preset": options.preset} | chosen
  command = type(options).__name__.lower()
  words += [command, *IMPORTS]
  # An option of several values would take what stands behind it.
  for name in sorted(chosen, key=lambda x: (command, x) not in POSITIONAL):
    value = chosen[name]
    if isinstance(value, bool):
      words.append(word(name if value else f"no_{name}"))
      continue
    if (command, name) not in POSITIONAL:
      words.append(word(name))
    words += map(str, value if isinstance(value, tuple) else (value,))
  return shlex.join(words)


def check_name(option: str, name: str, known: Iterable[str]) -> None:
  """Raises a ValueError unless a name is one of the known ones."""
  if name not in known:
    raise ValueError(
      f"`{option}` must be one of {', '.join(known)}, got {name!r}."
      f"{' Put spaces between several.' * (',' in name)}"
    )


def load(option: str, name: str, kind: str) -> Any:
  """Imports MODULE or MODULE:NAME, also from the current directory."""
  # Unlike `python -m jdist`, the installed command does not look there.
  sys.path.append(os.getcwd())
  module, _, attribute = name.partition(":")
  OWN[module.partition(".")[0]] = f"`{option} {name}`"
  try:
    found = importlib.import_module(module)
    if kind == "a module" and not attribute:
      if getattr(found, "__file__", "") is None:
        raise ImportError("it is a folder without `__init__.py`")
      return found
    return getattr(found, attribute)
  except (TypeError, *_UNUSABLE) as error:  # It may be a relative name.
    raise ValueError(
      f"`{option}` must be {kind} that can be imported, got {name!r}: {error}."
    ) from None


def raised_in(error: BaseException) -> str:
  """Says which module of the user's own has raised an error; else ""."""
  frames = [x.f_globals for x, _ in traceback.walk_tb(error.__traceback__)]
  tops = [str(x.get("__name__")).partition(".")[0] for x in frames]
  end = f" raised {type(error).__name__}, whose traceback follows."
  return next((OWN[x] + end for x in reversed(tops) if x in OWN), "")


def check_names(
  option: str, names: Sequence[Any], kind: str, known: Iterable[str] = ()
) -> None:
  """Raises a ValueError unless there are one or more different, known values.

  The error calls them by the plural noun `kind`; no `known` allows all.
  """
  checks.check_distinct(option, tuple(names), kind)
  for name in names if known else ():
    check_name(option, name, known)


def check(options: Any) -> None:
  """Raises a ValueError for a value outside its range, or without its need."""
  for name, field in options.__dataclass_fields__.items():
    # Defaults satisfy their own rules, and None means "not given".
    entry = field.metadata.get("option")
    value = getattr(options, name)
    if value == "" != field.default:  # A script's variable has no value.
      raise ValueError(f"`{word(name)}` must not be empty: leave it out.")
    if entry is None or value is None or value == field.default:
      continue
    if entry.within is not None:
      for one in value if isinstance(value, tuple) else (value,):
        _check_within(name, one, entry.within)
    if entry.needs and name in given(options):
      _check_need(options, name, *entry.needs)


def _check_within(name: str, value: float, within: str) -> None:
  # Comparisons with NaN are false, so that NaN is never within a range.
  low, high = map(float, within[1:-1].split(","))
  above = low < value if within[0] == "(" else low <= value
  # Larger counts, where no limit is named, are no numbers of NumPy and JAX.
  most = 2**31 if isinstance(value, int) and high == math.inf else high
  if above and (value < most or (within[-1] == "]" and value == high)):
    return
  rule = f"in {within}"
  if within == _groups.SEED:
    rule = "from 0 to 2**32 - 1"
  elif high == math.inf:
    rule = "positive" if within[0] == "(" else f"at least {low:g}"
    rule += " and finite" if value == math.inf else ""
    rule += " and below 2**31" if 2**31 <= value < math.inf else ""
  raise ValueError(f"`{word(name)}` must be {rule}, got {value}.")


def with_driver(options: Any) -> Any:
  """Returns the options of a server's run with the engine that is usual."""
  if getattr(options, "driver", "") is None:
    if options.protocol is not None:
      return dataclasses.replace(options, driver="clock")
    if options.elastic:
      return dataclasses.replace(options, driver="threads")
  return options


def _check_need(options: Any, name: str, need: str, *values: Any) -> None:
  if not hasattr(options, need):
    return  # A group of options can also be part of a command without it.
  if need == "protocol" and getattr(options, "elastic", False):
    return  # Which of them a method uses, is found when it is built.
  found = getattr(options, need)
  # Without values any value will do, as for `--stages`.
  if found in values or (not values and found is not None):
    return
  where = f"without `{' '.join([word(need), *map(str, values[:1])])}`"
  if need == "action":
    where = f"of `jdist pipeline {found}`"
  elif None in values:
    where = f"with `{word(need)} {found}`"
  check_left_out(options, (name,), where)


def check_workers(workers: int, processes: int) -> None:
  """Raises a ValueError unless workers divide evenly over processes."""
  if workers % processes:
    raise ValueError(
      f"`--workers` must be a multiple of the {processes} processes, got "
      f"{workers}."
    )


def check_left_out(options: Any, names: Iterable[str], where: str) -> None:
  """Raises a ValueError for the first of some options that is given."""
  found = given(options)
  for name in names:
    if name in found:
      raise ValueError(
        f"`{word(name)}` must be left out {where}, got "
        f"{getattr(options, name)}."
      )


def check_used(
  options: Any,
  chosen: Sequence[str],
  known: Iterable[str],
  takes: Callable[[str], AbstractSet[str]],
) -> None:
  """Raises a ValueError that names all given options without any effect.

  Values of the preset do not count as given: presets are for all methods. The
  `chosen` methods or protocols run, and the error names which of the `known`
  ones use an option. `takes` returns the arguments of a name's factory that can
  be filled.
  """
  fields = options.__dataclass_fields__
  fills = {
    name: fields[name].metadata["option"].fills
    for name in given(options)
    if "option" in fields[name].metadata
  }
  # Most runs end here: only a refusal asks what every other method takes.
  taken = set().union(*map(takes, chosen))
  unused = [x for x, names in fills.items() if names and not taken & {*names}]
  if not unused:
    return
  users = {name: takes(name) for name in known}
  parts = []
  for name in unused:
    using = ", ".join(x for x, found in users.items() if found & {*fills[name]})
    hint = fields[name].metadata["option"].hint
    others = f"{', and ' if using else ''}others with `{hint}`" if hint else ""
    parts.append(
      f"`{word(name)}`, got {getattr(options, name)}, is used by "
      f"{f'{using}{others}' or 'none of them'}"
    )
  words = " and ".join(f"`{word(name)}`" for name in unused)
  raise ValueError(
    f"{words} must be left out for {', '.join(chosen)}, which "
    f"{'does' if len(chosen) == 1 else 'do'} not use "
    f"{'it' if len(unused) == 1 else 'them'}: {'; '.join(parts)}."
  )


def join_processes(
  options: Any, num_devices: int, common: Callable[[], dict[str, object]] = dict
) -> None:
  """Joins the processes of the run, if there are several.

  All must have the same `common` options.
  """
  # Imported here, because help and errors should not wait for JAX.
  from jdist import collectives

  number, own = options.num_processes, options.process_id
  if options.coordinator_address is None:
    if (number, own) != (None, None):
      raise ValueError(
        "`--coordinator-address` must be given with `--num-processes` and "
        "`--process-id`: the host:port of process 0."
      )
    return
  # JAX reads all three from the environment of Slurm or MPI.
  if options.coordinator_address == "auto":
    collectives.start_processes()
    return
  if number is None or own is None:
    raise ValueError(
      "`--num-processes` and `--process-id` must be given with "
      "`--coordinator-address`, unless that is `auto`."
    )
  checks.check_int("--process-id", own, 0, number - 1)
  check_workers(options.workers, number)
  collectives.start_processes(
    options.coordinator_address,
    number,
    own,
    # On CPUs the devices are virtual, and each process makes its part.
    cpu_devices_per_process=num_devices // number,
    options=common(),
  )
