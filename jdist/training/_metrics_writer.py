"""Records as events of TensorBoard."""

import contextlib
import math
import os
from types import TracebackType

from jdist import checks
from jdist.training.loop import _record


class MetricsWriter:
  """Writes records for TensorBoard, as they come.

  Its `write` is made for `Trainer.fit(..., on_record=writer.write)`.  A run
  that goes on writes on in the same directory.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens or makes the directory.

    Args:
      directory: of the events: `tensorboard --logdir DIRECTORY` shows them.

    Raises:
      ImportError: when tensorboardX is not installed.
    """
    board = checks.import_extra("tensorboardX", "metrics")
    self._directory = os.fspath(directory)
    self._writer = board.SummaryWriter(self._directory)

  def write(self, record: _record.Record) -> None:
    """Writes a record: each of its metrics, losses, rounds, bytes, rate.

    Raises:
      OSError: when it cannot be written, as the disk is full for instance.
    """
    values = {f"test/{name}": value for name, value in record.metrics.items()}
    values |= {
      "train/loss": record.train_loss,
      "train/rounds": record.rounds,
      "train/sent_bytes": record.sent_bytes,
      "train/samples_per_s": record.samples_per_s,
      "train/skipped": record.skipped,
    }
    if math.isnan(record.samples_per_s):  # There is none yet.
      del values["train/samples_per_s"]
    try:
      for name, value in values.items():
        self._writer.add_scalar(name, value, record.step)
      self._writer.flush()
    except OSError as error:
      raise OSError(
        f"events could not be written to {self._directory}: {error.strerror}. "
        "Make room, or take another `directory`."
      ) from error

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    if error is None:
      self.close()
      return
    # What it could not write before, it cannot write now.
    with contextlib.suppress(OSError):
      self.close()
