"""The rates of an accelerator."""

import dataclasses

from jdist import signatures


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator's rates.

  Attributes:
    name: The device's name.
    flops_per_s: Floating point operations a second that programs reach, not
      the data sheet's.
    memory_bytes_per_s: Memory bandwidth that programs reach.
    launch_s: The shortest time of one kernel.
  """

  name: str
  flops_per_s: signatures.PositiveFloat
  memory_bytes_per_s: signatures.PositiveFloat
  launch_s: signatures.NonNegativeFloat = 0.0

  def compute_s(self, flops: float, num_bytes: float) -> float:
    """Returns the seconds of a kernel.

    Arithmetic and memory traffic overlap, as in the roofline model, and no
    kernel is shorter than its launch.

    >>> Device("toy", flops_per_s=10, memory_bytes_per_s=2).compute_s(20, 2)
    2.0
    """
    return max(
      flops / self.flops_per_s,
      num_bytes / self.memory_bytes_per_s,
      self.launch_s,
    )
