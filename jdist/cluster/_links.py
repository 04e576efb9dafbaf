"""Links between machines, and how long it takes to send something."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
  """A machine's link to the others, full duplex.

  Attributes:
    bandwidth_bits_per_s: in each direction.
    latency_s: of one message.

  >>> Link(bandwidth_bits_per_s=1e9).send_s(num_bytes=125e6)
  1.0
  """

  bandwidth_bits_per_s: float
  latency_s: float = 0.0

  def __post_init__(self) -> None:
    if not self.bandwidth_bits_per_s > 0:
      raise ValueError(
        "`bandwidth_bits_per_s` must be positive, got "
        f"{self.bandwidth_bits_per_s}."
      )
    if not self.latency_s >= 0:
      raise ValueError(
        f"`latency_s` must not be negative, got {self.latency_s}."
      )

  def send_s(self, num_bytes: float, messages: float = 0) -> float:
    """Seconds to send so many bytes in so many messages, one by one."""
    bits = 8 * num_bytes
    return bits / self.bandwidth_bits_per_s + messages * self.latency_s


def ring_messages(num_workers: int) -> int:
  """Messages, one after the other, of an all-reduce in a ring: 2 (N - 1).

  >>> ring_messages(8)
  14
  """
  if num_workers < 1:
    raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
  return 2 * (num_workers - 1)
