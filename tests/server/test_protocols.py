"""Laws that hold for every protocol, whatever happens to its messages."""

import collections
import dataclasses
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from jdist import conformance, server
from jdist.server import _messages
from tests import _thinned

BATCHES = server.SpeedBatches(total=64)
PROTOCOLS = {
  "bsp": server.BSP(),
  "bsp with backups": server.BSP(backups=1),
  "bsp as one job": server.BSP(restart_s=1.0),
  "asp": server.ASP(),
  "ssp 0": server.SSP(bound=0),
  "ssp 2": server.SSP(bound=2, batches=BATCHES),
  "1-softsync": server.NSoftsync(n=1),
  "2-softsync": server.NSoftsync(
    n=2, weighting=server.Weighting(staleness=server.inverse_staleness)
  ),
  "fedbuff": server.fedbuff(buffer=3),
  "dbs": server.dbs(64),
  "ringmaster": server.Ringmaster(max_staleness=2),
  "h_ps": server.h_ps(64),
  "h_ps in turn": server.h_ps(64, pipelined=False),
  "decoupled": server.DecoupledDiLoCo(interval=4, fragments=2),
  "decoupled, a quorum of all": server.DecoupledDiLoCo(
    interval=3, fragments=3, quorum=1.0, grace=0.0, ahead=2
  ),
  "decoupled in turn": server.DecoupledDiLoCo(
    interval=2, fragments=2, quorum=0.7, ahead=0
  ),
}


def test_every_public_protocol_has_its_name():
  """A line that is missing would take a protocol from the command line."""
  rules = {
    rule
    for rule in vars(server).values()
    if isinstance(rule, type) and issubclass(rule, server.Protocol)
  }
  named = {
    "asp": server.ASP, "bsp": server.BSP, "dbs": server.dbs,
    "decoupled_diloco": server.DecoupledDiLoCo, "fedbuff": server.fedbuff,
    "h_ps": server.h_ps, "n_softsync": server.NSoftsync,
    "ringmaster": server.Ringmaster, "ssp": server.SSP,
  }  # fmt: skip
  assert named == server.PROTOCOLS
  # H-PS is made by a function, and ASP is the base class under its name.
  assert rules - {server.HPS} == {
    rule for rule in named.values() if isinstance(rule, type)
  }


def test_every_named_protocol_is_tested():
  tried = {type(protocol) for protocol in PROTOCOLS.values()}
  made = {
    type(factory(**_REQUIRED.get(name, {})))
    for name, factory in server.PROTOCOLS.items()
  }
  assert made == tried


_REQUIRED = {
  "dbs": {"total": 64},
  "h_ps": {"total": 64},
  "n_softsync": {"n": 1},
  "ringmaster": {"max_staleness": 4},
}


