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
    ValueError, match="`in_step` must be False with `ahead` 2"
  ):
    protocol(ahead=2, in_step=True)


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
    grace=draw.choice([0.0, 1.0]), ahead=int(late), in_step=late,
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
