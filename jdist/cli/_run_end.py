"""How runs end: with a row, diverged (3), or by a SIGTERM (143)."""

import dataclasses
import pathlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from jdist import training

# Exit statuses of a run that has diverged, and of one that SIGTERM has ended.
DIVERGED = 3
TERMINATED = 143


class TerminatedError(Exception):
  """SIGTERM has ended a run between two steps."""


class DivergedError(Exception):
  """A run has ended with a loss that is not a finite number."""


def write_row(
  output: pathlib.Path,
  options: Any,
  method: str | None,
  records: "list[training.Record]",
  **more: Any,
) -> None:
  """Appends a run's row, with a summary of its records, and says where."""
  # Not above: every command imports this file, `--help` too.
  from jdist import training
  from jdist.training import comparison

  fields = {"learning_rate": options.learning_rate, "workers": options.workers}
  fields |= comparison.summarize(records) | more
  config = dataclasses.asdict(options)
  row = training.make_row(config, options.seed, method=method, **fields)
  training.append_rows(output / "rows.jsonl", [row])
  print(f"Row: {output / 'rows.jsonl'}")


def check(records: Any, rate: float, saved: Any = None) -> None:
  """Raises a DivergedError if the last record is of a run that has diverged."""
  last = records[-1]
  if not last.diverged:
    return
  first = next(record.step for record in records if record.diverged)
  kept = f" States that are finite stay in {saved}." if saved else ""
  raise DivergedError(
    f"the loss is not finite since step {first} of {last.step} or before. Take "
    f"a lower `--learning-rate`, {rate:g} here, a longer `--warmup-epochs`, or "
    f"`--skip-nonfinite` where single gradients are not finite.{kept}"
  )
