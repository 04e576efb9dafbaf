"""Tables as text: a form which one can write by hand, and a drawing."""

import pathlib
import re
from collections.abc import Mapping

from jdist import checks, signatures
from jdist.pipeline.schedule._table import (
  Action,
  check_passes,
  Op,
  start_times,
  StuckError,
  Table,
)

_OPS = {op.letter: op for op in Op if op != Op.IDLE}
# Python reads no numbers of thousands of digits.
_WORD = re.compile(r"([FBIWU])(\d{0,18})(?:/(\d{1,18}))?(?:@(\d{1,18}))?")
_NUMBERS = {
  "stages": "num_stages",
  "microbatches": "num_microbatches",
  "iterations": "num_iterations",
  "window": "window",
}
# The order is that of an action's numbers.
_COUNTED = ("num_stages", "num_microbatches", "num_iterations")
_KEYS = ("name", *_NUMBERS, "weights")


@signatures.checked
def format_table(table: Table) -> str:
  """Formats a table as text that `parse_table` reads.

  >>> from jdist import pipeline
  >>> print(format_table(pipeline.make_table("1f1b", 2, 2)))
  name 1f1b
  stages 2
  microbatches 2
  device F0 F1 B0 B1 U
  device F0 B0 F1 B1 U
  """
  lines = [f"name {table.name}"]
  for key, field in _NUMBERS.items():
    value = getattr(table, field)
    if value != 1 or key in ("stages", "microbatches"):
      lines.append(f"{key} {value}")
  if table.weights != "delayed":
    lines.append(f"weights {table.weights}")
  for device, order in enumerate(table.devices):
    words = [str(x) for x in order]
    # Only a stage on the device of its own number needs no name.
    if table.device_of[device : device + 1] == (device,):
      # The look-ahead keeps `/1` from matching the start of `/10`.
      words = [re.sub(rf"/{device}(?!\d)", "", x) for x in words]
    lines.append(" ".join(["device", *words]))
  return "\n".join(lines)


@signatures.checked
def parse_table(text: str, name: str = "table") -> Table:
  """Parses the text form of a table.

  A line for each device lists its actions in order: F is a forward pass, B a
  backward pass, I and W its input and weight part, each with the number of the
  micro-batch; U is the update.  `/2` names the stage, by default the one with
  the device's number; `@1` names the iteration, by default 0::

      name mine              # Lines like these may be left out.
      iterations 1
      window 1               # The iterations that may be in progress at once.
      weights delayed        # Or stashed, newest.
      device F0 F1 B0 B1 U
      device F0 B0 F1 B1 U

  The numbers of `stages` and `microbatches` are counted unless given.

  Args:
    text: The text; `#` starts a comment.
    name: The name of the table if the text has none.

  Raises:
    ValueError: If a line cannot be parsed; the message names it.
  """
  found: dict[str, str] = {}
  devices: list[tuple[Action, ...]] = []
  for number, line in enumerate(text.splitlines(), 1):
    key, *words = line.split("#")[0].split() or [""]
    if not key:
      continue
    if key == "device":
      own = len(devices)
      devices.append(tuple(_action(x, own, number) for x in words))
    elif key not in _KEYS or len(words) != 1 or key in found:
      raise ValueError(
        f"line {number} must be `device` and its actions, or one of "
        f"{', '.join(_KEYS)} with one value, each once, got {line.strip()!r}."
      )
    else:
      found[key] = words[0]
  # Numbers that the text gives take precedence, so that `check_table` can find
  # actions that are missing at the end.
  numbers = {
    field: 1 + max((x[place] for order in devices for x in order), default=0)
    for place, field in enumerate(_COUNTED, 1)
  }
  for key, field in _NUMBERS.items():
    if key in found:
      if not re.fullmatch(r"\d{1,18}", found[key]):
        raise ValueError(f"`{key}` must be a number, got {found[key]!r}.")
      numbers[field] = int(found[key])
  check_passes(*(numbers[field] for field in _COUNTED))
  return Table(
    found.get("name", name),
    tuple(devices),
    weights=found.get("weights", "delayed"),  # type: ignore[arg-type]
    **numbers,
  )


@signatures.checked
def load_table(path: str | pathlib.Path) -> Table:
  """Reads a table from a file in the form of `parse_table`."""
  # The name of the file is the table's unless the text has one.
  path = pathlib.Path(path)
  try:
    return parse_table(checks.read_text(path), path.stem)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def _action(word: str, own: int, line: int) -> Action:
  # Only an update has no micro-batch.
  match = _WORD.fullmatch(word)
  if match is None or (match[1] == "U") != (not match[2]):
    raise ValueError(
      f"line {line} must have actions such as F0, B0, F2/1@3 or U, got "
      f"{word!r}."
    )
  return Action(
    _OPS[match[1]],
    int(match[3]) if match[3] else own,
    int(match[2] or 0),
    int(match[4] or 0),
  )


@signatures.checked
def draw_table(table: Table, *, max_ticks: int = 60) -> str:
  """Draws a table in ticks of time.

  A forward pass takes one tick, as does each part of a split backward pass; a
  whole backward pass takes two.  An update takes none: `*` marks the end of the
  action before it.  Micro-batches are numbered through all iterations, and the
  stages of a device that has several are lettered from a.

  Args:
    table: The table to draw.  If its order cannot run, the drawing ends with
      `?` before the action at which a device waits forever.
    max_ticks: The number of ticks after which the drawing is cut off.

  >>> from jdist import pipeline
  >>> print(draw_table(pipeline.make_table("gpipe", 2, 2)))
  device 0 |F0  F1  .   .   .   B0  B0  B1  B1*
  device 1 |.   F0  F1  B0  B0  B1  B1*
  """
  try:
    starts: Mapping[Action, float] = start_times(table, _ticks)
  except StuckError as stuck:
    starts = stuck.starts
  # A row maps ticks to words; missing ticks are idle.
  rows: list[dict[int, str]] = []
  for order in table.devices:
    cells: dict[int, str] = {}
    end = 0
    for action in order:
      if action not in starts:
        cells[end] = "?" + _word(table, action)
        break
      start = int(starts[action])
      # An update takes no tick and marks the one before, once.
      if action.op == Op.UPDATE and end:
        cells[end - 1] = cells[end - 1].rstrip("*") + "*"
        continue
      end = start + int(_ticks(action))
      for tick in range(start, end):
        cells[tick] = _word(table, action)
    rows.append(cells)
  last = max(max(cells, default=0) for cells in rows)
  width = max(
    (len(word) for cells in rows for word in cells.values()), default=1
  )
  digits = len(str(len(rows) - 1))
  lines = []
  for device, cells in enumerate(rows):
    shown = range(min(last + 1, max_ticks))
    words = [cells.get(t, ".").ljust(width) for t in shown]
    more = " ..." if last >= max_ticks else ""
    # Idle ticks after a device's last action say nothing.
    while not more and words and not words[-1].strip(" ."):
      words.pop()
    line = (" ".join(words) + more).rstrip()
    lines.append(f"device {device:>{digits}} |{line}")
  return "\n".join(lines)


def _ticks(action: Action) -> float:
  return {Op.BACKWARD: 2, Op.UPDATE: 0}.get(action.op, 1)


def _word(table: Table, action: Action) -> str:
  device = table.device_of[action.stage]
  own = [s for s, d in enumerate(table.device_of) if d == device]
  chunk = "" if len(own) == 1 else chr(ord("a") + own.index(action.stage))
  number = action.iteration * table.num_microbatches + action.microbatch
  shown = "" if action.op == Op.UPDATE else str(number)
  return f"{action.op.letter}{shown}{chunk}"
