"""H-PS: its three parts by hand, and in time."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jdist import cluster, server
from jdist.server import _server_state

pytest.importorskip("simpy")

# A push or a pull of 100 bytes takes 0.5 s; every worker has its own link.
# The schedules below are worked out for messages that follow each other.
LINK = cluster.Link(8 * 200.0, sharing="first_come")
COSTS = cluster.Profile(
  seconds_per_sample=0.1, pull_bytes=100.0, push_bytes=100.0
)
PLANS = server.BitPlans()


def run(protocol, speeds, costs=COSTS, updates=40, **options):
  options.setdefault("link", LINK)
  machines = options.pop("machines", None) or cluster.workers(
    speeds, server_link=cluster.Link(1e12), **options
  )
  simulation = server.Simulation(
    machines, protocol, costs, trace=cluster.Trace()
  )
  simulation.run(updates=updates)
  return simulation


def round_s(protocol, speeds, **options):
  """Seconds of a round, long after the beginning."""
  simulation = run(protocol, speeds, **options)
  start = simulation.now_s
  simulation.run(updates=simulation.state.version + 20)
  return (simulation.now_s - start) / 20


speeds_s = st.lists(st.floats(0.1, 50.0), min_size=1, max_size=8)


@hypothesis.given(speeds_s, st.integers(1, 500), st.data())
def test_batches_end_together_and_sum_exactly(speeds, total, data):
  num = len(speeds)
  overheads = data.draw(
    st.lists(st.floats(0.0, 5.0), min_size=num, max_size=num)
  )
  limits = data.draw(
    st.lists(st.integers(1, 200) | st.none(), min_size=num, max_size=num)
  )
  bounded = server.BalancedBatches(total, accumulate=False)
  sizes = bounded.sizes(speeds, overheads_s=overheads, limits=limits)
  most = sum(total if limit is None else limit for limit in limits)
  assert sum(sizes) == min(max(total, num), max(most, num))
  for size, limit in zip(sizes, limits, strict=True):
    assert 1 <= size <= (limit or total + num)
  # Who could take more ends no sooner than who could take less, but for one
  # sample of rounding each.
  ends = [n / v + c for n, v, c in zip(sizes, speeds, overheads, strict=True)]
  for i in range(num):
    for j in range(num):
      if sizes[i] > 1 and (limits[j] is None or sizes[j] < limits[j]):
        assert ends[i] <= ends[j] + 1 / speeds[i] + 1 / speeds[j] + 1e-6


def test_memory_bounds_batches_or_their_parts():
  speeds, limits = [8.0, 4.0, 2.0, 1.0], [40, None, 10, 100]
  parts = server.BalancedBatches(150)
  assert parts.sizes(speeds, limits=limits) == (80, 40, 20, 10)
  rule = server.HPS(batches=parts, limits={"a": 40, "b": None, "c": 10})
  tasks = ("a", 80), ("b", 40), ("c", 20), ("c", 21), ("d", 10)
  assert [rule.passes(*task) for task in tasks] == [2, 1, 2, 3, 1]
  bounded = server.BalancedBatches(150, accumulate=False)
  assert bounded.sizes(speeds, limits=limits) == (40, 80, 10, 20)
  assert server.HPS(batches=bounded, limits={"a": 40}).passes("a", 41) == 1


def test_each_part_of_a_batch_pays_its_start():
  machines = cluster.Cluster(
    (cluster.Node("a", memory_bytes=10.0), cluster.Node("b"))
  )
  costs = cluster.Profile(
    seconds_per_sample=1.0, seconds_per_batch=0.5, bytes_per_sample=1.0
  )
  protocol = server.h_ps(50, tasks=False, plans=None, limits={"a": 10})
  simulation = run(protocol, None, costs, updates=1, machines=machines)
  # 25 samples in three parts; the second round's are only begun.
  assert simulation.nodes["a"].compute_s == pytest.approx(25 + 1.5)
  assert simulation.now_s == pytest.approx(26.5)
  with pytest.raises(ValueError, match="A batch of 25 samples"):
    run(
      server.h_ps(50, accumulate=False), None, costs, machines=machines
    )  # Its memory is not known to the server.


def test_tasks_follow_speeds_and_links():
  protocol = server.h_ps(60, pipelined=False, plans=None)
  machines = cluster.workers(
    [3.0, 1.0], link=LINK, server_link=cluster.Link(1e12)
  )
  simulation = run(protocol, None, machines=machines)
  assert [x.samples for x in simulation.state.members.values()] == [45, 15]
  assert round_s(protocol, [3.0, 1.0]) == pytest.approx(1.5 + 1.0)
  # Its messages take 3 s and not 1 s: n / 30 + 3 = (60 - n) / 10 + 1.
  topology = cluster.star(
    {"worker0": cluster.Link(8 * 200 / 3), "worker1": LINK}, "server"
  )
  slower = cluster.Cluster(machines.nodes, topology)
  simulation = run(protocol, None, machines=slower)
  assert [x.samples for x in simulation.state.members.values()] == [30, 30]


@pytest.mark.parametrize(
  ("samples", "wanted"),
  # Of two equal workers: computing hides the second of messages; half of it.
  ((30, 1.5), (20, 1.0), (4, 0.6)),
)
def test_pipelined_round_matches_the_schedule_by_hand(samples, wanted):
  options = {"tasks": False, "plans": None}
  protocol = server.h_ps(2 * samples, **options)
  if samples == 30:
    simulation = run(protocol, [2.0, 2.0])
    assert dict(simulation.staleness) == {0: 2, 1: 78}
    assert simulation.pulled_bytes == pytest.approx(
      100 * simulation.state.version * 2, abs=200
    )
  assert round_s(protocol, [2.0, 2.0]) == pytest.approx(wanted)
  in_turn = server.h_ps(2 * samples, pipelined=False, **options)
  assert round_s(in_turn, [2.0, 2.0]) == pytest.approx(samples / 20 + 1.0)


@pytest.mark.parametrize("tasks", (False, True))
def test_late_pipeline_matches_the_schedule_by_hand(tasks):
  """12 rounds of 3 s of computing and 1 s of messages, then those of 3 s."""
  protocol = server.h_ps(120, tasks=tasks, plans=None, pipelined_from=12)
  simulation = run(protocol, [2.0, 2.0], updates=12)
  assert dict(simulation.staleness) == {0: 24}
  assert simulation.now_s == pytest.approx(12 * 4.0)
  simulation.run(updates=40)
  # The pipeline's first round is on what its workers were just sent.
  assert dict(simulation.staleness) == {0: 26, 1: 54}
  assert simulation.now_s == pytest.approx(12 * 4.0 + 1.0 + 28 * 3.0)


def test_tasks_follow_links_until_the_pipeline_begins():
  """As they do in turn and in a pipeline; a worker's messages take 3 s."""
  topology = cluster.star(
    {"worker0": cluster.Link(8 * 200 / 3), "worker1": LINK}, "server"
  )
  machines = cluster.Cluster(cluster.workers([3.0, 1.0]).nodes, topology)
  simulation = run(
    server.h_ps(60, plans=None, pipelined_from=20), None, machines=machines,
    updates=19,
  )  # fmt: skip
  assert [x.samples for x in simulation.state.members.values()] == [30, 30]
  simulation.run(updates=40)
  assert [x.samples for x in simulation.state.members.values()] == [45, 15]


