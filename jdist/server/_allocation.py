"""Allocation of samples to workers: how large each one's batch is."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from typing import Protocol as Interface

from jdist import checks, signatures


class Allocation(Interface):
  """Decides how many samples each worker takes its gradient of."""

  @property
  def smoothing(self) -> float:
    """Share of the last speed that a new measurement leaves, in [0, 1)."""

  def every(self, num_workers: int) -> int | None:
    """Returns after how many pushes batches are allocated again.

    By default they never are (None), or only by the protocol itself.
    """
    return None

  def sizes(self, speeds: Sequence[float | None]) -> tuple[int, ...]:
    """Returns all batch sizes, given samples a second, None if unmeasured."""


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class FixedBatches(Allocation):
  """Batches of one size for all workers.

  Attributes:
    samples: Size of each batch, at least 1.

  >>> FixedBatches(32).sizes([1.0, 8.0])
  (32, 32)
  """

  samples: signatures.PositiveInt
  # Speeds are measured all the same, for a protocol that reads them.
  smoothing: ClassVar[float] = 0.5

  def sizes(self, speeds: Sequence[float | None]) -> tuple[int, ...]:
    """Returns the one size for each worker."""
    return (self.samples,) * len(speeds)


def check_limits(
  limits: Mapping[Any, int | None] | None, minimum: int = 1
) -> None:
  """Raises a ValueError for a limit below the smallest batch."""
  for worker, limit in (limits or {}).items():
    if limit is not None:
      checks.check_int(
        "limits",
        limit,
        minimum,
        remedy=f"The memory of {worker!r} must hold the smallest batch; leave "
        "out a worker whose batches nothing bounds.",
      )


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class SpeedBatches:
  r"""Batches that follow measured speeds, so that iteration times agree.

  .. math:: v_i \leftarrow a v_i + (1 - a) \frac{b_i}{t_i}, \qquad
            b_i = B \frac{v_i}{\sum_j v_j}

  rounded to integers whose sum is B, by largest remainder inside the bounds.
  A worker without a measurement counts as one of the mean speed.

  Attributes:
    total: B, samples of all workers' batches together.
    period: Pushes between two allocations; one for each worker if None.
    smoothing: a, in [0, 1).
    minimum: The smallest batch.
    maximum: The largest batch, for instance what fits into memory.
    limits: The same of single workers, by their names.

  References:
    DBS-SGD, performance-aware dynamic batch size.  Reconstruction: the paper
    names neither the estimate of the speed nor the rounding; batches
    proportional to speeds are the known alternative `p_i <- p_i / t_i`.

  >>> SpeedBatches(total=12).sizes([3.0, 1.0, None])
  (6, 2, 4)
  """

  total: signatures.PositiveInt
  period: signatures.PositiveInt | None = None
  smoothing: float = 0.5
  minimum: signatures.PositiveInt = 1
  maximum: int | None = None
  limits: Mapping[Any, int | None] | None = None

  def __post_init__(self) -> None:
    check_limits(self.limits, self.minimum)
    checks.check_number("smoothing", self.smoothing, high=1, open_high=True)
    if self.maximum is not None:
      checks.check_int("maximum", self.maximum, self.minimum)

  def every(self, num_workers: int) -> int | None:
    """Returns the period, by default a push of every worker."""
    return self.period or max(1, num_workers)

  def sizes(
    self,
    speeds: Sequence[float | None],
    *,
    overheads_s: Sequence[float] | None = None,
    limits: Sequence[int | None] | None = None,
  ) -> tuple[int, ...]:
    """Returns batches in proportion to the speeds.

    The sum is `total`, or the nearest sum that the bounds allow for this number
    of workers.

    Args:
      speeds: Samples a second, None where nothing was measured yet.
      overheads_s: Seconds of each worker's task apart from its samples, if all
        tasks are to end at the same time; 0 if None.
      limits: The largest batch of each worker, None for any.

    >>> SpeedBatches(total=12).sizes([3.0, 1.0], limits=[7, None])
    (7, 5)
    """
    if not len(speeds):
      return ()
    # A worker that was not measured yet counts as one of the mean speed, so
    # that it disturbs the others' batches least.
    known = [speed for speed in speeds if speed is not None and speed > 0]
    mean = sum(known) / len(known) if known else 1.0
    num = len(speeds)
    total = max(self.total, num * self.minimum)
    most = total if self.maximum is None else self.maximum
    upper = [
      most if limit is None else max(self.minimum, min(most, limit))
      for limit in ([None] * num if limits is None else limits)
    ]
    return largest_remainder(
      [speed if speed else mean for speed in speeds],
      min(total, sum(upper)),
      minimum=self.minimum,
      maximum=upper,
      offsets=overheads_s if known else None,
    )


def largest_remainder(
  shares: Sequence[float],
  total: int,
  *,
  minimum: int = 0,
  maximum: int | Sequence[int] | None = None,
  offsets: Sequence[float] | None = None,
) -> tuple[int, ...]:
  r"""Rounds shares to integers whose sum is exact, inside bounds.

  Finds the level of

  .. math:: \sum_i \mathrm{clip}((\lambda - c_i) s_i, l, u_i) = B

  of positive shares s, a total B, minima l, maxima u (no bound if None) and
  offsets c (0 if None), and gives what rounding down leaves to the largest
  remainders, the first of equal ones.

  Raises:
    ValueError: If the bounds allow no such sum.

  >>> largest_remainder([8, 4, 2, 1], 16)
  (9, 4, 2, 1)
  >>> largest_remainder([8, 4, 2, 1], 16, minimum=2, maximum=6)
  (6, 5, 3, 2)
  >>> largest_remainder([2.0, 1.0], 10, offsets=[1.0, 0.0])
  (6, 4)
  """
  num = len(shares)
  for i, share in enumerate(shares):
    if not 0 < share < math.inf:
      raise ValueError(f"`shares` must be positive, got {share} at {i}.")
  one = math.inf if maximum is None else maximum
  upper = [one] * num if isinstance(one, (int, float)) else list(one)
  if not minimum * num <= total <= sum(upper) or not num:
    raise ValueError(
      f"`total` must lie between the sums of the bounds, {minimum * num} and "
      f"{sum(upper)}, got {total}."
    )
  terms = list(zip(shares, offsets or [0.0] * num, upper, strict=True))
  level = _level(terms, total, minimum)
  wanted = [min(max((level - c) * s, minimum), high) for s, c, high in terms]
  sizes = [math.floor(each) for each in wanted]
  left = total - sum(sizes)
  # The index breaks ties, so that all drivers allocate alike. Rounding of
  # floats may leave one sample too many or too few anywhere.
  order = sorted(range(num), key=lambda i: (sizes[i] - wanted[i], i))
  step = 1 if left > 0 else -1
  while left:
    for i in order[::step]:
      if left and minimum <= sizes[i] + step <= upper[i]:
        sizes[i] += step
        left -= step
  return tuple(sizes)


def _level(
  terms: Sequence[tuple[float, float, float]], total: int, minimum: int
) -> float:
  """Returns the least level at which clipped shares have a sum."""
  # The sum is piecewise linear in the level, and rises. Below its first bend a
  # share gives `minimum`, above its second `high`: O(n log n) for n workers.
  bends = [(minimum / s + c, s, minimum + s * c) for s, c, _ in terms]
  bends += [
    (high / s + c, -s, -(high + s * c))
    for s, c, high in terms
    if high < math.inf
  ]
  bends.sort()
  slope, constant, at = 0.0, float(minimum * len(terms)), 0.0
  # Where all shares are at a bound, only rounding is left of the slope.
  flat = 1e-12 * max(s for s, _, _ in terms)
  for bend, change, moved in bends:
    if slope > flat and slope * bend + constant > total:
      break
    slope, constant, at = slope + change, constant - moved, bend
  return (total - constant) / slope if slope > flat else at
