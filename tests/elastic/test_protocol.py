"""Rounds as messages: one merge late, weights, and members that come and go."""

import functools
import itertools
import random

import pytest

from jdist import cluster, server


def protocol(**options):
  return server.DecoupledDiLoCo(
    batches=server.FixedBatches(8), interval=4, quorum=1.0, grace=0.0,
    **options,
  )  # fmt: skip


def test_members_in_step_are_one_merge_late():
  """By hand: who pushes last is sent what the others are."""
  rule = protocol(ahead=1, in_step=True)
  state = rule.init("ab")
  send = functools.partial(rule.receive, state, 0.0)
  for worker in "ab":
    (reply,) = send(server.Pull(worker))
    assert reply.pulled is None
  # The first to push has its next task at once, before anything is merged.
  (reply,) = send(server.Push("a", 0, 32, 1.0))
  assert (reply.task, reply.pulled) == (2, ())
  # It waits after its second push, which belongs to the second merge.
  assert send(server.Push("a", 2, 32, 1.0)) == []
  assert send(server.Pull("a")) == []
  reply, update, waiting = send(server.Push("b", 1, 32, 1.0))
  assert (reply.worker, reply.pulled) == ("b", ())
  assert (update.tasks, update.staleness) == ((0, 1), (0, 0))
  assert (waiting.worker, waiting.pulled) == ("a", (0,))
  reply, update = send(server.Push("b", 3, 32, 1.0))
  assert (reply.worker, reply.pulled) == ("b", (0,))
  assert (update.tasks, update.staleness) == ((2, 3), (1, 1))


def test_push_that_misses_its_merge_is_in_the_next_one():
  rule = protocol(ahead=1, in_step=True)
  state = rule.init("ab")
  for worker in "ab":
    rule.receive(state, 0.0, server.Pull(worker))
  rule.receive(state, 1.0, server.Push("a", 0, 32, 1.0))
  # The merge does not wait for who has left, and returns.
  (update,) = rule.receive(state, 1.0, server.Leave("b"))
  assert update.tasks == (0,)
  rule.receive(state, 1.0, server.Join("b"))
  (reply,) = rule.receive(state, 1.0, server.Pull("b"))
  assert (reply.fragment, reply.pulled, reply.version) == (0, None, 1)
  assert [x[2:] for x in state.changes] == [
    ("joined", "a", 2), ("joined", "b", 2), ("left", "b", 1),
    ("returned", "b", 2),
  ]  # fmt: skip
  assert [x[1:] for x in state.shares] == [(1, 1)]


def test_weights_follow_samples():
  """The paper's follow samples times samples a step."""
  found = []
  for weights in ("samples", "paper"):
    rule = protocol(ahead=0, weights=weights)
    state = rule.init("ab")
    for worker in "ab":
      rule.receive(state, 0.0, server.Pull(worker))
    rule.receive(state, 1.0, server.Push("a", 0, 30, 1.0))
    update, *_ = rule.receive(state, 1.0, server.Push("b", 1, 10, 1.0))
    found.append(update.weights)
  assert found[0] == pytest.approx((0.75, 0.25))
  assert found[1] == pytest.approx((0.9, 0.1))


def test_in_step_needs_a_task_ahead():
  with pytest.raises(
    ValueError, match="`in_step` must be False with `ahead` 0"
  ):
    protocol(ahead=0, in_step=True)


def test_merge_is_sent_while_members_compute():
  """By hand: with two tasks a merge travels under the task before its own."""
  rule = protocol(ahead=2, in_step=True)
  state = rule.init("ab")
  send = functools.partial(rule.receive, state, 0.0)
  for worker in "ab":
    first, second = send(server.Pull(worker))
    assert (first.pulled, second.pulled) == (None, ())
  # The first to push has a task, and what follows that needs the merge.
  assert send(server.Push("a", 0, 32, 1.0)) == []
  assert send(server.Pull("a")) == []
  update, reply = send(server.Push("b", 2, 32, 1.0))
  assert (update.tasks, update.staleness) == ((0, 2), (0, 0))
  assert (reply.worker, reply.task, reply.pulled) == ("a", 4, (0,))
  (reply,) = send(server.Pull("b"))
  assert (reply.worker, reply.task, reply.pulled) == ("b", 5, (0,))
  # Each is pushed one merge late, by either.
  assert send(server.Push("b", 3, 32, 1.0)) == []
  update, *_ = send(server.Push("a", 1, 32, 1.0))
  assert (update.tasks, update.staleness) == ((1, 3), (1, 1))


