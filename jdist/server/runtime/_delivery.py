"""A protocol and a learner together: what every driver in real time does."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jdist.server import _driver, _messages, _protocol
from jdist.server.runtime import _engine
from jdist.storage import plain_data


class SentTask(NamedTuple):
  """A task on its way to a worker.

  Attributes:
    reply: the protocol's.
    more: the learner's part of the header.
    payload: its bytes; None where nothing is sent.
  """

  reply: _messages.Reply
  more: dict[str, Any]
  payload: np.ndarray | None


class Delivery(_driver.Driver):
  """Hands messages to a protocol, and has the learner do what it answers.

  Without clock, threads or network: a driver of real workers and a replay of
  what was recorded hand over the same messages, and get the same bits.

  Attributes:
    refused: pushes that the learner refused, by the reason.
    lost_samples: of tasks that were given out and came to nothing.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    learner: _engine.ServerLearner,
    names: Sequence[str],
    here: Iterable[str],
  ):
    """Makes one before the first message.

    Args:
      protocol: the server's.
      learner: the server's.
      names: of all workers.
      here: those that are there from the beginning.
    """
    super().__init__(protocol, names, here, _Receiver(learner))
    self._sender, self._now_s = learner, 0.0
    self.refused: collections.Counter[str] = collections.Counter()
    self.lost_samples = 0
    self._sent: list[SentTask] = []
    self._timers: list[_messages.Timer] = []

  @property
  def now_s(self) -> float:
    """The time of the last message."""
    return self._now_s

  def send(self, reply: _messages.Reply) -> None:
    """Encodes what a worker is sent."""
    self._sent.append(SentTask(reply, *self._sender.reply(reply)))

  def wait(self, timer: _messages.Timer) -> None:
    """Leaves a timer to who has a clock."""
    self._timers.append(timer)

  def accept(
    self, push: _messages.Push, more: dict[str, Any], payload: np.ndarray
  ) -> None:
    """Has the learner take a push, if its task is out.

    Raises:
      RefusedError: when it cannot be used; who drives counts it.
    """
    assignment = self.state.tasks.get(push.task)
    if assignment is None or assignment.worker != push.worker:
      return  # The protocol discards it.
    self._sender.push(push.task, more, payload)
    self.nodes[str(push.worker)].compute_s += push.compute_s

  def hand_over(
    self, now_s: float, message: _messages.Message
  ) -> tuple[list[SentTask], list[_messages.Timer]]:
    """Gives a message to the protocol.

    Returns:
      What is to be sent, and timers to be set.
    """
    self._now_s, self._sent, self._timers = now_s, [], []
    before = set(self.state.members)
    # Who joins and is a member has come back before it was missed.
    joins = isinstance(message, _messages.Join)
    leaver = message.worker if isinstance(message, _messages.Join) else None
    self.deliver(message)
    if not joins:
      gone = before - set(self.state.members)
      leaver = next(iter(gone), None)
    if leaver is not None:
      self._sender.leave(leaver)
    return self._sent, self._timers

  def _forget(self, number: int) -> None:
    task = self._tasks.get(number)
    if task is not None:
      self.lost_samples += task.samples
    super()._forget(number)

  def summary(self) -> dict[str, Any]:
    """Returns the run in figures, of wall seconds."""
    found = super().summary()
    found["wall_s"] = found.pop("virtual_s")
    return found | {
      "refused": dict(self.refused),
      "lost_samples": self.lost_samples,
      "nodes": {x: dataclasses.asdict(y) for x, y in self.nodes.items()},
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


class _Receiver:
  """A server's learner as drivers know learners: replies are sent apart."""

  def __init__(self, learner: _engine.ServerLearner):
    self.apply, self.discard = learner.apply, learner.discard

  def pull(self, reply: _messages.Reply) -> None:
    """Does nothing: `Delivery.send` encodes the reply."""
