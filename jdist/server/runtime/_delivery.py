"""A driver without clock, threads or network, and replays of recordings."""

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist import signatures
from jdist.server import _driver, _messages, _protocol
from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.runtime import _message_record
from jdist.storage import plain_data

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
    """Makes a driver before the first message; see `Driver`."""
    super().__init__(protocol, names, here, learner)
    self._last_payload: tuple[Any, Any] = (None, None)
    self._sent: list[SentTask] = []
    self._timers: list[_messages.Timer] = []

  def send(
    self, reply: _messages.Reply, more: dict[str, Any], payload: Any
  ) -> None:
    """Keeps a task for a worker until `take_sent`."""
    # Not sent here: a replay has no workers, and a server first records it.
    if payload is not None:
      if self._last_payload[0] is not payload:
        # All workers of a barrier are sent the same object: one copy for all.
        self._last_payload = payload, _gradient_messages.bytes_of(payload)
      payload = self._last_payload[1]
    self._sent.append(SentTask(reply, more, payload))

  def wait(self, timer: _messages.Timer) -> None:
    """Keeps a timer for the caller, which has a clock."""
    self._timers.append(timer)

  def take_sent(self) -> tuple[list[SentTask], list[_messages.Timer]]:
    """Returns tasks to send and timers to set since the last call."""
    sent, timers, self._sent, self._timers = self._sent, self._timers, [], []
    return sent, timers

  def summary(self) -> dict[str, Any]:
    """Returns statistics of the run, in wall seconds."""
    totals = super().summary()
    totals["wall_s"] = totals.pop("virtual_s")
    return totals | {
      "nodes": {x: dataclasses.asdict(y) for x, y in self.nodes.items()}
    }

  def save(self) -> dict[str, Any]:
    """Returns the protocol's state and all counts, as JSON can hold them."""
    return {
      name: plain_data.to_plain(getattr(self, name)) for name in self._kinds()
    }

  def load(self, plain: Any) -> None:
    """Restores what `save` returned."""
    kinds = self._kinds()
    if not isinstance(plain, dict) or plain.keys() != kinds.keys():
      raise plain_data.PlainDataError(
        f"`driver` must be an object of {', '.join(kinds)}, and is not."
      )
    # All are built before one is set, so that a refusal changes nothing.
    values = {
      name: plain_data.from_plain(plain[name], kind, name)
      for name, kind in kinds.items()
    }
    for name, value in values.items():
      setattr(self, name, value)

  def _kinds(self) -> dict[str, Any]:
    return {"state": type(self.state)} | _KINDS


@signatures.checked
def replay(
  path: str | pathlib.Path,
  protocol: _protocol.Protocol,
  learner: _learner.ServerLearner,
) -> Delivery:
  """Hands recorded messages to a protocol again, each at its recorded time.

  With the same protocol, a learner at the same beginning, and programs that are
  compiled by the same flags for the same machine, the server ends with the same
  bits.

  Args:
    path: Path of the recording.
    protocol: The protocol of the recorded run.
    learner: The server's learner at its beginning, or any other that takes the
      same payloads.

  Returns:
    The driver at the end, with the protocol's state and all counts.

  Raises:
    ValueError: If the file is no recording, or one of another protocol or
      learner.
  """
  delivery: Delivery | None = None
  sent: dict[int, str] = {}
  for header, payload in _message_record.read(path):
    if header["kind"] == "begin":
      delivery = Delivery(protocol, learner, header["names"], header["workers"])
      continue
    assert delivery is not None, "a recording begins with its workers"
    if header["kind"] == "sent":
      if sent.pop(header["task"], None) != header["hash"]:
        raise ValueError(
          f"`path` must be a recording of this protocol and learner: the "
          f"reply of task {header['task']} is another one."
        )
      continue
    kind = _message_record.MESSAGES[header["kind"]]
    message = plain_data.from_plain(header["message"], kind)
    if isinstance(message, _messages.Push) and header["more"] is not None:
      delivery.accept(message, header["more"], payload)
    delivery.deliver(message, header["now_s"])
    for each in delivery.take_sent()[0]:
      sent[each.reply.task] = _message_record.hash_of(each.payload)
  if delivery is None:
    raise ValueError(f"`path` must be a recording, got {path}.")
  return delivery
