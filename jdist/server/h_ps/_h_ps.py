"""H-PS: rounds whose tasks, messages and precision follow each worker."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jdist import checks, signatures
from jdist.server import (
  _allocation,
  _messages,
  _protocol,
  _server_state,
  _weights,
)
from jdist.server._messages import Actions, Worker
from jdist.server.h_ps import _bit_plans

_BY_SAMPLES = _weights.Weighting("linear")
_PLANS = _bit_plans.BitPlans()


@signatures.checked
@dataclasses.dataclass(frozen=True)
class BalancedBatches(_allocation.Allocation):
  r"""Batches that let all workers of a round finish at the same time.

  With t the measured seconds of a sample, c those of communication that nothing
  hides, and m what a worker's memory holds,

  .. math:: n_i t_i + c_i = T, \qquad \sum_i n_i = B, \qquad
            n_{\min} \le n_i \le m_i

  which is solved for the level T and rounded by largest remainder, so that the
  sum is B exactly.  Where gradients are accumulated, memory bounds no batch
  but what is computed at once.  A worker that was not measured yet counts as
  one of the mean speed.

  Attributes:
    total: B, samples of a round.
    measured: Whether batches follow measurements; equal parts of B if not.
    smoothing: Weight of earlier measurements in a moving average, in [0, 1).
    minimum: The smallest batch, so that each worker is measured again.
    accumulate: Whether a batch that memory does not hold is computed in parts;
      if not, memory bounds it.

  References:
    H-PS, dynamic scheduling of tasks by the workers' status.  Reconstruction:
    the abstract names neither the equations nor the estimates, and a worker
    may have no task at all there.

  >>> batches = BalancedBatches(total=14)
  >>> batches.sizes([2.0, 1.0])
  (9, 5)
  >>> batches.sizes([2.0, 1.0], overheads_s=[4.0, 0.0])  # 3 s and 4 s; 7 s.
  (7, 7)
  >>> BalancedBatches(14, accumulate=False).sizes([2.0, 1.0], limits=[6, None])
  (6, 8)
  """

  total: int
  measured: bool = True
  smoothing: float = 0.5
  minimum: int = 1
  accumulate: bool = True

  def __post_init__(self) -> None:
    self._batches  # noqa: B018  Checks the arguments.

  @property
  def _batches(self) -> _allocation.SpeedBatches:
    return _allocation.SpeedBatches(
      self.total, smoothing=self.smoothing, minimum=self.minimum
    )

  def sizes(
    self,
    speeds: Sequence[float | None],
    *,
    overheads_s: Sequence[float] | None = None,
    limits: Sequence[int | None] | None = None,
  ) -> tuple[int, ...]:
    """Returns each worker's batch, with the arguments of `SpeedBatches`."""
    return self._batches.sizes(
      speeds if self.measured else [None] * len(speeds),
      overheads_s=overheads_s,
      # Memory bounds a task only where gradients cannot be accumulated.
      limits=None if self.accumulate else limits,
    )


