"""A network on a virtual clock: how long messages take beside each other."""

import heapq
from collections.abc import Callable
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

  A message that is alone on the link is through when its bytes are, and needs
  no event for it.  Once several are there they are in a heap: counted are the
  bytes that each message has been given since the link was last empty, which
  are alike for all, and a message is through when they reach what they were at
  its beginning plus its own.  A message costs a push and a pop of the heap,
  however many there are.
  """

  def __init__(self, link: _links.Link, label: str, environment: Any):
    self.label = label
    self._bytes_per_s = link.bandwidth_bits_per_s / 8
    self._environment = environment
    # Alone on the link: its message, from when until when, and its bytes.
    self._alone: _Sharing | None = None
    self._begin_s, self._end_s, self._bytes = 0.0, 0.0, 0.0
    self._given, self._at_s = 0.0, 0.0
    self._heap: list[tuple[float, int, _Sharing]] = []
    self._count = 0
    self._wake_s: float | None = None

  def carry(self, message: "_Sharing", num_bytes: float, now_s: float) -> None:
    """Takes a message, and notifies it when it has been carried."""
    heap, alone = self._heap, self._alone
    if heap:
      passed = (now_s - self._at_s) * self._bytes_per_s
      self._given += passed / len(heap)
    # The clock may be rounded to just before the end of one that has arrived.
    elif alone is None or self._end_s <= now_s or alone.has_arrived:
      self._alone, self._bytes, self._begin_s = message, num_bytes, now_s
      self._end_s = end = now_s + num_bytes / self._bytes_per_s
      if end > message.last_s:
        message.last_s = end
      if message.ends_s is not None:
        message.ends_s[self] = end
      return
    else:  # The first of two: what it has been given so far counts.
      self._given = (now_s - self._begin_s) * self._bytes_per_s
      heap.append((self._bytes, self._count, alone))
      alone.share(self)
      self._alone = None
      self._count += 1
    self._at_s = now_s
    heapq.heappush(heap, (self._given + num_bytes, self._count, message))
    message.share(self)
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
    ready = []
    while heap and heap[0][0] <= bound:
      ready.append(heapq.heappop(heap)[2])
    if heap:
      self._arm()
    for message in ready:
      message.carried(self)


class _Sharing:
  """A message on the way over fairly shared links.

  Its arrival is an event of its own, scheduled when all that it waits for is
  known, and void once another message joins it on a link.
  """

  __slots__ = (
    "arrival",
    "due_s",
    "ends_s",
    "environment",
    "has_arrived",
    "last_s",
    "latency_s",
    "note",
    "waits",
  )  # fmt: skip

  def __init__(
    self,
    environment: Any,
    fair: list[_Fair],
    num_bytes: float,
    last_s: float,
    latency_s: float,
    note: Callable[[str, float], None] | None,
  ):
    self.environment, self.arrival = environment, environment.event()
    self.last_s, self.latency_s, self.note = last_s, latency_s, note
    self.due_s: float | None = None
    self.has_arrived = False
    # By link, as far as it is known; of a trace only.
    self.ends_s: dict[_Fair, float] | None = None if note is None else {}
    self.waits = 0
    now = environment.now
    for queue in fair:
      queue.carry(self, num_bytes, now)
    if not self.waits:
      self._schedule(now)

  def share(self, queue: _Fair) -> None:
    """Takes note that nobody knows yet when a link will have carried it."""
    self.waits += 1
    self.due_s = None
    if self.ends_s is not None:
      self.ends_s.pop(queue, None)

  def carried(self, queue: _Fair) -> None:
    """Takes note that a link has carried it; the last one lets it arrive."""
    now = self.environment.now
    if self.note is not None:
      self.note(queue.label, now)
    self.waits -= 1
    if not self.waits:
      self._schedule(now)

  def _schedule(self, now_s: float) -> None:
    last = self.last_s if self.last_s > now_s else now_s
    self.due_s = due = last + self.latency_s
    event = self.environment.timeout(due - now_s, due)
    event.callbacks.append(self._arrive)

  def _arrive(self, event: Any) -> None:
    if event._value is not self.due_s:
      return  # Another message has joined it since.
    if self.note is not None and self.ends_s is not None:
      for queue, end_s in self.ends_s.items():
        self.note(queue.label, end_s)
    self.has_arrived = True
    # At once, as its own event would be the next of the clock.
    arrival = self.arrival
    arrival._ok, arrival._value = True, None
    callbacks, arrival.callbacks = arrival.callbacks, None
    for callback in callbacks:
      callback(arrival)


# Latency, and the links of a way by how they are shared.
_Way = tuple[float, list[tuple[str, _FirstCome]], list[_Fair]]


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
    self._first_come: dict[_topology.Hop, _FirstCome] = {}
    self._fair: dict[_topology.Hop, _Fair] = {}
    self._ways: dict[_topology.Hop, _Way] = {}

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
    latency, first_come, fair = self._way(source, target)
    last = now = environment.now
    for label, queue in first_come:
      until = queue.carry_s(now, num_bytes)
      last = max(last, until)
      if trace is not None:
        busy = num_bytes / queue._bytes_per_s
        trace.add(label, name, until - busy, until, kind)
    if not fair:
      return environment.timeout(last + latency - now)
    note = None
    if trace is not None:

      def note(label: str, end_s: float) -> None:
        trace.add(label, name, now, end_s, kind)

    return _Sharing(environment, fair, num_bytes, last, latency, note).arrival

  def _way(self, source: str, target: str) -> _Way:
    way = self._ways.get((source, target))
    if way is None:
      assert self._topology is not None
      latency = 0.0
      first_come: list[tuple[str, _FirstCome]] = []
      fair: list[_Fair] = []
      for hop in self._topology.route(source, target):
        link, label = self._topology.link(*hop), "->".join(hop)
        latency += link.latency_s
        if link.sharing == "fair":
          fair.append(
            self._fair.setdefault(hop, _Fair(link, label, self._environment))
          )
        else:
          queue = self._first_come.setdefault(hop, _FirstCome(link))
          first_come.append((label, queue))
      way = self._ways[source, target] = (latency, first_come, fair)
    return way
