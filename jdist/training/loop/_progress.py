"""Progress of a run in the terminal: rate, loss, bytes."""

import contextlib
import math
import sys
from collections.abc import Iterator

from jdist import signatures

# The bar takes the columns that the text leaves free, within these limits.
_LEAST, _MOST = 8, 24
# The columns between the parts, and those of the remaining time.
_BETWEEN, _TIME = 4, 8


class Progress:
  """A progress line on a terminal; it writes nothing into a log file."""

  def __init__(self, num_steps: int, label: str, *, start_step: int = 0):
    """Prepares the line, which entering the context shows.

    Args:
      num_steps: The last step.
      label: A name of the run, for instance the method and the seed.
      start_step: The first step of a resumed run.
    """
    # Imported here, since it would slow down `import jdist`.
    from rich import console, progress

    self._label = label
    self._column = progress.BarColumn(bar_width=_MOST)
    self._bar = progress.Progress(
      progress.TextColumn("[bold]{task.description}"),
      self._column,
      progress.MofNCompleteColumn(),
      progress.TextColumn("{task.fields[figures]}"),
      progress.TimeRemainingColumn(compact=True),
      console=console.Console(file=sys.stderr),
      # A long period evens out the pauses in which programs are compiled.
      speed_estimate_period=300.0,
      transient=True,
      disable=not sys.stderr.isatty(),
    )
    self._task = self._bar.add_task(
      label, total=num_steps, completed=start_step, figures=""
    )

  def extend(self, num_steps: int) -> None:
    """Makes the line at least `num_steps` long."""
    total = self._bar.tasks[self._task].total or 0
    self._bar.update(self._task, total=max(total, num_steps))

  def update(self, step: int, figures: str) -> None:
    """Moves to a step and shows a short text, cut off where it does not fit."""
    total = f"{self._bar.tasks[self._task].total or 0:.0f}"
    taken = len(self._label) + 2 * len(total) + 1 + _TIME + _BETWEEN
    room = max(self._bar.console.width - taken - _LEAST, 0)
    if len(figures) > room:
      figures = f"{figures[: max(room - 1, 0)]}…"
    self._column.bar_width = min(_LEAST + room - len(figures), _MOST)
    self._bar.update(self._task, completed=step, figures=figures)

  @contextlib.contextmanager
  def aside(self) -> Iterator[None]:
    """Hides the line while other lines are written to the terminal."""
    self._bar.stop()
    try:
      yield
    finally:
      self._bar.start()

  def __enter__(self) -> "Progress":
    self._bar.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._bar.stop()


@signatures.checked
def format_rate(per_s: float) -> str:
  """Formats a rate per second, and a dash for an unknown one.

  >>> format_rate(12_345.6), format_rate(math.nan)
  ('12,346', '–')
  """
  return "–" if math.isnan(per_s) else f"{per_s:,.0f}"


@signatures.checked
def format_bytes(num_bytes: float) -> str:
  """Formats bytes in the largest suitable unit, 1 kB = 1000 bytes.

  >>> format_bytes(999), format_bytes(12_345_678)
  ('999 B', '12.3 MB')
  """
  size = float(num_bytes)
  for unit in ("B", "kB", "MB", "GB"):
    # Rounded before it is compared: 999,999 bytes are 1 MB, not 1000 kB.
    rounded = float(f"{size:.3g}")
    if rounded < 1000:
      return f"{rounded:g} {unit}"
    size /= 1000
  return f"{float(f'{size:.3g}'):.15g} TB"