class Network:
  """Workers, and messages that are lost, repeated, or wait for each other."""

  def __init__(self, protocol, num_workers, seed):
    self.protocol, self.random = protocol, random.Random(seed)
    self.names = [f"w{i}" for i in range(num_workers)]
    self.state = protocol.init(self.names)
    # The messages of a worker come in their order.
    self.queues = {name: collections.deque() for name in self.names}
    self.away = set()
    for name in self.names:
      self.queues[name].append(server.Pull(name))
    self.pushed = 0
    self.applied, self.discarded = collections.Counter(), 0
    self.versions = 0
    self.ahead = []
    self.timers = []

  def deliver(self, message):
    if isinstance(message, server.Push):
      self.pushed += 1
    for action in self.protocol.receive(self.state, 0.0, message):
      self.carry_out(action)

  def carry_out(self, action):
    if isinstance(action, server.Apply):
      assert len(action.tasks) == len(action.weights) == len(action.staleness)
      assert min(action.staleness) >= 0 and min(action.weights) > 0
      self.applied.update(action.tasks)
      self.versions += 1
    elif isinstance(action, server.Discard):
      self.discarded += 1
    elif isinstance(action, server.Timer):
      self.timers.append(action.task)
    elif isinstance(action, server.Reply):
      # There may be two updates in one answer.
      assert action.version == self.versions <= self.state.version
      assert action.worker in self.state.members
      if isinstance(self.state, server.SSP().empty_state().__class__):
        clocks = self.state.clocks
        self.ahead.append(clocks[action.worker] - min(clocks.values()))
      if action.worker not in self.away:
        seconds = self.random.uniform(0.5, 4.0)
        self.queues[action.worker] += [
          server.Push(action.worker, action.task, action.samples, seconds),
          server.Pull(action.worker),
        ]

  def step(self, faults):
    """Delivers a message of a random worker, or lets something go wrong."""
    while self.timers and (not faults or self.random.random() < 0.1):
      self.deliver(_messages.Expired(self.timers.pop(0)))
    name = self.random.choice(self.names)
    queue, happens = self.queues[name], self.random.random()
    if faults and happens < 0.05:
      self.away.add(name)
      if self.random.random() < 0.5:  # Else the last messages still come.
        queue.clear()
      self.deliver(server.Leave(name))
    elif name in self.away:
      if queue:
        self.deliver(queue.popleft())
      elif not faults or happens < 0.5:
        self.away.discard(name)
        queue += [server.Join(name), server.Pull(name)]
    elif not queue:
      return
    elif faults and happens < 0.15:
      queue.popleft()  # Lost.
      if not queue:
        queue += [server.Join(name), server.Pull(name)]
    elif faults and happens < 0.25:
      self.deliver(queue[0])  # And once more, later.
    elif faults and happens < 0.3 and self.state.tasks:
      task = self.random.choice(list(self.state.tasks))
      late = self.state.tasks[task].worker
      self.deliver(_messages.Expired(task))
      self.queues[late] += [server.Join(late), server.Pull(late)]
    else:
      self.deliver(queue.popleft())


def each_push_is_counted_once(net):
  state = net.state
  held = len(getattr(state, "collected", ())) + len(
    getattr(state, "pushes_of_round", ())
  )
  assert set(net.applied.values()) <= {1}
  assert state.applied == net.applied.total()
  assert sum(state.discarded.values()) == net.discarded
  assert net.pushed == state.applied + net.discarded + held
  assert state.version == net.versions


@pytest.mark.parametrize("name", PROTOCOLS)
@hypothesis.settings(max_examples=25)
@hypothesis.given(st.integers(1, 6), st.integers(0, 10**6))
def test_each_push_is_applied_once_or_discarded(name, num_workers, seed):
  protocol = PROTOCOLS[name]
  net = Network(protocol, num_workers, seed)
  for _ in range(150):
    net.step(faults=True)
    each_push_is_counted_once(net)
  sizes = [member.samples for member in net.state.members.values()]
  assert sum(sizes) == net.state.total_samples
  # Whatever failed before, the members continue.
  for worker in net.names:
    net.queues[worker] += [server.Join(worker), server.Pull(worker)]
  net.away.clear()
  before = net.versions
  for _ in range(60 * num_workers):
    net.step(faults=False)
  each_push_is_counted_once(net)
  assert net.versions > before
  assert len(net.state.tasks) <= protocol.depth * num_workers
  if isinstance(protocol, server.SSP):
    assert max(net.ahead) <= protocol.bound


