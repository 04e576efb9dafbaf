"""A model's costs: seconds and memory of a batch, bytes of a message."""

import dataclasses
import math

from jdist import signatures


@signatures.explained
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

  def compute_s(self, samples: float, passes: float = 1) -> float:
    """Returns the seconds of a gradient at speed 1.

    Args:
      samples: Samples of the gradient.
      passes: Batches into which they are cut.
    """
    return passes * self.seconds_per_batch + samples * self.seconds_per_sample

  def memory_bytes(self, samples: float) -> float:
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
