"""Tests of protocols on the virtual clock, time alone."""

import collections
import dataclasses
import functools
import gc
import math
import sys
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jdist import cluster, server

pytest.importorskip("simpy")

PROFILE = cluster.Profile(seconds_per_sample=0.1)
FIVE = server.FixedBatches(5)


class Noting(server.EmptyServer):
  """Takes note of what happens to each task."""

  def __init__(self):
    super().__init__(0)
    self.out, self.log = {}, []

  def reply(self, reply):
    assert reply.task not in self.out
    self.out[reply.task] = reply
    self.log.append(reply)
    return super().reply(reply)

  def apply(self, update):
    for task in update.tasks:
      del self.out[task]
    self.log.append(update)

  def discard(self, task):
    del self.out[task]
    self.log.append(task)


def noting():
  names = (*"abcdefgh", "fast", "slow", *(f"worker{i}" for i in range(8)))
  return server.Pair(Noting(), dict.fromkeys(names, server.EmptyWorker()))


def test_run_whose_tasks_all_expire_is_refused():
  """It would never end: each push comes after its worker has left."""
  late = server.ASP(batches=FIVE, timeout_s=1e-9)
  with pytest.raises(ValueError, match="`timeout_s` must be longer"):
    simulation(protocol=late).run(updates=1)


def test_slow_machine_may_expire_while_others_train():
  """Its tasks take a second, and those of the other one a tenth."""
  late = server.ASP(batches=FIVE, timeout_s=0.9)
  run = simulation((5.0, 0.5), late)
  run.run(updates=200)
  assert run.state.version == 200 and run.nodes["worker1"].updates == 0


def simulation(speeds=(2.0, 1.0), protocol=None, **arguments):
  machines = arguments.pop("machines", None) or cluster.workers(
    speeds,
    **{k: arguments.pop(k) for k in ("link", "jitter") if k in arguments},
  )
  return server.Simulation(
    machines,
    protocol or server.ASP(batches=FIVE),
    arguments.pop("profile", PROFILE),
    **arguments,
  )


def test_step_matches_its_times_by_hand():
  # Speed 2: half a second is a quarter; a link of a second for a message.
  learner = noting()
  run = simulation(
    link=cluster.Link(8.0),
    profile=dataclasses.replace(PROFILE, push_bytes=1.0),
    learner=learner,
  )
  run.run(updates=2)
  # worker0: computes to 0.25, sends to 1.25; worker1's push waits at the
  # server's link and is there at 2.25.
  assert run.now_s == pytest.approx(2.25)
  assert learner.server.log == [
    server.Reply("worker0", 0, 0, 5),
    server.Reply("worker1", 1, 0, 5),
    server.Apply((0,), (1.0,), (0,)),
    server.Reply("worker0", 2, 1, 5),
    server.Apply((1,), (1.0,), (1,)),
    server.Reply("worker1", 3, 2, 5),
  ]
  assert run.pushed_bytes == 3 and run.pulled_bytes == 0


def test_barrier_takes_as_long_as_the_slowest_worker():
  run = simulation((8.0, 1.0, 1.0), server.BSP(batches=FIVE))
  run.run(updates=10)
  assert run.now_s == pytest.approx(5.0)
  assert all(node.updates == 10 for node in run.nodes.values())
  assert set(run.staleness) == {0}


def test_mean_staleness_is_one_less_than_the_workers_at_any_speed():
  for speeds in ((1.0,) * 4, (8.0, 4.0, 2.0, 1.0)):
    run = simulation(speeds, jitter=0.05)
    run.run(updates=4000)
    mean = sum(k * v for k, v in run.staleness.items()) / run.state.applied
    assert mean == pytest.approx(3.0, abs=0.02)


def iteration_spread(run):
  seconds = [
    node.iteration_s
    for node in run.nodes.values()
    if not math.isnan(node.iteration_s)
  ]
  return max(seconds) / min(seconds)


