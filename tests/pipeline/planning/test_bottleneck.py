"""Partitions: by hand, against all cuts, and their refusals."""

import dataclasses
import math
import time

import pytest

from jdist import cluster, pipeline
from tests.pipeline.planning import _small_clusters as small

_Cost = pipeline.LayerCost
# Layers b and e have small outputs.
_FIVE = [
  _Cost(name, seconds, 2 * seconds, parameter_bytes=10, output_bytes=sent)
  for name, seconds, sent in zip(
    "abcde", (1, 1, 2, 3, 1), (50, 5, 50, 50, 5), strict=True
  )
]


def _pair(bytes_per_s, *, speeds=(1.0, 1.0), memory=math.inf, latency=0.0):
  nodes = tuple(
    cluster.Node(name, speed=speed, memory_bytes=memory)
    for name, speed in zip("xy", speeds, strict=True)
  )
  link = cluster.Link(8 * bytes_per_s, latency)
  return cluster.Cluster(
    nodes, cluster.Topology({("x", "y"): link}), server="x"
  )


def test_partition_matches_hand_calculation():
  # A cut behind c makes stages of 12 seconds each, but its 50 bytes take 50
  # seconds on a slow link.
  fast = pipeline.partition(_FIVE, _pair(1000.0))
  assert (fast.cuts, fast.bottleneck_s) == ((3,), 12.0)
  assert fast.trip_s == pytest.approx(24.0 + 2 * 0.05)
  assert str(fast) == "a to c on x | d to e on y"
  slow = pipeline.partition(_FIVE, _pair(1.0, latency=0.5))
  assert (slow.cuts, slow.bottleneck_s) == ((2,), 18.0)
  assert slow.trip_s == 24.0 + 2 * (5.0 + 0.5)
  assert [slow.stage_of(i) for i in range(5)] == [0, 0, 1, 1, 1]


def test_fast_machine_gets_more_layers():
  plan = pipeline.partition(_FIVE, _pair(1e6, speeds=(1.0, 3.0)))
  assert (plan.cuts, plan.bottleneck_s) == ((2,), 6.0)


def test_memory_moves_a_cut():
  # Parameters, gradients and momentum need 30 bytes a layer, and two
  # micro-batches are in flight.
  costs = [dataclasses.replace(x, saved_bytes=10) for x in _FIVE]
  footprint = pipeline.Footprint(in_flight=(2, 1))
  free = pipeline.partition(costs, _pair(1e6), footprint=footprint)
  assert (free.cuts, free.memory_bytes) == ((3,), (150.0, 80.0))
  tight = pipeline.partition(costs, _pair(1e6, memory=130), footprint=footprint)
  assert (tight.cuts, tight.memory_bytes) == ((2,), (100.0, 120.0))


def test_recomputation_keeps_inputs_and_costs_a_forward_pass():
  costs = [dataclasses.replace(x, saved_bytes=100) for x in _FIVE]
  footprint = pipeline.Footprint(
    in_flight=(4, 1), recompute=True, input_bytes=8
  )
  plan = pipeline.partition(costs, _pair(1e6), footprint=footprint)
  assert plan.recompute and plan.bottleneck_s == 16.0
  assert [x.backward_s for x in plan.stages] == [12.0, 12.0]
  assert [x.saved_bytes for x in plan.stages] == [8, 50]
  assert plan.memory_bytes == (90 + 32 + 300, 60 + 50 + 200)
  # Arrays that a recomputed micro-batch saves count for memory, too.
  tight = pipeline.partition(costs, _pair(1e6, memory=400), footprint=footprint)
  assert tight.memory_bytes == (60 + 32 + 200, 90 + 5 + 300)


def test_partition_matches_brute_force():
  fitting = 0
  for seed in range(200):
    costs, machines, footprint, microbatches = small.case(seed)
    wanted = small.brute_force(
      costs, machines, machines.names, footprint, microbatches
    )
    options = {"footprint": footprint, "num_microbatches": microbatches}
    if wanted[0] == math.inf:
      with pytest.raises(ValueError, match="No partition fits into memory"):
        pipeline.partition(costs, machines, **options)
      continue
    fitting += 1
    plan = pipeline.partition(costs, machines, **options)
    assert (plan.bottleneck_s, plan.trip_s) == pytest.approx(wanted), seed
    limits = [machines.node(x).memory_bytes for x in machines.names]
    assert all(map(float.__le__, plan.memory_bytes, limits))
  assert 100 < fitting < 190


def test_simulated_memory_matches_the_footprint():
  costs = [
    dataclasses.replace(x, saved_bytes=7, working_bytes=3) for x in _FIVE
  ]
  footprint = pipeline.Footprint(in_flight=(2, 1), optimizer_copies=2)
  plan = pipeline.partition(costs, _pair(10.0), footprint=footprint)
  pytest.importorskip("simpy")
  times = pipeline.simulate(
    pipeline.make_table("1f1b", 2, 4), plan.stages, _pair(10.0),
    nodes=plan.nodes, optimizer_copies=2,
  )  # fmt: skip
  assert times.memory_bytes == plan.memory_bytes


def test_error_names_the_stage_beyond_memory():
  big = dataclasses.replace(_FIVE[3], parameter_bytes=1e9)
  costs = [*_FIVE[:3], big, _FIVE[4]]
  with pytest.raises(
    ValueError,
    match=r"layer 'd' alone needs 3 GB, and '[xy]' has 2 GB\. Take more "
    "machines, recomputation, fewer versions",
  ):
    pipeline.partition(costs, _pair(1.0, memory=2e9))
  footprint = pipeline.Footprint(recompute=True)
  even = [dataclasses.replace(x, parameter_bytes=1e9) for x in _FIVE]
  with pytest.raises(ValueError, match=r"stage 0 of 2, 'a to c', needs 9 GB"):
    pipeline.partition(even, _pair(1.0, memory=7e9), footprint=footprint)


def test_partition_of_many_layers_is_fast():
  layers = [
    _Cost(f"{i}", 1 + i % 7, 2, output_bytes=1 + i % 5, saved_bytes=i % 3)
    for i in range(200)
  ]
  machines = cluster.workers(
    [1.0 + i % 3 for i in range(64)], link=cluster.Link(8.0)
  )
  start_s = time.process_time()
  plan = pipeline.partition(layers, machines)
  assert len(plan.stages) == 64
  assert time.process_time() - start_s < 5.0


def test_given_cuts_are_used():
  found = pipeline.partition(_FIVE, _pair(1.0), cuts=[4])
  assert found.cuts == (4,)
  assert found.bottleneck_s > pipeline.partition(_FIVE, _pair(1.0)).bottleneck_s
