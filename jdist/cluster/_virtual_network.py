"""A network on a virtual clock, whose messages share its links."""

import heapq
from collections.abc import Callable
from typing import Any, Literal

from jdist import signatures
from jdist.cluster import _topology, _trace

# Relative rounding errors of counted bytes, and of the clock.
_ROUNDING = 1e-9
_CLOCK_ROUNDING = 1e-15


class _FirstCome:
  """One direction of a link that carries one message after the other."""

  def __init__(self, link: _topology.Link):
    self._bytes_per_s = link.bandwidth_bits_per_s / 8
    self._free_s = 0.0

  def carry_s(self, now_s: float, num_bytes: float) -> float:
    """Takes a message and returns the time at which it has passed."""
    start = max(now_s, self._free_s)
    self._free_s = start + num_bytes / self._bytes_per_s
    return self._free_s


class _Fair:
  """One direction of a link that all messages on it share equally.

  A single message needs no event: the time at which it has passed is known at
  once.  Several are kept in a heap.  Processor sharing gives the same number of
  bytes to each of them, so that one count suffices: a message has passed when
  the count has grown by its own bytes.  A message costs one push and one pop of
  the heap, however many share the link.
  """

  def __init__(self, link: _topology.Link, label: str, environment: Any):
    self.label = label
    self._bytes_per_s = link.bandwidth_bits_per_s / 8
    self._environment = environment
    # The message that is alone on the link, with its beginning, end and bytes.
    self._alone: _Sharing | None = None
    self._begin_s, self._end_s, self._bytes = 0.0, 0.0, 0.0
    # Bytes that each message of the heap has been given until `_at_s`.
    self._given, self._at_s = 0.0, 0.0
    # The count breaks ties in the order of arrival, which keeps runs
    # deterministic; messages have no order.
    self._heap: list[tuple[float, int, _Sharing]] = []
    self._count = 0
    self._wake_s: float | None = None

  def carry(self, message: "_Sharing", num_bytes: float, now_s: float) -> None:
    """Takes a message, and notifies it when it has passed."""
    heap, alone = self._heap, self._alone
    if heap:
      passed = (now_s - self._at_s) * self._bytes_per_s
      self._given += passed / len(heap)
    # Rounding may put the clock just before the end of a message that has
    # already arrived, hence the third condition.
    elif alone is None or self._end_s <= now_s or alone.has_arrived:
      self._alone, self._bytes, self._begin_s = message, num_bytes, now_s
      self._end_s = end = now_s + num_bytes / self._bytes_per_s
      if end > message.last_s:
        message.last_s = end
      if message.ends_s is not None:
        message.ends_s[self] = end
      return
    else:  # The link's only message becomes the first of two.
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
    # SimPy cannot cancel an event.  One that is armed for an earlier time stays
    # valid, and arms the next one.
    if self._wake_s is None or at < self._wake_s:
      self._wake_s = at
      # The event's value is the time for which it was armed; a closure for each
      # event would cost more.
      self._environment.timeout(after, at).callbacks.append(self._wake)

  def _wake(self, event: Any) -> None:
    if event._value != self._wake_s:
      return  # An event for an earlier time has replaced this one.
    self._wake_s = None
    heap, now = self._heap, self._environment.now
    self._given += (now - self._at_s) * self._bytes_per_s / len(heap)
    self._at_s = now
    # A rest below the clock's resolution would be scheduled for the present
    # time again and again.
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
  """A message in transit over fairly shared links.

  Its arrival is an event that is scheduled once the end on all links is known,
  and that becomes void when another message joins on a link.
  """

  # Runs of thousands of machines create millions of these.
  __slots__ = (
    "arrival", "due_s", "ends_s", "environment", "has_arrived", "last_s",
    "latency_s", "note", "waits",
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
    # Known ends by link, which only a trace needs.
    self.ends_s: dict[_Fair, float] | None = None if note is None else {}
    self.waits = 0
    now = environment.now
    for queue in fair:
      queue.carry(self, num_bytes, now)
    if not self.waits:
      self._schedule(now)

  def share(self, queue: _Fair) -> None:
    """Marks the message's end on a link as unknown."""
    self.waits += 1
    self.due_s = None
    if self.ends_s is not None:
      self.ends_s.pop(queue, None)

  def carried(self, queue: _Fair) -> None:
    """Notes that the message has passed a link; after the last it arrives."""
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
    # Another message may have joined since, which moves the end.  Each schedule
    # makes a new float, so identity distinguishes even equal times.
    if event._value is not self.due_s:
      return
    if self.note is not None and self.ends_s is not None:
      for queue, end_s in self.ends_s.items():
        self.note(queue.label, end_s)
    self.has_arrived = True
    # Succeeding the arrival would schedule one more event for this very time;
    # its callbacks run here instead.
    arrival = self.arrival
    arrival._ok, arrival._value = True, None
    callbacks, arrival.callbacks = arrival.callbacks, None
    for callback in callbacks:
      callback(arrival)


# The latency of a route, and its links by the way in which they are shared.
_Way = tuple[float, list[tuple[str, _FirstCome]], list[_Fair]]


@signatures.explained
class Network:
  """Carries messages over a topology on SimPy's clock.

  A message flows over all links of its route at once.  It arrives when it has
  passed the slowest of them and the latencies have elapsed; on each link it
  waits for other messages, or shares the bandwidth with them.

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
    sharing: Literal["first_come", "fair"] = "fair",
  ):
    """Makes a network on SimPy's clock; without links messages take no time.

    Links are shared as they say themselves, or else by `sharing`.
    """
    self._sharing = sharing
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
    """Sends a message and returns SimPy's event of its arrival.

    The trace shows it under `name`, in the colour of its `kind`.
    """
    environment, trace = self._environment, self._trace
    if self._topology is None:
      return environment.timeout(0.0)
    latency, first_come, fair = self._way(source, target)
    # On first-come links the end is known now; only shared links need events.
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
        if (link.sharing or self._sharing) == "fair":
          fair.append(
            self._fair.setdefault(hop, _Fair(link, label, self._environment))
          )
        else:
          queue = self._first_come.setdefault(hop, _FirstCome(link))
          first_come.append((label, queue))
      way = self._ways[source, target] = (latency, first_come, fair)
    return way
