"""Stale synchronous parallel: a bound on the lead over the slowest worker."""

import collections
import dataclasses

from jdist import checks
from jdist.server import _protocol, _server_state
from jdist.server._messages import Action, Worker


@dataclasses.dataclass
class SSPState(_server_state.ServerState):
  """The state of `SSP`.

  Attributes:
    clocks: gradients of each member since it joined, from the clock at which
      it did.
    counts: members at each clock.
    lowest: the least clock of a member.
    waiting: by their clock, members that are too far ahead.
  """

  clocks: dict[Worker, int] = dataclasses.field(default_factory=dict)
  counts: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )
  lowest: int = 0
  waiting: dict[int, dict[Worker, None]] = dataclasses.field(
    default_factory=dict
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SSP(_protocol.Protocol[SSPState]):
  r"""Asynchronous SGD with a bound on the lead over the slowest worker.

  Each gradient is an update.  A member that has given c gradients begins the
  next one if c is at most the least of all members plus s, and waits if not.
  A worker that joins or returns begins at the least clock.

  Attributes:
    bound: s, >= 0.  With 0 all are in the same round, yet every gradient is an
      update of its own.

  Raises:
    ValueError: when `bound` is negative.

  References:
    Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server, NeurIPS 2013.

  >>> from jdist import server
  >>> protocol = server.SSP(bound=0)
  >>> state = protocol.init(["a", "b"])
  >>> for worker in "ab":
  ...   _ = protocol.receive(state, 0.0, server.Pull(worker))
  >>> protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  [Apply(tasks=(0,), weights=(1.0,), staleness=(0,))]
  >>> protocol.receive(state, 1.0, server.Pull("a"))  # Waits for "b".
  []
  >>> for action in protocol.receive(state, 2.0, server.Push("b", 1, 32, 2.0)):
  ...   print(action)
  Apply(tasks=(1,), weights=(1.0,), staleness=(1,))
  Reply(worker='a', task=2, version=2, samples=32)
  """

  state_type = SSPState
  bound: int = 3

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_int("bound", self.bound, 0)

  def on_join(self, state: SSPState, worker: Worker) -> None:
    """Starts a member at the least clock."""
    state.clocks[worker] = state.lowest
    state.counts[state.lowest] += 1

  def on_leave(
    self, state: SSPState, worker: Worker, actions: list[Action]
  ) -> None:
    """Stops waiting for the member."""
    # Its clock may have been the least one, for which others wait.
    clock = state.clocks.pop(worker)
    state.waiting.get(clock, {}).pop(worker, None)
    self._take_from(state, clock, actions)

  def on_pull(
    self, state: SSPState, worker: Worker, actions: list[Action]
  ) -> None:
    """Gives a member a task unless it is too far ahead."""
    clock = state.clocks[worker]
    if clock <= state.lowest + self.bound:
      self.reply(state, worker, actions)
    else:
      state.waiting.setdefault(clock, {})[worker] = None

  def on_push(
    self, state: SSPState, push: _server_state.Assignment, actions: list[Action]
  ) -> None:
    """Applies the update and releases workers that the bound has blocked."""
    self.apply(state, [push], actions)
    clock = state.clocks[push.worker]
    state.clocks[push.worker] = clock + 1
    state.counts[clock + 1] += 1
    self._take_from(state, clock, actions)

  def _take_from(
    self, state: SSPState, clock: int, actions: list[Action]
  ) -> None:
    """Counts one member less at a clock."""
    # The least clock only rises, so that all updates together advance it once
    # for each clock: constant work a message, without a search for the minimum.
    state.counts[clock] -= 1
    while state.clocks and not state.counts[state.lowest]:
      del state.counts[state.lowest]
      state.lowest += 1
      ready = state.waiting.pop(state.lowest + self.bound, {})
      for worker in sorted(ready, key=_server_state.by_rank(state)):
        self.reply(state, worker, actions)