@pytest.mark.parametrize(
  "name",
  _thinned.some(list(PROTOCOLS), ["bsp with backups", "h_ps", "decoupled"]),
)
def test_protocol_keeps_the_laws_on_the_clock(name):
  pytest.importorskip("simpy")
  conformance.check(PROTOCOLS[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting(server.Protocol):
  """Waits for ever from the tenth task on."""

  def on_pull(self, state, worker, actions):
    if state.next_task < 10:
      super().on_pull(state, worker, actions)


def test_protocol_that_waits_for_ever_is_named():
  pytest.importorskip("simpy")
  with pytest.raises(AssertionError, match="no worker waits for ever"):
    conformance.check(Waiting())


@pytest.mark.parametrize("name", PROTOCOLS)
def test_no_barrier_waits_for_a_departed_worker(name):
  net = Network(PROTOCOLS[name], 4, seed=1)
  for _ in range(100):
    net.step(faults=False)
  for gone in ("w1", "w3"):
    net.away.add(gone)
    net.queues[gone].clear()
    net.deliver(server.Leave(gone))
    net.names.remove(gone)
  before = net.versions
  for _ in range(100):
    net.step(faults=False)
  assert net.versions > before + 5


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_same_messages_give_the_same_actions(name):
  def actions():
    net = Network(PROTOCOLS[name], 5, seed=3)
    for _ in range(300):
      net.step(faults=True)
    return dataclasses.asdict(net.state)

  assert actions() == actions()


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_timeout_ends_a_membership(name):
  protocol = dataclasses.replace(PROTOCOLS[name], timeout_s=5.0)
  state = protocol.init(["a", "b"])
  reply, timer, *_ = protocol.receive(state, 0.0, server.Pull("a"))
  assert timer == server.Timer(reply.task, 5.0)
  protocol.receive(state, 5.0, _messages.Expired(reply.task))
  assert list(state.members) == ["b"]
  late = server.Push("a", reply.task, reply.samples, 6.0)
  assert protocol.receive(state, 6.0, late) == [
    server.Discard(reply.task, "left")
  ]
  # A timer of a task that is no more says nothing.
  assert protocol.receive(state, 9.0, _messages.Expired(reply.task)) == []


def test_late_pushes_of_backups_are_discarded():
  protocol = server.BSP(backups=2)
  state = protocol.init("abcd")
  for worker in "abcd":
    protocol.receive(state, 0.0, server.Pull(worker))
  assert protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0)) == []
  (update,) = protocol.receive(state, 1.0, server.Push("b", 1, 32, 1.0))
  assert update == server.Apply((0, 1), (0.5, 0.5), (0, 0))
  for task, worker in ((2, "c"), (3, "d")):
    late = protocol.receive(state, 2.0, server.Push(worker, task, 32, 2.0))
    assert late == [server.Discard(task, "late")]
  assert state.discarded == {"late": 2}


def test_static_job_restarts_when_a_worker_leaves_or_joins():
  protocol = server.BSP(restart_s=3.0)
  state = protocol.init("abc")
  for worker in "abc":
    protocol.receive(state, 0.0, server.Pull(worker))
  protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  protocol.receive(state, 1.0, server.Pull("a"))
  dropped, timer = protocol.receive(state, 1.5, server.Leave("b"))
  assert dropped == server.Discard(0, "restart")
  assert timer == server.Timer(3, 3.0)
  # What c still computes is of no use.
  late = protocol.receive(state, 2.0, server.Push("c", 2, 32, 2.0))
  assert late == [server.Discard(2, "restart")]
  assert protocol.receive(state, 2.0, server.Pull("c")) == []
  # One more who joins: all wait anew.
  protocol.receive(state, 3.0, server.Join("b"))
  (timer,) = protocol.receive(state, 3.0, server.Pull("b"))
  assert protocol.receive(state, 4.5, _messages.Expired(3)) == []
  replies = protocol.receive(state, 6.0, _messages.Expired(timer.task))
  assert [reply.worker for reply in replies] == ["a", "c", "b"]


def test_updates_sum_in_the_order_of_joining():
  protocol = server.BSP()
  state = protocol.init("abc")
  for worker in "abc":
    protocol.receive(state, 0.0, server.Pull(worker))
  for task in (2, 0):
    protocol.receive(state, 0.0, server.Push("abc"[task], task, 32, 1.0))
  (update,) = protocol.receive(state, 0.0, server.Push("b", 1, 32, 1.0))
  assert update.tasks == (0, 1, 2)


