"""A protocol and a learner together, without clock, threads or network."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist.server import _driver, _messages, _protocol
from jdist.server.gradients import _gradient_messages, _learner
from jdist.storage import plain_data


class SentTask(NamedTuple):
  """A task on its way to a worker, with the learner's part of its message."""

  reply: _messages.Reply
  more: dict[str, Any]
  payload: np.ndarray | None


class Delivery(_driver.Driver):
  """Hands messages to a protocol, and keeps what its actions send.

  It has no clock, threads or network: the server of real workers and a replay
  of its recording hand over the same messages, and get the same bits.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    learner: _learner.ServerLearner,
    names: Sequence[str],
    here: Iterable[str],
  ):
    """Makes one before the first message, as a `Driver`."""
    super().__init__(protocol, names, here, learner)
    self._last_payload: tuple[Any, Any] = (None, None)
    self._sent: list[SentTask] = []
    self._timers: list[_messages.Timer] = []

  def send(
    self, reply: _messages.Reply, more: dict[str, Any], payload: Any
  ) -> None:
    """Keeps what a worker is to be sent."""
    # Not sent here: a replay has no workers, and a server first records it.
    if payload is not None:
      if self._last_payload[0] is not payload:
        # All workers of a barrier are sent the same object: one copy for all.
        found = _gradient_messages.bytes_of(payload)
        self._last_payload = payload, found
      payload = self._last_payload[1]
    self._sent.append(SentTask(reply, more, payload))

  def wait(self, timer: _messages.Timer) -> None:
    """Keeps a timer for the caller, which has a clock."""
    self._timers.append(timer)

  def take_sent(self) -> tuple[list[SentTask], list[_messages.Timer]]:
    """Returns tasks to send and timers to set since the last call."""
    found = self._sent, self._timers
    self._sent, self._timers = [], []
    return found

  def summary(self) -> dict[str, Any]:
    """Returns the run in figures, of wall seconds."""
    found = super().summary()
    found["wall_s"] = found.pop("virtual_s")
    return found | {
      "nodes": {x: dataclasses.asdict(y) for x, y in self.nodes.items()}
    }

  def save(self) -> dict[str, Any]:
    """Returns the protocol's state and all counts, as JSON can hold them."""
    return {
      name: plain_data.to_plain(getattr(self, name)) for name in self._kinds()
    }

  def load(self, plain: Any) -> None:
    """Restores what `save` returned.

    Raises:
      PlainDataError: when it is not of this protocol's types.
    """
    kinds = self._kinds()
    if not isinstance(plain, dict) or plain.keys() != kinds.keys():
      raise plain_data.PlainDataError(
        f"`driver` must be an object of {', '.join(kinds)}, and is not."
      )
    # All are built before one is set, so that a refusal changes nothing.
    found = {
      name: plain_data.from_plain(plain[name], kind, name)
      for name, kind in kinds.items()
    }
    for name, value in found.items():
      setattr(self, name, value)

  def _kinds(self) -> dict[str, Any]:
    """Returns the attributes that a checkpoint keeps, with their types."""
    return {"state": type(self.state)} | _KINDS


_KINDS: dict[str, Any] = {
  "nodes": dict[str, _driver.NodeTotals],
  "staleness": collections.Counter[int],
  "refused": collections.Counter[str],
  "lost_samples": int,
  "applied_samples": int,
  "pushed_bytes": float,
  "pulled_bytes": float,
  "_tasks": dict[int, _driver.TaskGiven],
}
