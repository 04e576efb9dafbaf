"""The base of drivers: a protocol whose actions are carried out."""

import collections
import dataclasses
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jdist import checks
from jdist.server import _messages, _protocol
from jdist.server.gradients import _learner

_log = logging.getLogger(__name__)
# A worker whose pushes are refused as often in a row is expelled.
_MAX_REFUSED = 3


def environment(now_s: float = 0.0) -> Any:
  """Returns SimPy's clock."""
  return checks.import_extra("simpy", "sim").Environment(now_s)


@dataclasses.dataclass
class NodeTotals:
  """Totals of a machine.

  Attributes:
    updates: Number of its gradients that are in updates.
    samples: Number of samples of these gradients.
    discarded: Number of its gradients that were not used.
    ages: Number of its gradients in updates, for each staleness.
    compute_s: Seconds that it computed, of tasks that have ended.
    iteration_s: Seconds of its last task, from sending the task's parameters
      to receiving its gradient.
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


# These messages never end a membership; the check stands in the hot path.
_FREQUENT = (_messages.Push, _messages.Pull)
# Reasons of discarded pushes whose tasks were not out.
_NOT_OUT = ("repeated", "left")


class Driver:
  """Runs a protocol: carries out its actions at the server, and counts.

  A driver gives every message of a worker to `deliver`, and before it a push
  to `accept`.  It overrides `now_s`, `send` and `wait`, which depend on how
  time passes and where workers are.

  Attributes:
    protocol: The server's protocol.
    state: The protocol's state.
    nodes: What each machine did.
    staleness: Gradients in updates, by their staleness.
    applied_samples: Samples whose gradients are in updates.
    lost_samples: Samples of tasks that were given out and not used.
    refused: Pushes that the learner refused, by the reason.
    pulled_bytes: Bytes sent to workers.
    pushed_bytes: Bytes sent to the server.
  """

  def __init__(
    self,
    protocol: _protocol.Protocol,
    names: Sequence[str],
    here: Iterable[str],
    learner: _learner.ServerLearner | None = None,
  ):
    """Makes a driver before the first message; `here` are the first members.

    Without a learner no arrays are moved.
    """
    given = "a state, a time and a message"
    checks.check_function("protocol.receive", protocol.receive, given, 3)
    self.protocol, self._learner = protocol, learner
    self.state = protocol.init(here)
    self.nodes = {name: NodeTotals() for name in names}
    self.staleness: collections.Counter[int] = collections.Counter()
    self.applied_samples = self.lost_samples = 0
    self.refused: collections.Counter[str] = collections.Counter()
    self.pulled_bytes = self.pushed_bytes = 0.0
    self._tasks: dict[int, TaskGiven] = {}
    self._last_s, self._expired = 0.0, 0
    self._refused_in_a_row: collections.Counter[str] = collections.Counter()

  @property
  def mean_staleness(self) -> float:
    """The mean over gradients, of which an update may take several."""
    total = sum(age * count for age, count in self.staleness.items())
    return total / max(1, sum(self.staleness.values()))

  # Methods that a driver overrides.

  @property
  def now_s(self) -> float:
    """Seconds since the start, up to the last message."""
    return self._last_s

  @property
  def under_way_s(self) -> float:
    """Seconds spent on tasks that have not ended, as far as they are known."""
    return 0.0

  def send(
    self, reply: _messages.Reply, more: dict[str, Any], payload: Any
  ) -> None:
    """Sends a worker its task, with what the learner says about it."""
    raise NotImplementedError

  def wait(self, timer: _messages.Timer) -> None:
    """Delivers `Expired` once the timer's time has passed."""
    raise NotImplementedError

  # Methods that it calls.

  def accept(
    self, push: _messages.Push, more: dict[str, Any], payload: Any
  ) -> bool:
    """Has the learner decode a push, before it is delivered.

    A push that the protocol will discard is not decoded.

    Returns:
      False when the learner refuses the push.  It must not be delivered then:
      its worker has to leave, and to join again unless it is `expelled`.
    """
    # A push whose task is not out, or is another worker's, is discarded by the
    # protocol: a stranger's bytes must not reach the learner.
    task = self.state.tasks.get(push.task)
    if (
      self._learner is None
      or task is None
      or task.worker != push.worker
      or self.protocol.is_late(self.state, task)
    ):
      return True
    assert payload is not None
    try:
      self._learner.push(push.task, more, payload)
    except _learner.RefusedError as error:
      self.refuse(str(push.worker), push.task, error)
      return False
    self.pardon(str(push.worker))
    return True

  def refuse(
    self, worker: str, task: int, error: _learner.RefusedError
  ) -> None:
    """Counts a push that cannot be used."""
    _log.warning("A push of %s for task %d is refused: %s", worker, task, error)
    self.refused[error.reason] += 1
    self._refused_in_a_row[worker] += 1

  def pardon(self, worker: str) -> None:
    """Forgets refused pushes of a worker that was restarted."""
    self._refused_in_a_row.pop(worker, None)

  def expelled(self, worker: str) -> bool:
    """Returns whether too many pushes of a worker were refused in a row."""
    return self._refused_in_a_row[worker] >= _MAX_REFUSED

  @property
  def all_expelled(self) -> bool:
    """True once no worker is left whose pushes can be used."""
    return all(map(self.expelled, self.nodes))

  def deliver(
    self, message: _messages.Message, now_s: float | None = None
  ) -> None:
    """Gives a message to the protocol, and carries out its actions.

    The time is `now_s` seconds after the start, or the driver's own if None.
    """
    worker, gone = None, []
    if not isinstance(message, _FREQUENT):
      of: Any = message
      if isinstance(message, _messages.Expired):
        of = self._tasks.get(message.task)
      worker = getattr(of, "worker", None)
      # Noted before: a member that leaves takes its tasks along.
      if worker in self.state.members:
        gone = list(self.state.members[worker].tasks)
      else:
        worker = None
    now_s = self.now_s if now_s is None else now_s
    self._last_s = now_s
    if isinstance(message, _messages.Push):
      task = self._tasks.get(message.task)
      if task is not None:
        self.nodes[task.worker].iteration_s = now_s - task.start_s
    found = self.protocol.receive(self.state, now_s, message)
    # A list first: to ask an abstract class takes as long as a task's entry.
    several = type(found) is list or isinstance(found, Iterable)
    for action in found if several else (found,):
      if isinstance(action, _messages.Reply):
        self._give(action, now_s)
      elif isinstance(action, _messages.Apply):
        self._apply(action)
      elif isinstance(action, _messages.Discard):
        # The first push of a repeated task may wait for its update.
        if action.reason not in _NOT_OUT and action.task in self._tasks:
          self.nodes[self._tasks[action.task].worker].discarded += 1
          self._forget(action.task)
      elif isinstance(action, _messages.Timer):
        self.wait(action)
      else:
        raise ValueError(
          "`protocol.receive` must return a list of actions, got "
          f"{checks.show(action)} in it or in its place."
        )
    if gone and isinstance(message, _messages.Expired):
      self._expired += 1
      if self._expired > 10 * len(self.nodes):
        raise _learner.RefusedError(
          "timeout",
          "`timeout_s` must be longer than a task takes, got "
          f"{self.protocol.timeout_s:g}: {self._expired} tasks in a row "
          "expired without an update. Take ten times the seconds of a task.",
        )
    for number in gone:
      # A timer that has expired may leave its worker a member.
      if number not in self.state.tasks:
        self._forget(number)
    if worker is None or self._learner is None:
      return
    # A Join from a member means that it restarted before it was missed.
    joins = isinstance(message, _messages.Join)
    if joins or worker not in self.state.members:
      self._learner.leave(worker)

  def summary(self) -> dict[str, Any]:
    """Returns statistics of the run, in a form that JSON can hold.

    Staleness is given as the mean over gradients in updates, the mean of the
    machines' means, the maximum, and counts; `iteration_spread` is the slowest
    machine's last iteration over the fastest's; `utilisation` is the mean part
    of the time in which machines computed.
    """
    nodes = self.nodes.values()
    means = [node.staleness / node.updates for node in nodes if node.updates]
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
        "mean_over_updates": self.mean_staleness,
        "mean_over_nodes": sum(means) / len(means) if means else 0.0,
        "maximum": max(self.staleness, default=0),
        "counts": {str(k): v for k, v in sorted(self.staleness.items())},
      },
      "discarded": dict(self.state.discarded),
      "refused": dict(self.refused),
      "lost_samples": self.lost_samples,
      "pulled_bytes": self.pulled_bytes,
      "pushed_bytes": self.pushed_bytes,
    } | self.protocol.summary(self.state)

  def _give(self, reply: _messages.Reply, now_s: float) -> None:
    self._tasks[reply.task] = TaskGiven(str(reply.worker), reply.samples, now_s)
    more: dict[str, Any] = {}
    payload = None
    if self._learner is not None:
      more, payload = self._learner.reply(reply)
    self.send(reply, more, payload)

  def _apply(self, update: _messages.Apply) -> None:
    # Before the counts: an update that fails must not be counted.
    if self._learner is not None:
      self._learner.apply(update)
    self._expired = 0
    for number, stale in zip(update.tasks, update.staleness, strict=True):
      task = self._tasks[number]
      node = self.nodes[task.worker]
      node.updates += 1
      node.ages[stale] = node.ages.get(stale, 0) + 1
      self.staleness[stale] += 1
      if number not in update.kept:
        node.samples += task.samples
        self.applied_samples += task.samples
        del self._tasks[number]

  def _forget(self, number: int) -> None:
    # A learner keeps something of each task that is out, and must drop
    # it exactly once when it is not used.
    task = self._tasks.pop(number, None)
    if task is not None:
      self.lost_samples += task.samples
      if self._learner is not None:
        self._learner.discard(number)
