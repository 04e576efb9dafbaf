"""Connections of a server and its workers over modelled links, in order."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jdist import cluster


class _Channel:
  """One direction between a worker and its server, as a connection has it.

  A modelled network may carry a message without bytes, or a small one, faster
  than an earlier large one.  A task must not overtake the one before it: its
  parameters may be what that one brings, or a difference from them.
  """

  __slots__ = ("_under_way",)

  def __init__(self) -> None:
    self._under_way: collections.deque[list[Any]] = collections.deque()

  def send(
    self, carried: Any, deliver: Callable[..., Any], *arguments: Any
  ) -> None:
    """Calls `deliver` once a message and all earlier ones have been carried.

    `carried` is the network's event; None if there is nothing to carry.
    """
    under_way = self._under_way
    if carried is None and not under_way:
      deliver(*arguments)
      return
    # The first entry says that it has been carried. The clock makes millions of
    # messages, so they are lists.
    message = [carried is None, deliver, arguments]
    under_way.append(message)

    def arrive(event: Any) -> None:
      del event
      message[0] = True
      while under_way and under_way[0][0]:
        _, deliver, arguments = under_way.popleft()
        deliver(*arguments)

    if carried is not None:
      carried.callbacks.append(arrive)


class Links:
  """Carries messages as long as a cluster's links take, on SimPy's clock."""

  def __init__(
    self,
    environment: Any,
    machines: cluster.Cluster,
    trace: cluster.Trace | None = None,
  ):
    self._server, self._traces = machines.server, trace is not None
    self._environment = environment
    self._network = cluster.Network(environment, machines.topology, trace)
    self._channels: dict[tuple[str, str], _Channel] = {}
    for name in machines.names:
      self.connect(name)

  def connect(self, worker: str) -> None:
    """Opens a new connection: its messages do not wait for earlier ones."""
    for kind in ("push", "pull"):
      self._channels[kind, worker] = _Channel()

  def send(
    self,
    kind: Literal["push", "pull"],
    worker: str,
    num_bytes: float | None,
    deliver: Callable[..., Any],
    *arguments: Any,
    task: int = 0,
    parts: Sequence[tuple[str, float]] | None = None,
  ) -> None:
    """Has a function called when bytes have been carried.

    A message without bytes (None) travels with the one before it.  `parts` are
    bytes from other workers, in place of the server's.
    """
    carried = None
    if num_bytes is not None:
      source, target = self._server, worker
      if kind == "push":
        source, target = target, source
      name = f"{kind} {task}" if self._traces else kind
      sent = [
        self._network.send(x, target, size, name=name, kind=kind)
        for x, size in ([(source, num_bytes)] if parts is None else parts)
      ]
      carried = sent[0] if parts is None else self._environment.all_of(sent)
    self._channels[kind, worker].send(carried, deliver, *arguments)
