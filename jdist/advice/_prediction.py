"""Predicted times of methods, from their costs and a link."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist import checks, cluster, signatures

_LEFT_OUT = 0.07
# Logarithms of bits a second, between which all links lie.
_SLOWEST, _FASTEST = math.log(1e3), math.log(1e15)


class MethodCosts(NamedTuple):
  """The costs of a method for a worker; `Advice` has the equation.

  Attributes:
    interval: The steps of a round, H; 1 for a method without rounds.
    step_s: The seconds c of a step that sends nothing, one for each block of
      measurements.
    extra_s: The seconds x that the method adds to a step here, by encoding and
      decoding, and by sending hidden messages if they were sent; as blocks.
    round_bytes: The bytes that a worker sends in a round.
    round_messages: The consecutive messages in which it sends them.
    hidden_steps: The steps d under which they are sent.
    send_ratio: The seconds that they took in those that the link gives them; 1
      (default) if they were not sent.
  """

  interval: int
  step_s: Sequence[float]
  extra_s: Sequence[float]
  round_bytes: float
  round_messages: int
  hidden_steps: int
  send_ratio: float = 1.0

  def send_s(self, link: cluster.Link) -> float:
    """Returns the seconds s of a round's messages on a link."""
    return self.send_ratio * link.send_s(self.round_bytes, self.round_messages)


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Advice(signatures.Explained):
  r"""The predicted times of methods for one model, machine and link.

  The mean step of a round of H steps takes

  .. math:: t = c + x + \tfrac{1}{H} \max(0, s - d \, c)

  where s are the seconds of a round's messages (`MethodCosts.send_s`), and c
  and x are those of the slowest machine.

  Attributes:
    costs: The costs of each method; others are compared with the first one.
    link: The link of each worker.
    slowdowns: The seconds of machines in those of this one, as of which all
      others are; 1 by default.
  """

  costs: Mapping[str, MethodCosts]
  link: cluster.Link
  slowdowns: Sequence[signatures.PositiveFloat] = (1.0,)

  def __post_init__(self) -> None:
    for own in self.costs.values():
      checks.check_continuous("interval", own.interval, low=1.0)
      for name, low in (("step_s", 0.0), ("extra_s", -math.inf)):
        for x in checks.check_list(name, getattr(own, name), "seconds"):
          checks.check_number(name, x, low=low, open_low=True)
      for name in own._fields[3:]:
        checks.check_number(name, getattr(own, name))
    blocks = {len(x) for own in self.costs.values() for x in own[1:3]}
    if len(blocks) > 1 or 0 in blocks:
      raise ValueError(
        "`costs` must have equally many blocks, one or more, in all `step_s` "
        f"and `extra_s`, got {sorted(blocks)}."
      )

  @property
  def slowdown(self) -> float:
    """The seconds of the slowest machine in those of this one."""
    return max([1.0, *self.slowdowns])

  @property
  def base(self) -> str:
    """The method with which others are compared."""
    return next(iter(self.costs))

  @property
  def step_s(self) -> float:
    """The seconds of a step without any communication."""
    return self.slowdown * statistics.median(self.costs[self.base].step_s)

  def exposed_s(self, name: str, link: cluster.Link | None = None) -> float:
    """Returns the seconds for which a mean step waits for messages."""
    own, link = self.costs[name], link or self.link
    left_s = own.send_s(link) - own.hidden_steps * self.step_s
    return max(0.0, left_s) / own.interval

  def delay_steps(self, name: str) -> int:
    """Returns by how many steps a mean must be late to hide its messages.

    At least 1, and at most a third of a round: a later one may be unstable.
    """
    own = self.costs[name]
    hiding = math.ceil(min(own.send_s(self.link) / self.step_s, own.interval))
    return max(1, min(hiding, own.interval // 3))

  def seconds(
    self, name: str, link: cluster.Link | None = None
  ) -> tuple[float, float, float]:
    """Returns a mean step's seconds: the 5 % quantile, median and 95 % one.

    They have the profile's spread, and 7 % that the equation leaves out.
    """
    low, middle, high = np.quantile(self._blocks(name, link), (0.05, 0.5, 0.95))
    return low * (1 - _LEFT_OUT), middle, high * (1 + _LEFT_OUT)

  def _blocks(self, name: str, link: cluster.Link | None = None) -> Any:
    own = self.costs[name]
    computed = np.array(own.step_s) + np.maximum(0.0, own.extra_s)
    return self.slowdown * computed + self.exposed_s(name, link)

  def pays(self, name: str) -> bool:
    """Returns whether a method's step is shorter than the base's.

    Within the spread of their differences in each block it does not pay.
    """
    saved = self._blocks(self.base) - self._blocks(name)
    return bool(np.quantile(saved, 0.05) > 0)

  @property
  def best(self) -> str:
    """The method with the shortest step; the base unless another one pays."""
    paying = [name for name in self.costs if self.pays(name)]
    return min(paying or [self.base], key=lambda name: self.seconds(name)[1])

  def pays_below(self, name: str) -> float | None:
    """Returns the bandwidth below which a method's step is the shorter one.

    Returns:
      Bits a second with the latency of the link; infinity if it pays on every
      link, and None if on none.
    """

    def costs(link: cluster.Link) -> bool:
      return self.seconds(name, link)[1] >= self.seconds(self.base, link)[1]

    rate = self._first(costs)
    return None if rate == 0 else math.inf if rate is None else rate

  def rate_for(self, name: str, utilization: float) -> float | None:
    """Returns the lowest bandwidth at which a method reaches a utilization.

    Args:
      name: The method's name.
      utilization: The part of a mean step in which the model's own step is
        computed, in (0, 1].

    Returns:
      Bits a second with the latency of the link; 0 if it is reached on every
      link, and None if on none.
    """
    checks.check_number("utilization", utilization, high=1, open_low=True)
    aim_s = self.step_s / utilization
    return self._first(lambda link: self.seconds(name, link)[1] <= aim_s)

  def _first(self, holds: Callable[[cluster.Link], bool]) -> float | None:
    """Returns the lowest rate at which something holds that holds above it."""

    def at(log_rate: float) -> bool:
      rate = math.exp(log_rate)
      return holds(dataclasses.replace(self.link, bandwidth_bits_per_s=rate))

    low, high = _SLOWEST, _FASTEST
    if at(low) or not at(high):
      return 0.0 if at(low) else None
    for _ in range(40):
      middle = (low + high) / 2
      low, high = (low, middle) if at(middle) else (middle, high)
    return math.exp(high)