def test_push_of_a_departed_worker_is_summed_last():
  protocol = server.BSP()
  state = protocol.init("abc")
  # Its task has the least number.
  for worker in "bca":
    protocol.receive(state, 0.0, server.Pull(worker))
  for task, worker in enumerate("bc"):
    protocol.receive(state, 0.0, server.Push(worker, task, 32, 1.0))
  protocol.receive(state, 0.0, server.Leave("b"))
  (update,) = protocol.receive(state, 0.0, server.Push("a", 2, 32, 1.0))
  assert update.tasks == (2, 1, 0)


def test_a_barrier_weighs_by_samples():
  protocol = server.BSP(
    batches=server.SpeedBatches(total=40, smoothing=0.0),
    weighting=server.Weighting("linear"),
  )
  state = protocol.init("ab")
  for now in range(2):
    first = state.next_task
    for worker in "ab":
      protocol.receive(state, now, server.Pull(worker))
    sizes = [state.tasks[first + i].samples for i in range(2)]
    protocol.receive(state, now, server.Push("a", first, sizes[0], 1.0))
    (update,) = protocol.receive(
      state, now, server.Push("b", first + 1, sizes[1], sizes[1] / 60)
    )
  # Equal batches first; then as 20 samples a second to 60.
  assert sizes == [10, 30]
  assert update.weights == pytest.approx((0.25, 0.75))


def test_a_gradient_counts_by_the_samples_that_were_pushed():
  protocol = server.BSP(weighting=server.Weighting("linear"))
  state = protocol.init("ab")
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  # The first had fewer than the 32 that it was given.
  protocol.receive(state, 1.0, server.Push("a", 0, 8, 1.0))
  (update,) = protocol.receive(state, 1.0, server.Push("b", 1, 32, 1.0))
  assert update.weights == pytest.approx((0.2, 0.8))


class FollowingSeveral(server.SpeedBatches):
  """Batches that follow speeds, which one worker alone does not need."""

  def every(self, num_workers):
    return super().every(num_workers) if num_workers > 1 else None


def test_batches_follow_speeds_once_a_second_worker_joins():
  batches = FollowingSeveral(total=40, smoothing=0.0)
  protocol = server.ASP(batches=batches)
  state = protocol.init("a")
  assert state.until_allocation is None
  protocol.receive(state, 0.0, server.Join("b"))
  for worker, seconds in (("a", 1.0), ("b", 3.0)):
    (reply,) = protocol.receive(state, 0.0, server.Pull(worker))
    push = server.Push(worker, reply.task, reply.samples, seconds)
    protocol.receive(state, seconds, push)
  assert [x.samples for x in state.members.values()] == [30, 10]


def test_bounds_hold_for_a_returning_worker():
  protocol = server.SSP(bound=1)
  state = protocol.init("ab")
  for _ in range(5):  # b is away from the first step.
    protocol.receive(state, 0.0, server.Leave("b"))
    (reply,) = protocol.receive(state, 0.0, server.Pull("a"))
    protocol.receive(state, 0.0, server.Push("a", reply.task, 32, 1.0))
  protocol.receive(state, 0.0, server.Join("b"))
  assert state.clocks == {"a": 5, "b": 5}


def test_stale_gradient_stays_damped_in_a_mean():
  weighting = server.Weighting("linear", staleness=server.inverse_staleness)
  protocol = server.NSoftsync(n=1, weighting=weighting)
  state = protocol.init("ab")
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  # Two updates by one worker alone, and one with the other's old gradient.
  for task in (0, 2, 3, 4, 5):
    actions = protocol.receive(state, 1.0, server.Push("a", task, 8, 1.0))
    assert all(x.weights == (0.5, 0.5) for x in actions)
    protocol.receive(state, 1.0, server.Pull("a"))
  (update,) = protocol.receive(state, 2.0, server.Push("b", 1, 24, 1.0))
  assert update.staleness == (0, 2)
  # Shares of samples have the sum 1, and damping is no part of that.
  assert update.weights == (0.25, 0.75 / 2)


