"""Links between machines, and the time that messages take on them."""

import dataclasses
from typing import Literal

from jdist import checks


@dataclasses.dataclass(frozen=True)
class Link:
  """A machine's link to the others, full duplex.

  Attributes:
    bandwidth_bits_per_s: in each direction.
    latency_s: of one message.
    sharing: what messages do that are on the link together: `"first_come"`, one
      after the other; `"fair"`, each has an equal part of the bandwidth.

  >>> Link(bandwidth_bits_per_s=1e9).send_s(num_bytes=125e6)
  1.0
  """

  bandwidth_bits_per_s: float
  latency_s: float = 0.0
  sharing: Literal["first_come", "fair"] = "first_come"

  def __post_init__(self) -> None:
    if not self.bandwidth_bits_per_s > 0:
      raise ValueError(
        "`bandwidth_bits_per_s` must be positive, got "
        f"{self.bandwidth_bits_per_s}."
      )
    checks.check_number("latency_s", self.latency_s)
    checks.check_choice("sharing", self.sharing, ("first_come", "fair"))

  def send_s(self, num_bytes: float, messages: float = 0) -> float:
    """Returns the seconds for bytes in messages, one after the other."""
    bits = 8 * num_bytes
    return bits / self.bandwidth_bits_per_s + messages * self.latency_s


def ring_messages(num_workers: int) -> int:
  """Counts the messages, one after the other, of an all-reduce in a ring.

  >>> ring_messages(8)
  14
  """
  if num_workers < 1:
    raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
  return 2 * (num_workers - 1)