def test_messages_are_hidden_once_the_pipeline_begins():
  """Before, they shorten the round; 1 s of messages, 1 of computing."""
  protocol = server.h_ps(20, tasks=False, pipelined_from=10)
  simulation = run(protocol, [1.0, 1.0], updates=9)
  in_turn = list(simulation.state.plans.values())
  simulation.run(updates=14)
  hidden = list(simulation.state.plans.values())
  wanted = [
    list(PLANS.choose([1.0] * 2, [1.0] * 2, pipelined=x, slack=0.9))
    for x in (False, True)
  ]
  assert [in_turn, hidden] == wanted and in_turn != hidden


def test_staleness_is_always_one():
  machines = cluster.Cluster(
    (
      cluster.Node("a", jitter=0.5, speed=3.0),
      cluster.Node("b", outages=(cluster.Outage(20.0, 40.0),)),
      cluster.Node("c", jitter=0.3, outages=(cluster.Outage(60.0),)),
    ),
    cluster.star(dict.fromkeys("abc", LINK), "server"),
  )
  simulation = run(server.h_ps(60), None, machines=machines, updates=60)
  assert set(simulation.staleness) == {0, 1}
  # The first round, and none after it.
  assert simulation.staleness[0] == 3
  assert list(simulation.state.members) == ["a", "b"]


