"""A network on a virtual clock: how long messages take beside each other."""

import functools
import heapq
from typing import Any

from jdist.cluster import _links, _topology, _trace

# What rounding may leave of a message: of its bytes, and of the clock.
_ROUNDING = 1e-9
_CLOCK_ROUNDING = 1e-15


class _FirstCome:
  """One direction of a link on which messages follow one after the other."""

  def __init__(self, link: _links.Link):
    self._bytes_per_s = link.bandwidth_bits_per_s / 8
    self._free_s = 0.0

  def carry_s(self, now_s: float, num_bytes: float) -> float:
    """Takes a message and returns when it will have been carried."""
    start = max(now_s, self._free_s)
    self._free_s = start + num_bytes / self._bytes_per_s
    return self._free_s


class _Fair:
  """One direction of a link that all messages on it share equally.

  Counts the bytes that each message on the link has been given since the link
  was last empty, which are alike for all; a message is through when they reach
  what they were at its beginning plus its own.  A message costs a push and a
  pop of a heap, however many there are.
  """

  def __init__(self, link: _links.Link, environment: Any):
    self._bytes_per_s = link.bandwidth_bits_per_s / 8
    self._environment = environment
    self._given, self._at_s = 0.0, 0.0
    self._heap: list[tuple[float, int, Any]] = []
    self._count = 0
    self._wake_s: float | None = None

  def carry(self, num_bytes: float, done: Any) -> None:
    """Takes a message; calls `done()` when it has been carried."""
    heap, now = self._heap, self._environment.now
    if heap:
      passed = (now - self._at_s) * self._bytes_per_s
      self._given += passed / len(heap)
    self._at_s = now
    heapq.heappush(heap, (self._given + num_bytes, self._count, done))
    self._count += 1
    self._arm()

  def _arm(self) -> None:
    heap = self._heap
    left = heap[0][0] - self._given
    after = left * len(heap) / self._bytes_per_s if left > 0.0 else 0.0
    at = self._at_s + after
    # One that is armed for an earlier time arms itself again.
    if self._wake_s is None or at < self._wake_s:
      self._wake_s = at
      # The event's value says for when it was armed: no closure.
      self._environment.timeout(after, at).callbacks.append(self._wake)

  def _wake(self, event: Any) -> None:
    if event._value != self._wake_s:
      return  # An earlier one was armed later.
    self._wake_s = None
    heap, now = self._heap, self._environment.now
    self._given += (now - self._at_s) * self._bytes_per_s / len(heap)
    self._at_s = now
    # Less than the clock can tell from now would wake this for ever.
    bound = self._given * (1 + _ROUNDING) + _ROUNDING
    bound += _CLOCK_ROUNDING * now * self._bytes_per_s
    if len(heap) == 1 and heap[0][0] <= bound:
      self._given = 0.0
      heap.pop()[2]()
      return
    ready = []
    while heap and heap[0][0] <= bound:
      ready.append(heapq.heappop(heap)[2])
    if heap:
      self._arm()
    else:
      self._given = 0.0
    for done in ready:
      done()


class _Sharing:
  """A message on the way over fairly shared links."""

  __slots__ = (
    "arrival",
    "environment",
    "kind",
    "last_s",
    "latency_s",
    "name",
    "start_s",
    "trace",
    "waits",
  )  # fmt: skip

  def __init__(
    self,
    network: "Network",
    fair: list[tuple[str, _Fair]],
    num_bytes: float,
    last_s: float,
    latency_s: float,
    name: str,
    kind: str,
  ):
    self.environment, self.trace = network._environment, network._trace
    self.arrival = self.environment.event()
    self.start_s, self.last_s = self.environment.now, last_s
    self.latency_s, self.name, self.kind = latency_s, name, kind
    self.waits = len(fair)
    for label, queue in fair:
      if self.trace is None:
        queue.carry(num_bytes, self.carried)
      else:
        queue.carry(num_bytes, functools.partial(self.carried, label))

  def carried(self, label: str | None = None) -> None:
    """Takes note that a link has carried it; the last one lets it arrive."""
    now = self.environment.now
    if self.trace is not None and label is not None:
      self.trace.add(label, self.name, self.start_s, now, self.kind)
    self.waits -= 1
    if not self.waits:
      after = max(self.last_s, now) + self.latency_s - now
      self.arrival._ok, self.arrival._value = True, None
      self.environment.schedule(self.arrival, delay=after)


class Network:
  """Carries messages over a topology on SimPy's clock.

  A message flows over all links of its way at once.  It arrives when the last
  of them has carried it, and the latencies have gone by; on each it waits for,
  or shares with, the others that are there.

  >>> import simpy
  >>> from jdist import cluster
  >>> environment = simpy.Environment()
  >>> link = cluster.Link(bandwidth_bits_per_s=8.0, sharing="fair")
  >>> links = cluster.star({"a": link, "b": link}, "switch")
  >>> network = Network(environment, links)
  >>> for num_bytes in (1, 2):
  ...   arrival = network.send("a", "b", num_bytes)
  ...   arrival.callbacks.append(lambda _: print(environment.now))
  >>> environment.run()
  2.0
  3.0
  """

  def __init__(
    self,
    environment: Any,
    topology: _topology.Topology | None,
    trace: _trace.Trace | None = None,
  ):
    """Makes a network in which nothing is under way.

    Args:
      environment: a `simpy.Environment`.
      topology: the links; messages take no time if None.
      trace: where to note when each direction of a link was busy.
    """
    self._environment, self._topology = environment, topology
    self._trace = trace
    self._queues: dict[_topology.Hop, _FirstCome | _Fair] = {}
    self._ways: dict[
      _topology.Hop, tuple[float, list[tuple[str, _FirstCome | _Fair]]]
    ] = {}

  def send(
    self,
    source: str,
    target: str,
    num_bytes: float,
    *,
    name: str = "message",
    kind: str = "communicate",
  ) -> Any:
    """Sends a message.

    Args:
      source: from whom.
      target: to whom.
      num_bytes: its size.
      name: in the trace.
      kind: in the trace.

    Returns:
      An event of SimPy that happens when it arrives.

    Raises:
      ValueError: when there is no way.
    """
    environment, trace = self._environment, self._trace
    if self._topology is None:
      return environment.timeout(0.0)
    latency, queues = self._way(source, target)
    now = environment.now
    last, fair = now, []
    for label, queue in queues:
      if isinstance(queue, _Fair):
        fair.append((label, queue))
        continue
      until = queue.carry_s(now, num_bytes)
      last = max(last, until)
      if trace is not None:
        busy = num_bytes / queue._bytes_per_s
        trace.add(label, name, until - busy, until, kind)
    if not fair:
      return environment.timeout(last + latency - now)
    return _Sharing(self, fair, num_bytes, last, latency, name, kind).arrival

  def _way(
    self, source: str, target: str
  ) -> tuple[float, list[tuple[str, _FirstCome | _Fair]]]:
    way = self._ways.get((source, target))
    if way is None:
      assert self._topology is not None
      latency, queues = 0.0, []
      for hop in self._topology.route(source, target):
        link = self._topology.link(*hop)
        latency += link.latency_s
        if hop not in self._queues:
          self._queues[hop] = (
            _Fair(link, self._environment)
            if link.sharing == "fair"
            else _FirstCome(link)
          )
        queues.append(("->".join(hop), self._queues[hop]))
      way = self._ways[source, target] = (latency, queues)
    return way
