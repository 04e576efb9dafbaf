"""Messages of a stated size without arrays: what the engines alone cost."""

from typing import Any

import numpy as np

from jdist.server import _messages
from jdist.server.gradients import _learner

_NOTHING = np.zeros(0, np.uint8)


class EmptyServer(_learner.ServerLearner):
  """Sends and takes messages of a model's size, and updates nothing.

  The virtual clock replays with it, too, up to the event of a checkpoint.

  Args:
    num_bytes: Size of a message.
  """

  def __init__(self, num_bytes: int = 0):
    self._num_bytes, self.samples = num_bytes, 0
    self._tasks: dict[int, int] = {}

  def reply(
    self, reply: _messages.Reply
  ) -> tuple[dict[str, Any], np.ndarray | None]:
    """Returns a message of that size, where there is a pull."""
    self._tasks[reply.task] = reply.samples
    more = {"bytes": self._num_bytes}
    if reply.pull_plan is None:
      return more, None
    return more, np.zeros(self._num_bytes, np.uint8)

  def apply(self, update: _messages.Apply) -> None:
    """Counts samples."""
    self.samples += sum(map(self._tasks.pop, {*update.tasks} - update.kept))

  def discard(self, task: int) -> None:
    """Drops a task."""
    self._tasks.pop(task)

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the count of samples."""
    del whole
    tasks = [list(x) for x in self._tasks.items()]
    return {"samples": self.samples, "tasks": tasks}, _NOTHING

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    del payload
    self.samples = notes["samples"]
    self._tasks = dict(map(tuple, notes["tasks"]))


class EmptyWorker(_learner.WorkerLearner):
  """Computes nothing, and sends as many bytes as its task says."""

  stateless = True

  def __init__(self, *, stateless: bool = True):
    self.stateless = stateless

  def compute(
    self, header: dict[str, Any]
  ) -> tuple[dict[str, Any], np.ndarray]:
    """Returns bytes."""
    return {}, np.zeros(header["more"]["bytes"], np.uint8)

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns an empty state."""
    del whole
    return {}, _NOTHING