@dataclasses.dataclass
class HPSState(_server_state.ServerState):
  """The state of `HPS`.

  Attributes:
    round: The round of the next update.
    opened: The first round that has not been opened.
    owing: For each open round, members whose gradients its update waits for.
    collected: Gradients of open rounds.
    next_round: For each member, the first round of which it has no task yet.
    ready: Members that have asked for tasks, and are given them as rounds open.
    held: For each member, the version that it was sent last.
    plans: For each member, the plan of bits of its messages.
  """

  round: int = 0
  opened: int = 0
  owing: dict[int, dict[Worker, None]] = dataclasses.field(default_factory=dict)
  collected: list[_server_state.Assignment] = dataclasses.field(
    default_factory=list
  )
  next_round: dict[Worker, int] = dataclasses.field(default_factory=dict)
  ready: dict[Worker, None] = dataclasses.field(default_factory=dict)
  held: dict[Worker, int] = dataclasses.field(default_factory=dict)
  plans: dict[Worker, int] = dataclasses.field(default_factory=dict)


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class HPS(_protocol.Protocol[HPSState]):
  r"""Rounds of one gradient of each member, whose batches follow its speed.

  An update is the mean over the samples of a round, as in `BSP`.  With
  `BalancedBatches` all finish at the same time.  Pipelined, a member has two
  tasks: while the gradient of round k - 1 and the parameters that result
  are under way, it computes round k on those that it has,

  .. math:: \theta_{k+1} = \theta_k - \eta \sum_i \frac{n_i}{B}
            \nabla L(\theta_{k-1}; B_i)

  so that the staleness is exactly 1 from the second round on, and a round takes
  max(t, (t + c) / 2) where computing takes t, and a push and a pull c; t + c
  without it.  A stale gradient costs least at a low rate, so the pipeline may
  begin in the middle of a run, by `pipelined_from`.  With `plans` each
  member's pushes and pulls take the most bits that lengthen no round.  The
  first pull of a member, and its first one after an absence, is exact.

  A worker that joins takes part from the next round that is not opened, and no
  round waits for a member that has left.  Gradients are summed in the order of
  joining.

  Attributes:
    batches: `server.BalancedBatches`.
    weighting: Weights of gradients in an update; by samples by default.
    pipelined: Whether communication is hidden under computation.
    pipelined_from: Number of updates before the pipeline begins; no gradient is
      stale until then.
    plans: Plans of the messages' bits; None makes all messages exact.
    limits: Samples that a member's memory holds at once; members without an
      entry have no limit.
    slack: Part of the computation under which communication must fit, in
      (0, 1].

  References:
    H-PS: heterogeneity-aware parameter server.  Reconstruction: the abstract
    names the three parts and none of their equations.  Xu et al., OD-SGD
    (arXiv 2005.06728): the pipeline.

  >>> from jdist import server
  >>> protocol = server.HPS(batches=server.BalancedBatches(64))
  >>> state = protocol.init(["a", "b"])
  >>> for action in protocol.receive(state, 0.0, server.Pull("a")):
  ...   print(action)
  Reply(worker='a', task=0, version=0, samples=32)
  Reply(worker='a', task=1, version=0, samples=32, pull_plan=None)
  >>> _ = protocol.receive(state, 0.0, server.Pull("b"))
  >>> protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  []
  >>> protocol.receive(state, 1.0, server.Pull("a"))  # It has task 1.
  []
  >>> for action in protocol.receive(state, 3.0, server.Push("b", 2, 32, 3.0)):
  ...   print(action)
  Apply(tasks=(0, 2), weights=(0.5, 0.5), staleness=(0, 0))
  Reply(worker='a', task=4, version=1, samples=48)
  Reply(worker='b', task=5, version=1, samples=16)
  """

  state_type = HPSState
  batches: BalancedBatches = dataclasses.field()  # It has no default.
  weighting: _weights.Weighting = _BY_SAMPLES
  pipelined: bool = True
  pipelined_from: int = 0
  plans: _bit_plans.BitPlans | None = None
  limits: Mapping[Worker, int | None] | None = None
  slack: signatures.Fraction = 0.9

  def __post_init__(self) -> None:
    super().__post_init__()
    _allocation.check_limits(self.limits)
    checks.set_structural(self, "pipelined_from", minimum=0)
    if self.pipelined_from and not self.pipelined:
      raise ValueError(
        "`pipelined_from` must be 0 without `pipelined`, got "
        f"{self.pipelined_from}."
      )

  @property
  def depth(self) -> int:
    """Two tasks in a pipeline, one of them under way, and one otherwise."""
    return 2 if self.pipelined else 1

  def overlaps(self, state: HPSState) -> bool:
    """Returns whether the pipeline has begun."""
    return self.pipelined and state.version >= self.pipelined_from

  def passes(self, worker: Worker, samples: int) -> int:
    """Returns the number of batches into which memory cuts a task."""
    limit = (self.limits or {}).get(worker)
    if limit is None or not self.batches.accumulate:
      return 1
    return math.ceil(samples / limit)

  def share(self, plan: int) -> float:
    """Returns the bytes of a plan's messages over those of plan 0."""
    return 1.0 if self.plans is None else self.plans.share(plan)

  def observe(
    self,
    state: HPSState,
    push: _server_state.Assignment,
    message: _messages.Push,
  ) -> None:
    """Updates the measured speed, and the time of an exact exchange."""
    super().observe(state, push, message)
    if push.pull_plan is None:
      # Without a pull the time since the reply is no time of messages.
      return
    passed = state.now_s - push.sent_s - message.compute_s - message.waited_s
    # Scaled to exact messages, so that measurements of all plans compare.
    share = (self.share(push.pull_plan) + self.share(push.push_plan)) / 2
    member = state.members[push.worker]
    member.exchange_s = self.smooth(member.exchange_s, max(passed, 0.0) / share)

  def allocate(self, state: HPSState) -> None:
    """Sets each member's batch of the next round, and its messages' bits."""
    members = state.members
    overheads, overlaps = None, self.overlaps(state)
    if not overlaps:
      # In turn a member's messages lengthen its round; hidden ones do not.
      overheads = [
        (member.exchange_s or 0.0) * self.share(state.plans.get(worker, 0))
        for worker, member in members.items()
      ]
    limits = self.limits or {}
    # Sizes before plans: a member's bits depend on how long it will compute.
    sizes = self.batches.sizes(
      [member.speed for member in members.values()],
      overheads_s=overheads,
      limits=[limits.get(worker) for worker in members],
    )
    for member, samples in zip(members.values(), sizes, strict=True):
      member.samples = samples
    state.total_samples = sum(sizes)
    if self.plans is not None:
      plans = self.plans.choose(
        [x.samples / x.speed if x.speed else None for x in members.values()],
        [x.exchange_s for x in members.values()],
        pipelined=overlaps,
        slack=self.slack,
      )
      state.plans = dict(zip(members, plans, strict=True))

  def on_leave(self, state: HPSState, worker: Worker, actions: Actions) -> None:
    """Stops waiting for the member, and forgets its parameters."""
    for owing in state.owing.values():
      owing.pop(worker, None)
    for of_members in (state.next_round, state.ready, state.held):
      of_members.pop(worker, None)
    state.plans.pop(worker, None)
    self._close(state, actions)

  def on_pull(self, state: HPSState, worker: Worker, actions: Actions) -> None:
    """Gives a member its tasks of open rounds; later ones follow."""
    if state.round == state.opened:
      self._open(state, actions)
    state.ready[worker] = None
    self._give(state, worker, actions)

  def on_push(
    self, state: HPSState, push: _server_state.Assignment, actions: Actions
  ) -> None:
    """Keeps a gradient until its round is complete."""
    del state.owing[push.round][push.worker]
    state.collected.append(push)
    self._close(state, actions)

  def _close(self, state: HPSState, actions: Actions) -> None:
    """Makes the updates that are complete, and opens the next rounds."""
    # Several rounds may be complete at once, after a member has left.
    while state.round < state.opened and not state.owing[state.round]:
      del state.owing[state.round]
      pushes = [x for x in state.collected if x.round == state.round]
      state.collected = [x for x in state.collected if x.round > state.round]
      state.round += 1
      # All members of a round may have left before they pushed.
      if pushes:
        pushes = _server_state.in_order(state, pushes)
        self.apply(state, pushes, actions, mean=True)
      self._open(state, actions)

  def _open(self, state: HPSState, actions: Actions) -> None:
    """Opens as many rounds as a member may have tasks."""
    if not state.members:
      return
    # A pipeline has one more round open, whose tasks hide this one's messages.
    while state.opened < state.round + 1 + self.overlaps(state):
      # The members of now: one that joins later takes part in a later round.
      state.owing[state.opened] = dict.fromkeys(state.members)
      state.opened += 1
      self.allocate(state)
    for worker in state.members:
      if worker in state.ready:
        self._give(state, worker, actions)

  def _give(self, state: HPSState, worker: Worker, actions: Actions) -> None:
    """Gives a member its tasks of open rounds, if there are any."""
    # A member that returns has no task of rounds that were opened without it.
    first = max(state.next_round.get(worker, 0), state.round)
    for number in range(first, state.opened):
      if worker not in state.owing[number]:
        continue
      plan = state.plans.get(worker, 0)
      pull_plan: int | None = plan
      if worker not in state.held:
        pull_plan = 0  # There is nothing to which a difference could be added.
      elif state.held[worker] == state.version:
        pull_plan = None
      task = self.reply(
        state, worker, actions, push_plan=plan, pull_plan=pull_plan
      )
      task.round = number
      state.held[worker] = state.version
      state.next_round[worker] = number + 1