def test_dbs_equalizes_iterations_again_after_a_slowdown():
  speeds = (8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0)
  machines = cluster.workers(speeds)
  nodes = list(machines.nodes)
  nodes[0] = dataclasses.replace(
    nodes[0], slowdowns=(cluster.Slowdown(600.0, 0.25),)
  )
  machines = dataclasses.replace(machines, nodes=tuple(nodes))
  run = simulation(machines=machines, protocol=server.dbs(512))
  plain = simulation(machines=machines)
  for until in (500.0, 1500.0):
    run.run(seconds=until)
    plain.run(seconds=until)
    assert iteration_spread(run) <= 1.15
    assert iteration_spread(plain) > 3
    # As many samples a second: no machine ever waits.
    assert run.applied_samples >= 0.97 * plain.applied_samples
  sizes = [member.samples for member in run.state.members.values()]
  assert sum(sizes) == 512 and sizes[0] < sizes[1] / 3


def failing():
  """Three machines, one of which is away twice, and one for ever."""
  return cluster.Cluster(
    (
      cluster.Node("a", jitter=0.2),
      cluster.Node(
        "b", outages=(cluster.Outage(3.2, 3.4), cluster.Outage(7.1, 20.0))
      ),
      cluster.Node("c", jitter=0.1, outages=(cluster.Outage(11.0),)),
      cluster.Node("d", outages=(cluster.Outage(0.0, 5.0),)),
    )
  )


PROTOCOLS = {
  "bsp": server.BSP(batches=FIVE),
  "backups": server.BSP(batches=FIVE, backups=1),
  "asp": server.ASP(batches=FIVE),
  "ssp": server.SSP(batches=FIVE, bound=1),
  "softsync": server.NSoftsync(batches=FIVE, n=2),
  "dbs": server.dbs(20),
  "ringmaster": server.Ringmaster(batches=FIVE, max_staleness=2),
  "timeout": server.ASP(batches=FIVE, timeout_s=0.45),
  "h_ps": server.h_ps(20),
  "h_ps in turn": server.h_ps(20, pipelined=False),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_failures_block_no_worker_and_lose_no_count(name):
  learner = noting()
  run = simulation(
    machines=failing(), protocol=PROTOCOLS[name], learner=learner
  )
  run.run(seconds=40.0)
  updates = [
    each for each in learner.server.log if isinstance(each, server.Apply)
  ]
  tasks = collections.Counter(task for each in updates for task in each.tasks)
  assert set(tasks.values()) == {1}
  assert run.state.applied == len(tasks)
  assert run.applied_samples == sum(
    reply.samples
    for reply in learner.server.log
    if isinstance(reply, server.Reply) and reply.task in tasks
  )
  before = run.state.version
  run.run(seconds=80.0)
  assert run.state.version > before + 20
  assert set(run.state.members) == {"a", "b", "d"}
  assert len(learner.server.out) <= 3 + 3


def test_trace_shows_every_outage():
  trace = cluster.Trace()
  run = simulation(machines=failing(), protocol=PROTOCOLS["asp"], trace=trace)
  run.run(seconds=25.0)
  away = [x for x in trace if x.kind == "away"]
  # The last one is away from the beginning, and the third for ever.
  assert sorted((x.resource, x.start_s, x.end_s) for x in away) == [
    ("b", 3.2, 3.4), ("b", 7.1, 20.0), ("c", 11.0, 11.0), ("d", 0.0, 5.0)
  ]  # fmt: skip


@pytest.mark.parametrize("name", PROTOCOLS)
def test_same_seed_gives_the_same_events(name):
  def log(seed):
    learner = noting()
    run = simulation(
      machines=failing(),
      protocol=PROTOCOLS[name],
      learner=learner,
      seed=seed,
    )
    run.run(seconds=25.0)
    return learner.server.log, run.now_s, run.events

  assert log(0) == log(0)
  if name != "bsp":  # Its order is the workers', whatever the jitter.
    assert log(0) != log(1)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(0, 150), st.sampled_from(sorted(PROTOCOLS)))
