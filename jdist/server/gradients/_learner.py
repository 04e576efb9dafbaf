"""Interfaces of a server's and a worker's learner, and those without arrays."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from typing import Protocol as Interface

import numpy as np

from jdist import signatures
from jdist.server import _messages
from jdist.server.gradients import _packed
from jdist.states import PyTree

_NOTHING = np.zeros(0, np.uint8)


class RefusedError(ValueError):
  """Raised for a push that cannot be used.

  Attributes:
    reason: One word: `"nan"`, `"shape"`, `"header"` or another of a learner.
  """

  def __init__(self, reason: str, text: str):
    super().__init__(text)
    self.reason = reason


class Samples(Interface):
  """Source of batches; `data.SampleStream` is one."""

  @property
  def shared(self) -> bool:
    """Whether all workers take their samples from one stream."""

  def batch(
    self, worker: int, start: int, count: int, *, size: int | None = None
  ) -> PyTree:
    """Returns `count` samples padded to `size`, with a `"mask"`."""


class ServerModel(NamedTuple):
  """State that a server keeps of a model.

  Attributes:
    params: The parameters.
    opt_state: The state of the server's optimizer.
    model_state: Batch statistics and the like.
  """

  params: PyTree
  opt_state: PyTree
  model_state: PyTree


class ServerLearner(Interface):
  """Handles a server's arrays; called by one thread, in the protocol's order.

  A payload is a tree of arrays, or its bytes as a uint8 array, which every
  channel and file needs.  A header's `more` is what JSON can hold.
  """

  def reply(self, reply: _messages.Reply) -> tuple[dict[str, Any], Any]:
    """Returns a task's `more` and its payload, None if nothing is sent."""

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, before the protocol is given it.

    Raises:
      RefusedError: If the push cannot be used.
    """
    return None

  def apply(self, update: _messages.Apply) -> None:
    """Updates the model by pushes."""

  def discard(self, task: int) -> None:
    """Drops a task, whether its push has been decoded or not."""

  def leave(self, worker: _messages.Worker) -> None:
    """Forgets what a worker holds: it has left, or starts again."""
    return None

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the state of a checkpoint: what JSON can hold, and bytes.

    The virtual clock needs the `whole`, with what workers hold; real workers
    start again with exact parameters.
    """

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""


class WorkerLearner(Interface):
  """Handles a worker's arrays; called by one thread, in the order of tasks."""

  @property
  def stateless(self) -> bool:
    """Whether no later push depends on whether a task has been computed.

    The virtual clock then leaves out gradients that are too late when they
    are complete.
    """

  def prepare(self) -> None:
    """Compiles all that the run needs, before the first pull."""
    return None

  def receive(self, header: dict[str, Any], payload: Any) -> None:
    """Takes the parameters of a task, if its header says that they are sent.

    Every task is received, in order: a difference builds on the one before.
    """
    return None

  def compute(self, header: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the push of the task received last: its `more` and payload."""

  def restart(self, *, lost: bool = False) -> None:
    """Forgets all tasks: the next pull sends exact parameters.

    If its process was `lost`, a new one begins without what a feedback kept.
    """
    return None

  def save(self, *, whole: bool = False) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the state of a checkpoint: what JSON can hold, and bytes.

    The virtual clock needs the `whole`, and not only what a new process of this
    worker continues with.
    """

  def load(self, notes: dict[str, Any], payload: np.ndarray) -> None:
    """Restores what `save` returned."""
    return None


@signatures.checked
class Pair:
  """A server's learner and those of all its workers, in one process.

  `Simulation` runs it on the virtual clock.  `GradientLearner` is a pair for
  the usual arguments.

  Attributes:
    server: The server's learner.
    workers: The workers' learners, by name.
  """

  def __init__(
    self, server: ServerLearner, workers: Mapping[Any, WorkerLearner]
  ):
    # Any: attributes such as a model are a learner's own, not the interface's.
    self.server: Any = server
    self.workers: dict[str, Any] = {
      str(name): one for name, one in workers.items()
    }
    # Nothing is encoded only to be decoded in the next program.
    for one in (server, *self.workers.values()):
      one.decoded = True
      if hasattr(one, "pack"):
        one.pack()

  @property
  def model(self) -> ServerModel:
    """The server's model."""
    model: ServerModel = _packed.unpack(self.server.model)
    return model

  @property
  def losses(self) -> list[tuple[int, float]]:
    """The samples so far and the loss of the last updates, at most 1,000."""
    return list(self.server.losses)


class EmptyServer(ServerLearner):
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


class EmptyWorker(WorkerLearner):
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
