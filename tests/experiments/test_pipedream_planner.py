"""PipeDream's planner: against its recursion as published, and by hand."""

import functools
import random

import pytest

from jdist import cluster, pipeline
from tests.experiments import _loading
from tests.pipeline.planning import _small_clusters as small

_Cost = pipeline.LayerCost
_FOOTPRINT = pipeline.Footprint()


@pytest.fixture
def planner(monkeypatch):
  return _loading.load(
    "pipedream_planner", "pipeline/pipedream_planner.py", monkeypatch
  )


def _by_definition(costs, bytes_per_s, number, seconds):
  """A(0, L - 1, m) as in the paper, written as it stands."""

  def parameters(i, j):
    return sum(x.parameter_bytes for x in costs[i : j + 1])

  def stage(i, j, m):
    sync = 4 * (m - 1) * parameters(i, j) / (bytes_per_s * m)
    return (seconds(i, j) + sync) / m

  @functools.cache
  def best(i, j, m):
    values = [stage(i, j, m)]
    for k in range(i, j):
      for last in range(1, m):
        sent = 2 * costs[k].output_bytes / (bytes_per_s * last)
        values.append(max(best(i, k, m - last), stage(k + 1, j, last), sent))
    return min(values)

  return lambda i, j: best(i, j, number)


@pytest.mark.parametrize("seed", range(20))
def test_two_levels_match_the_published_recursion(planner, seed):
  generator = random.Random(seed)
  costs = small.layers(generator, 6)
  inner, outer = generator.choice([(2, 2), (1, 4), (4, 1), (3, 2)])

  def seconds(i, j):
    return sum(x.compute_s + x.update_s for x in costs[i : j + 1])

  wanted = _by_definition(costs, 50.0, inner, seconds)
  wanted = _by_definition(costs, 20.0, outer, wanted)
  found = planner._LevelPlanner(costs, True, _FOOTPRINT, float("inf"))
  found.add(planner.Level(inner, 50.0))
  found.add(planner.Level(outer, 20.0))
  for i in range(6):
    for j in range(i, 6):
      assert found.seconds[i, j] == pytest.approx(wanted(i, j))
  stages = found.stages()
  assert sum(number for _, _, number in stages) == inner * outer
  if inner == 1:
    # The stages that it names take what it says.
    most = 0.0
    for start, end, number in stages:
      sync = 4 * (number - 1) * sum(x.parameter_bytes for x in costs[start:end])
      work = seconds(start, end - 1) + sync / (20.0 * number)
      sent = 2 * costs[start - 1].output_bytes / 20.0 if start else 0.0
      most = max(most, work / number, sent / number)
    assert most == pytest.approx(wanted(0, 5))


def test_heavy_layer_gets_two_machines(planner):
  costs = [_Cost("a", 2, 4), _Cost("b", 1, 2, parameter_bytes=100)]
  plan, replicas = planner.partition(
    costs, cluster.workers([1.0] * 3), [(3, 100.0)], footprint=_FOOTPRINT
  )
  assert (plan.cuts, replicas, plan.bottleneck_s) == ((1,), (2, 1), 3.0)
  plan, replicas = planner.partition(
    costs,
    cluster.workers([1.0] * 2),
    [(2, 100.0)],
    replicate=False,
    footprint=_FOOTPRINT,
  )
  assert (replicas, plan.bottleneck_s) == ((1, 1), 6.0)


def test_stashed_versions_must_fit(planner):
  # In front of another stage both of a's versions take 600 bytes.
  costs = [
    _Cost("a", 1, 2, parameter_bytes=150), _Cost("b", 1, 2, parameter_bytes=1),
  ]  # fmt: skip
  for memory, wanted in ((700, (1, 1)), (500, (2,)), (100, None)):
    nodes = tuple(cluster.Node(x, memory_bytes=memory) for x in "xy")
    given = costs, cluster.Cluster(nodes), [(2, 1e9)]
    if wanted is None:
      with pytest.raises(ValueError, match="no partition that fits"):
        planner.partition(*given, footprint=_FOOTPRINT)
    else:
      assert planner.partition(*given, footprint=_FOOTPRINT)[1] == wanted


def test_replicas_are_simulated_as_one_fast_machine(planner):
  pytest.importorskip("simpy")
  costs = [
    _Cost("a", 2, 4, parameter_bytes=30, output_bytes=1),
    _Cost("b", 1, 2, parameter_bytes=300),
  ]
  names = {f"worker{i}": cluster.Link(800.0) for i in range(3)}
  machines = cluster.Cluster(
    tuple(map(cluster.Node, names)), cluster.star(names, "server")
  )
  plan, replicas = planner.partition(
    costs, machines, [(3, 100.0)], footprint=_FOOTPRINT
  )
  merged, fast = planner.merge_replicas(plan, replicas, machines)
  # (6 + 4 * 30 / (100 * 2)) / 2 for two machines.
  assert merged.bottleneck_s == plan.bottleneck_s == pytest.approx(3.3)
  table = pipeline.make_table("pipedream", 2, 1, num_iterations=20)
  times = pipeline.simulate(table, merged.stages, fast)
  assert times.iteration_s == pytest.approx(3.3)


def test_levels_must_make_up_the_machines(planner):
  given = [_Cost("a", 1.0)], cluster.workers([1.0] * 3)
  with pytest.raises(ValueError, match="make up the 3 machines, got 2 x 2"):
    planner.partition(*given, [(2, 1.0), (2, 1.0)], footprint=_FOOTPRINT)
  planner.partition(*given, [(3, 1.0)], footprint=_FOOTPRINT)
