"""Random failures: a machine is up and down for exponential times."""

import dataclasses
import random

from jdist import checks
from jdist.cluster import _cluster, _node


@dataclasses.dataclass(frozen=True)
class Failures:
  r"""A law by which machines fail, each for itself, and come back.

  A machine is up for a time of mean u and down for one of mean d, in turn, both
  exponential, so that it is down for

  .. math:: \frac{d}{u + d}

  of the time.  Once it is up again it restarts for a constant time before it
  asks for work; it counts as up meanwhile.  A machine that fails as it restarts
  begins that anew.  At second 0 it is down with this probability, too: the law
  is as far from its beginning as it will ever be.

  Attributes:
    up_s: u, mean seconds from a return to the next failure.
    down_s: d, mean seconds of an outage.
    restart_s: seconds of a restart.
    seed: of the times; each machine has a stream of its own, by its name.

  Raises:
    ValueError: when a time is out of its range.

  References:
    Exponential times to failure are the usual law of hardware without memory
    (Barlow and Proschan, Mathematical Theory of Reliability, 1965).

  >>> law = Failures(up_s=80.0, down_s=20.0, restart_s=1.0)
  >>> law.down_fraction
  0.2
  >>> machines = law.apply(_cluster.workers([1.0]), until_s=300.0)
  >>> [f"{x.start_s:.0f} to {x.end_s:.0f}" for x in machines.nodes[0].outages]
  ['6 to 12', '129 to 132', '158 to 163', '265 to 273']
  >>> round(law.up_seconds("worker0", 300.0))
  282
  """

  up_s: float
  down_s: float
  restart_s: float = 0.0
  seed: int = 0

  def __post_init__(self) -> None:
    checks.check_number("up_s", self.up_s, open_low=True)
    checks.check_number("down_s", self.down_s, open_low=True)
    checks.check_number("restart_s", self.restart_s)
    checks.check_seed(self.seed)

  @classmethod
  def of(
    cls,
    fraction: float,
    cycle_s: float,
    *,
    restart_s: float = 0.0,
    seed: int = 0,
  ) -> "Failures":
    """Returns the law by which machines are down for a part of the time.

    Args:
      fraction: d / (u + d), in (0, 1).
      cycle_s: u + d, mean seconds from a failure to the next.
      restart_s: as of `Failures`.
      seed: as of `Failures`.
    """
    if not 0 < fraction < 1:
      raise ValueError(f"`fraction` must be in (0, 1), got {fraction}.")
    checks.check_number("cycle_s", cycle_s, open_low=True)
    return cls((1.0 - fraction) * cycle_s, fraction * cycle_s, restart_s, seed)

  @property
  def down_fraction(self) -> float:
    """The part of the time in which a machine is down."""
    return self.down_s / (self.up_s + self.down_s)

  def down_times(
    self, name: str, until_s: float
  ) -> tuple[tuple[float, float], ...]:
    """Returns when a machine is down, from and to, without its restarts.

    Args:
      name: of the machine.
      until_s: failures after it are left out.
    """
    stream = random.Random(f"{self.seed} failures {name}")
    found: list[tuple[float, float]] = []
    now = 0.0
    if stream.random() >= self.down_fraction:
      now = stream.expovariate(1.0 / self.up_s)
    while now < until_s:
      end = now + stream.expovariate(1.0 / self.down_s)
      found.append((now, end))
      now = end + stream.expovariate(1.0 / self.up_s)
    return tuple(found)

  def up_seconds(self, name: str, until_s: float) -> float:
    """Returns for how long a machine is up, restarts included."""
    return until_s - sum(
      min(end, until_s) - start for start, end in self.down_times(name, until_s)
    )

  def apply(
    self, machines: _cluster.Cluster, until_s: float
  ) -> _cluster.Cluster:
    """Returns the cluster with this law's outages in place of its own.

    Args:
      machines: the cluster.
      until_s: no machine fails after it.
    """
    nodes = []
    for node in machines.nodes:
      outages: list[_node.Outage] = []
      for start, end in self.down_times(node.name, until_s):
        back = end + self.restart_s
        if outages and start <= outages[-1].end_s:  # As it restarts.
          start = outages.pop().start_s
        outages.append(_node.Outage(start, back))
      nodes.append(dataclasses.replace(node, outages=tuple(outages)))
    return dataclasses.replace(machines, nodes=tuple(nodes))
