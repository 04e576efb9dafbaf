"""The learners of a pair on the virtual clock, and their messages under way."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jdist.server import _messages
from jdist.server.gradients import _gradient_messages, _learner

# A message's `more` and payload, as learners know them.
Message = tuple[dict[str, Any], Any]


class _Replay(_learner.EmptyServer):
  """Moves no arrays, and refuses the pushes that were refused before."""

  def __init__(self, refused: dict[int, str]):
    super().__init__()
    self._refused = refused

  def push(self, task: int, more: dict[str, Any], payload: np.ndarray) -> None:
    if task in self._refused:
      raise _learner.RefusedError(self._refused[task], "Refused before.")


class PairMessages:
  """Computes the pushes of a pair, and holds its messages under way."""

  def __init__(self, pair: _learner.Pair, names: Iterable[str]):
    self.pair = pair  # During a replay learners that compute nothing.
    # The reasons of refused pushes, by task, for a replay.
    self.refused: dict[int, str] = {}
    self._sent: dict[str, dict[int, Message]] = {name: {} for name in names}
    # Pushes of tasks that their machines are computing.
    self._begun: dict[str, dict[int, Message]] = {name: {} for name in names}
    self._pushed: dict[int, Message] = {}

  def send(self, name: str, task: int, more: Any, payload: Any) -> None:
    """Keeps the message of a task until its machine computes it."""
    self._sent[name][task] = more, payload

  def begin(self, reply: _messages.Reply, *, discards: bool) -> None:
    """Computes the push of a task that its machine begins.

    A program that is started here has ended when the server looks at the loss.
    """
    name = str(reply.worker)
    # Where the server discards late gradients, those on which no later push
    # depends are computed when their task ends, and only if they are in time.
    if not (discards and self.pair.workers[name].stateless):
      self._begun[name][reply.task] = self._compute(reply)

  def end(self, reply: _messages.Reply, *, late: bool) -> None:
    """Sends the push of a task that its machine has computed."""
    begun = self._begun[str(reply.worker)]
    if reply.task in begun:
      self._pushed[reply.task] = begun.pop(reply.task)
      return
    pushed = self._compute(reply, late=late)
    # Its version can only become older: a late gradient stays late.
    if pushed is not None:
      self._pushed[reply.task] = pushed

  def _compute(self, reply: _messages.Reply, *, late: bool = False) -> Any:
    name = str(reply.worker)
    more, payload = self._sent[name].pop(reply.task)
    worker = self.pair.workers[name]
    header = reply._asdict()
    header["more"] = more
    worker.receive(header, payload)
    return None if late else worker.compute(header)

  def skip(self, reply: _messages.Reply) -> None:
    """Drops a task that its worker must not compute."""
    for tasks in (self._sent, self._begun):
      tasks[str(reply.worker)].pop(reply.task, None)

  def take_push(self, task: int) -> Message:
    """Returns a push that the server receives."""
    return self._pushed.pop(task, ({}, None))

  def clear(self, name: str) -> None:
    """Drops all messages of a machine that has failed."""
    self._sent[name].clear()
    self._begun[name].clear()

  def replay(self, refused: Iterable[Any]) -> _learner.ServerLearner:
    """Takes learners that compute nothing, until `load`; returns the server."""
    server = _Replay(dict(map(tuple, refused)))
    empty = {
      name: _learner.EmptyWorker(stateless=one.stateless)
      for name, one in self.pair.workers.items()
    }
    self.pair = _learner.Pair(server, empty)
    return server

  def save(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns all states and messages: notes, and uint8 arrays."""
    notes: dict[str, Any] = {
      "refused": list(self.refused.items()),
      "learners": {},
      "messages": {},
    }
    arrays = {}
    for key, one in _learners(self.pair).items():
      notes["learners"][key], arrays[key] = one.save(whole=True)
    messages = {f"push {task}": x for task, x in self._pushed.items()}
    for begun in self._begun.values():
      messages |= {f"push {task}": x for task, x in begun.items()}
    for sent in self._sent.values():
      messages |= {f"pull {task}": x for task, x in sent.items()}
    for key, (more, payload) in messages.items():
      found, notes["messages"][key] = _gradient_messages.sendable(payload, more)
      if found is not None:
        arrays[key] = found
    return notes, arrays

  def load(
    self,
    pair: _learner.Pair,
    notes: dict[str, Any],
    arrays: dict[str, np.ndarray],
  ) -> None:
    """Takes a pair and loads its saved states, after a replay."""
    self.pair = pair
    for key, one in _learners(pair).items():
      one.load(notes["learners"][key], arrays[key])

    def saved(key: str) -> Message:
      return notes["messages"][key], arrays.get(key)

    for kind, group in (
      ("pull", self._sent.values()),
      ("push", [*self._begun.values(), self._pushed]),
    ):
      for messages in group:
        messages.update({task: saved(f"{kind} {task}") for task in messages})


def _learners(pair: _learner.Pair) -> dict[str, Any]:
  """Returns all learners of a pair, by their keys in a checkpoint."""
  workers = {f"worker {name}": one for name, one in pair.workers.items()}
  return {"server": pair.server} | workers
