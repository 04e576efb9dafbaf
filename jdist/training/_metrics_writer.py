"""Writer of records as events for TensorBoard."""

import contextlib
import math
import os

from jdist import checks, signatures
from jdist.training.loop import _record


@signatures.checked
class MetricsWriter:
  """Writes records for TensorBoard during a run.

  Pass its `write` to `Trainer.fit(..., on_record=writer.write)`. A resumed run
  continues in the same directory.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens or makes the directory, which `tensorboard --logdir` shows."""
    board = checks.import_extra("tensorboardX", "metrics")
    self._directory = os.fspath(directory)
    self._writer = board.SummaryWriter(self._directory)

  def write(self, record: _record.Record) -> None:
    """Writes a record's metrics, losses, rounds, bytes and rate.

    Raises:
      OSError: If the events cannot be written, for instance because the disk
        is full.
    """
    values = {f"test/{name}": value for name, value in record.metrics.items()}
    values |= {
      "train/loss": record.train_loss,
      "train/rounds": record.rounds,
      "train/sent_bytes": record.sent_bytes,
      "train/samples_per_s": record.samples_per_s,
      "train/skipped": record.skipped,
    }
    # The rate of the first step is unknown, and TensorBoard would draw a NaN.
    if math.isnan(record.samples_per_s):
      del values["train/samples_per_s"]
    try:
      for name, value in values.items():
        self._writer.add_scalar(name, value, record.step)
      # TensorBoard shows a running experiment, so records are not buffered.
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

  def __exit__(self, kind: object, error: object, trace: object) -> None:
    if error is None:
      self.close()
      return
    # After a failed write the file cannot be flushed, and a second error would
    # hide the first one.
    with contextlib.suppress(OSError):
      self.close()
