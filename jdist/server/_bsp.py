"""Bulk synchronous parallel: a barrier in every update."""

import dataclasses

from jdist import signatures
from jdist.server import _protocol, _server_state
from jdist.server._messages import Actions, Worker


@dataclasses.dataclass
class BSPState(_server_state.ServerState):
  """The state of `BSP`.

  Attributes:
    owing: Members whose gradients the update waits for.
    begun: Whether one of them has been given its task.
    pushes_of_round: Gradients of this update so far.
    waiting: Members that are ready for a task of the next update.
    changed: Whether a member has joined since the last restart.
    restart: Number of the timer after which all start again; None without a
      restart.
    first_task: The first task that was given after the last restart.
  """

  owing: dict[Worker, None] = dataclasses.field(default_factory=dict)
  begun: bool = False
  pushes_of_round: list[_server_state.Assignment] = dataclasses.field(
    default_factory=list
  )
  waiting: dict[Worker, None] = dataclasses.field(default_factory=dict)
  changed: bool = False
  restart: int | None = None
  first_task: int = 0


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class BSP(_protocol.Protocol[BSPState]):
  r"""Synchronous SGD: an update is the mean of one gradient of each member.

  A worker that joins during an update takes part from the next update on, and
  the update no longer waits for a member that has left.  Gradients are summed
  in the order in which their workers joined, not in the order of pushes.

  With `restart_s` the members are one job, as with collectives among them: when
  a member leaves or joins, the present update is lost, and all start again
  after `restart_s` seconds.  Computation is not interrupted.  A worker with a
  task of the lost update completes it first, in vain, which takes longer than a
  real job's restart if tasks take longer than `restart_s`.

  Attributes:
    backups: Number of slowest members for which an update does not wait, and
      whose gradients are discarded.
    restart_s: Seconds of a restart of all members after one has left or joined;
      with None the others continue.

  References:
    Valiant, A Bridging Model for Parallel Computation, CACM 1990.
    Chen et al., Revisiting Distributed Synchronous SGD (arXiv 1604.00981):
    backup workers.

  >>> from jdist import server
  >>> protocol = server.BSP(batches=server.FixedBatches(32))
  >>> state = protocol.init(["a", "b"])
  >>> for worker in "ab":
  ...   _ = protocol.receive(state, 0.0, server.Pull(worker))
  >>> protocol.receive(state, 1.0, server.Push("b", 1, 32, 1.0))
  []
  >>> protocol.receive(state, 1.0, server.Pull("b"))  # Waits for "a".
  []
  >>> for action in protocol.receive(state, 2.0, server.Push("a", 0, 32, 2.0)):
  ...   print(action)
  Apply(tasks=(0, 1), weights=(0.5, 0.5), staleness=(0, 0))
  Reply(worker='b', task=2, version=1, samples=32)
  """

  state_type = BSPState
  backups: signatures.NonNegativeInt = 0
  restart_s: signatures.NonNegativeFloat | None = None

  def on_join(self, state: BSPState, worker: Worker) -> None:
    """Waits for the member, from this update on unless it has begun."""
    if not state.begun:
      state.owing[worker] = None
    elif self.restart_s is not None:
      state.changed = True

  def on_leave(self, state: BSPState, worker: Worker, actions: Actions) -> None:
    """Stops waiting for the member."""
    state.owing.pop(worker, None)
    state.waiting.pop(worker, None)
    if self.restart_s is not None:
      self._restart(state, actions)
    else:
      self._close(state, actions)

  def on_pull(self, state: BSPState, worker: Worker, actions: Actions) -> None:
    """Gives a member its task if this update waits for it."""
    # A member joined: the job restarts once it asks for a task, not before.
    if state.changed:
      self._restart(state, actions)
    if state.restart is not None:
      state.waiting[worker] = None
    elif worker in state.owing:
      state.begun = True
      self.reply(state, worker, actions)
    else:
      state.waiting[worker] = None

  def is_late(self, state: BSPState, push: _server_state.Assignment) -> bool:
    """Returns whether a gradient is of an earlier update or of a restart."""
    return push.task < state.first_task or push.version < state.version

  def on_push(
    self, state: BSPState, push: _server_state.Assignment, actions: Actions
  ) -> None:
    """Keeps a gradient of this update, and discards an earlier one."""
    if self.is_late(state, push):
      restarted = push.task < state.first_task
      self.discard(state, push, actions, "restart" if restarted else "late")
      return
    state.owing.pop(push.worker)
    state.pushes_of_round.append(push)
    self._close(state, actions)

  def on_expired(self, state: BSPState, number: int, actions: Actions) -> None:
    """Gives all ready members their tasks after a restart."""
    if number == state.restart:
      state.restart = None
      self._begin(state, actions)

  def _restart(self, state: BSPState, actions: Actions) -> None:
    """Drops the update that was begun, and has all members wait for a timer."""
    assert self.restart_s is not None
    for push in state.pushes_of_round:
      self.discard(state, push, actions, "restart")
    state.pushes_of_round, state.changed = [], False
    state.restart = self.timer(state, self.restart_s, actions)
    state.first_task = state.next_task

  def _close(self, state: BSPState, actions: Actions) -> None:
    """Makes the update if it is complete, and begins the next one."""
    # Every member is in an update or waits for one. An update thus takes a
    # constant number of operations for each member, and one sort.
    if not state.pushes_of_round:
      # All members for which the update waited have left: there is nothing to
      # apply, but members that joined meanwhile must not wait forever.
      if not state.owing:
        self._begin(state, actions)
      return
    if len(state.owing) > self.backups:
      return
    pushes = _server_state.in_order(state, state.pushes_of_round)
    state.pushes_of_round = []
    self.apply(state, pushes, actions, mean=True)
    self._begin(state, actions)

  def _begin(self, state: BSPState, actions: Actions) -> None:
    # A dictionary without values is a set that keeps its order.
    state.owing = dict.fromkeys(state.members)
    ready = sorted(state.waiting, key=_server_state.by_rank(state))
    state.waiting = {}
    state.begun = bool(ready)
    for worker in ready:
      self.reply(state, worker, actions)
