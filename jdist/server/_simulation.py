"""A protocol on a virtual clock: workers, messages and failures over time."""

import collections
import dataclasses
import gc
import math
import random
from collections.abc import Callable
from typing import Any
from typing import Protocol as Interface

from jdist import checks, cluster
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
    staleness: the sum over its gradients in updates.
    compute_s: how long it computed.
    iteration_s: how long its last task took, from the task's parameters on
      their way to its gradient at the server.
  """

  updates: int = 0
  samples: int = 0
  discarded: int = 0
  staleness: int = 0
  compute_s: float = 0.0
  iteration_s: float = math.nan


@dataclasses.dataclass
class _Task:
  """A task that a machine has: `start_s` is when it was given."""

  worker: str
  samples: int
  start_s: float


@dataclasses.dataclass(slots=True)
class _Given:
  """A task on its way to a machine, or there since `arrived_s`."""

  reply: _messages.Reply
  arrived_s: float | None = None


# After which nobody's tasks are gone; a tuple, as it is asked of each message.
_FREQUENT = (_messages.Push, _messages.Pull)


class Simulation:
  """Runs a protocol on a cluster whose time is computed, not waited for.

  Deterministic: everything follows from the arguments.  Each machine draws its
  jitter from a stream of its own, so that two protocols see the same machines.

  Attributes:
    now_s: virtual seconds since the start.
    events: steps of the clock so far; one that is made again from the same
      arguments and has made as many stands where this one stands.
    state: the protocol's.
    nodes: what each machine did.
    staleness: gradients in updates, by their staleness.
    pulled_bytes: sent to workers.
    pushed_bytes: sent to the server.

  >>> from jdist import cluster, server
  >>> simulation = Simulation(
  ...   cluster.workers([2.0, 1.0]),
  ...   server.ASP(batches=server.FixedBatches(10)),
  ...   cluster.Profile(seconds_per_sample=0.1),
  ... )
  >>> simulation.run(updates=6)
  >>> simulation.now_s
  2.0
  >>> {name: node.updates for name, node in simulation.nodes.items()}
  {'worker0': 4, 'worker1': 2}
  """

  def __init__(
    self,
    machines: cluster.Cluster,
    protocol: _protocol.Protocol,
    profile: cluster.Profile,
    *,
    seed: int = 0,
    learner: Learner | None = None,
    trace: cluster.Trace | None = None,
    detection_s: float = 1.0,
  ):
    """Makes a simulation at second 0, all machines ready that are there.

    Args:
      machines: the cluster.
      protocol: the server's.
      profile: what a task costs.
      seed: of the jitter, >= 0.
      learner: takes gradients and makes updates; time alone goes by if None.
      trace: where to note what was busy when.
      detection_s: after so many seconds the server notices a failure.

    Raises:
      ValueError: when an argument is not as described, or a machine's memory
        does not hold its first batch.
      ImportError: when SimPy is not installed.
    """
    checks.check_type(
      "machines", machines, cluster.Cluster, "a `cluster.Cluster`"
    )
    checks.check_type(
      "protocol", protocol, _protocol.Protocol, "a protocol of `jdist.server`"
    )
    checks.check_type(
      "profile", profile, cluster.Profile, "a `cluster.Profile`"
    )
    checks.check_number("detection_s", detection_s)
    checks.check_seed(seed)
    try:
      import simpy
    except ImportError:
      raise ImportError(
        "The virtual clock needs SimPy: `pip install 'jdist[sim]'`."
      ) from None
    self._environment = simpy.Environment()
    self.protocol, self.profile = protocol, profile
    self.machines, self.trace = machines, trace
    self.learner = learner
    self._server = machines.server
    self._network = cluster.Network(self._environment, machines.topology, trace)
    self._detection_s = detection_s
    self._of_name = {node.name: node for node in machines.nodes}
    self._random = {
      node.name: random.Random(f"{seed} {node.name}")
      for node in machines.nodes
      if node.jitter
    }
    # What a machine began before its last failure, it does not end.
    self._lives = dict.fromkeys(self._of_name, 0)
    self._away: set[str] = set()
    self._tasks: dict[int, _Task] = {}
    # A machine computes one after the other, as they were given.
    self._queues: dict[str, collections.deque[_Given]] = {
      name: collections.deque() for name in self._of_name
    }
    self._busy: set[str] = set()
    self.events = 0
    self.nodes = {node.name: NodeTotals() for node in machines.nodes}
    self.staleness: collections.Counter[int] = collections.Counter()
    self.pulled_bytes = self.pushed_bytes = 0.0
    here = [node.name for node in machines.nodes if node.available(0.0)]
    self._away.update(set(self._of_name) - set(here))
    self.state = protocol.init(here)
    machines.check_batches(
      profile,
      [
        self._batch_size(node.name) if node.name in here else 0
        for node in machines.nodes
      ],
    )
    for node in machines.nodes:
      self._plan_outages(node)
    for name in here:
      self._after(0.0, self._ready, name, 0)

  @property
  def now_s(self) -> float:
    """Virtual seconds since the start."""
    return float(self._environment.now)

  def run(
    self,
    *,
    updates: int | None = None,
    seconds: float | None = None,
    samples: int | None = None,
    events: int | None = None,
  ) -> None:
    """Lets time go by until a limit, the first that is reached.

    Limits count from second 0, so a run can be continued by a larger one.

    Args:
      updates: of the parameters.
      seconds: virtual ones.
      samples: in updates.
      events: steps of the clock.

    Raises:
      ValueError: when no limit is given.
    """
    limits = (updates, seconds, samples, events)
    if all(limit is None for limit in limits):
      raise ValueError(
        "`updates`, `seconds`, `samples` or `events` must be given: a cluster "
        "runs for ever."
      )
    until = (math.inf if limit is None else limit for limit in limits)
    max_updates, max_s, max_samples, max_events = until
    # What happens here leaves no cycles, and the collector would walk over all
    # of a large cluster's objects again and again.
    collects = self.learner is None and gc.isenabled()
    if collects:
      gc.disable()
    try:
      self._run(max_updates, max_s, max_samples, max_events)
    finally:
      if collects:
        gc.enable()

  def _run(
    self,
    max_updates: float,
    max_s: float,
    max_samples: float,
    max_events: float,
  ) -> None:
    environment, state = self._environment, self.state
    count_samples = max_samples < math.inf
    while state.version < max_updates and self.events < max_events:
      after = environment.peek()
      if after > max_s or after == math.inf:
        break
      if count_samples and self.applied_samples >= max_samples:
        break
      environment.step()
      self.events += 1

  @property
  def applied_samples(self) -> int:
    """Samples whose gradients are in updates."""
    return sum(node.samples for node in self.nodes.values())

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
    busy_s, now_s = sum(node.compute_s for node in nodes), self.now_s
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

  # The course of a task, each step once the one before has happened.

  def _batch_size(self, name: str) -> int:
    """Returns what a machine must hold at once of its first batch."""
    samples = self.state.members[name].samples
    return math.ceil(samples / self.protocol.passes(name, samples))

  def _ready(self, name: str, life: int) -> None:
    if life == self._lives[name]:
      self._deliver(_messages.Pull(name))

  def _send_parameters(self, reply: _messages.Reply) -> None:
    name = str(reply.worker)
    self._tasks[reply.task] = _Task(name, reply.samples, self._environment.now)
    if self.learner is not None:
      self.learner.pull(reply)
    given, life = _Given(reply), self._lives[name]
    if name in self._away:  # What is sent to it is lost.
      life = -1
    else:
      self._queues[name].append(given)
    if reply.pull_plan is None:
      self._receive(given, name, life)
      return
    num_bytes = self.profile.pull_bytes * self.protocol.share(reply.pull_plan)
    self.pulled_bytes += num_bytes
    arrival = self._network.send(
      self._server,
      name,
      num_bytes,
      name=self._label("pull", reply.task),
      kind="pull",
    )
    arrival.callbacks.append(lambda _: self._receive(given, name, life))

  def _receive(self, given: _Given, name: str, life: int) -> None:
    if life == self._lives[name]:
      given.arrived_s = self._environment.now
      self._begin(name, life)

  def _begin(self, name: str, life: int) -> None:
    """Lets a machine begin its next task, if it is idle and the task there."""
    queue = self._queues[name]
    if name in self._busy or not queue:
      return
    arrived_s = queue[0].arrived_s
    if arrived_s is not None:
      self._busy.add(name)
      waited_s = self._environment.now - arrived_s
      self._compute(queue.popleft().reply, name, life, waited_s)

  def _compute(
    self, reply: _messages.Reply, name: str, life: int, waited_s: float
  ) -> None:
    node, now = self._of_name[name], self._environment.now
    work = self.profile.compute_s(reply.samples, reply.passes)
    encoded = (reply.push_plan > 0) + ((reply.pull_plan or 0) > 0)
    work += encoded * self.profile.seconds_per_encoding
    if node.jitter:
      work *= node.draw(self._random[name])
    seconds = node.end_s(now, work) - now
    self.nodes[name].compute_s += seconds
    if self.trace is not None:
      task = f"task {reply.task}"
      self.trace.add(name, task, now, now + seconds, "compute")
    timeout = self._environment.timeout(seconds)
    timeout.callbacks.append(
      lambda _: self._send_gradient(reply, name, life, seconds, waited_s)
    )

  def _send_gradient(
    self,
    reply: _messages.Reply,
    name: str,
    life: int,
    compute_s: float,
    waited_s: float,
  ) -> None:
    if life != self._lives[name]:
      return
    num_bytes = self.profile.push_bytes * self.protocol.share(reply.push_plan)
    self.pushed_bytes += num_bytes
    arrival = self._network.send(
      name,
      self._server,
      num_bytes,
      name=self._label("push", reply.task),
      kind="push",
    )
    push = _messages.Push(name, reply.task, reply.samples, compute_s, waited_s)
    arrival.callbacks.append(lambda _: self._take(push, life))
    self._busy.discard(name)
    self._begin(name, life)

  def _label(self, kind: str, task: int) -> str:
    """Returns a message's name in the trace, if there is one."""
    return kind if self.trace is None else f"{kind} {task}"

  def _take(self, push: _messages.Push, life: int) -> None:
    name = str(push.worker)
    task = self._tasks.get(push.task)
    if task is not None:
      took = self._environment.now - task.start_s
      self.nodes[name].iteration_s = took
    self._deliver(push)
    if life == self._lives[name]:
      if name not in self.state.members:  # A timer had it counted as gone.
        self._deliver(_messages.Join(name))
      self._deliver(_messages.Pull(name))

  # Failures.

  def _plan_outages(self, node: cluster.Node) -> None:
    for outage in node.outages:
      if outage.start_s > 0:
        self._after(outage.start_s, self._fail, node.name, outage)
      if outage.end_s < math.inf:
        self._after(outage.end_s, self._return, node.name)

  def _fail(self, name: str, outage: cluster.Outage) -> None:
    self._lives[name] += 1
    self._away.add(name)
    self._queues[name].clear()
    self._busy.discard(name)
    now = self._environment.now
    if self.trace is not None:
      end = outage.end_s if outage.end_s < math.inf else now
      self.trace.add(name, "away", now, end, "away")
    # One that is back before this was noticed says so itself.
    if now + self._detection_s < outage.end_s:
      self._after(self._detection_s, self._deliver, _messages.Leave(name))

  def _return(self, name: str) -> None:
    self._away.discard(name)
    self._deliver(_messages.Join(name))
    self._deliver(_messages.Pull(name))

  def _after(
    self, seconds: float, function: Callable[..., None], *args: Any
  ) -> None:
    timeout = self._environment.timeout(seconds)
    timeout.callbacks.append(lambda _: function(*args))

  # Messages and actions.

  def _deliver(self, message: _messages.Message) -> None:
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
    actions = self.protocol.receive(self.state, self._environment.now, message)
    for action in actions:
      if isinstance(action, _messages.Reply):
        self._send_parameters(action)
      elif isinstance(action, _messages.Apply):
        self._apply(action)
      elif isinstance(action, _messages.Discard):
        self._discard(action.task)
      else:
        self._after(
          action.after_s, self._deliver, _messages.Expired(action.task)
        )
    for task in gone:
      self._forget(task)

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
      node.staleness += stale
      self.staleness[stale] += 1

  def _discard(self, number: int) -> None:
    task = self._tasks.get(number)
    if task is not None:
      self.nodes[task.worker].discarded += 1
      self._forget(number)

  def _forget(self, number: int) -> None:
    if self._tasks.pop(number, None) is not None and self.learner is not None:
      self.learner.discard(number)
