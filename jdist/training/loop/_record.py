"""Records of a run, its history, and its progress in the terminal."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from jdist import signatures


class Record(NamedTuple):
  """A run's position and results at an evaluation.

  Attributes:
    step: The number of updates so far.
    rounds: The number of synchronizations so far.
    sent_bytes: The bytes that one worker has sent, see `collectives.Traffic`.
    train_loss: The mean loss over the steps since the last record and over the
      workers of this process; NaN if there was no step.
    metrics: The result of `evaluate`.
    train_s: Seconds of training so far, including those before a resume.
      Evaluation, saving and the first step of each call, which compiles, do
      not count.
    samples_per_s: Training samples of all workers per second of `train_s`;
      NaN before the second step.
    clock: Whether the seconds are "wall" or, in a simulation, "virtual".
    diverged: Whether `is_diverged` says so of the evaluated loss, or without it
      of that of the last training step.
    skipped: The number of steps that `transforms.skip_nonfinite` has skipped.
  """

  step: int
  rounds: int
  sent_bytes: float
  train_loss: float
  metrics: dict[str, float]
  train_s: float
  samples_per_s: float
  clock: Literal["wall", "virtual"] = "wall"
  diverged: bool = False
  skipped: int = 0


class History(NamedTuple):
  """The past of a run, before this call.

  Attributes:
    records: The records so far.
    sent_bytes: The bytes that one worker has sent; None if unknown.
    train_s: Seconds of training, as in a record.
    samples: The number of samples trained on in these seconds.
    losses: The sum and the number of training losses since the last record.
  """

  records: Sequence[Record] = ()
  sent_bytes: float | None = None
  train_s: float = 0.0
  samples: int = 0
  losses: tuple[float, int] = (0.0, 0)

  @classmethod
  def after(cls, records: Sequence[Record]) -> "History":
    """Returns the history of a run that continues from its last record."""
    if not records:
      return cls()
    # Records have no number of samples, but their rate and time give it back.
    last = records[-1]
    samples = round(last.samples_per_s * last.train_s) if last.train_s else 0
    return cls(records, last.sent_bytes, last.train_s, samples)


@signatures.checked
def is_diverged(metrics: Mapping[str, float], losses: Sequence[float]) -> bool:
  """Returns whether a run's loss is not finite, or beyond any classifier's.

  Args:
    metrics: The result of an evaluation, which may have a `loss`: beside an
      `accuracy` a cross-entropy, for which 1,000 is beyond all reason.
    losses: The training losses since the last record. The last of them counts
      if `metrics` has no loss.
  """
  loss = metrics.get("loss", losses[-1] if len(losses) else 0.0)
  most = 1e3 if {"loss", "accuracy"} <= metrics.keys() else math.inf
  return not (math.isfinite(loss) and loss <= most)


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
    """Prepares the line of the context; a run of 0 `num_steps` has no end."""
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
      disable=not (sys.stderr and sys.stderr.isatty()),
      # Lines for a file must not go to the terminal with the bar.
      redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
    )
    self._task = self._bar.add_task(
      label, total=num_steps or None, completed=start_step, figures=""
    )

  def extend(self, num_steps: int) -> None:
    """Makes the line at least `num_steps` long."""
    total = self._bar.tasks[self._task].total or 0
    self._bar.update(self._task, total=max(total, num_steps))

  def show(
    self, record: Record, doing: str, run: str = "", before: int = 0
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
