"""A machine of a cluster, its speed over time, and what a model costs it."""

import dataclasses
import functools
import math
import random
from typing import Annotated

from jdist import checks, signatures

# Time would stand still on a faster machine.
_Speed = Annotated[
  float, functools.partial(checks.check_number, open_low=True, high=1e9)
]


class _Interval:
  start_s: float
  end_s: float

  def __post_init__(self) -> None:
    if not self.end_s > self.start_s:
      raise ValueError(
        f"`end_s` must lie after `start_s`, got {self.end_s} after "
        f"{self.start_s}."
      )


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Slowdown(_Interval):
  """A time in which a machine is slower, or faster.

  Attributes:
    start_s: The beginning, 0 or later.
    factor: The positive factor of the speed, for which 0 is an `Outage`.
    end_s: The end, later than it; infinity by default.
  """

  start_s: signatures.NonNegativeFloat
  factor: _Speed
  end_s: float = math.inf


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Outage(_Interval):
  """A time in which a machine is unavailable; its work in progress is lost.

  Attributes:
    start_s: The time of the failure, 0 or later.
    end_s: The time of the return, later than it; infinity by default.
  """

  start_s: signatures.NonNegativeFloat
  end_s: float = math.inf


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Node:
  r"""A machine that computes.

  Work that takes t seconds on a machine of speed 1 takes

  .. math:: t \, e^{\sigma z - \sigma^2 / 2} / v, \qquad z \sim N(0, 1)

  seconds on this one, t / v on average.

  Attributes:
    name: A unique name in the cluster.
    speed: The speed v, relative to the machine on which a profile was measured.
    jitter: The standard deviation sigma of the logarithm of a task's time.
    memory_bytes: Memory that must hold a batch.
    slowdowns: Changes of the speed; the factors of overlapping ones multiply.
    outages: Times in which the machine is unavailable, in order.
  """

  name: str
  speed: _Speed = 1.0
  jitter: signatures.NonNegativeFloat = 0.0
  memory_bytes: signatures.PositiveScalar = math.inf
  slowdowns: tuple[Slowdown, ...] = ()
  outages: tuple[Outage, ...] = ()

  def __post_init__(self) -> None:
    if not self.name:
      raise ValueError(f"`name` must be text, got {self.name!r}.")
    if self.jitter > 20:  # Tasks would shrink by e**-200, and time stand still.
      raise ValueError(f"`jitter` must be at most 20, got {self.jitter}.")
    ends = -math.inf
    for outage in self.outages:
      if outage.start_s < ends:
        raise ValueError(
          "`outages` must follow one after the other, got one of "
          f"{self.name!r} from {outage.start_s} s, before the last has ended."
        )
      ends = outage.end_s

  def end_s(self, start_s: float, work_s: float) -> float:
    """Returns the end of work that takes `work_s` at speed 1, jitter included.

    >>> node = Node("a", speed=2.0, slowdowns=(Slowdown(3.0, 0.5),))
    >>> node.end_s(start_s=0.0, work_s=8.0)  # 6 s of work until second 3.
    5.0
    """
    if not self.slowdowns:
      return start_s + work_s / self.speed
    now = start_s
    # The speed is constant between two ends of slow-downs: work is done piece
    # by piece until the last piece suffices.
    while True:
      speed, until = self.speed, math.inf
      for slow in self.slowdowns:
        if slow.start_s <= now < slow.end_s:
          speed *= slow.factor
          until = min(until, slow.end_s)
        elif now < slow.start_s:
          until = min(until, slow.start_s)
      end = now + (work_s / speed if speed else math.inf)
      if not end > until:  # So does a NaN, for which there is no last piece.
        return end
      work_s -= (until - now) * speed
      now = until

  def draw(self, generator: random.Random) -> float:
    """Draws the factor by which jitter lengthens a task; its mean is 1."""
    return math.exp(
      self.jitter * generator.gauss(0.0, 1.0) - 0.5 * self.jitter**2
    )

  def available(self, now_s: float) -> bool:
    """Returns whether the machine is outside of its outages."""
    return not any(o.start_s <= now_s < o.end_s for o in self.outages)


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
    """Returns the seconds at speed 1 of a gradient in some passes."""
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
