"""Partitions of other papers."""

import functools
import math
import random

import pytest

from jdist import cluster, pipeline
from jdist.pipeline.planning import _baseline_plans, _bottleneck
from tests.pipeline.planning import _small_clusters as small

_Cost = pipeline.LayerCost


def test_even_partitions_look_at_one_thing_only():
  seconds = (1, 1, 1, 1, 4, 4)
  costs = [_Cost(f"{i}", x, x, output_bytes=9) for i, x in enumerate(seconds)]
  machines = cluster.workers([1.0, 9.0], link=cluster.Link(8.0))
  layers = pipeline.even_partition(costs, machines)
  assert (layers.cuts, layers.bottleneck_s) == ((3,), 9.0)
  compute = pipeline.even_partition(costs, machines, by="compute")
  assert (compute.cuts, compute.bottleneck_s) == ((4,), 9.0)
  assert compute.stages[0].compute_s == 8.0
  with pytest.raises(ValueError, match="each of the 7 stages, got 6"):
    pipeline.even_partition(costs, cluster.workers([1.0] * 7))


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
def test_the_planner_is_the_papers_recursion_on_two_levels(seed):
  generator = random.Random(seed)
  costs = small.layers(generator, 6)
  inner, outer = generator.choice([(2, 2), (1, 4), (4, 1), (3, 2)])

  def seconds(i, j):
    return sum(x.compute_s + x.update_s for x in costs[i : j + 1])

  wanted = _by_definition(costs, 50.0, inner, seconds)
  wanted = _by_definition(costs, 20.0, outer, wanted)
  machines = cluster.workers([1.0] * (inner * outer))
  planner = _baseline_plans._LevelPlanner(
    _bottleneck.Chain(costs, machines), True
  )
  planner.add(pipeline.Level(inner, 50.0))
  planner.add(pipeline.Level(outer, 20.0))
  for i in range(6):
    for j in range(i, 6):
      assert planner.seconds[i, j] == pytest.approx(wanted(i, j))
  stages = planner.stages()
  assert sum(number for _, _, number in stages) == inner * outer
  if inner == 1:
    # The stages that it names take what it says.
    found = 0.0
    for start, end, number in stages:
      sync = 4 * (number - 1) * sum(x.parameter_bytes for x in costs[start:end])
      work = seconds(start, end - 1) + sync / (20.0 * number)
      sent = 2 * costs[start - 1].output_bytes / 20.0 if start else 0.0
      found = max(found, work / number, sent / number)
    assert found == pytest.approx(wanted(0, 5))


def test_a_heavy_layer_gets_two_machines():
  costs = [_Cost("a", 2, 4), _Cost("b", 1, 2, parameter_bytes=100)]
  machines = cluster.workers([1.0] * 3)
  levels = [pipeline.Level(3, 100.0)]
  plan = pipeline.pipedream_partition(costs, machines, levels)
  assert (plan.cuts, plan.replicas, plan.bottleneck_s) == ((1,), (2, 1), 3.0)
  two = cluster.workers([1.0] * 2)
  plan = pipeline.pipedream_partition(
    costs, two, [pipeline.Level(2, 100.0)], replicate=False
  )
  assert (plan.replicas, plan.bottleneck_s) == ((1, 1), 6.0)


def test_stashed_versions_must_fit():
  # In front of another stage both of a's versions take 600 bytes.
  costs = [
    _Cost("a", 1, 2, parameter_bytes=150), _Cost("b", 1, 2, parameter_bytes=1),
  ]  # fmt: skip
  levels = [pipeline.Level(2, 1e9)]
  for memory, replicas in ((700, (1, 1)), (500, (2,))):
    nodes = [cluster.Node(x, memory_bytes=memory) for x in "xy"]
    plan = pipeline.pipedream_partition(
      costs, cluster.Cluster(tuple(nodes)), levels
    )
    assert plan.replicas == replicas
  small_nodes = [cluster.Node(x, memory_bytes=100) for x in "xy"]
  with pytest.raises(ValueError, match="layer 'a' alone needs"):
    pipeline.pipedream_partition(
      costs, cluster.Cluster(tuple(small_nodes)), levels
    )


def test_replicas_are_simulated_as_one_fast_machine():
  pytest.importorskip("simpy")
  costs = [
    _Cost("a", 2, 4, parameter_bytes=30, output_bytes=1),
    _Cost("b", 1, 2, parameter_bytes=300),
  ]
  names = {f"worker{i}": cluster.Link(800.0) for i in range(3)}
  machines = cluster.Cluster(
    tuple(map(cluster.Node, names)), cluster.star(names, "server")
  )
  plan = pipeline.pipedream_partition(
    costs, machines, [pipeline.Level(3, 100.0)]
  )
  merged, fast = pipeline.merge_replicas(plan, machines)
  # (6 + 4 * 30 / (100 * 2)) / 2 for two machines.
  assert merged.bottleneck_s == plan.bottleneck_s == pytest.approx(3.3)
  table = pipeline.make_table("pipedream", 2, 1, num_iterations=20)
  times = pipeline.simulate(table, merged.stages, fast)
  assert times.iteration_s == pytest.approx(3.3)


def test_levels_must_make_up_the_machines():
  with pytest.raises(ValueError, match="make up the 3 machines, got 2 x 2"):
    pipeline.pipedream_partition(
      [_Cost("a", 1.0)],
      cluster.workers([1.0] * 3),
      [pipeline.Level(2, 1.0), pipeline.Level(2, 1.0)],
    )
  assert math.isfinite(
    pipeline.pipedream_partition(
      [_Cost("a", 1.0)],
      cluster.workers([1.0] * 3),
      [pipeline.Level(3, 1.0)],
    ).bottleneck_s
  )