@signatures.checked
def h_ps(
  total: int,
  *,
  tasks: bool = True,
  pipelined: bool = True,
  pipelined_from: int = 0,
  plans: _bit_plans.BitPlans | None = _PLANS,
  limits: Mapping[Worker, int | None] | None = None,
  smoothing: float = 0.5,
  accumulate: bool = True,
  slack: float = 0.9,
  timeout_s: float | None = None,
) -> HPS:
  """H-PS: tasks by speed, communication under computation, fewer bits.

  Args:
    total: Samples of a round, of all workers together.
    tasks: Whether batches let all finish at the same time; equal ones if not.
    pipelined: As in `server.HPS`.
    pipelined_from: As in `server.HPS`.
    plans: As in `server.HPS`; None for exact messages.
    limits: As in `server.HPS`.
    smoothing: As in `server.BalancedBatches`.
    accumulate: As in `server.BalancedBatches`.
    slack: As in `server.HPS`.
    timeout_s: As in `server.Protocol`.

  Returns:
    The protocol; with only one of its three parts it is an ablation.

  References:
    H-PS; `server.HPS` lists the reconstructions.
  """
  return HPS(
    batches=BalancedBatches(
      total, measured=tasks, smoothing=smoothing, accumulate=accumulate
    ),
    pipelined=pipelined,
    pipelined_from=pipelined_from,
    plans=plans,
    limits=limits,
    slack=slack,
    timeout_s=timeout_s,
  )
