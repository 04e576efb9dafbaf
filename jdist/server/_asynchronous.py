"""Asynchronous SGD: each gradient is an update, or n of any workers are."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from jdist import signatures
from jdist.server import _allocation, _protocol, _server_state, _weights
from jdist.server._messages import Actions, Worker

ASP = _protocol.Protocol  # Asynchronous SGD: each gradient is an update.


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ringmaster(_protocol.Protocol):
  r"""Asynchronous SGD that discards gradients which are too stale.

  A gradient of staleness tau is an update if tau < R, and is discarded if not;
  its worker continues from the present parameters.

  Attributes:
    max_staleness: R, >= 1; one for each worker is near the theory's best where
      gradients are noisy.

  References:
    Maranjyan et al., Ringmaster ASGD: The First Asynchronous SGD with Optimal
    Time Complexity (arXiv 2501.16168), Algorithm 4; no computation is stopped.

  >>> from jdist import server
  >>> protocol = server.Ringmaster(max_staleness=1)
  >>> state = protocol.init(["a", "b"])
  >>> for worker in "ab":
  ...   _ = protocol.receive(state, 0.0, server.Pull(worker))
  >>> protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  [Apply(tasks=(0,), weights=(1.0,), staleness=(0,))]
  >>> protocol.receive(state, 1.0, server.Push("b", 1, 32, 1.0))
  [Discard(task=1, reason='late')]
  """

  # A fresh gradient has staleness 0.
  max_staleness: signatures.PositiveInt

  def is_late(
    self, state: _server_state.ServerState, push: _server_state.Assignment
  ) -> bool:
    """Returns whether a gradient is too stale."""
    return state.version - push.version >= self.max_staleness


@signatures.checked
def dbs(
  total: int,
  *,
  period: int | None = None,
  smoothing: float = 0.5,
  minimum: int = 1,
  maximum: int | None = None,
  limits: Mapping[Worker, int | None] | None = None,
  rate: Any = "linear",
  parts: Any = None,
  inverse_staleness: bool = False,
  timeout_s: float | None = None,
) -> _protocol.Protocol:
  r"""DBS-SGD: asynchronous SGD whose batches follow each worker's speed.

  Each gradient is an update, as in ASGD; batches are proportional to measured
  speeds (`server.SpeedBatches`), so that iterations take equally long and no
  worker's gradients are much staler than another's.

  Args:
    total: Samples of all workers' batches together.
    period: Pushes between two allocations; one for each worker if None.
    smoothing: Share of the last speed that a new measurement leaves.
    minimum: The smallest batch.
    maximum: The largest batch.
    limits: The largest batch of single workers, by their names.
    rate: The learning rate grows with a worker's batch: `"linear"`,
      `"square_root"` or `"none"`.
    parts: Part of the data that each worker owns; None if the parts are equal
      or all data is shared.
    inverse_staleness: Divides a gradient by its staleness.
    timeout_s: As in `server.Protocol`.

  References:
    DBS-SGD.  Reconstruction: the abstract names neither the estimate of the
    speeds, nor how often batches change, nor the rate.
  """
  return ASP(
    batches=_allocation.SpeedBatches(
      total,
      period=period,
      smoothing=smoothing,
      minimum=minimum,
      maximum=maximum,
      limits=limits,
    ),
    weighting=_weights.Weighting(
      samples=rate,
      parts=parts,
      staleness=_weights.inverse_staleness if inverse_staleness else None,
    ),
    timeout_s=timeout_s,
  )


@dataclasses.dataclass
class SoftsyncState(_server_state.ServerState):
  """The state of `NSoftsync`.

  Attributes:
    collected: Gradients since the last update.
  """

  collected: list[_server_state.Assignment] = dataclasses.field(
    default_factory=list
  )


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class NSoftsync(_protocol.Protocol[SoftsyncState]):
  r"""n-softsync: n updates in the time of one gradient of each worker.

  With L members an update is made of c = floor(L / n) gradients:

  .. math:: \theta \leftarrow \theta - \frac1c \sum_{k=1}^{c} \alpha(\tau_k) g_k

  n = L is ASGD.  With n = 1 an update takes L gradients, of fast workers
  several, and no worker waits: no barrier.

  Attributes:
    n: At least 1.  A larger number than that of members acts as their number.
    buffer: c >= 1, whatever L is; None for the c above.

  References:
    Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI
    2016 (arXiv 1511.05950); the rate that falls with the staleness is
    `Weighting(staleness=server.inverse_staleness)`.

  >>> from jdist import server
  >>> protocol = server.NSoftsync(n=1)
  >>> state = protocol.init(["a", "b"])
  >>> for worker in "ab":
  ...   _ = protocol.receive(state, 0.0, server.Pull(worker))
  >>> protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  []
  >>> protocol.receive(state, 1.0, server.Pull("a"))
  [Reply(worker='a', task=2, version=0, samples=32)]
  >>> protocol.receive(state, 2.0, server.Push("a", 2, 32, 1.0))
  [Apply(tasks=(0, 2), weights=(0.5, 0.5), staleness=(0, 0))]
  """

  state_type = SoftsyncState
  n: signatures.PositiveInt
  buffer: signatures.PositiveInt | None = None

  def on_leave(
    self, state: SoftsyncState, worker: Worker, actions: Actions
  ) -> None:
    """Makes the update if it is complete for the members that are left."""
    self._update(state, actions)

  def on_push(
    self, state: SoftsyncState, push: _server_state.Assignment, actions: Actions
  ) -> None:
    """Collects a gradient."""
    state.collected.append(push)
    self._update(state, actions)

  def _update(self, state: SoftsyncState, actions: Actions) -> None:
    # The last member may have left, and its gradient waits for no other.
    wanted = self.buffer or max(1, len(state.members) // self.n)
    # All that were collected: fewer may be wanted since a member has left.
    if len(state.collected) >= wanted:
      pushes, state.collected = state.collected, []
      self.apply(state, pushes, actions, mean=True)


@signatures.checked
def fedbuff(
  *,
  batches: Any = _protocol.FIXED,
  buffer: signatures.PositiveInt = 10,
  timeout_s: float | None = None,
) -> NSoftsync:
  r"""FedBuff: an update of K gradients, which are damped by their staleness.

  .. math:: \theta \leftarrow \theta - \frac{\alpha}{K} \sum_{k=1}^{K}
            \frac{g_k}{\sqrt{1 + \tau_k}}

  No worker waits, and several of the K gradients may be one worker's.

  Args:
    batches: As in `server.Protocol`.
    buffer: K, >= 1; 10 in the paper.
    timeout_s: As in `server.Protocol`.

  References:
    Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation
    (arXiv 2106.06639), Algorithm 1.  Departure: a worker pushes one gradient
    where the paper's clients push the difference of several local steps.
  """
  damping = _weights.Weighting(staleness=lambda tau: (1 + tau) ** -0.5)
  return NSoftsync(
    batches=batches, n=1, buffer=buffer, weighting=damping, timeout_s=timeout_s
  )


@dataclasses.dataclass
class SSPState(_server_state.ServerState):
  """The state of `SSP`.

  Attributes:
    clocks: Gradients of each member since it joined, from the clock at which
      it did.
    counts: Members at each clock.
    lowest: The least clock of a member.
    waiting: By their clock, members that are too far ahead.
  """

  clocks: dict[Worker, int] = dataclasses.field(default_factory=dict)
  counts: collections.Counter[int] = dataclasses.field(
    default_factory=collections.Counter
  )
  lowest: int = 0
  waiting: dict[int, dict[Worker, None]] = dataclasses.field(
    default_factory=dict
  )


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class SSP(_protocol.Protocol[SSPState]):
  r"""Asynchronous SGD with a bound on the lead over the slowest worker.

  Each gradient is an update.  A member that has given c gradients begins the
  next one if c is at most the least of all members plus s, and waits if not.
  A worker that joins or returns begins at the least clock.

  Attributes:
    bound: s, >= 0.  With 0 all are in the same round, yet every gradient is an
      update of its own.

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
  bound: signatures.NonNegativeInt = 3

  def on_join(self, state: SSPState, worker: Worker) -> None:
    """Starts a member at the least clock."""
    state.clocks[worker] = state.lowest
    state.counts[state.lowest] += 1

  def on_leave(self, state: SSPState, worker: Worker, actions: Actions) -> None:
    """Stops waiting for the member."""
    # Its clock may have been the least one, for which others wait.
    clock = state.clocks.pop(worker)
    state.waiting.get(clock, {}).pop(worker, None)
    self._take_from(state, clock, actions)

  def on_pull(self, state: SSPState, worker: Worker, actions: Actions) -> None:
    """Gives a member a task unless it is too far ahead."""
    clock = state.clocks[worker]
    if clock <= state.lowest + self.bound:
      self.reply(state, worker, actions)
    else:
      state.waiting.setdefault(clock, {})[worker] = None

  def on_push(
    self, state: SSPState, push: _server_state.Assignment, actions: Actions
  ) -> None:
    """Applies the update and releases workers that the bound has blocked."""
    self.apply(state, [push], actions)
    clock = state.clocks[push.worker]
    state.clocks[push.worker] = clock + 1
    state.counts[clock + 1] += 1
    self._take_from(state, clock, actions)

  def _take_from(self, state: SSPState, clock: int, actions: Actions) -> None:
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
