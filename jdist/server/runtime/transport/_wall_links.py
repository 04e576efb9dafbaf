"""Links and timers of a cluster's file, on a clock that follows the wall's."""

import time
from collections.abc import Callable
from typing import Any

from jdist import cluster
from jdist.server import _ordered_channel


class WallLinks:
  """Carries messages as long as modelled links take, and waits for timers.

  Links are `cluster.Network`'s, the same as the virtual clock's.  What a
  message or a timer has called is called by `advance`, in its thread.

  Args:
    machines: whose links messages take; none are modelled if None.
    first_s: seconds at the start, of a resumed run.

  Attributes:
    first_s: seconds at the start.

  Raises:
    ImportError: when SimPy is not installed.
  """

  def __init__(self, machines: cluster.Cluster | None, first_s: float = 0.0):
    try:
      import simpy
    except ImportError:
      raise ImportError(
        "Links in real time need SimPy: `pip install 'jdist[ray]'`."
      ) from None
    self.first_s = first_s
    self._began_s: float | None = None
    self._environment = simpy.Environment(initial_time=first_s)
    self._server = "" if machines is None else machines.server
    topology = None if machines is None else machines.topology
    self._network = cluster.Network(self._environment, topology)
    self._has_links = topology is not None
    self._channels: dict[tuple[str, str], _ordered_channel.OrderedChannel] = {}

  def begin(self) -> None:
    """Starts the clock."""
    self._began_s = time.monotonic()

  @property
  def began(self) -> bool:
    """Returns whether the clock goes."""
    return self._began_s is not None

  @property
  def wall_s(self) -> float:
    """Wall seconds since the start, of a resumed run from its mark on."""
    return self._at_s(time.monotonic())

  @property
  def now_s(self) -> float:
    """The time until which everything has been called."""
    return float(self._environment.now)

  @property
  def wait_s(self) -> float:
    """Seconds until there is something to call."""
    return max(self._environment.peek() - self.wall_s, 0.0)

  def _at_s(self, monotonic_s: float) -> float:
    if self._began_s is None:
      return self.first_s
    return self.first_s + monotonic_s - self._began_s

  def advance(self, monotonic_s: float | None = None) -> None:
    """Calls all that was due until then, or now.

    Step by step: what is called may advance further, and `run(until=...)`
    within another leaves events behind that stop all later ones.
    """
    now_s = self._at_s(time.monotonic() if monotonic_s is None else monotonic_s)
    environment = self._environment
    if now_s > environment.now:
      environment.timeout(now_s - environment.now)
      while environment.peek() <= now_s:
        environment.step()

  def after(
    self, seconds: float, function: Callable[..., Any], *arguments: Any
  ) -> None:
    """Has a function called once so many seconds have gone by."""
    timeout = self._environment.timeout(max(seconds, 0.0))
    timeout.callbacks.append(lambda _: function(*arguments))

  def connect(self, worker: str) -> None:
    """Opens a new connection: its messages do not wait for earlier ones."""
    for kind in ("push", "pull"):
      channel = _ordered_channel.OrderedChannel()
      self._channels[kind, worker] = channel

  def push(
    self, worker: str, size: int, arrive: Callable[..., Any], *arguments: Any
  ) -> None:
    """Has a function called when a worker's bytes are at the server."""
    event = None
    if self._has_links:
      event = self._network.send(worker, self._server, size, kind="push")
    self._channels["push", worker].send(event, arrive, *arguments)

  def pull(
    self, worker: str, size: int, arrive: Callable[..., Any], *arguments: Any
  ) -> None:
    """Has a function called when the server's bytes are at a worker."""
    event = None
    if size and self._has_links:
      # The transfer starts now, not when the message that caused it was sent.
      self.advance()
      event = self._network.send(self._server, worker, size, kind="pull")
    self._channels["pull", worker].send(event, arrive, *arguments)
