"""Decoupled DiLoCo: fragments merged by a quorum, a grace window and tokens."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

from jdist import checks, signatures
from jdist.server import _messages, _protocol, _server_state
from jdist.server._messages import Action, Worker

Change = tuple[float, int, str, str, int]
Share = tuple[float, int, int]
# Merges of each fragment whose pushes are kept for members behind.
KEPT_MERGES = 8


@dataclasses.dataclass
class DecoupledState(_server_state.ServerState):
  """The state of `DecoupledDiLoCo`.

  Attributes:
    merges: Number of merges of each fragment.
    turn: The fragment after the one that was merged last.
    collected: Pushes that wait for a merge, in the order of their receipt.
    grace: The fragment of each open grace window, by the number of its timer.
    waiting: Members whose push of the turn's fragment is not merged, and
      whether they have asked for their next task.
    next_fragment: The fragment of each member's next task.
    held: For each member, the merges of each fragment that it was sent.
    unmerged: For each member and fragment, samples and steps since its last
      push of the fragment.
    covered: Samples and steps whose progress each push holds.
    stretch_s: Seconds of a member's steps between two pushes, smoothed over all
      members.
    merged_samples: Samples whose progress is merged, each fragment counted by
      its part.
    slots: With `in_step`, the number of each member's present task; task k is
      pushed into merge k.
    joins: How often each worker has joined.
    changes: Changes of the membership: time, merges so far, `"joined"`,
      `"left"` or `"returned"`, the worker, and the members after it.
    shares: For each merge its time, the members whose pushes are in it, and all
      members.
    log: With `peers`, the last merges.
    told: With `peers`, the number of merges of which each member was told.
  """

  merges: list[int] = dataclasses.field(default_factory=list)
  turn: int = 0
  collected: list[_server_state.Assignment] = dataclasses.field(
    default_factory=list
  )
  grace: dict[int, int] = dataclasses.field(default_factory=dict)
  waiting: dict[Worker, bool] = dataclasses.field(default_factory=dict)
  next_fragment: dict[Worker, int] = dataclasses.field(default_factory=dict)
  held: dict[Worker, list[int]] = dataclasses.field(default_factory=dict)
  unmerged: dict[Worker, list[tuple[int, int]]] = dataclasses.field(
    default_factory=dict
  )
  covered: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
  stretch_s: float | None = None
  merged_samples: float = 0.0
  slots: dict[Worker, int] = dataclasses.field(default_factory=dict)
  joins: dict[Worker, int] = dataclasses.field(default_factory=dict)
  changes: list[Change] = dataclasses.field(default_factory=list)
  shares: list[Share] = dataclasses.field(default_factory=list)
  log: list[_messages.Merge] = dataclasses.field(default_factory=list)
  told: dict[Worker, int] = dataclasses.field(default_factory=dict)


@signatures.checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCo(_protocol.Protocol[DecoupledState]):
  r"""Learners on their own clocks, whose fragments are merged by a quorum.

  A member takes local steps forever; after every H / P of them it pushes the
  next of P fragments of its parameters.  Once a quorum of the members has
  pushed fragment p, and a grace window for the others has passed, the pushes
  that were received make its outer step,

  .. math:: \Delta_p = \frac{\sum_m w_m \Delta_{m,p}}{\sum_m w_m}, \qquad
            w_m = c_m \cdot \frac{c_m}{s_m}, \qquad
            \Theta_p \leftarrow \Theta_p + \mathrm{outer}(\Delta_p)

  with c the samples (tokens) and s the steps of which a push is the progress.
  The window is a part of the measured time that a member needs from one push to
  the next, and members compute during it.  It ends early when all members have
  pushed.

  With `ahead` 1 a member continues at once after a push, with what was merged
  until the push was received.  With 2 it has its next task already while it
  computes: it waits for no message, and receives merges one task later.  With 0
  it waits until the fragment that it has pushed is merged, and all members push
  the same fragment; with P = 1, a quorum of all and equal members that is
  DiLoCo.

  With `in_step` all members push the same fragment, too, exactly one merge
  late, in every order: `ahead` 1 sends a task after the push before it, and 2
  as soon as the merges that it begins with are made, while the member computes.
  The bits are the same.  A late push is part of its fragment's next merge.

  A member that joins or returns is sent all parameters, and what it had not
  pushed is lost.

  Attributes:
    batches: The samples of one local step of each member.
    interval: H, local steps from one push of a fragment to its next; a
      multiple of P.
    fragments: P.
    quorum: Part of the members, in (0, 1], whose pushes a merge waits for.
    grace: Length of the window, in times between two pushes of a member.
    ahead: Number of tasks that a member has before its push is merged: 0, 1 or
      2.
    in_step: Whether members are exactly one merge late; not with `ahead` 0.
    weights: The weights w of a merge's pushes: `"paper"` is c * c / s, and
      `"samples"` is c.
    parts: Part of the parameters' bytes in each fragment; None if all are
      equal.
    peers: Whether members merge, too: in place of merged fragments they are
      sent each other's pushes, unless they join or are far behind.

  References:
    Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training
    (arXiv 2604.21428): quorum, grace window, weights c * c / s and the outer
    step.  Reconstruction, where the text at hand was the abstract and the
    equations: the quorum is a part of the members (K there); how the window
    adapts; merged fragments are received between two tasks, not between two
    steps; a returning learner starts with a fresh inner optimizer.  Departures:
    a push is the progress since the last one (there the difference to the
    syncer's parameters, which counts steps twice that are made while a push is
    under way), and a learner keeps its progress that is not merged.  The
    paper's radial-directional averaging of pushes is left out.

  >>> from jdist import server
  >>> protocol = server.DecoupledDiLoCo(
  ...   batches=server.FixedBatches(8), interval=4, quorum=1.0, grace=0.0,
  ...   ahead=0,
  ... )
  >>> state = protocol.init(["a", "b"])
  >>> protocol.receive(state, 0.0, server.Pull("a"))
  [Reply(worker='a', task=0, version=0, samples=32, passes=4)]
  >>> _ = protocol.receive(state, 0.0, server.Pull("b"))
  >>> protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  []
  >>> protocol.receive(state, 1.0, server.Pull("a"))  # Waits for the merge.
  []
  >>> for action in protocol.receive(state, 3.0, server.Push("b", 1, 32, 3.0)):
  ...   print(action)
  Apply(tasks=(0, 1), weights=(0.5, 0.5), staleness=(0, 0))
  Reply(worker='a', task=2, version=1, samples=32, passes=4, pulled=(0,))
  """

  interval: signatures.PositiveInt = 8
  fragments: signatures.PositiveInt = 1
  quorum: signatures.Fraction = 0.5
  grace: signatures.NonNegativeFloat = 0.5
  ahead: int = 1
  in_step: bool = False
  weights: Literal["paper", "samples"] = "paper"
  parts: Sequence[float] | None = None
  peers: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.interval % self.fragments:
      raise ValueError(
        f"`interval` must be a multiple of the {self.fragments} fragments, got "
        f"{self.interval}."
      )
    checks.check_choice("ahead", self.ahead, (0, 1, 2))
    if self.in_step and not self.ahead:
      raise ValueError(
        "`in_step` must be False with `ahead` 0: it makes members exactly one "
        "merge late. Take `ahead=2`."
      )
    if self.parts is not None and (
      len(self.parts) != self.fragments
      or not min(self.parts) >= 0
      or not 0 < sum(self.parts) < math.inf
    ):
      raise ValueError(
        f"`parts` must be {self.fragments} numbers, one for each fragment, not "
        f"all of them 0, got {tuple(self.parts)}."
      )

  def empty_state(self) -> DecoupledState:
    """Returns a state without members."""
    return DecoupledState(merges=[0] * self.fragments)

  @property
  def depth(self) -> int:
    """Two tasks with `ahead` 2, and one otherwise."""
    return max(self.ahead, 1)

  @property
  def steps(self) -> int:
    """Number of local steps between two pushes of a member."""
    return self.interval // self.fragments

  def part(self, fragment: int) -> float:
    """Returns a fragment's part of the parameters' bytes."""
    if self.parts is None:
      return 1.0 / self.fragments
    return self.parts[fragment] / sum(self.parts)

  def push_share(self, reply: _messages.Reply) -> float:
    """Returns the pushed fragment's part of a message's bytes."""
    return self.part(reply.fragment)

  def pull_share(self, reply: _messages.Reply) -> float:
    """Returns the sent fragments' part of a message's bytes."""
    if reply.pulled is None:
      return 1.0
    return sum(map(self.part, reply.pulled))

  def summary(self, state: DecoupledState) -> dict[str, Any]:
    """Returns statistics of the membership."""
    parts = [merged / max(living, 1) for _, merged, living in state.shares]
    return {
      "changes": list(state.changes),
      "merges": list(state.shares),
      "merged_share": sum(parts) / len(parts) if parts else math.nan,
    }

  def on_join(self, state: DecoupledState, worker: Worker) -> None:
    """Makes a member begin with the fragment whose turn it is."""
    state.next_fragment[worker] = state.turn
    state.unmerged[worker] = [(0, 0)] * self.fragments
    state.slots[worker] = state.version
    before = state.joins.get(worker, 0)
    state.joins[worker] = before + 1
    self._note(state, worker, "returned" if before else "joined")

  def on_leave(
    self, state: DecoupledState, worker: Worker, actions: list[Action]
  ) -> None:
    """Stops waiting for the member, whose pushes stay."""
    state.waiting.pop(worker, None)
    state.held.pop(worker, None)
    state.told.pop(worker, None)
    del state.next_fragment[worker], state.unmerged[worker], state.slots[worker]
    self._note(state, worker, "left")
    # With fewer members the pushes so far may be a quorum.
    for key in dict.fromkeys(self._key(push) for push in state.collected):
      self._close(state, key, actions)

  def on_pull(
    self, state: DecoupledState, worker: Worker, actions: list[Action]
  ) -> None:
    """Gives a member as many tasks as it may have, unless it has to wait."""
    if worker in state.waiting:
      # Its next task follows the merge, in the order of joining.
      state.waiting[worker] = True
      return
    while len(state.members[worker].tasks) < self.depth:
      if self.in_step and state.version < state.slots[worker]:
        state.waiting[worker] = True
        return
      self._give(state, worker, actions)

  def on_push(
    self,
    state: DecoupledState,
    push: _server_state.Assignment,
    actions: list[Action],
  ) -> None:
    """Keeps a fragment, and merges it if its merge is complete."""
    fragment = push.fragment
    unmerged = state.unmerged[push.worker]
    # A task trains all fragments and pushes one: the others' samples wait for
    # their own pushes, and each push counts all since its last one.
    for i, (samples, steps) in enumerate(unmerged):
      unmerged[i] = (samples + push.samples, steps + self.steps)
    state.covered[push.task] = unmerged[fragment]
    unmerged[fragment] = (0, 0)
    state.collected.append(push)
    if self.in_step:
      missed = max(state.version - push.round, 0)
      push.round += -(-missed // self.fragments) * self.fragments
      # Given before the merge, which the last push of a round completes: its
      # member must not be sent what the others are not.
      if state.version >= state.slots[push.worker]:
        self._give(state, push.worker, actions)
    elif not self.ahead and fragment == state.turn:
      state.waiting[push.worker] = False
    self._close(state, self._key(push), actions)

  def observe(
    self,
    state: DecoupledState,
    push: _server_state.Assignment,
    message: _messages.Push,
  ) -> None:
    """Updates the measured time of a member's steps."""
    super().observe(state, push, message)
    # An exponential mean over about as many tasks as there are members.
    kept = 1.0 - 1.0 / max(len(state.members), 2)
    before, now = state.stretch_s, message.compute_s
    state.stretch_s = (
      now if before is None else kept * before + (1.0 - kept) * now
    )

  def on_expired(
    self, state: DecoupledState, number: int, actions: list[Action]
  ) -> None:
    """Ends a grace window, and merges its fragment."""
    if number in state.grace:
      self._merge(state, state.grace[number], actions)

  def _note(self, state: DecoupledState, worker: Worker, kind: str) -> None:
    change = state.now_s, state.version, kind, str(worker), len(state.members)
    state.changes.append(change)

  def _key(self, push: _server_state.Assignment) -> int:
    """Returns the number of the merge that a push waits for."""
    return push.round if self.in_step else push.fragment

  def _close(
    self, state: DecoupledState, key: int, actions: list[Action]
  ) -> None:
    """Makes a merge for which all have pushed, or opens its grace window."""
    # A member may have pushed a fragment twice before it is merged: it counts
    # once for the quorum, and both pushes are merged.
    here = {x.worker for x in state.collected if self._key(x) == key}
    # With `in_step` merges keep their order.
    if not here or (self.in_step and key != state.version):
      return
    pushed = len(here & state.members.keys())
    if pushed == len(state.members):
      self._merge(state, key, actions)
      return
    # The push of a member that has left is merged, but counts for no quorum.
    if pushed < math.ceil(self.quorum * len(state.members)):
      return
    # In units of measured time: the same setting serves fast and slow clusters.
    window_s = self.grace * (state.stretch_s or 0.0)
    if not window_s:
      self._merge(state, key, actions)
    elif key not in state.grace.values():
      state.grace[self.timer(state, window_s, actions)] = key

  def _merge(
    self, state: DecoupledState, key: int, actions: list[Action]
  ) -> None:
    """Makes a fragment's outer step of all pushes so far."""
    pushes = [x for x in state.collected if self._key(x) == key]
    state.collected = [x for x in state.collected if self._key(x) != key]
    state.grace = {k: x for k, x in state.grace.items() if x != key}
    pushes = _server_state.in_order(state, pushes)
    fragment = pushes[0].fragment
    merged = {push.worker for push in pushes} & state.members.keys()
    state.shares.append((state.now_s, len(merged), len(state.members)))
    staleness = tuple(state.merges[fragment] - x.version for x in pushes)
    covered = [state.covered.pop(push.task) for push in pushes]
    # The weights c * c / s of the paper: tokens times tokens a step.
    shares = [
      samples if self.weights == "samples" else samples * samples / steps
      for samples, steps in covered
    ]
    total = sum(shares)
    weights = tuple(
      share / total * self.weighting.damping(stale)
      for share, stale in zip(shares, staleness, strict=True)
    )
    tasks = tuple(push.task for push in pushes)
    actions.append(_messages.Apply(tasks, weights, staleness))
    if self.peers:
      workers = tuple(push.worker for push in pushes)
      state.log.append(_messages.Merge(fragment, tasks, weights, workers))
      del state.log[: -KEPT_MERGES * self.fragments]
    state.version += 1
    state.applied += len(tasks)
    state.merges[fragment] += 1
    state.merged_samples += self.part(fragment) * sum(x for x, _ in covered)
    # With `ahead` 0 a late merge of another fragment keeps the turn.
    if self.ahead or fragment == state.turn:
      state.turn = (fragment + 1) % self.fragments
      ready = [worker for worker, asked in state.waiting.items() if asked]
      ready.sort(key=_server_state.by_rank(state))
      state.waiting = {}
      for worker in ready:
        self.on_pull(state, worker, actions)
    if self.in_step:
      self._close(state, state.version, actions)

  def _give(
    self, state: DecoupledState, worker: Worker, actions: list[Action]
  ) -> None:
    """Gives a member its next task, with the merges since its last one."""
    held = state.held.get(worker)
    pulled = None
    if held is not None:
      # Only fragments with a merge that the member has not been sent.
      pulled = tuple(i for i, x in enumerate(state.merges) if x > held[i])
    state.held[worker] = list(state.merges)
    merges = self._merges_for(state, worker) if self.peers else None
    slot = state.version
    if self.in_step and held is not None:
      slot = max(state.slots[worker] + 1, slot)
    state.slots[worker] = slot
    fragment = state.next_fragment[worker] if self.ahead else state.turn
    if self.in_step:
      fragment = slot % self.fragments
    state.next_fragment[worker] = (fragment + 1) % self.fragments
    task = self.reply(
      state,
      worker,
      actions,
      pull_plan=None if pulled == () else 0,
      fragment=fragment,
      pulled=pulled,
      merges=merges,
    )
    task.round = slot
    # The staleness of a push counts merges of its fragment, not all updates.
    task.version = state.merges[fragment]

  def _merges_for(
    self, state: DecoupledState, worker: Worker
  ) -> tuple[_messages.Merge, ...]:
    """Returns the merges since a member's last task, if all are in the log."""
    before, state.told[worker] = state.told.get(worker), state.version
    if before is None or state.version - before > len(state.log):
      return ()
    return tuple(state.log[len(state.log) - (state.version - before) :])
