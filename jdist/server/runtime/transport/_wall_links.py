"""Links of a cluster's file, on a live server's clock."""

from collections.abc import Callable
from typing import Any

from jdist import cluster
from jdist.server import _ordered_channel


class WallLinks:
  """Carries messages as long as the links of a cluster take.

  The links are `cluster.Network`'s, the same as the virtual clock's.
  """

  def __init__(self, environment: Any, machines: cluster.Cluster):
    self._server = machines.server
    self._network = cluster.Network(environment, machines.topology)
    self._channels: dict[tuple[str, str], _ordered_channel.OrderedChannel] = {}

  def connect(self, worker: str) -> None:
    """Opens a new connection: its messages do not wait for earlier ones."""
    for kind in ("push", "pull"):
      channel = _ordered_channel.OrderedChannel()
      self._channels[kind, worker] = channel

  def push(
    self, worker: str, size: int, arrive: Callable[..., Any], *arguments: Any
  ) -> None:
    """Has a function called when a worker's bytes are at the server."""
    event = self._network.send(worker, self._server, size, kind="push")
    self._channels["push", worker].send(event, arrive, *arguments)

  def pull(
    self, worker: str, size: int, arrive: Callable[..., Any], *arguments: Any
  ) -> None:
    """Has a function called when the server's bytes are at a worker.

    A task without bytes travels with the message before it.
    """
    event = None
    if size:
      event = self._network.send(self._server, worker, size, kind="pull")
    self._channels["pull", worker].send(event, arrive, *arguments)
