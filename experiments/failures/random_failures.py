"""Random failures: a machine is up and down for exponential times."""

import dataclasses
import random

from jdist import checks, cluster


@dataclasses.dataclass(frozen=True)
class Failures:
  r"""Failure model: each machine fails and restarts independently.

  Up times and down times alternate and are exponential with means u and d.  The
  fraction of time in which a machine is down is

  .. math:: \frac{d}{u + d}.

  After an outage a machine restarts for a constant time before it asks for
  work; this counts as up time.  A failure during a restart begins the restart
  anew.  The process is stationary: at second 0 a machine is down with the same
  probability as later.

  Attributes:
    up_s: Mean seconds u from a return to the next failure.
    down_s: Mean seconds d of an outage.
    restart_s: Seconds of a restart.
    seed: Seed of all times; each machine draws from a stream of its own name.

  Raises:
    ValueError: when a time is out of its range.

  References:
    Exponential times to failure are the usual law of hardware without memory
    (Barlow and Proschan, Mathematical Theory of Reliability, 1965).

  >>> law = Failures(up_s=80.0, down_s=20.0, restart_s=1.0)
  >>> law.down_fraction
  0.2
  >>> machines = law.apply(cluster.workers([1.0]), until_s=300.0)
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
    """Returns the model in which machines are down for a fraction of the time.

    Args:
      fraction: The fraction d / (u + d), in (0, 1).
      cycle_s: Mean seconds u + d from one failure to the next.
      restart_s: Seconds of a restart.
      seed: Seed of all times.
    """
    if not 0 < fraction < 1:
      raise ValueError(f"`fraction` must be in (0, 1), got {fraction}.")
    checks.check_number("cycle_s", cycle_s, open_low=True)
    return cls((1.0 - fraction) * cycle_s, fraction * cycle_s, restart_s, seed)

  @property
  def down_fraction(self) -> float:
    """The fraction of time in which a machine is down."""
    return self.down_s / (self.up_s + self.down_s)

  def down_times(
    self, name: str, until_s: float
  ) -> tuple[tuple[float, float], ...]:
    """Returns start and end of each outage, without restarts.

    Args:
      name: The machine's name.
      until_s: The end of the studied time; later failures are left out.
    """
    stream = random.Random(f"{self.seed} failures {name}")
    found: list[tuple[float, float]] = []
    now = 0.0
    # An exponential time has no memory: its rest at second 0 has the same
    # distribution as the whole.
    if stream.random() >= self.down_fraction:
      now = stream.expovariate(1.0 / self.up_s)
    while now < until_s:
      end = now + stream.expovariate(1.0 / self.down_s)
      found.append((now, end))
      now = end + stream.expovariate(1.0 / self.up_s)
    return tuple(found)

  def up_seconds(self, name: str, until_s: float) -> float:
    """Returns the seconds in which a machine is up, restarts included."""
    return until_s - sum(
      min(end, until_s) - start for start, end in self.down_times(name, until_s)
    )

  def apply(self, machines: cluster.Cluster, until_s: float) -> cluster.Cluster:
    """Returns the cluster with this model's outages in place of its own.

    Args:
      machines: The cluster.
      until_s: The time after which no machine fails.
    """
    nodes = []
    for node in machines.nodes:
      outages: list[cluster.Outage] = []
      for start, end in self.down_times(node.name, until_s):
        back = end + self.restart_s
        # A failure during a restart continues the same outage.
        if outages and start <= outages[-1].end_s:
          start = outages.pop().start_s
        outages.append(cluster.Outage(start, back))
      nodes.append(dataclasses.replace(node, outages=tuple(outages)))
    return dataclasses.replace(machines, nodes=tuple(nodes))