def test_blocked_worker_is_released_once_the_slowest_catches_up():
  protocol = server.SSP(bound=1)
  state = protocol.init("ab")
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  for task in (0, 2):  # Two ahead of the other after these.
    protocol.receive(state, 1.0, server.Push("a", task, 32, 1.0))
    replies = protocol.receive(state, 1.0, server.Pull("a"))
  assert replies == []
  _, reply = protocol.receive(state, 2.0, server.Push("b", 1, 32, 1.0))
  assert (reply.worker, reply.version) == ("a", 3)


def test_n_updates_take_a_gradient_of_each_worker():
  protocol = server.NSoftsync(n=2)
  state = protocol.init("abcd")
  for worker in "abcd":
    protocol.receive(state, 0.0, server.Pull(worker))
  updates = [
    protocol.receive(state, 1.0, server.Push(worker, task, 32, 1.0))
    for task, worker in enumerate("abcd")
  ]
  assert [len(x) for x in updates] == [0, 1, 0, 1]


def test_buffer_of_any_workers_is_damped_by_staleness():
  protocol = server.fedbuff(buffer=2)  # Fewer than there are workers.
  state = protocol.init("abc")
  for worker in "abc":
    protocol.receive(state, 0.0, server.Pull(worker))
  updates = []
  for task in (0, 3, 4):  # The first two fill a buffer without the others.
    updates += protocol.receive(state, 1.0, server.Push("a", task, 8, 1.0))
    protocol.receive(state, 1.0, server.Pull("a"))
  updates += protocol.receive(state, 2.0, server.Push("b", 1, 8, 2.0))
  fresh, mixed = updates
  assert (fresh.tasks, fresh.weights) == ((0, 3), (0.5, 0.5))
  assert (mixed.tasks, mixed.staleness) == ((4, 1), (0, 1))
  assert mixed.weights == (0.5, pytest.approx(0.5 / 2**0.5))


def test_shares_follow_samples_and_parts():
  root = server.Weighting("square_root")
  assert root.share(samples=48, mean_samples=12) == 2.0
  parts = server.Weighting(parts={"a": 0.75, "b": 0.25})
  assert [parts.share(8, 8, worker) for worker in "ab"] == [1.5, 0.5]


def test_push_of_another_workers_task_is_discarded():
  protocol = server.ASP()
  state = protocol.init(["a", "b"])
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  found = protocol.receive(state, 1.0, server.Push("b", 0, 32, 1.0))
  assert found == [_messages.Discard(0, "repeated")]
  # Its own worker may still push it.
  (update,) = protocol.receive(state, 2.0, server.Push("a", 0, 32, 1.0))
  assert isinstance(update, _messages.Apply) and update.tasks == (0,)


def test_gradient_of_the_greatest_staleness_is_late():
  protocol = server.Ringmaster(max_staleness=2)
  state = protocol.init("abc")
  for worker in "abc":
    protocol.receive(state, 0.0, server.Pull(worker))
  found = [
    protocol.receive(state, 1.0, server.Push(worker, task, 32, 1.0))[0]
    for task, worker in enumerate("abc")
  ]
  assert found[1].staleness == (1,)
  assert found[2] == _messages.Discard(2, "late")


def test_waiting_members_follow_in_the_order_of_joining():
  protocol = server.SSP(bound=0)
  state = protocol.init("abc")
  for worker in "abc":
    protocol.receive(state, 0.0, server.Pull(worker))
  for task, worker in ((2, "c"), (0, "a")):
    protocol.receive(state, 1.0, server.Push(worker, task, 32, 1.0))
    protocol.receive(state, 1.0, server.Pull(worker))
  _, *replies = protocol.receive(state, 2.0, server.Push("b", 1, 32, 1.0))
  assert [reply.worker for reply in replies] == ["a", "c"]


