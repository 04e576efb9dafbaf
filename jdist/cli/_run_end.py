"""Runs that end otherwise than trained: diverged (3), told by SIGTERM (143)."""

from typing import Any

# Exit statuses of a run that has diverged, and of one that SIGTERM has ended.
DIVERGED = 3
TERMINATED = 143


class TerminatedError(Exception):
  """SIGTERM has ended a run between two steps."""


class DivergedError(Exception):
  """A run has ended with a loss that is not a finite number."""


def check(records: Any, rate: float, saved: Any = None) -> None:
  """Raises a DivergedError if the last record is of a run that has diverged.

  Args:
    records: of the run.
    rate: its learning rate.
    saved: the directory of checkpoints, if there is one.
  """
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
