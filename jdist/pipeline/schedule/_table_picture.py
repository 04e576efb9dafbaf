"""Drawings of tables as text."""

from collections.abc import Mapping

from jdist import signatures
from jdist.pipeline.schedule._table import (
  Action,
  Op,
  start_times,
  StuckError,
  Table,
)

_TICKS = {Op.BACKWARD: 2, Op.UPDATE: 0}


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
    waiting: list[Action] = []
  except StuckError as stuck:
    starts, waiting = stuck.starts, stuck.waiting
  # A row maps ticks to words; missing ticks are idle.
  rows: list[dict[int, str]] = []
  for order in table.devices:
    cells: dict[int, str] = {}
    end = 0
    for action in order:
      if action not in starts:
        if action in waiting:
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
  return _TICKS.get(action.op, 1)


def _word(table: Table, action: Action) -> str:
  device = table.device_of[action.stage]
  own = [s for s, d in enumerate(table.device_of) if d == device]
  chunk = "" if len(own) == 1 else chr(ord("a") + own.index(action.stage))
  number = action.iteration * table.num_microbatches + action.microbatch
  shown = "" if action.op == Op.UPDATE else str(number)
  return f"{action.op.letter}{shown}{chunk}"
