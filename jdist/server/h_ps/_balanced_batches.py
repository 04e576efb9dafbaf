"""Batches with which all workers are done at the same time."""

import dataclasses
import math
from collections.abc import Sequence

from jdist import signatures
from jdist.server import _allocation


@signatures.checked
@dataclasses.dataclass(frozen=True)
class BalancedBatches:
  r"""Batches that let all workers of a round finish at the same time.

  With t the measured seconds of a sample, c those of communication that nothing
  hides, and m what a worker's memory holds,

  .. math:: n_i t_i + c_i = T, \qquad \sum_i n_i = B, \qquad
            n_{\min} \le n_i \le m_i

  which is solved for the level T and rounded by largest remainder, so that the
  sum is B exactly.  Where gradients are accumulated, memory bounds no batch
  but what is computed at once.  A worker that was not measured yet counts as
  one of the mean speed.

  Attributes:
    total: B, samples of a round.
    measured: whether batches follow measurements; equal parts of B if not.
    smoothing: share of the last measurement that a new one leaves, in [0, 1).
    minimum: the smallest batch, so that each worker is measured again.
    accumulate: whether a batch that memory does not hold is computed in parts;
      if not, memory bounds it.

  Raises:
    ValueError: when an argument is out of its range.

  References:
    H-PS, dynamic scheduling of tasks by the workers' status.  Reconstruction:
    the abstract names neither the equations nor the estimates, and a worker
    may have no task at all there.

  >>> batches = BalancedBatches(total=14)
  >>> batches.sizes([2.0, 1.0])
  (9, 5)
  >>> batches.sizes([2.0, 1.0], overheads_s=[4.0, 0.0])  # 3 s and 4 s; 7 s.
  (7, 7)
  >>> BalancedBatches(14, accumulate=False).sizes([2.0, 1.0], limits=[6, None])
  (6, 8)
  """

  total: int
  measured: bool = True
  smoothing: float = 0.5
  minimum: int = 1
  accumulate: bool = True

  def __post_init__(self) -> None:
    self._batches  # noqa: B018  Checks the arguments.

  @property
  def _batches(self) -> _allocation.SpeedBatches:
    return _allocation.SpeedBatches(
      self.total, smoothing=self.smoothing, minimum=self.minimum
    )

  def every(self, num_workers: int) -> int | None:
    """Returns None: each round's batches are allocated when it begins."""
    del num_workers
    return None

  def sizes(
    self,
    speeds: Sequence[float | None],
    *,
    overheads_s: Sequence[float] | None = None,
    limits: Sequence[int | None] | None = None,
  ) -> tuple[int, ...]:
    """Returns the batch of each worker.

    The sum is `total`, or the nearest that the bounds allow.

    Args:
      speeds: samples a second, None where nothing was measured yet.
      overheads_s: c, of each worker; 0 if None.
      limits: m, of each worker, None for any.
    """
    return self._batches.sizes(
      speeds if self.measured else [None] * len(speeds),
      overheads_s=overheads_s,
      # Memory bounds a task only where gradients cannot be accumulated.
      limits=None if self.accumulate else limits,
    )

  def passes(self, samples: int, limit: int | None) -> int:
    """Returns into how many batches a task is cut.

    >>> BalancedBatches(64).passes(samples=33, limit=16)
    3
    """
    if limit is None or not self.accumulate:
      return 1
    return math.ceil(samples / max(limit, 1))