def test_plan_has_the_most_bits_that_can_be_hidden():
  topology = cluster.star(
    {
      "worker0": LINK,  # 1 s under 2 s of computing: exact.
      "worker1": cluster.Link(8 * 200 / 3),  # 3 s: 16 bits.
      "worker2": cluster.Link(8 * 200 / 9),  # 9 s: 8 bits do not hide.
    },
    "server",
  )
  machines = cluster.Cluster(cluster.workers([1.0] * 3).nodes, topology)
  simulation = run(server.h_ps(60), None, machines=machines)
  assert list(simulation.state.plans.values()) == [0, 1, 2]
  exchange = [x.exchange_s for x in simulation.state.members.values()]
  assert exchange == pytest.approx([1.0, 3.0, 9.0])
  # The last one's chain of two rounds.
  assert round_s(server.h_ps(60), None, machines=machines) == pytest.approx(
    (2.0 + 9.0 * PLANS.share(2)) / 2
  )


def test_without_a_pipeline_bits_fill_the_time_of_the_slowest_worker():
  protocol = server.h_ps(40, tasks=False, pipelined=False)
  simulation = run(protocol, [4.0, 1.0])
  assert list(simulation.state.plans.values()) == [0, 2]
  assert round_s(protocol, [4.0, 1.0]) == pytest.approx(2 + PLANS.share(2))


def test_first_pull_of_a_member_is_exact():
  protocol = server.h_ps(20, tasks=False, pipelined=False)
  state = protocol.init("ab")
  replies = []

  def deliver(now, message):
    found = protocol.receive(state, now, message)
    replies.extend(x for x in found if isinstance(x, server.Reply))

  def end_round(now):
    for reply in replies[-2:]:
      deliver(now, server.Push(reply.worker, reply.task, 10, 1.0))

  for worker in "ab":
    deliver(0.0, server.Pull(worker))
  end_round(10.0)
  end_round(20.0)
  # The first round was exact, and is measured: 9 s of messages.
  assert [x.pull_plan for x in replies] == [0, 0, 2, 2, 2, 2]
  assert set(state.plans) == {"a", "b"}
  deliver(25.0, server.Leave("b"))
  assert set(state.plans) == {"a"}
  deliver(25.0, server.Join("b"))
  deliver(25.0, server.Pull("b"))
  deliver(30.0, server.Push("a", replies[-2].task, 10, 1.0))
  assert [(x.worker, x.pull_plan) for x in replies[6:]] == [("a", 2), ("b", 0)]


def test_encoding_takes_the_machines_time():
  costs = cluster.Profile(
    seconds_per_sample=0.1, pull_bytes=100.0, push_bytes=100.0,
    seconds_per_encoding=0.05,
  )  # fmt: skip
  protocol = server.h_ps(16, tasks=False)
  # 0.8 s of computing, 1 s of messages: 16 bits, made and read.
  assert round_s(protocol, [1.0, 1.0], costs=costs) == pytest.approx(0.9)
  assert round_s(protocol, [1.0, 1.0]) == pytest.approx(0.8)


