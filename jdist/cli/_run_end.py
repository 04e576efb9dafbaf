"""Ends of runs: with a row, refused (2), diverged (3), to be repeated (75)."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, TYPE_CHECKING

from jdist.cli import _options

if TYPE_CHECKING:
  from jdist import training

# Exit statuses of a run that has diverged, of one that may succeed when it is
# started again, and of one that SIGTERM has ended.
DIVERGED = 3
AGAIN = 75
TERMINATED = 143
UNREAD = 141  # A shell's status of SIGPIPE: nothing reads the output.
BEYOND = "not finite, or above 1,000"
# Reasons of errors that pass: others may free a disk, a port or open files.
_PASSING = (
  errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EADDRINUSE,
  errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT,
)  # fmt: skip
# Entries of checkpoints in place of options, too long to be shown.
_HIDDEN = {
  "cluster": "`--cluster` is of other machines than in the checkpoint",
  "networks": "`--predictor` is of another network than in the checkpoint",
}
# Entries of checkpoints that follow from options, which differ as well.
_FOLLOWING = ("every", "unit", "clock")


class TerminatedError(Exception):
  """SIGTERM has ended a run between two steps."""


class LostError(Exception):
  """A run has lost another process, and may be started again."""


class DivergedError(Exception):
  """A run has ended with a loss that is not finite, or beyond all reason."""


def passes(error: BaseException | None) -> bool:
  """Returns whether the same command may succeed later, after an error.

  It may where another process was lost, a disk was full or a port was taken.
  """
  while error is not None:
    # Libraries pass on a system's reason in their own errors' texts.
    text, number = str(error).lower(), getattr(error, "errno", None)
    if isinstance(error, TimeoutError | ConnectionError | LostError) or any(
      x == number or os.strerror(x).lower() in text for x in _PASSING
    ):
      return True
    # The channel's errors have no number: another run has the port.
    if isinstance(error, PermissionError) and number is None:
      return True
    error = error.__cause__
  return False


def check(options: Any, records: Any, saved: bool) -> None:
  """Raises a DivergedError if the run has diverged by its last record."""
  last = records[-1]
  if not last.diverged:
    return
  # Evaluations see a divergence only at their next record.
  first = next(record.step for record in records if record.diverged)
  kept = f" States that are finite stay in {options.checkpoints}."
  remedies = "or a longer `--warmup-epochs`."
  if options.driver is None:  # A server does not skip gradients.
    remedies = (
      "a longer `--warmup-epochs`, or `--skip-nonfinite` where single "
      "gradients are not finite."
    )
  raise DivergedError(
    f"the loss is {BEYOND}, since step {first} of {last.step} or before. "
    f"Take a lower `--learning-rate`, {options.learning_rate:g} here, "
    f"{remedies}{kept if saved else ''}"
  )


@contextlib.contextmanager
def explained(
  folder: str | None,
  newest: Callable[[], str | None],
  unit: str,
  total: int | None,
  status: Any,
) -> Iterator[None]:
  """Explains in words of the command line why the training within has ended.

  `newest` names the newest checkpoint in a folder, `unit` is the singular of
  what the run counts up to `total`, and `status` is the run's `Status`.
  """
  from jdist import server, training

  of = "" if total is None else f" of {total}"

  def kept(what: str | None) -> str:
    if what is None:
      return f"nothing is saved. This starts again: {status.command}"
    return f"{what} is saved in {folder}. This resumes: {status.command}"

  try:
    yield
  except training.OtherRunError as error:
    raise _refusal(error) from None
  except server.LostRunError as error:
    start = "last checkpoint" if folder else "beginning"
    raise LostError(
      f"{error} The same command starts from the {start}."
    ) from None
  except KeyboardInterrupt:
    said = "" if folder else "as there is no `--checkpoints DIR`, "
    said = f"its status is in {status.output}; {said}{kept(newest())}"
    raise KeyboardInterrupt(said) from None
  except training.PreemptedError as stop:
    saved = kept("which") if stop.saved else f"and {kept(newest())}"
    raise TerminatedError(
      f"ended after {unit} {stop.step}{of}, {saved}"
    ) from None


def _refusal(error: "training.OtherRunError") -> ValueError:
  """Returns the error for a checkpoint of a run with other options."""
  parts = []
  for name, (there, here) in error.differences.items():
    if name in _HIDDEN:
      parts.append(_HIDDEN[name])
    elif name not in _FOLLOWING:
      parts.append(
        f"`{_options.word(name)}` is {_shown(there)} in the checkpoint and "
        f"{_shown(here)} here"
      )
  return ValueError(
    f"{', '.join(parts)}. Resume with the same options, or start again in "
    "another directory."
  )


def _shown(value: Any) -> str:
  if value is None:
    return "not given"
  return " ".join(map(str, value)) if isinstance(value, list) else str(value)
