"""The virtual clock's counts by hand: limits, failures and streams."""

import pytest

from jdist import cluster, server

pytest.importorskip("simpy")

TENTH = cluster.Profile(seconds_per_sample=0.1)


def run_of(nodes, protocol=None, **more):
  """Makes a run of tasks of five samples, half a second at speed 1."""
  protocol = protocol or server.ASP(batches=server.FixedBatches(5))
  machines = cluster.Cluster(tuple(nodes))
  return server.Simulation(machines, protocol, TENTH, **more)


@pytest.mark.parametrize(
  ("limit", "updates"),
  [
    ({"seconds": 1.0}, 2),  # What happens at the limit itself has happened.
    ({"seconds": 0.99}, 1),
    ({"samples": 10}, 2),
    ({"samples": 11}, 3),
    ({"updates": 3, "seconds": 9.0}, 3),
  ],
)
def test_run_ends_at_the_first_event_that_reaches_a_limit(limit, updates):
  run = run_of([cluster.Node("a")])
  run.run(**limit)
  assert run.state.version == updates
  assert run.applied_samples == 5 * updates


def test_failure_loses_the_samples_under_way_and_is_noticed_a_second_later():
  outage = cluster.Outage(1.2, 5.0)
  run = run_of([cluster.Node("a", outages=(outage,)), cluster.Node("b")])
  run.run(seconds=2.1)
  assert run.lost_samples == 0 and "a" in run.state.members
  run.run(seconds=2.3)
  assert run.lost_samples == 5 and "a" not in run.state.members
  # Two tasks before the failure; b has ended four by then.
  assert run.nodes["a"].updates == 2 and run.applied_samples == 10 + 20
  assert run.summary()["lost_samples"] == 5


def test_machine_that_is_back_before_it_is_missed_stays_a_member():
  """A second after its failure nobody takes it for gone."""
  run = run_of([cluster.Node("a", outages=(cluster.Outage(1.1, 1.2),))])
  run.run(seconds=2.15)  # A task of its has ended since then, and one has not.
  assert list(run.state.members) == ["a"] and run.state.joined == 2


class Restarted(server.EmptyWorker):
  """Notes each restart, and whether the process was lost."""

  def __init__(self):
    super().__init__()
    self.lost = []

  def restart(self, *, lost=False):
    self.lost.append(lost)


class RefusingOnce(server.EmptyServer):
  """Refuses the first push."""

  left = 1

  def push(self, *arguments):
    self.left -= 1
    if self.left == 0:
      raise server.RefusedError("shape", "It is not one of the model.")


def test_failure_loses_a_residual_and_a_refused_push_does_not():
  worker = Restarted()
  learner = server.Pair(RefusingOnce(0), {"a": worker})
  node = cluster.Node("a", outages=(cluster.Outage(1.2, 1.3),))
  run = run_of([node], learner=learner)
  run.run(seconds=1.1)
  assert worker.lost == [False]
  run.run(seconds=1.25)
  assert worker.lost == [False, True]


@pytest.mark.parametrize("seed", [0, 1])
def test_machines_draw_by_streams_of_their_own(seed):
  """So two protocols see the same machines, and two machines differ."""

  def seconds(protocol, seed):
    trace = cluster.Trace()
    nodes = [cluster.Node(name, jitter=0.5) for name in "ab"]
    run_of(nodes, protocol, seed=seed, trace=trace).run(seconds=20.0)
    return [
      [x.seconds for x in trace if x.resource == name][:5] for name in "ab"
    ]

  five = server.FixedBatches(5)
  a, b = seconds(server.ASP(batches=five), seed)
  assert seconds(server.BSP(batches=five), seed) == [
    pytest.approx(a),
    pytest.approx(b),
  ]
  assert a != pytest.approx(b)
  assert seconds(server.ASP(batches=five), seed + 1)[0] != pytest.approx(a)


def test_spread_of_iterations_is_the_longest_over_the_shortest():
  run = run_of([cluster.Node("a"), cluster.Node("b", speed=0.25)])
  run.run(seconds=9.0)
  assert run.summary()["iteration_spread"] == pytest.approx(4.0)


def test_run_is_refused_after_ten_expired_tasks_for_each_machine():
  late = server.ASP(batches=server.FixedBatches(5), timeout_s=0.1)
  run = run_of([cluster.Node("a"), cluster.Node("b")], late)
  with pytest.raises(ValueError, match="21 tasks in a row expired"):
    run.run(seconds=99.0)


def test_machine_that_returns_computes_no_task_of_its_earlier_life():
  """A pipelined machine has a task in its queue when it fails."""
  trace = cluster.Trace()
  node = cluster.Node("a", outages=(cluster.Outage(0.75, 2.0),))
  run = run_of([node], server.h_ps(5, plans=None), trace=trace)
  run.run(seconds=0.8)
  given = run.state.next_task
  run.run(seconds=3.1)
  found = [x for x in trace if x.kind == "compute"]
  later = [x for x in found if x.start_s >= 2.0]
  assert [x.start_s for x in later] == [2.0, 2.5, 3.0]
  assert all(int(x.name.removeprefix("task ")) >= given for x in later)


def test_machine_that_is_never_there_has_no_span():
  """Its absence has no end, and pictures and files need one."""
  trace = cluster.Trace()
  nodes = [cluster.Node("a", outages=(cluster.Outage(0.0),)), cluster.Node("b")]
  run_of(nodes, trace=trace).run(updates=2)
  assert trace.resources == ("b",)


def test_task_that_ends_at_once_is_refused():
  """Time would stand still: the clock cannot tell its end from its start."""
  node = cluster.Node("a", outages=(cluster.Outage(0.0, 5.0),))
  run = server.Simulation(
    cluster.Cluster((node,)), server.ASP(), cluster.Profile(1e-20)
  )
  with pytest.raises(ValueError, match="`speed` of 'a' must make a task of"):
    run.run(updates=1)


def test_push_says_how_long_its_task_waited_for_the_one_before():
  run = run_of([cluster.Node("a")], server.h_ps(5, plans=None))
  waited, deliver = [], run.deliver

  def noted(message, *arguments):
    if isinstance(message, server.Push):
      waited.append(message.waited_s)
    deliver(message, *arguments)

  run.deliver = noted
  run.run(updates=4)
  # Two tasks come at once, and then one as the other one begins.
  assert waited == pytest.approx([0.0, 0.5, 0.5, 0.5])