def test_exchange_is_scaled_to_exact_messages_by_both_plans():
  """The first pull after a return is exact, and its push is not."""
  rule = server.h_ps(16, plans=PLANS)
  state = rule.init("a")
  state.now_s = 4.0
  task = _server_state.Assignment(0, "a", 0, 8, push_plan=2, pull_plan=0)
  # One of four seconds was computed, and half of one waited for.
  rule.observe(state, task, server.Push("a", 0, 8, 1.0, waited_s=0.5))
  exact_s = 2.5 / ((1.0 + PLANS.share(2)) / 2)
  assert state.members["a"].exchange_s == pytest.approx(exact_s)
  # A worker's clock may say more than has passed here.
  state.members["a"].exchange_s = None
  rule.observe(state, task, server.Push("a", 0, 8, 3.75, waited_s=0.5))
  assert state.members["a"].exchange_s == 0.0


def test_messages_of_few_bits_lengthen_a_round_less():
  protocol = server.HPS(
    batches=server.BalancedBatches(40), pipelined=False, plans=PLANS
  )
  state = protocol.init("ab")
  for member in state.members.values():
    member.speed = 10.0
  state.members["a"].exchange_s, state.plans = 4.0, {"a": 2}
  protocol.allocate(state)
  # Both end after t seconds: 10 t + 10 (t - 4 share) = 40.
  wanted = 10 * (2 - 2 * PLANS.share(2))
  assert state.members["a"].samples == pytest.approx(wanted, abs=1)


def test_gradients_of_a_round_are_summed_in_the_order_of_joining():
  rule = server.h_ps(64, pipelined=False, plans=None)
  state = rule.init("ab")
  for worker in "ab":
    rule.receive(state, 0.0, server.Pull(worker))
  assert rule.receive(state, 1.0, server.Push("b", 1, 32, 1.0)) == []
  update, *_ = rule.receive(state, 2.0, server.Push("a", 0, 32, 2.0))
  assert update.tasks == (0, 1)


def test_messages_fit_under_the_given_part_of_the_computation():
  plans = []
  for slack in (0.9, 0.5):
    rule = server.h_ps(16, slack=slack)
    state = rule.init("a")
    member = state.members["a"]
    member.speed, member.exchange_s = 16.0, 0.7  # A task takes a second.
    rule.allocate(state)
    plans.append(state.plans["a"])
  assert plans == [0, 1]


def test_member_that_returns_is_given_a_task_once_it_asks():
  rule = server.h_ps(20, tasks=False, pipelined=False, plans=None)
  state = rule.init("ab")
  for worker in "ab":
    rule.receive(state, 0.0, server.Pull(worker))
  rule.receive(state, 1.0, server.Leave("b"))
  rule.receive(state, 1.0, server.Join("b"))
  _, *replies = rule.receive(state, 2.0, server.Push("a", 0, 10, 1.0))
  assert [x.worker for x in replies] == ["a"]
  (reply,) = rule.receive(state, 3.0, server.Pull("b"))
  assert (reply.worker, reply.version) == ("b", 1)


def test_task_without_a_pull_takes_no_bytes_of_it():
  rule = server.h_ps(16, plans=PLANS)
  reply = server.Reply("a", 0, 0, 8, push_plan=2, pull_plan=None)
  assert (rule.pull_share(reply), rule.push_share(reply)) == (
    0.0,
    PLANS.share(2),
  )


def test_bytes_of_plans_by_hand():
  plans = server.BitPlans(((32, 32), (4, 4)), (66, 3))
  # A flag for each tensor. In 4 bits: 64 and 2 entries with a scale each, and 3
  # entries in two bytes.
  assert plans.num_bytes(0) == 2 + 4 * (66 + 3)
  assert plans.num_bytes(1) == 2 + (32 + 1 + 2 * 4) + (2 + 4)
  with pytest.raises(ValueError, match="fewer and fewer bytes"):
    server.BitPlans(((32,), (8,), (8,)), (64,))


def test_bits_leave_a_margin_in_a_pipeline_and_none_in_turn():
  assert PLANS.choose([2.0], [1.9], pipelined=True) == (1,)
  # An exchange as short as a rounding error costs no bits.
  assert PLANS.choose([1.0, 1.0], [1e-10, 0.0], pipelined=False) == (0, 0)
