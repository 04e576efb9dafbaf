"""Routes between machines, and the seconds for which bytes occupy them."""

import collections
import functools
from collections.abc import Iterable, Sequence

from jdist import cluster

_Hop = tuple[str, str]


class Routes:
  """The seconds that messages between stages take on a cluster's links.

  Links are full duplex: between two stages outputs flow one way, and gradients
  of the same size the other way.
  """

  def __init__(self, machines: cluster.Cluster):
    self._topology = machines.topology
    # The searches ask for the same pairs of machines many thousand times.
    self.hops = functools.cache(self._hops)
    # The seconds a byte of the slowest link on a route.
    self.byte_s = functools.cache(
      lambda *ends: max((s for _, s, _ in self.hops(*ends)), default=0.0)
    )
    # The seconds that a message takes in addition to those of its bytes.
    self.latency_s = functools.cache(
      lambda *ends: sum(s for _, _, s in self.hops(*ends))
    )
    self.shared_byte_s = functools.cache(self._shared_byte_s)

  def _hops(
    self, one: str, other: str
  ) -> tuple[tuple[_Hop, float, float], ...]:
    """Returns each hop of a route with its seconds a byte and its latency."""
    if self._topology is None or one == other:
      return ()
    ways = self._topology.route(one, other)
    links = [(hop, self._topology.link(*hop)) for hop in ways]
    return tuple((x, 8 / y.bandwidth_bits_per_s, y.latency_s) for x, y in links)

  def _shared_byte_s(self, before: str, here: str, after: str) -> float:
    """Returns the seconds a byte of the slowest link that two cuts share."""
    # A machine receives outputs from the stage before and gradients from the
    # stage after by its own link, and sends both by it in return.
    after_hops = {hop for hop, _, _ in self.hops(after, here)}
    back_hops = {hop for hop, _, _ in self.hops(here, after)}
    return max(
      [s for hop, s, _ in self.hops(before, here) if hop in after_hops]
      + [s for hop, s, _ in self.hops(here, before) if hop in back_hops],
      default=0.0,
    )

  def busiest_s(
    self, nodes: Sequence[str], cut_bytes: Iterable[float]
  ) -> float:
    """Returns the seconds for which a micro-batch occupies the busiest link."""
    loads: dict[_Hop, float] = collections.defaultdict(float)
    for one, other, num_bytes in zip(nodes, nodes[1:], cut_bytes, strict=False):
      for way in ((one, other), (other, one)):
        for hop, seconds, _ in self.hops(*way):
          loads[hop] += seconds * num_bytes
    return max(loads.values(), default=0.0)
