"""The base of protocols: membership, tasks, batches and versions."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from jdist import checks, signatures
from jdist.server import _allocation, _messages, _weights
from jdist.server._messages import Actions, Worker
from jdist.server._server_state import Assignment, Member, ServerState

FIXED = _allocation.FixedBatches(32)
_ALIKE = _weights.Weighting()
State = TypeVar("State", bound=ServerState)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol(Generic[State]):
  """Asynchronous SGD (ASP), and the base of all protocols.

  A protocol decides when a worker starts, and which gradients make an update.
  It is a state machine: `receive` takes one message and returns what
  the driver has to do.  It has no clock, no randomness and no arrays.  The
  messages of one worker must come in their order; they may be lost or repeated.
  A worker whose push is discarded with `"left"` sends `Join` again.

  This class is ASGD (ASP): all workers start at once, and each gradient is an
  update.  Another protocol overrides `on_pull`, `on_push`, `on_join` and
  `on_leave`, and calls `reply`, `apply`, `discard` and `timer` in them.  The
  tasks that a worker may have at once, their batches and the bytes of their
  messages follow from `depth`, `passes` and `share`.

  Attributes:
    state_type: Class attribute, the type of its state: a `ServerState` with
      further fields.
    batches: Allocation of samples to workers; 32 each by default.
    weighting: Weights of gradients in an update; equal ones by default.
    timeout_s: Seconds without a push after which a worker counts as gone; None
      waits forever.

  References:
    Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012: Downpour
    SGD, with one parameter shard and without its local steps.

  >>> from jdist import server
  >>> protocol = server.ASP(batches=server.FixedBatches(32))
  >>> state = protocol.init(["a", "b"])
  >>> protocol.receive(state, 0.0, server.Pull("a"))
  [Reply(worker='a', task=0, version=0, samples=32)]
  >>> protocol.receive(state, 0.0, server.Pull("b"))
  [Reply(worker='b', task=1, version=0, samples=32)]
  >>> protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  [Apply(tasks=(0,), weights=(1.0,), staleness=(0,))]
  >>> protocol.receive(state, 1.5, server.Push("b", 1, 32, 1.5))
  [Apply(tasks=(1,), weights=(1.0,), staleness=(1,))]
  """

  state_type: ClassVar[Any] = ServerState
  batches: _allocation.Allocation = FIXED
  weighting: _weights.Weighting = _ALIKE
  timeout_s: float | None = None

  def __post_init__(self) -> None:
    for name in ("every", "sizes"):
      if not callable(getattr(self.batches, name, None)):
        raise ValueError(
          "`batches` must be an allocation such as `server.FixedBatches(32)`, "
          f"got {checks.show(self.batches)}."
        )
    checks.check_type(
      "weighting", self.weighting, _weights.Weighting, "a `server.Weighting`"
    )
    if self.timeout_s is not None:
      checks.check_number("timeout_s", self.timeout_s, open_low=True)

  # Methods that a driver calls.

  @signatures.explained
  def init(self, workers: Iterable[Worker]) -> State:
    """Returns the state before the first message.

    The workers are the first members, for which a barrier waits.
    """
    state = self.empty_state()
    for worker in workers:
      if worker in state.members:
        raise ValueError(f"`workers` must differ, got {worker!r} twice.")
      self._add(state, worker)
    self.allocate(state)
    for worker in state.members:
      self.on_join(state, worker)
    return state

  def receive(
    self, state: State, now_s: float, message: _messages.Message
  ) -> Actions:
    """Takes a message and returns the actions to carry out.

    Args:
      state: The state from `init`, which is changed in place: at thousands of
        workers a copy for each message would take most of the time.
      now_s: The driver's time, from which durations are measured.
      message: One of `Join`, `Leave`, `Pull`, `Push` and `Expired`.

    Returns:
      Actions, in the order in which the driver carries them out.
    """
    state.now_s = now_s
    actions: Actions = []
    # The most frequent messages first: this is the simulation's inner loop.
    if isinstance(message, _messages.Push):
      self._push(state, message, actions)
    elif isinstance(message, _messages.Pull):
      member = state.members.get(message.worker)
      if member is not None and len(member.tasks) < self.depth:
        self.on_pull(state, message.worker, actions)
    elif isinstance(message, _messages.Join):
      # A member that joins has restarted before its failure was noticed.
      self._leave(state, message.worker, actions)
      self._add(state, message.worker)
      self.on_join(state, message.worker)
    elif isinstance(message, _messages.Leave):
      self._leave(state, message.worker, actions)
    elif isinstance(message, _messages.Expired):
      # A timer of a task that has been pushed meanwhile is void.
      if message.task in state.tasks:
        self._leave(state, state.tasks[message.task].worker, actions)
      else:
        self.on_expired(state, message.task, actions)
    else:
      raise ValueError(
        "`message` must be a Join, Leave, Pull, Push or Expired, got "
        f"{checks.show(message)}."
      )
    return actions

  # Methods that a protocol overrides.

  @property
  def depth(self) -> int:
    """Number of tasks that a worker may have at once, to do in their order."""
    return 1

  @property
  def steps(self) -> int:
    """Number of local steps of a task, each on a member's samples."""
    return 1

  def sizes(
    self, workers: Sequence[Worker], speeds: Sequence[float | None]
  ) -> Sequence[int]:
    """Returns the batch sizes of workers of these speeds, None if unknown."""
    batches: Any = self.batches
    if limits := getattr(batches, "limits", None):
      return batches.sizes(speeds, limits=[limits.get(x) for x in workers])
    return self.batches.sizes(speeds)

  def passes(self, worker: Worker, samples: int) -> int:
    """Returns the number of batches into which memory cuts a task."""
    del worker, samples
    return 1

  def share(self, plan: int) -> float:
    """Returns the bytes of a plan's messages over those of plan 0."""
    del plan
    return 1.0

  def push_share(self, reply: _messages.Reply) -> float:
    """Returns the bytes of a task's push over those of an exact message."""
    return self.share(reply.push_plan)

  def pull_share(self, reply: _messages.Reply) -> float:
    """Returns the bytes of a task's pull over those of an exact message."""
    return 0.0 if reply.pull_plan is None else self.share(reply.pull_plan)

  def observe(
    self, state: State, push: Assignment, message: _messages.Push
  ) -> None:
    """Updates the member's measured speed."""
    del push
    if message.compute_s > 0:
      member = state.members[message.worker]
      speed = message.samples / message.compute_s
      member.speed = self.smooth(member.speed, speed)

  def allocate(self, state: State) -> None:
    """Sets the size of each member's next batch."""
    speeds = [member.speed for member in state.members.values()]
    sizes = self.sizes(list(state.members), speeds)
    for member, samples in zip(state.members.values(), sizes, strict=True):
      member.samples = samples
    state.total_samples = sum(sizes)
    state.until_allocation = self.batches.every(len(sizes))

  def empty_state(self) -> State:
    """Returns a state without members."""
    return self.state_type()

  def summary(self, state: State) -> dict[str, Any]:
    """Returns further figures of a run, as JSON can hold them."""
    del state
    return {}

  def on_join(self, state: State, worker: Worker) -> None:
    """Updates the state for a new member."""

  def on_leave(self, state: State, worker: Worker, actions: Actions) -> None:
    """Updates the state after a member was removed from `state.members`."""

  def on_pull(self, state: State, worker: Worker, actions: Actions) -> None:
    """Gives a member a task, now or later."""
    self.reply(state, worker, actions)

  def on_push(self, state: State, push: Assignment, actions: Actions) -> None:
    """Uses a member's gradient, or discards it if it is late."""
    if self.is_late(state, push):
      self.discard(state, push, actions)
    else:
      self.apply(state, [push], actions)

  def is_late(self, state: State, push: Assignment) -> bool:
    """Returns whether a gradient would be discarded if it were pushed now.

    Drivers then neither decode nor compute it.  A protocol that discards
    pushes need not say so beforehand: False only costs that time.
    """
    del state, push
    return False

  def on_expired(self, state: State, number: int, actions: Actions) -> None:
    """Handles a timer that the protocol itself has started."""

  # Actions, which the methods above add to their list.

  def reply(
    self,
    state: State,
    worker: Worker,
    actions: Actions,
    *,
    push_plan: int = 0,
    pull_plan: int | None = 0,
    fragment: int = 0,
    pulled: tuple[int, ...] | None = None,
    merges: tuple[_messages.Merge, ...] | None = None,
  ) -> Assignment:
    """Sends the parameters to a member, with the number of its samples.

    A `server.Reply`, which has the other arguments, is added to the `actions`.
    """
    member, version = state.members[worker], state.version
    task, state.next_task = state.next_task, state.next_task + 1
    samples = self.steps * member.samples
    found = state.tasks[task] = Assignment(
      task, worker, version, samples, state.now_s, push_plan, pull_plan,
      fragment=fragment,
    )  # fmt: skip
    member.tasks.append(task)
    passes = self.steps * self.passes(worker, member.samples)
    actions.append(
      _messages.Reply(
        worker, task, version, samples, passes, push_plan, pull_plan, fragment,
        pulled, merges,
      )
    )  # fmt: skip
    if self.timeout_s is not None:
      actions.append(_messages.Timer(task, self.timeout_s))
    return found

  def apply(
    self,
    state: State,
    pushes: list[Assignment],
    actions: Actions,
    *,
    mean: bool = False,
  ) -> None:
    """Makes an update of one or more pushes, and adds it to `actions`.

    With `mean` the sum of its weights, without those of staleness, is 1.
    """
    version, weighting = state.version, self.weighting
    staleness = tuple([version - push.version for push in pushes])
    tasks = tuple([push.task for push in pushes])
    if weighting is _ALIKE:  # The default, which a large cluster asks often.
      weights = [1.0 / len(pushes) if mean else 1.0] * len(pushes)
    else:
      weights = weighting.weights(
        pushes, staleness, state.mean_samples, mean=mean
      )
    actions.append(_messages.Apply(tasks, tuple(weights), staleness))
    state.version += 1
    state.applied += len(tasks)

  def discard(
    self, state: State, push: Assignment, actions: Actions, reason: str = "late"
  ) -> None:
    """Drops a push."""
    actions.append(_messages.Discard(push.task, reason))
    state.discarded[reason] += 1

  def timer(self, state: State, wait_s: float, actions: Actions) -> int:
    """Starts a timer and returns its number, which `on_expired` is given."""
    # Timers and tasks share their numbers, so that `Expired` names one of them.
    number, state.next_task = state.next_task, state.next_task + 1
    actions.append(_messages.Timer(number, wait_s))
    return number

  def smooth(self, before: float | None, measured: float) -> float:
    """Returns a measurement, smoothed by earlier ones as speeds are."""
    if before is None:
      return measured
    kept = self.batches.smoothing
    return kept * before + (1 - kept) * measured

  # The book-keeping.

  def _push(
    self, state: State, message: _messages.Push, actions: Actions
  ) -> None:
    task = message.task
    push = state.tasks.get(task)
    if push is None or push.worker != message.worker:
      # A network may deliver a push twice, and a worker may have been counted
      # as gone while it computed.
      here = message.worker in state.members
      reason = "repeated" if here else "left"
      actions.append(_messages.Discard(task, reason))
      state.discarded[reason] += 1
      return
    del state.tasks[task]
    member = state.members[push.worker]
    member.tasks.remove(task)
    state.pushes += 1
    push.samples = message.samples
    self.observe(state, push, message)
    if state.until_allocation is not None:
      state.until_allocation -= 1
      if state.until_allocation <= 0:
        self.allocate(state)
    self.on_push(state, push, actions)

  def _add(self, state: State, worker: Worker) -> None:
    (samples,) = self.sizes([worker], [None])
    # An allocation for one worker alone would be the total of all batches.
    if state.members:
      samples = min(samples, max(1, round(state.mean_samples)))
    state.members[worker] = Member(state.joined, samples)
    state.joined += 1
    state.total_samples += samples
    if state.until_allocation is None:
      state.until_allocation = self.batches.every(len(state.members))

  def _leave(self, state: State, worker: Worker, actions: Actions) -> None:
    member = state.members.pop(worker, None)
    if member is None:
      return
    for task in member.tasks:
      del state.tasks[task]
    state.total_samples -= member.samples
    self.on_leave(state, worker, actions)
