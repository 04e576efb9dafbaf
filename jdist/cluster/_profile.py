"""A model's costs: seconds and memory of a batch, bytes of a message."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Sequence

from jdist import checks, signatures


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Profile:
  r"""The costs of a task on a machine of speed 1.

  .. math:: t(b) = t_0 + t_1 b, \qquad m(b) = m_0 + m_1 b

  Attributes:
    seconds_per_sample: The time t1.
    seconds_per_batch: The time t0.
    bytes_per_sample: The memory m1.
    bytes_of_model: The memory m0.
    pull_bytes: Bytes of the parameters that a worker receives.
    push_bytes: Bytes of the gradient that it sends.
    seconds_per_encoding: Time to encode or decode a compressed message.
    name: The model's name in reports.

  Raises:
    ValueError: If a cost is negative, or a batch takes no time.

  >>> Profile(seconds_per_sample=0.01, seconds_per_batch=0.1).compute_s(10)
  0.2
  """

  seconds_per_sample: signatures.NonNegativeFloat
  seconds_per_batch: signatures.NonNegativeFloat = 0.0
  bytes_per_sample: signatures.NonNegativeFloat = 0.0
  bytes_of_model: signatures.NonNegativeFloat = 0.0
  pull_bytes: signatures.NonNegativeFloat = 0.0
  push_bytes: signatures.NonNegativeFloat = 0.0
  seconds_per_encoding: signatures.NonNegativeFloat = 0.0
  name: str = "model"

  def __post_init__(self) -> None:
    if not self.seconds_per_sample + self.seconds_per_batch:
      raise ValueError(
        "`seconds_per_sample` or `seconds_per_batch` must be positive, got "
        "none: time would stand still."
      )

  def compute_s(self, samples: int, passes: int = 1) -> float:
    """Returns the seconds of a gradient at speed 1.

    Args:
      samples: Samples of the gradient.
      passes: Batches into which they are cut.
    """
    return passes * self.seconds_per_batch + samples * self.seconds_per_sample

  def memory_bytes(self, samples: int) -> float:
    """Returns the memory of the model and a batch."""
    return self.bytes_of_model + samples * self.bytes_per_sample

  def max_samples(self, memory_bytes: float) -> int | None:
    """Returns the largest batch that fits into memory; None for any.

    >>> Profile(1.0, bytes_per_sample=10, bytes_of_model=5).max_samples(36)
    3
    """
    left = memory_bytes - self.bytes_of_model
    if left < 0:
      return 0
    if not self.bytes_per_sample or left == math.inf:
      return None
    return math.floor(left / self.bytes_per_sample)

  @classmethod
  def fit(
    cls, samples: Sequence[int], seconds: Sequence[float], **costs: float
  ) -> "Profile":
    """Fits both times of a batch by least squares; neither is negative.

    Args:
      samples: Batch sizes, at least two different ones.
      seconds: The measured seconds of each.
      **costs: The other fields.

    Raises:
      ValueError: With fewer than two sizes.

    >>> found = Profile.fit([10, 20, 40], [0.2, 0.3, 0.5])
    >>> round(found.seconds_per_sample, 6), round(found.seconds_per_batch, 6)
    (0.01, 0.1)
    """
    if len(samples) != len(seconds) or len(set(samples)) < 2:
      raise ValueError(
        "`samples` must have two different sizes at least, and `seconds` one "
        f"time for each, got {samples!r} and {seconds!r}."
      )
    fit = functools.partial(statistics.linear_regression, samples, seconds)
    slope = max(fit().slope, 0.0)
    start = statistics.fmean(seconds) - slope * statistics.fmean(samples)
    # A negative time per batch would let small batches end before they begin:
    # the best line through zero takes its place.
    if start < 0:
      start, slope = 0.0, fit(proportional=True).slope
    return cls(seconds_per_sample=slope, seconds_per_batch=start, **costs)  # type: ignore[arg-type]

  @classmethod
  def measure(
    cls,
    step: Callable[[int], float],
    samples: Sequence[int],
    *,
    repeats: int = 5,
    **costs: float,
  ) -> "Profile":
    """Measures a batch of each size and fits both times to the medians.

    Args:
      step: A function of a batch size that computes a gradient, waits for it
        and returns the seconds.
      samples: Batch sizes.
      repeats: Measurements of each size.
      **costs: The other fields.
    """
    checks.check_int("repeats", repeats, 1)
    for size in samples:
      step(size)  # The first call compiles and is not counted.
    found: dict[int, list[float]] = {size: [] for size in samples}
    # Sizes take turns, so that a slow phase of the machine hits all of them.
    for _ in range(repeats):
      for size in samples:
        found[size].append(step(size))
    medians = [statistics.median(found[size]) for size in samples]
    return cls.fit(samples, medians, **costs)
