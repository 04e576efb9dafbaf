"""Parts of the joint search by hand: times, limits, layouts and routes."""

import dataclasses
import math
import types

import pytest

from jdist import cluster, pipeline
from jdist.pipeline.planning import _bottleneck, _candidate, _placement

pytest.importorskip("simpy")
_Cost = pipeline.LayerCost
_TWO = cluster.Cluster(
  (cluster.Node("n0"), cluster.Node("n1")),
  # A byte takes a second, and a message two more.
  cluster.Topology({("n0", "n1"): cluster.Link(8.0, latency_s=2.0)}),
  server="n0",
)


def _problem(costs, batch_size=4):
  problem = _candidate.PlanProblem(
    costs, _TWO, batch_size, batch_size, 1.0, 0.0, 0, None
  )
  problem.place_s(2, False)
  return problem


def test_slower_sends_lengthen_messages_alone():
  costs = [_Cost(x, 1.0, 3.0, weight_s=1.0, output_bytes=4.0) for x in "ab"]
  plan = pipeline.partition(costs, _TWO)
  for factor in (1.0, 1.5):
    first, last = pipeline.stage_times(plan, _TWO, factor)
    assert first == pipeline.StageTimes(1.0, 3.0, 1.0, factor * (4 + 2))
    assert last == pipeline.StageTimes(1.0, 3.0, 1.0, 0.0)


@pytest.mark.parametrize(
  ("window", "live"), [(1, [3, 3, 2, 1]), (2, [4, 3, 2, 1])]
)
def test_a_stage_keeps_at_most_the_micro_batches_of_its_window(window, live):
  choice = _candidate.Candidate("ours", 3, 4, window, False)
  assert _candidate.most_live(choice, [pipeline.StageTimes()] * 4) == live


def test_stages_of_a_machine_share_its_speed():
  # Two stages of a machine take twice as long: of "cd" or "de" 4 s, of "ab" 6 s
  # with and without the message of 3.5 s between them.
  costs = [_Cost(x, 0.5, 1.0) for x in "ab"] + [
    _Cost(x, 0.4, 0.6) for x in "cde"
  ]
  costs[0] = dataclasses.replace(costs[0], output_bytes=3.5)
  choice = _candidate.Candidate("interleaved", 4, 2, None, False)
  plan = _problem(costs).partition(choice, pipeline.Footprint())
  assert plan.nodes == ("n0", "n1", "n0", "n1")
  assert plan.cuts[:2] == (1, 2)


def test_no_rate_is_above_its_bound():
  problem = _problem([_Cost(x, 1.0, 2.0) for x in "ab"], 1)
  choice = problem.cut(_candidate.Candidate("1f1b", 1, 2, None, False))
  # Two stages of three seconds, and two messages.
  assert problem.simulated(choice).samples_per_s == pytest.approx(1 / 10)
  bound = dataclasses.replace(choice, samples_per_s=0.01)
  assert problem.simulated(bound).samples_per_s == 0.01


def test_near_layouts_differ_by_a_cut_machines_or_a_stage():
  here = ("a", "b"), (2,)
  near = [
    (("a", "b"), (1,)),
    (("a", "b"), (3,)),
    (("b", "a"), (2,)),
    (("c", "b"), (2,)),
    (("a", "c"), (2,)),
  ]
  fewer = [(("b",), ()), (("a",), ())]
  assert [*_placement.near_layouts(here, "abc", 4, 1)] == near + fewer
  # Neither of two stages on a machine is removed alone.
  here = ("a",), (2,)
  assert [*_placement.near_layouts(here, "a", 3, 2)] == [(("a",), (1,))]


def test_links_are_shared_on_the_way_there_or_back():
  # Messages from b to c pass a, those from d to b as well, and not in return.
  ways = {"ab": "ab", "ba": "ba", "cb": "cb", "bc": "bac", "db": "dab"}
  ways["bd"] = "bd"
  topology = types.SimpleNamespace(
    route=lambda one, other: tuple(
      zip(ways[one + other], ways[one + other][1:], strict=False)
    ),
    link=lambda one, other: cluster.Link(8.0 if "b" in (one, other) else 2.0),
  )
  routes = _bottleneck.Routes(types.SimpleNamespace(topology=topology))
  assert routes.shared_byte_s("a", "b", "c") == 1.0
  assert routes.shared_byte_s("a", "b", "d") == 1.0
  assert routes.shared_byte_s("c", "b", "d") == 0.0
  assert routes.byte_s("b", "c") == 4.0 and math.isclose(
    routes.busiest_s("abc", [1.0, 1.0]), 4.0
  )