def test_resumed_run_stands_where_the_first_one_stood(events, name):
  def make():
    return simulation(
      machines=failing(), protocol=PROTOCOLS[name], learner=noting()
    )

  whole = make()
  whole.run(events=events)
  stood = dict(whole.learner.server.out)
  saved = whole.save()
  whole.learner.server.log.clear()
  whole.run(events=events + 100)
  again = make()
  again.learner.server.out = stood
  again.resume(*saved)
  again.run(events=events + 100)
  assert again.learner.server.log == whole.learner.server.log
  # As text, in which an unknown duration, a NaN, equals another one.
  assert str(again.nodes) == str(whole.nodes) and again.now_s == whole.now_s


HANGING = {
  "softsync": server.NSoftsync(n=1, batches=FIVE, timeout_s=0.8),
  "bsp": server.BSP(batches=FIVE, timeout_s=1.2),
  "h_ps": server.h_ps(15, plans=None, timeout_s=1.3),
  "h_ps in turn": server.h_ps(15, pipelined=False, timeout_s=1.6),
  "decoupled_diloco": server.DecoupledDiLoCo(
    batches=FIVE, interval=2, fragments=1, quorum=1.0, timeout_s=1.5
  ),
}


@pytest.mark.parametrize("name", HANGING)
def test_waiting_pushes_outlive_their_timers(name):
  # "c" hangs: what the others have pushed waits for it when timers expire.
  slow = (cluster.Slowdown(2.4, 1e-6),)
  nodes = (
    cluster.Node("a"),
    cluster.Node("b", speed=1.3),
    cluster.Node("c", slowdowns=slow),
  )
  learner = noting()
  run = simulation(
    machines=cluster.Cluster(nodes), protocol=HANGING[name], learner=learner
  )
  run.run(seconds=4.0)
  before = run.state.version
  run.run(seconds=40.0)
  assert run.state.version > before + 5
  assert "c" not in run.state.members
  held = set(run.state.tasks) | {
    push.task for push in getattr(run.state, "collected", [])
  }
  assert set(learner.server.out) <= held | {
    push.task for push in getattr(run.state, "pushes_of_round", [])
  }


def test_work_cut_off_by_a_failure_is_not_counted():
  # Up for one second of every ten, with tasks of nine.
  outages = tuple(
    cluster.Outage(1.0 + 10 * i, 10.0 + 10 * i) for i in range(10)
  )
  trace = cluster.Trace()
  run = simulation(
    machines=cluster.Cluster((cluster.Node("a", outages=outages),)),
    protocol=server.ASP(batches=server.FixedBatches(90)),
    trace=trace,
  )
  run.run(seconds=100.0)
  assert run.nodes["a"].compute_s == pytest.approx(10.0)
  assert run.summary()["utilisation"] == pytest.approx(0.1)
  spans = [x for x in trace if x.kind == "compute"]
  assert [x.seconds for x in spans[:9]] == pytest.approx([1.0] * 9)


def test_unfinished_work_counts_until_the_end_of_the_run():
  # The second's task takes four times as long as the first's.
  run = simulation((1.0, 0.25), server.ASP(batches=FIVE))
  run.run(updates=1)
  assert run.now_s == pytest.approx(0.5)
  assert run.nodes["worker1"].compute_s == 0.0
  assert run.under_way_s == pytest.approx(0.5)
  assert run.summary()["utilisation"] == pytest.approx(1.0)


def test_growing_batches_stay_within_memory():
  nodes = (
    cluster.Node("fast", speed=8.0, memory_bytes=40.0),
    cluster.Node("slow"),
  )
  machines = cluster.Cluster(nodes)
  profile = dataclasses.replace(PROFILE, bytes_per_sample=1.0)
  run = simulation(machines=machines, protocol=server.dbs(64), profile=profile)
  with pytest.raises(
    ValueError, match=r"'fast' must hold a batch of .* holds 40"
  ):
    run.run(updates=100)
  learner = noting()
  run = simulation(
    machines=machines,
    protocol=server.dbs(64, limits={"fast": 40}),
    profile=profile,
    learner=learner,
  )
  run.run(updates=100)
  sizes = {
    (x.worker, x.samples)
    for x in learner.server.log
    if isinstance(x, server.Reply)
  }
  assert ("fast", 40) in sizes and ("slow", 24) in sizes
  assert max(samples for worker, samples in sizes if worker == "fast") == 40


