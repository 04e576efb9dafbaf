"""The rates of an accelerator."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator's rates.

  Attributes:
    name: of the device.
    flops_per_s: floating point operations a second that programs reach, not
      the data sheet's.
    memory_bytes_per_s: memory bandwidth that programs reach.
    launch_s: the least time of one kernel.
  """

  name: str
  flops_per_s: float
  memory_bytes_per_s: float
  launch_s: float = 0.0

  def __post_init__(self) -> None:
    for field in ("flops_per_s", "memory_bytes_per_s"):
      if not getattr(self, field) > 0:
        raise ValueError(
          f"`{field}` must be positive, got {getattr(self, field)}."
        )
    if not self.launch_s >= 0:
      raise ValueError(f"`launch_s` must not be negative, got {self.launch_s}.")

  def compute_s(self, flops: float, num_bytes: float) -> float:
    """Returns the seconds of a kernel: of arithmetic, memory, or its launch.

    >>> Device("toy", flops_per_s=10, memory_bytes_per_s=2).compute_s(20, 2)
    2.0
    """
    return max(
      flops / self.flops_per_s,
      num_bytes / self.memory_bytes_per_s,
      self.launch_s,
    )
