"""n-softsync: an update of several gradients, of any workers."""

import dataclasses

from jdist import checks
from jdist.server import _protocol, _server_state
from jdist.server._messages import Action, Worker


@dataclasses.dataclass
class SoftsyncState(_server_state.ServerState):
  """The state of `NSoftsync`.

  Attributes:
    collected: gradients since the last update.
  """

  collected: list[_server_state.Assignment] = dataclasses.field(
    default_factory=list
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NSoftsync(_protocol.Protocol[SoftsyncState]):
  r"""n-softsync: n updates in the time of one gradient of each worker.

  With L members an update is made of c = floor(L / n) gradients:

  .. math:: \theta \leftarrow \theta - \frac1c \sum_{k=1}^{c} \alpha(\tau_k) g_k

  n = L is ASGD.  With n = 1 an update takes L gradients, of fast workers
  several, and no worker waits: no barrier.

  Attributes:
    n: at least 1.  A larger number than that of members acts as their number.

  Raises:
    ValueError: when `n` is less than 1.

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
  n: int

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_int("n", self.n, 1)

  def on_leave(
    self, state: SoftsyncState, worker: Worker, actions: list[Action]
  ) -> None:
    """Makes the update if it is complete for the members that are left."""
    self._update(state, actions)

  def on_push(
    self,
    state: SoftsyncState,
    push: _server_state.Assignment,
    actions: list[Action],
  ) -> None:
    """Collects a gradient."""
    state.collected.append(push)
    self._update(state, actions)

  def _update(self, state: SoftsyncState, actions: list[Action]) -> None:
    # The last member may have left, and its gradient waits for no other.
    wanted = max(1, len(state.members) // self.n)
    # All that were collected: fewer may be wanted since a member has left.
    if len(state.collected) >= wanted:
      pushes, state.collected = state.collected, []
      self.apply(state, pushes, actions, mean=True)