def test_counted_bytes_match_the_messages():
  profile = dataclasses.replace(PROFILE, push_bytes=3.0, pull_bytes=5.0)
  run = simulation(profile=profile, link=cluster.Link(8e6))
  run.run(updates=50)
  out = len(run.state.tasks)
  assert run.pulled_bytes == 5.0 * run.state.next_task
  assert 3.0 * 50 <= run.pushed_bytes <= 3.0 * (50 + out)


def test_exact_messages_take_no_time_to_encode():
  profile = dataclasses.replace(PROFILE, seconds_per_encoding=1.0)
  run = simulation((1.0,), profile=profile)
  run.run(updates=4)
  assert run.now_s == pytest.approx(4 * 0.5)


def test_memory_does_not_grow_with_updates():
  run = simulation((1.0, 2.0, 3.0), server.SSP(batches=FIVE), jitter=0.1)
  held = []
  for updates in (500, 1000, 5000):
    run.run(updates=updates)
    held.append(
      (
        len(run._tasks),
        len(run.state.tasks),
        sys.getsizeof(run.state.counts),
        len(run._environment._queue),
      )
    )
  assert max(max(each) for each in held) < 500
  assert held[2][0] <= 3 and held[2][3] < 20


def test_batch_beyond_the_memory_of_a_machine_is_refused():
  machines = cluster.Cluster((cluster.Node("a", memory_bytes=4.0),))
  profile = dataclasses.replace(PROFILE, bytes_per_sample=1.0)
  with pytest.raises(ValueError, match="4 samples fit"):
    simulation(machines=machines, profile=profile)


def test_missing_simpy_names_the_extra_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "simpy", None)
  with pytest.raises(ImportError, match=r"\.\[sim\]"):
    simulation()


def test_iteration_spread_is_of_the_last_tasks():
  machines = cluster.workers([1.0, 0.25])
  run = server.Simulation(machines, server.ASP(batches=FIVE), PROFILE)
  run.run(updates=20)
  found = [run.nodes[name].iteration_s for name in machines.names]
  # Five samples of 0.1 s each, on machines of speeds 1 and 1/4.
  assert found == pytest.approx([0.5, 2.0])


def test_staleness_of_machines_leaves_out_those_without_an_update():
  # The third machine has not ended its first task.
  run = simulation((2.0, 1.0, 1e-6), server.ASP(batches=FIVE))
  run.run(updates=30)
  *others, slow = run.nodes.values()
  assert slow.updates == 0
  first, second = (x.staleness / x.updates for x in others)
  found = run.summary()["staleness"]["mean_over_nodes"]
  assert found == pytest.approx((first + second) / 2)


def test_utilisation_is_the_mean_over_machines():
  # Half of the barrier's time for the first machine, all for the second.
  run = simulation((2.0, 1.0), server.BSP(batches=FIVE))
  run.run(updates=10)
  assert run.summary()["utilisation"] == pytest.approx(0.75)


def test_repeated_push_is_not_discarded_while_the_first_one_waits():
  run = simulation((1.0, 1.0), server.BSP(batches=FIVE), learner=noting())
  for worker in run.nodes:
    run.deliver(server.Pull(worker))
  push = server.Push("worker0", 0, 5, 0.5)
  run.deliver(push)
  run.deliver(push)
  run.deliver(server.Leave("worker0"))
  run.deliver(push)
  assert run.state.discarded == {"repeated": 1, "left": 1}
  run.deliver(server.Push("worker1", 1, 5, 0.5))
  assert (run.applied_samples, run.lost_samples) == (10, 0)
  assert run.nodes["worker0"].discarded == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscardingTwice(server.Protocol):
  """Drops each push, and once more."""

  def on_push(self, state, push, actions):
    for _ in range(2):
      self.discard(state, push, actions)


