"""The tasks and pushes of a server's learner, and the samples given out."""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.server import _messages
from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.gradients._merge import Pushed

PyTree = Any
# A task that is out: the worker's number, samples, the kind of its push (a plan
# of bits, or a fragment), and the number of batches.
Task = tuple[int, int, int, int]


class ServerLedger:
  """The base of server learners: tasks that are out, and their pushes.

  A subclass has `model`, and says by `_like` what a push looks like.

  Args:
    workers: the names of all workers, in the order of the data's numbers.
    shared: whether all workers take from one stream of samples.
    codecs: the codec of each kind of push.

  Attributes:
    decoded: whether payloads are trees of what messages decode to, and not of
      what a channel carries.  A `Pair`, which is in one process, sets it.
    num_workers: number of all workers.
    tasks: tasks that are out, by number.
    position: samples given out, by worker; one entry, 0, of a shared stream.
    samples: samples in updates.
    losses: `(samples so far, loss)` of the last updates, at most 1,000.

  Raises:
    ValueError: when two workers have one name, or there are none.
  """

  model: Any
  decoded = False

  def __init__(
    self,
    workers: Sequence[_messages.Worker],
    shared: bool,
    codecs: Sequence[_gradient_messages.Codec],
  ):
    _gradient_messages.check_names(workers)
    self._shared, self._codecs = shared, codecs
    self.num_workers = len(workers)
    self._numbers = {name: i for i, name in enumerate(workers)}
    self._layouts: dict[int, PyTree] = {}
    self.tasks: dict[int, Task] = {}
    self._pushes: dict[int, Pushed] = {}
    self._losses: dict[int, float] = {}
    self.position: collections.Counter[int] = collections.Counter()
    self.samples = 0
    self.losses: collections.deque[tuple[int, float]] = collections.deque(
      maxlen=1000
    )

  def _like(self, kind: int) -> tuple[PyTree, PyTree]:
    """Returns a gradient and statistics as those in a push of a kind."""
    raise NotImplementedError

  def _give(self, reply: _messages.Reply, kind: int) -> tuple[int, int]:
    """Takes samples for a task; returns its worker's number and their start."""
    worker = self._numbers[reply.worker]
    whose = 0 if self._shared else worker
    start = self.position[whose]
    self.position[whose] = start + reply.samples
    self.tasks[reply.task] = worker, reply.samples, kind, reply.passes
    return worker, start

  def push(self, task: int, more: dict[str, Any], payload: Any) -> None:
    """Decodes a push, or refuses it."""
    kind, finite = self.tasks[task][2], True
    # What a message decodes to has been checked with its loss.
    if not self.decoded or isinstance(payload, np.ndarray):
      message = _gradient_messages.tree_of_push(payload, self._layout(kind))
      payload, finite = self._decode(kind, message)
    self._losses[task] = _gradient_messages.finite_loss(more, finite)
    self._pushes[task] = payload

  def _decode(self, kind: int, message: PyTree) -> tuple[Pushed, Any]:
    """Returns a push, and whether its numbers are finite."""
    codec = None if self.decoded else self._codecs[kind]
    return _gradient_messages.decode_push(codec)(message, self._like(kind)[0])

  def _layout(self, kind: int) -> PyTree:
    if kind not in self._layouts:
      codec = None if self.decoded else self._codecs[kind]
      self._layouts[kind] = _gradient_messages.layout(codec, *self._like(kind))
    return self._layouts[kind]

  def _empty_push(self, kind: int) -> Pushed:
    """Returns a push of zeros, whose programs `prepare` compiles."""
    zeros = jax.tree.map(
      lambda x: np.zeros(x.shape, x.dtype), self._layout(kind)
    )
    return self._decode(kind, zeros)[0]

  def _take(
    self, update: _messages.Apply
  ) -> tuple[list[Task], list[Pushed], list[float], float]:
    """Counts an update.

    Returns:
      Its tasks, pushes and their parts of all samples, in the protocol's order,
      and the mean loss.  Sums of floats depend on the order, and equal runs
      must end with equal bits, whatever the order of the pushes.
    """
    tasks = [self.tasks.pop(task) for task in update.tasks]
    whole = sum([samples for _, samples, _, _ in tasks])
    parts = [samples / whole for _, samples, _, _ in tasks]
    loss = 0.0
    for number, part in zip(update.tasks, parts, strict=True):
      loss += part * self._losses.pop(number)
    self.samples += whole
    self.losses.append((self.samples, loss))
    return tasks, [self._pushes.pop(task) for task in update.tasks], parts, loss

  def discard(self, task: int) -> None:
    """Drops a task, and its push if that has been decoded."""
    del self.tasks[task]
    self._pushes.pop(task, None)
    self._losses.pop(task, None)

  def leave(self, worker: _messages.Worker) -> None:
    """Forgets what a worker holds."""

  def _save(self) -> tuple[dict[str, Any], list[Pushed]]:
    """Returns the ledger: what JSON can hold, and the decoded pushes."""
    notes = {
      "samples": self.samples,
      "position": sorted(self.position.items()),
      "tasks": [[task, *x] for task, x in self.tasks.items()],
      "pushes": [[task, self._losses[task]] for task in self._pushes],
    }
    return notes, list(self._pushes.values())

  def _read(
    self, notes: dict[str, Any], payload: np.ndarray, tree: PyTree
  ) -> PyTree:
    """Restores the ledger, and returns the rest of a payload.

    Args:
      notes: what `_save` returned.
      payload: bytes of the saved pushes, behind those of a tree.
      tree: a tree of such shapes and dtypes.
    """
    self.samples = notes["samples"]
    self.position = collections.Counter(dict(map(tuple, notes["position"])))
    self.tasks = {task: tuple(x) for task, *x in notes["tasks"]}
    self._losses = dict(map(tuple, notes["pushes"]))
    like = [Pushed(*self._like(self.tasks[x][2])) for x in self._losses]
    found, pushes = jax.tree.map(
      jnp.asarray, _gradient_messages.tree_of_bytes(payload, (tree, like))
    )
    self._pushes = dict(zip(self._losses, pushes, strict=True))
    return found

  def snapshot(self) -> np.ndarray:
    """Returns the model's bytes, for `tree_of_bytes`."""
    model: _learner.ServerModel = self.model
    return _gradient_messages.tree_bytes((model.params, model.model_state))