def test_a_member_that_joins_a_round_that_has_begun_is_not_waited_for():
  protocol = server.BSP()
  state = protocol.init("ab")
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  protocol.receive(state, 1.0, server.Pull("a"))
  # The next round begins with the task of the member that waits.
  protocol.receive(state, 1.0, server.Push("b", 1, 32, 1.0))
  protocol.receive(state, 1.0, server.Join("c"))
  protocol.receive(state, 1.0, server.Pull("b"))
  protocol.receive(state, 2.0, server.Push("a", 2, 32, 1.0))
  update, *_ = protocol.receive(state, 2.0, server.Push("b", 3, 32, 1.0))
  assert update.tasks == (2, 3)


def test_update_of_softsync_takes_no_more_than_members_give():
  """With n = 2 an update takes one gradient; with n = 1 two, if c has left."""

  def begin(n):
    protocol = server.NSoftsync(n=n)
    state = protocol.init("abc")
    for worker in "abc":
      protocol.receive(state, 0.0, server.Pull(worker))
    return protocol, state

  protocol, state = begin(2)
  (update,) = protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  assert update.tasks == (0,)
  protocol, state = begin(1)
  for task, worker in enumerate("ab"):
    assert not protocol.receive(state, 1.0, server.Push(worker, task, 32, 1.0))
  (update,) = protocol.receive(state, 2.0, server.Leave("c"))
  assert update.tasks == (0, 1)


def test_dbs_hands_all_its_settings_on():
  parts, limits = {"a": 0.75, "b": 0.25}, {"a": 8}
  protocol = server.dbs(
    64, period=3, smoothing=0.25, minimum=2, maximum=40, limits=limits,
    rate="square_root", parts=parts, inverse_staleness=True, timeout_s=5.0,
  )  # fmt: skip
  assert protocol.batches == server.SpeedBatches(64, 3, 0.25, 2, 40, limits)
  assert protocol.weighting == server.Weighting(
    "square_root", parts, server.inverse_staleness
  )
  assert protocol.timeout_s == server.fedbuff(timeout_s=5.0).timeout_s == 5.0


def test_push_that_took_no_time_says_nothing_of_the_speed():
  protocol = server.ASP()
  state = protocol.init("a")
  for task, seconds in enumerate((0.0, 1.0, 0.5)):
    protocol.receive(state, 0.0, server.Pull("a"))
    protocol.receive(state, 1.0, server.Push("a", task, 32, seconds))
  # Half of 32 samples a second and half of 64, by the default smoothing.
  assert state.members["a"].speed == 48.0


def test_update_without_members_has_its_weights():
  protocol = server.BSP(weighting=server.Weighting("linear"))
  state = protocol.init("ab")
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  protocol.receive(state, 1.0, server.Leave("a"))
  (update,) = protocol.receive(state, 1.0, server.Leave("b"))
  assert (update.tasks, update.weights) == ((0,), (1.0,))


def test_job_restarts_once_for_a_member_that_joins():
  protocol = server.BSP(restart_s=1.0)
  state = protocol.init("ab")
  for worker in "ab":
    protocol.receive(state, 0.0, server.Pull(worker))
  protocol.receive(state, 1.0, server.Join("c"))
  (timer,) = protocol.receive(state, 1.0, server.Pull("c"))
  replies = protocol.receive(state, 2.0, _messages.Expired(timer.task))
  assert [reply.worker for reply in replies] == ["c"]
  # The others complete their tasks in vain, and get those of this update.
  for task, worker in enumerate("ab"):
    protocol.receive(state, 3.0, server.Push(worker, task, 32, 3.0))
    (reply,) = protocol.receive(state, 3.0, server.Pull(worker))
    assert (reply.worker, reply.version) == (worker, 0)


def test_last_member_may_leave_and_return():
  protocol = server.SSP(bound=0)
  state = protocol.init("a")
  protocol.receive(state, 0.0, server.Pull("a"))
  protocol.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  assert protocol.receive(state, 2.0, server.Leave("a")) == []
  protocol.receive(state, 3.0, server.Join("a"))
  (reply,) = protocol.receive(state, 3.0, server.Pull("a"))
  assert (reply.version, state.clocks) == (1, {"a": state.lowest})
