"""A protocol on a virtual clock: workers, messages and failures over time."""

import collections
import dataclasses
import gc
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from jdist import checks, cluster, signatures
from jdist.server import _driver, _links, _messages, _protocol
from jdist.server.clock import _pair_messages
from jdist.server.gradients import _learner


@dataclasses.dataclass(slots=True)
class _Given:
  """A task on its way to a machine, or there since `arrived_s`."""

  reply: _messages.Reply
  arrived_s: float | None = None


@signatures.checked
class Simulation(_driver.Driver):
  """Runs a protocol on a cluster whose time is computed, not waited for.

  Deterministic: everything follows from the arguments.  Each machine draws its
  jitter from a stream of its own, so that two protocols see the same machines.

  Attributes:
    now_s: Virtual seconds since the start.
    events: Steps of the clock so far.  A simulation of the same arguments is in
      the same state after the same number of events.
    machines: The cluster, as given, like `profile`, `trace` and `learner`.

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
    seed: signatures.Seed = 0,
    learner: _learner.Pair | None = None,
    trace: cluster.Trace | None = None,
    detection_s: signatures.NonNegativeFloat = 1.0,
  ):
    """Makes a simulation at second 0, all machines ready that are there.

    Args:
      machines: The cluster.
      protocol: The server's.
      profile: What a task costs.
      seed: Seed of the jitter, >= 0.
      learner: The learners of server and workers, such as a
        `GradientLearner(...)`; None simulates time alone.
      trace: Timeline that the simulation fills.
      detection_s: Seconds after which the server notices a failure.

    Raises:
      ValueError: If a machine has no learner, or its memory does not hold its
        first batch.
    """
    self._environment = _driver.environment()
    here = [node.name for node in machines.nodes if node.available(0.0)]
    server, self._under_way = None, None
    if learner is not None:
      missing = set(machines.names) - set(learner.workers)
      if missing:
        raise ValueError(
          "`learner` must have a learner for each machine, got none for "
          f"{sorted(missing)}. Make it with `workers=machines.names`."
        )
      server = learner.server
      self._under_way = _pair_messages.PairMessages(learner, machines.names)
    super().__init__(protocol, machines.names, here, server)
    self.learner = learner
    self.machines, self.profile, self.trace = machines, profile, trace
    self._links = _links.Links(self._environment, machines, trace)
    self._detection_s = detection_s
    self._of_name = {node.name: node for node in machines.nodes}
    # A stream for each machine: another protocol, which asks them in another
    # order, sees the same machines.
    self._random = {
      node.name: random.Random(f"{seed} {node.name}")
      for node in machines.nodes
      if node.jitter
    }
    # Failures of each machine: events of an earlier life are ignored.
    self._lives = dict.fromkeys(self._of_name, 0)
    self._away: set[str] = set(self._of_name) - set(here)
    # Tasks of each machine, which it computes in this order.
    self._queues: dict[str, collections.deque[_Given]] = {
      name: collections.deque() for name in self._of_name
    }
    # Machines that compute, and since when.
    self._busy: dict[str, float] = {}
    self._memory = {
      node.name: profile.max_samples(node.memory_bytes)
      for node in machines.nodes
    }
    self.events = 0
    # A machine must hold one pass of its first batch at once.
    first = {name: x.samples for name, x in self.state.members.items()}
    first = {x: math.ceil(n / protocol.passes(x, n)) for x, n in first.items()}
    machines.check_batches(profile, [first.get(x, 0) for x in machines.names])
    for node in machines.nodes:
      self._plan_outages(node)
    for name in here:
      self._after(0.0, self.deliver, _messages.Pull(name))

  @property
  def now_s(self) -> float:
    """Virtual seconds since the start."""
    return float(self._environment.now)

  @property
  def ended(self) -> bool:
    """Whether nothing happens any more, as all machines are away for good."""
    return bool(self._environment.peek() == math.inf)

  @property
  def under_way_s(self) -> float:
    """Seconds that machines have spent on their present tasks."""
    return sum(self._environment.now - began for began in self._busy.values())

  def run(
    self,
    *,
    updates: int | None = None,
    seconds: float | None = None,
    samples: int | None = None,
    events: int | None = None,
  ) -> None:
    """Advances the clock until the first of some limits.

    Limits count from second 0, so a run can be continued by a larger one.

    Args:
      updates: Number of updates of the parameters.
      seconds: Virtual seconds.
      samples: Number of samples in updates.
      events: Number of steps of the clock.

    Raises:
      ValueError: If no limit is finite, or a machine's memory does not hold a
        batch that the protocol gives out.
    """
    limits = {
      "updates": updates, "seconds": seconds, "samples": samples,
      "events": events,
    }  # fmt: skip
    given = {name: x for name, x in limits.items() if x is not None}
    for name, limit in given.items():
      checks.check_continuous(name, limit)
    if all(map(math.isinf, given.values())):
      raise ValueError(
        "`updates`, `seconds`, `samples` or `events` must be given and finite: "
        "a cluster runs for ever."
      )
    max_updates, max_s, max_samples, max_events = (
      given.get(name, math.inf) for name in limits
    )
    # What happens here leaves no cycles, and the collector would walk over all
    # of a large cluster's objects again and again.
    collects = self.learner is None and gc.isenabled()
    if collects:
      gc.disable()
    environment, state = self._environment, self.state
    try:
      while state.version < max_updates and self.events < max_events:
        after = environment.peek()
        if after > max_s or after == math.inf:
          break
        if self.applied_samples >= max_samples:
          break
        environment.step()
        self.events += 1
    finally:
      if collects:
        gc.enable()

  def wait(self, timer: _messages.Timer) -> None:
    """Schedules a timer."""
    self._after(timer.after_s, self.deliver, _messages.Expired(timer.task))

  # The course of a task, each step once the one before has happened.

  def send(
    self, reply: _messages.Reply, more: dict[str, Any], payload: Any
  ) -> None:
    """Sends the parameters, and adds the task to the machine's queue."""
    name = str(reply.worker)
    given, life = _Given(reply), self._lives[name]
    if name not in self._away:  # A message to a failed machine is lost.
      self._queues[name].append(given)
      if self._under_way is not None:
        self._under_way.send(name, reply.task, more, payload)
    num_bytes, parts = None, None
    if reply.merges:
      push_bytes, share = self.profile.push_bytes, self.protocol.push_share
      parts = [
        (str(peer), push_bytes * share(reply._replace(fragment=fragment)))
        for fragment, _, _, workers in reply.merges
        for peer in workers
        if peer != name
      ]
      num_bytes = sum(size for _, size in parts) or None
    elif reply.pull_plan is not None:
      num_bytes = self.profile.pull_bytes * self.protocol.pull_share(reply)
    self.pulled_bytes += num_bytes or 0.0
    self._links.send(
      "pull", name, num_bytes, self._receive, given, name, life,
      task=reply.task, parts=parts,
    )  # fmt: skip

  def _receive(self, given: _Given, name: str, life: int) -> None:
    if life == self._lives[name]:
      given.arrived_s = self._environment.now
      self._begin(name, life)

  def _begin(self, name: str, life: int) -> None:
    """Begins a machine's next task, if both are ready."""
    queue = self._queues[name]
    if name in self._busy or not queue:
      return
    arrived_s = queue[0].arrived_s
    if arrived_s is not None:
      self._busy[name] = self._environment.now
      waited_s = self._environment.now - arrived_s
      self._compute(queue.popleft().reply, name, life, waited_s)

  def _compute(
    self, reply: _messages.Reply, name: str, life: int, waited_s: float
  ) -> None:
    node, now = self._of_name[name], self._environment.now
    most = self._memory[name]
    if most is not None and reply.samples > most * reply.passes:
      raise ValueError(
        f"{name!r} must hold a batch of "
        f"{math.ceil(reply.samples / reply.passes)} samples, and its memory "
        f"holds {most}. Bound the batches of `protocol` by it, as `dbs(..., "
        "limits=)` does."
      )
    work = self.profile.compute_s(reply.samples, reply.passes)
    encoded = (reply.push_plan > 0) + ((reply.pull_plan or 0) > 0)
    work += encoded * self.profile.seconds_per_encoding
    # Drawn when the task begins, so that a discarded task draws, too.
    if node.jitter:
      work *= node.draw(self._random[name])
    seconds = node.end_s(now, work) - now
    if not 0 < seconds < math.inf:
      raise ValueError(
        f"`speed` of {name!r} must make a task of {work:g} s end, and not at "
        f"once, on a clock at {now:g} s, got {node.speed:g}."
      )
    if self.trace is not None:
      self.trace.add(name, f"task {reply.task}", now, now + seconds, "compute")
    if self._under_way is not None:
      if self._out(reply) is not None:
        discards = self.state.discarded["late"] > 0
        self._under_way.begin(reply, discards=discards)
      else:
        self._under_way.skip(reply)
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
    if self._under_way is not None:
      task = self._out(reply)
      if task is not None:
        late = self.protocol.is_late(self.state, task)
        self._under_way.end(reply, late=late)
      else:
        self._under_way.skip(reply)
    num_bytes = self.profile.push_bytes * self.protocol.push_share(reply)
    self.pushed_bytes += num_bytes
    push = _messages.Push(name, reply.task, reply.samples, compute_s, waited_s)
    self._links.send(
      "push", name, num_bytes, self._take, push, life, task=reply.task
    )
    self._end(name)
    self._begin(name, life)

  def _out(self, reply: _messages.Reply) -> Any:
    """Returns the protocol's task, None if it was taken from its worker.

    The worker was counted as gone then.  It will begin anew, and its remaining
    tasks may build on parameters that it was never sent.
    """
    task = self.state.tasks.get(reply.task)
    return task if task is not None and task.worker == reply.worker else None

  def _end(self, name: str) -> None:
    """Counts what a machine has computed by now, if it does."""
    began_s = self._busy.pop(name, self._environment.now)
    self.nodes[name].compute_s += self._environment.now - began_s

  def _take(self, push: _messages.Push, life: int) -> None:
    name = str(push.worker)
    if self._under_way is None or self.accept(
      push, *self._under_way.take_push(push.task)
    ):
      self.deliver(push)
    else:
      self.deliver(_messages.Leave(name))
      if self.expelled(name):
        self._depart(name)
    if life == self._lives[name]:
      if name not in self.state.members:
        # Its tasks were taken from it: by a timer, or with a refused push.
        self._restart(name)
        self.deliver(_messages.Join(name))
      self.deliver(_messages.Pull(name))

  def refuse(
    self, worker: str, task: int, error: _learner.RefusedError
  ) -> None:
    """Counts a push that cannot be used, and notes it for a replay."""
    super().refuse(worker, task, error)
    if self._under_way is not None:
      self._under_way.refused[task] = error.reason

  def _restart(self, name: str, *, lost: bool = False) -> None:
    if self.learner is not None:
      self.learner.workers[name].restart(lost=lost)

  # Checkpoints.

  def save(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the state of the run: values of JSON, and uint8 arrays.

    The clock itself is not saved: `resume` replays it.  Saved are the learners'
    states and all messages under way.
    """
    assert self._under_way is not None
    notes, arrays = self._under_way.save()
    return notes | {"events": self.events}, arrays

  def resume(
    self, notes: dict[str, Any], arrays: dict[str, np.ndarray]
  ) -> None:
    """Continues a run that was saved; it must be at its beginning.

    The clock is replayed with learners that compute nothing, which takes a
    small part of the run's time, and the learners' states are loaded then.
    """
    pair, under_way = self.learner, self._under_way
    assert pair is not None and under_way is not None
    assert not self.events, "a resumed run is a new one"
    self._learner = under_way.replay(notes["refused"])
    self.learner = under_way.pair
    self.run(events=notes["events"])
    self.learner, self._learner = pair, pair.server
    under_way.load(pair, notes, arrays)

  # Failures.

  def _plan_outages(self, node: cluster.Node) -> None:
    for outage in node.outages:
      if outage.start_s > 0:
        self._after(outage.start_s, self._fail, node.name, outage)
      elif self.trace is not None and outage.end_s < math.inf:
        self.trace.add(node.name, "away", 0.0, outage.end_s, "away")
      if outage.end_s < math.inf:
        self._after(outage.end_s, self._return, node.name)

  def _fail(self, name: str, outage: cluster.Outage) -> None:
    now = self._environment.now
    self._depart(name)
    if self.trace is not None:
      end = outage.end_s if outage.end_s < math.inf else now
      self.trace.add(name, "away", now, end, "away")
    # A machine that returns before it was noticed sends its own Join.
    if now + self._detection_s < outage.end_s:
      self._after(self._detection_s, self.deliver, _messages.Leave(name))

  def _depart(self, name: str) -> None:
    """Ends what a machine does, whether it has failed or was expelled."""
    self._lives[name] += 1
    self._away.add(name)
    self._queues[name].clear()
    if self._under_way is not None:
      self._under_way.clear(name)
    self._links.connect(name)
    if self.trace is not None and name in self._busy:
      self.trace.cut(name, self._environment.now)
    self._end(name)
    # As a live worker's process, whose successor begins without a residual.
    self._restart(name, lost=True)

  def _return(self, name: str) -> None:
    self._away.discard(name)
    self.pardon(name)
    self.deliver(_messages.Join(name))
    self.deliver(_messages.Pull(name))

  def _after(
    self, seconds: float, function: Callable[..., None], *args: Any
  ) -> None:
    timeout = self._environment.timeout(seconds)
    timeout.callbacks.append(lambda _: function(*args))