@pytest.mark.parametrize("seed", range(4))
def test_order_of_messages_changes_no_merge(seed):
  """Every merge has the same pushes, and begins a task of the same number."""
  found = []
  for ahead in (1, 2):
    rule, draw = protocol(ahead=ahead, in_step=True), random.Random(seed)
    state = rule.init("abc")
    began, tasks, merges = {x: [] for x in "abc"}, {}, []
    # A worker pushes its tasks one after the other, and asks at once.
    waiting = {x: [server.Pull(x)] for x in "abc"}
    while len(merges) < 12:
      worker = draw.choice([x for x, queue in waiting.items() if queue])
      actions = rule.receive(state, 0.0, waiting[worker].pop(0))
      actions += rule.receive(state, 0.0, server.Pull(worker))
      for action in actions:
        if isinstance(action, server.Apply):
          merges.append(sorted(tasks[x] for x in action.tasks))
        else:
          tasks[action.task] = action.worker, len(began[action.worker])
          began[action.worker].append(len(merges))
          push = server.Push(action.worker, action.task, 32, 1.0)
          waiting[action.worker].append(push)
    # Task k + 1 begins with the merges up to k - 1.
    assert all(x[:10] == [0, 0, *range(1, 9)] for x in began.values())
    found.append(merges)
  assert found[0] == found[1]


def failing(seed):
  """Machines that are up and down at random, and a protocol with rounds."""
  draw = random.Random(seed)
  nodes = []
  for number in range(draw.randint(1, 5)):
    outages, end_s = [], 0.0
    while end_s < 60.0:
      start_s = end_s + 0.01 + draw.expovariate(1 / 8)
      end_s = start_s + draw.uniform(0.01, 6.0)
      outages.append(cluster.Outage(start_s, end_s))
    speed = draw.choice([0.25, 1.0, 2.0])
    nodes.append(
      cluster.Node(f"w{number}", speed, jitter=0.2, outages=tuple(outages))
    )
  late = draw.random() < 0.6
  rule = server.DecoupledDiLoCo(
    batches=server.FixedBatches(4), interval=4,
    fragments=draw.choice([1, 2, 4]), quorum=draw.choice([0.3, 0.5, 1.0]),
    grace=draw.choice([0.0, 1.0]), ahead=late * draw.choice([1, 2]),
    in_step=late,
    timeout_s=draw.choice([None, 5.0]),
  )  # fmt: skip
  return cluster.Cluster(tuple(nodes)), rule


@pytest.mark.parametrize("seed", range(20))
def test_rounds_end_whoever_comes_and_goes(seed):
  pytest.importorskip("simpy")
  machines, rule = failing(seed)
  run = server.Simulation(
    machines, rule, cluster.Profile(0.02), seed=seed, detection_s=0.5
  )
  run.run(seconds=80)
  times = [0.0, *(x[0] for x in run.state.shares), 80.0]
  # No outage is longer than 6 s, and no round of the slowest than 2.
  assert max(b - a for a, b in itertools.pairwise(times)) < 14.0
  # A window may end with the pushes of those alone who have left since.
  assert all(x[1] <= x[2] for x in run.state.shares)
  if rule.in_step:
    # Merges keep their order: each fragment in its turn.
    count, number = run.state.version, rule.fragments
    turns = [len(range(p, count, number)) for p in range(number)]
    assert run.state.merges == turns


def test_staleness_counts_all_merges_that_were_missed():
  rule = server.DecoupledDiLoCo(
    batches=server.FixedBatches(8), interval=4, quorum=0.5, grace=0.0
  )
  state = rule.init("ab")
  send = functools.partial(rule.receive, state, 0.0)
  send(server.Pull("b"))
  for task in (1, 2):
    send(server.Pull("a"))
    update, *_ = send(server.Push("a", task, 32, 1.0))
    assert update.staleness == (0,)
  update, *_ = send(server.Push("b", 0, 32, 1.0))
  assert (update.tasks, update.staleness) == ((0,), (2,))
