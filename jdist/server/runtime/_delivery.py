"""A protocol and a learner together: what every driver in real time does."""

import collections
import io
import pickle
from typing import Any, NamedTuple

import numpy as np

from jdist.server import _driver, _messages, _protocol
from jdist.server.runtime import _engine


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


class Delivery:
  """Hands messages to a protocol, and has the learner do what it answers.

  Without clock, threads or network: a driver of real workers and a replay of
  what was recorded hand over the same messages, and get the same bits.

  Attributes:
    protocol: the server's.
    learner: the server's.
    state: the protocol's.
    nodes: what each worker did.
    staleness: gradients in updates, by their staleness.
    refused: pushes that the learner refused, by the reason.
    lost_samples: of tasks that were given out and came to nothing.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    learner: _engine.ServerLearner,
    workers: list[str],
  ):
    self.protocol, self.learner = protocol, learner
    self.state = protocol.init(workers)
    self.nodes = {name: _driver.NodeTotals() for name in workers}
    self.staleness: collections.Counter[int] = collections.Counter()
    self.refused: collections.Counter[str] = collections.Counter()
    self.lost_samples = 0
    # Worker, samples and when it was given, of tasks that are out or here.
    self.tasks: dict[int, tuple[str, int, float]] = {}

  def accept(
    self, push: _messages.Push, more: dict[str, Any], payload: np.ndarray
  ) -> None:
    """Has the learner take a push, if its task is out.

    Raises:
      RefusedError: when it cannot be used; it counts.
    """
    assignment = self.state.tasks.get(push.task)
    if assignment is None or assignment.worker != push.worker:
      return  # The protocol discards it.
    try:
      self.learner.push(push.task, more, payload)
    except _engine.RefusedError as error:
      self.refused[error.reason] += 1
      raise

  def deliver(
    self, now_s: float, message: _messages.Message
  ) -> tuple[list[SentTask], list[_messages.Timer]]:
    """Hands a message over.

    Returns:
      What is to be sent, and timers to be set.
    """
    gone, leaver = self._leaving(message)
    if isinstance(message, _messages.Push):
      self._note(now_s, message)
    sent: list[SentTask] = []
    timers: list[_messages.Timer] = []
    actions = self.protocol.receive(self.state, now_s, message)
    if leaver is not None:
      self.learner.leave(leaver)
    for action in actions:
      if isinstance(action, _messages.Reply):
        sent.append(self._reply(now_s, action))
      elif isinstance(action, _messages.Apply):
        self._apply(action)
      elif isinstance(action, _messages.Discard):
        found = self.tasks.get(action.task)
        if found is not None and action.reason not in ("repeated", "left"):
          self.nodes[found[0]].discarded += 1
          self._forget(action.task)
      else:
        timers.append(action)
    for task in gone:
      self._forget(task)
    return sent, timers

  def _leaving(
    self, message: _messages.Message
  ) -> tuple[list[int], str | None]:
    """Returns the tasks that go with a worker who leaves, and its name."""
    if isinstance(message, _messages.Push | _messages.Pull):
      return [], None
    worker: Any
    if isinstance(message, _messages.Expired):
      assignment = self.state.tasks.get(message.task)
      worker = None if assignment is None else assignment.worker
    else:
      worker = message.worker
    member = self.state.members.get(worker)
    if member is None:
      return [], None
    return list(member.tasks), str(worker)

  def _note(self, now_s: float, push: _messages.Push) -> None:
    assignment = self.state.tasks.get(push.task)
    if assignment is not None and assignment.worker == push.worker:
      node = self.nodes[str(push.worker)]
      node.compute_s += push.compute_s
      node.iteration_s = now_s - self.tasks[push.task][2]

  def _reply(self, now_s: float, reply: _messages.Reply) -> SentTask:
    self.tasks[reply.task] = (str(reply.worker), reply.samples, now_s)
    return SentTask(reply, *self.learner.reply(reply))

  def _apply(self, update: _messages.Apply) -> None:
    self.learner.apply(update)
    for number, stale in zip(update.tasks, update.staleness, strict=True):
      worker, samples, _ = self.tasks.pop(number)
      node = self.nodes[worker]
      node.updates += 1
      node.samples += samples
      node.staleness += stale
      self.staleness[stale] += 1

  def _forget(self, number: int) -> None:
    found = self.tasks.pop(number, None)
    if found is not None:
      self.lost_samples += found[1]
      self.learner.discard(number)

  @property
  def applied_samples(self) -> int:
    """Samples whose gradients are in updates."""
    return sum(node.samples for node in self.nodes.values())

  def save(self) -> bytes:
    """Returns the protocol's state and all counts."""
    kept = {x: getattr(self, x) for x in _KEPT}
    return pickle.dumps(kept, protocol=5)

  def load(self, data: bytes) -> None:
    """Takes over what `save` returned.

    Raises:
      ValueError: when there is anything else in it.
    """
    found = _Reader(io.BytesIO(data)).load()
    for name in _KEPT:
      setattr(self, name, found[name])


_KEPT = ("state", "nodes", "staleness", "refused", "lost_samples", "tasks")


class _Reader(pickle.Unpickler):
  """Reads states of protocols: dataclasses of `jdist.server`, and containers.

  Nothing is called but their constructors, whoever has written the file.
  """

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) in (
      ("collections", "Counter"),
      ("collections", "deque"),
      ("collections", "OrderedDict"),
    ):
      return getattr(collections, name)
    if module.startswith("jdist.server.") and "." not in name:
      found = getattr(__import__(module, fromlist=[name]), name, None)
      if isinstance(found, type):
        return found
    raise ValueError(
      f"The checkpoint must hold a protocol's state alone, got {module}.{name}."
    )