def test_push_that_is_discarded_twice_is_lost_once():
  protocol, learner = DiscardingTwice(batches=FIVE), noting()
  run = simulation((1.0,), protocol, learner=learner)
  run.deliver(server.Pull("worker0"))
  run.deliver(server.Push("worker0", 0, 5, 0.5))
  assert (run.lost_samples, run.nodes["worker0"].discarded) == (5, 1)
  assert learner.server.out == {}


class Refusing(server.EmptyServer):
  """Refuses pushes on demand."""

  refuses = True

  def push(self, *arguments):
    if self.refuses:
      raise server.RefusedError("shape", "It is not one of the model.")
    super().push(*arguments)


def test_refused_pushes_are_forgiven_after_a_good_one_and_a_restart():
  outages = (cluster.Outage(1.0, 2.0),)
  learner = server.Pair(Refusing(0), {"a": server.EmptyWorker()})
  run = simulation(
    machines=cluster.Cluster((cluster.Node("a", 0.01, outages=outages),)),
    learner=learner,
  )
  run.deliver(server.Pull("a"))

  def accept(*, refuses):
    learner.server.refuses = refuses
    return run.accept(server.Push("a", 0, 5, 0.5), {}, np.zeros(0, np.uint8))

  for refuses in (True, True, False, True, True):
    assert accept(refuses=refuses) is not refuses
  assert not run.expelled("a")  # Never three in a row.
  accept(refuses=True)
  run.run(seconds=1.5)
  assert run.expelled("a")
  run.run(seconds=2.5)
  assert not run.expelled("a")


def test_machine_that_returns_as_it_is_missed_stays_a_member():
  machines = cluster.Cluster(
    (cluster.Node("a", outages=(cluster.Outage(1.0, 1.5),)), cluster.Node("b"))
  )
  run = simulation(machines=machines, detection_s=0.5)
  run.run(seconds=3.2)
  assert run.state.members.keys() == {"a", "b"}
  # Tasks of half a second: one before the outage, and three after it.
  assert run.nodes["a"].updates == 4


def test_learner_forgets_a_worker_that_restarts_before_it_is_missed():
  left = []
  learner = noting()
  learner.server.leave = left.append
  outage = cluster.Outage(1.2, 1.4)
  nodes = cluster.Node("a", outages=(outage,)), cluster.Node("b")
  run = simulation(
    machines=cluster.Cluster(nodes), learner=learner, detection_s=9.0
  )
  run.run(seconds=2.0)
  assert left == ["a"]


def test_machine_that_returns_has_new_connections():
  """Its messages must not wait for those that it sent before it failed."""
  outage = cluster.Outage(1.0, 2.0)
  nodes = cluster.Node("a", outages=(outage,)), cluster.Node("b")
  run = simulation(machines=cluster.Cluster(nodes))
  before = dict(run._links._channels)
  run.run(seconds=2.5)
  kept = {
    x for x, channel in run._links._channels.items() if channel is before[x]
  }
  assert kept == {("push", "b"), ("pull", "b")}


def test_speed_at_which_the_clock_stands_still_is_refused():
  """The spread of the machines' times would divide by 0."""
  with pytest.raises(ValueError, match="`speed` of 'worker0' must make"):
    simulation((1e9, 1e-9), server.BSP(batches=FIVE)).run(updates=3)


def test_cluster_of_many_machines_is_checked_at_once():
  """Comparing all pairs of names took 20 s for 20,000 of them."""
  found = cluster.workers([1.0] * 20_000)
  begin = time.process_time()
  assert cluster.Cluster(found.nodes).names[-1] == "worker19999"
  assert time.process_time() - begin < 5.0


@pytest.mark.parametrize("collects", [True, False])
def test_collector_of_garbage_is_left_as_it_was(collects, monkeypatch):
  monkeypatch.setattr(gc, "isenabled", lambda: collects)
  changed = []
  for name in ("disable", "enable"):
    monkeypatch.setattr(gc, name, functools.partial(changed.append, name))
  simulation().run(updates=1)
  assert changed == (["disable", "enable"] if collects else [])
