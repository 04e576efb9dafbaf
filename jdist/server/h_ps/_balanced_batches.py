"""Batches with which all workers are done at the same time."""

import dataclasses
import math
from collections.abc import Sequence

from jdist import checks
from jdist.server import _allocation


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
    checks.check_int("total", self.total, 1)
    if not 0 <= self.smoothing < 1:
      raise ValueError(
        f"`smoothing` must be in [0, 1), got {self.smoothing}; 0 takes the "
        "last measurement alone."
      )
    checks.check_int("minimum", self.minimum, 1)

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
    if not speeds:
      return ()
    num = len(speeds)
    most = max(self.total, num * self.minimum)
    upper = [most] * num
    if limits is not None and not self.accumulate:
      upper = [
        most if limit is None else max(limit, self.minimum) for limit in limits
      ]
    # Memory bounds a task only where its gradients cannot be accumulated.
    total = min(most, sum(upper))
    known = [speed for speed in speeds if self.measured and speed]
    mean = sum(known) / len(known) if known else 1.0
    shares = [speed if speed and known else mean for speed in speeds]
    offsets = [0.0] * num
    if overheads_s is not None and known:
      offsets = list(overheads_s)
    # At the level T the sizes (T - c) / t, within bounds, sum up to the total.
    level = _allocation.water_level(shares, total, self.minimum, upper, offsets)
    wanted = [
      min(max((level - c) * share, self.minimum), high)
      for share, c, high in zip(shares, offsets, upper, strict=True)
    ]
    return _allocation.largest_remainder(
      wanted, total, minimum=self.minimum, maximum=upper
    )

  def passes(self, samples: int, limit: int | None) -> int:
    """Returns into how many batches a task is cut.

    >>> BalancedBatches(64).passes(samples=33, limit=16)
    3
    """
    if limit is None or not self.accumulate:
      return 1
    return math.ceil(samples / max(limit, 1))
