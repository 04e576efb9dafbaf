"""Progress of a run in the terminal: rate, loss, bytes."""

import math
import sys

from jdist import signatures
from jdist.training.loop import _record


@signatures.checked
class Progress:
  """A progress line on a terminal; it writes nothing into a log file."""

  def __init__(
    self,
    num_steps: signatures.NonNegativeInt,
    label: str,
    *,
    start_step: int = 0,
  ):
    """Prepares the line, which entering the context shows.

    Args:
      num_steps: The last step; 0 if it is unknown.
      label: A name of the run, for instance the method and the seed.
      start_step: The first step of a resumed run.
    """
    # Imported here, since it would slow down `import jdist`.
    from rich import console, progress, table

    # A part that does not fit is cut off, and the others stay whole.
    cut = table.Column(ratio=1, no_wrap=True, overflow="ellipsis")
    self._bar = progress.Progress(
      progress.TextColumn("[bold]{task.description}"),
      progress.BarColumn(bar_width=12),
      progress.MofNCompleteColumn(),
      progress.TextColumn("{task.fields[figures]}", table_column=cut),
      progress.TimeRemainingColumn(compact=True),
      expand=True,
      console=console.Console(file=sys.stderr),
      # A long period evens out the pauses in which programs are compiled.
      speed_estimate_period=300.0,
      transient=True,
      disable=not sys.stderr.isatty(),
      # Lines for a file must not go to the terminal with the bar.
      redirect_stdout=sys.stdout.isatty(),
    )
    self._task = self._bar.add_task(
      label, total=num_steps or None, completed=start_step, figures=""
    )

  def extend(self, num_steps: int) -> None:
    """Makes the line at least `num_steps` long."""
    total = self._bar.tasks[self._task].total or 0
    self._bar.update(self._task, total=max(total, num_steps))

  def show(
    self, record: _record.Record, doing: str, run: str = "", before: int = 0
  ) -> None:
    """Shows the activity of a run, or else the figures of its last step.

    The steps of other runs `before` it count, too.
    """
    text = doing or (
      f"loss {record.train_loss:.3f}  {format_rate(record.samples_per_s)} "
      f"samples/s  {format_bytes(record.sent_bytes)} sent"
    )
    self.update(before + record.step, f"{run}  {text}" if run else text)

  def update(self, step: int, figures: str) -> None:
    """Moves to a step and shows a short text."""
    self._bar.update(self._task, completed=step, figures=figures)

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
