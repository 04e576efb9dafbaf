"""Messages of a stated size without arrays: what the drivers alone cost."""

from typing import Any

import numpy as np

from jdist.server import _messages


class EmptyServer:
  """Sends and takes as many bytes as a model's messages, and updates nothing.

  Args:
    num_bytes: of a message in full.
    share: a plan's part of them; of `Protocol.share`.
  """

  def __init__(self, num_bytes: int, share: Any = lambda plan: 1.0):
    self._num_bytes, self._share = num_bytes, share
    self.samples = 0
    self._tasks: dict[int, int] = {}

  def reply(
    self, reply: _messages.Reply
  ) -> tuple[dict[str, Any], np.ndarray | None]:
    """Returns as many bytes as the plan takes."""
    self._tasks[reply.task] = reply.samples
    more = {"bytes": self._bytes(reply.push_plan)}
    if reply.pull_plan is None:
      return more, None
    return more, np.zeros(self._bytes(reply.pull_plan), np.uint8)

  def _bytes(self, plan: int) -> int:
    return round(self._num_bytes * self._share(plan))

  def push(self, task: int, more: dict[str, Any], payload: np.ndarray) -> None:
    """Takes anything."""
    del task, more, payload

  def apply(self, update: _messages.Apply) -> None:
    """Counts samples."""
    self.samples += sum(self._tasks.pop(task) for task in update.tasks)

  def discard(self, task: int) -> None:
    """Drops a task."""
    self._tasks.pop(task)

  def leave(self, worker: _messages.Worker) -> None:
    """Keeps nothing of a worker."""
    del worker

  def save(self) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the count of samples."""
    tasks = [list(x) for x in self._tasks.items()]
    notes = {"samples": self.samples, "tasks": tasks}
    return notes, np.zeros(0, np.uint8)

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Takes over what `save` returned."""
    del payload
    self.samples = notes["samples"]
    self._tasks = dict(map(tuple, notes["tasks"]))

  def totals(self) -> dict[str, Any]:
    """Returns the samples in updates; there is no loss."""
    return {"samples": self.samples, "losses": []}


class EmptyWorker:
  """Computes nothing, and sends as many bytes as it is told."""

  def prepare(self) -> None:
    """Has nothing to compile."""

  def compute(
    self, header: dict[str, Any], payload: np.ndarray
  ) -> tuple[dict[str, Any], np.ndarray]:
    """Returns bytes."""
    del payload
    return {}, np.zeros(header["more"]["bytes"], np.uint8)

  def restart(self) -> None:
    """Has nothing to forget."""

  def save(self) -> np.ndarray:
    """Has no state."""
    return np.zeros(0, np.uint8)

  def load(self, state: np.ndarray) -> None:
    """Has no state."""
    del state
