"""Records of a run, and the history that a resumed run starts from."""

import math
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
