"""The base of drivers: messages go to a protocol, its actions are done."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any
from typing import Protocol as Interface

from jdist.server import _messages, _protocol


class Learner(Interface):
  """Handles parameters and gradients while time goes by."""

  def pull(self, reply: _messages.Reply) -> None:
    """Sends the parameters of now to a worker, for a task."""

  def apply(self, update: _messages.Apply) -> None:
    """Updates the parameters with the gradients of tasks."""

  def discard(self, task: int) -> None:
    """Drops a task, its gradient late or its worker gone."""


@dataclasses.dataclass
class NodeTotals:
  """Totals of a machine.

  Attributes:
    updates: its gradients in updates.
    samples: in them.
    discarded: its gradients that were not used.
    ages: its gradients in updates, by their staleness.
    compute_s: how long it computed, of tasks that have ended.
    iteration_s: how long its last task took, from the task's parameters on
      their way to its gradient at the server.
  """

  updates: int = 0
  samples: int = 0
  discarded: int = 0
  ages: dict[int, int] = dataclasses.field(default_factory=dict)
  compute_s: float = 0.0
  iteration_s: float = math.nan

  @property
  def staleness(self) -> int:
    """The sum over its gradients in updates."""
    return sum(age * count for age, count in self.ages.items())


@dataclasses.dataclass
class TaskGiven:
  """A task that a machine has: `start_s` is when it was given."""

  worker: str
  samples: int
  start_s: float


# After which nobody's tasks are gone; a tuple, as it is asked of each message.
_FREQUENT = (_messages.Push, _messages.Pull)
# Reasons of discarded pushes whose tasks were not out.
_NOT_OUT = ("repeated", "left")


class Driver:
  """Runs a protocol: what has to be done at the server, and the totals.

  Whatever the workers are, a message of theirs is given to `deliver`.  A driver
  overrides `now_s`, `send` and `wait`, which have to do with time and workers.

  Attributes:
    protocol: the server's.
    learner: takes gradients and makes updates, if there is one.
    state: the protocol's.
    nodes: what each machine did.
    staleness: gradients in updates, by their staleness.
    applied_samples: samples whose gradients are in updates.
    pulled_bytes: sent to workers.
    pushed_bytes: sent to the server.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    names: Sequence[str],
    here: Iterable[str],
    learner: Learner | None = None,
  ):
    """Makes a driver before the first message.

    Args:
      protocol: the server's.
      names: of all machines.
      here: those that are there from the beginning.
      learner: takes gradients and makes updates.
    """
    self.protocol, self.learner = protocol, learner
    self.state = protocol.init(here)
    self.nodes = {name: NodeTotals() for name in names}
    self.staleness: collections.Counter[int] = collections.Counter()
    self.applied_samples = 0
    self.pulled_bytes = self.pushed_bytes = 0.0
    self._tasks: dict[int, TaskGiven] = {}

  # What a driver overrides.

  @property
  def now_s(self) -> float:
    """Seconds since the start."""
    raise NotImplementedError

  @property
  def under_way_s(self) -> float:
    """Seconds spent on tasks that have not ended, as far as they are known."""
    return 0.0

  def send(self, reply: _messages.Reply) -> None:
    """Sends a worker its task, with the parameters that it needs."""
    raise NotImplementedError

  def wait(self, timer: _messages.Timer) -> None:
    """Delivers `Expired` once the timer's time has gone by."""
    raise NotImplementedError

  # What it calls.

  def deliver(self, message: _messages.Message) -> None:
    """Gives a message to the protocol, and does what it says."""
    # Who leaves takes its tasks along, for which nothing will come any more.
    gone: list[int] = []
    if not isinstance(message, _FREQUENT):
      worker = (
        message.worker
        if not isinstance(message, _messages.Expired)
        else self._worker_of(message.task)
      )
      if worker in self.state.members:
        gone = list(self.state.members[worker].tasks)
    now_s = self.now_s
    if isinstance(message, _messages.Push):
      task = self._tasks.get(message.task)
      if task is not None:
        self.nodes[task.worker].iteration_s = now_s - task.start_s
    for action in self.protocol.receive(self.state, now_s, message):
      if isinstance(action, _messages.Reply):
        self._give(action, now_s)
      elif isinstance(action, _messages.Apply):
        self._apply(action)
      elif isinstance(action, _messages.Discard):
        # Of one that was pushed before, the push is perhaps still needed.
        if action.reason not in _NOT_OUT:
          self._discard(action.task)
      else:
        self.wait(action)
    for number in gone:
      # Where the protocol did not let it go, its tasks are still out.
      if number not in self.state.tasks:
        self._forget(number)

  def summary(self) -> dict[str, Any]:
    """Returns the run in figures, in a form that JSON can hold.

    Staleness as the mean over gradients in updates, as the mean over machines
    of their own means, as the maximum, and counted; `iteration_spread` is the
    slowest machine's last iteration over the fastest's; `utilisation` the part
    of the time in which machines computed, on the average.
    """
    nodes = self.nodes.values()
    means = [node.staleness / node.updates for node in nodes if node.updates]
    gradients = sum(self.staleness.values())
    stale = sum(age * count for age, count in self.staleness.items())
    lasting = [x.iteration_s for x in nodes if not math.isnan(x.iteration_s)]
    now_s = self.now_s
    busy_s = sum(node.compute_s for node in nodes) + self.under_way_s
    return {
      "virtual_s": now_s,
      "updates": self.state.version,
      "samples": self.applied_samples,
      "samples_per_s": self.applied_samples / now_s if now_s else 0.0,
      "utilisation": min(1.0, busy_s / (len(nodes) * now_s)) if now_s else 0.0,
      "iteration_spread": max(lasting) / min(lasting) if lasting else math.nan,
      "staleness": {
        "mean_over_updates": stale / gradients if gradients else 0.0,
        "mean_over_nodes": sum(means) / len(means) if means else 0.0,
        "maximum": max(self.staleness, default=0),
        "counts": {str(k): v for k, v in sorted(self.staleness.items())},
      },
      "discarded": dict(self.state.discarded),
      "pulled_bytes": self.pulled_bytes,
      "pushed_bytes": self.pushed_bytes,
    }

  def _give(self, reply: _messages.Reply, now_s: float) -> None:
    self._tasks[reply.task] = TaskGiven(str(reply.worker), reply.samples, now_s)
    if self.learner is not None:
      self.learner.pull(reply)
    self.send(reply)

  def _worker_of(self, number: int) -> str | None:
    task = self._tasks.get(number)
    return None if task is None else task.worker

  def _apply(self, update: _messages.Apply) -> None:
    if self.learner is not None:
      self.learner.apply(update)
    for number, stale in zip(update.tasks, update.staleness, strict=True):
      task = self._tasks.pop(number)
      node = self.nodes[task.worker]
      node.updates += 1
      node.samples += task.samples
      self.applied_samples += task.samples
      node.ages[stale] = node.ages.get(stale, 0) + 1
      self.staleness[stale] += 1

  def _discard(self, number: int) -> None:
    task = self._tasks.get(number)
    if task is not None:
      self.nodes[task.worker].discarded += 1
      self._forget(number)

  def _forget(self, number: int) -> None:
    if self._tasks.pop(number, None) is not None and self.learner is not None:
      self.learner.discard(number)
