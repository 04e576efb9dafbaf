"""Devices and links between machines, and the time that they take."""

import dataclasses
from typing import Literal

from jdist import checks, signatures


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


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Link:
  """A link between two machines, full duplex.

  Attributes:
    bandwidth_bits_per_s: Bandwidth in each direction.
    latency_s: Latency of one message.
    sharing: How concurrent messages share the link: with `"first_come"` one
      follows the other, with `"fair"` each has an equal part of the bandwidth,
      as TCP gives it. By default it is fair for servers, and first come for
      pipelines, whose connections send one message after the other.

  >>> Link(bandwidth_bits_per_s=1e9).send_s(num_bytes=125e6)
  1.0
  """

  bandwidth_bits_per_s: float
  latency_s: signatures.NonNegativeFloat = 0.0
  sharing: Literal["first_come", "fair"] | None = None

  def __post_init__(self) -> None:
    # An infinite bandwidth is allowed: messages then take the latency alone.
    checks.check_continuous(
      "bandwidth_bits_per_s", self.bandwidth_bits_per_s, open_low=True
    )

  def send_s(self, num_bytes: float, messages: float = 0) -> float:
    """Returns the seconds of bytes that are sent in consecutive messages."""
    bits = 8 * num_bytes
    return bits / self.bandwidth_bits_per_s + messages * self.latency_s


def ring_messages(num_workers: int) -> int:
  """Returns the number of consecutive messages of a ring all-reduce.

  >>> ring_messages(8)
  14
  """
  checks.check_int("num_workers", num_workers, 1)
  # A reduce-scatter and an all-gather have N - 1 steps each.
  return 2 * (num_workers - 1)
