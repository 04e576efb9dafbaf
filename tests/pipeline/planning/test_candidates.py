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


@pytest.mark.parametrize(
  ("stages", "number", "window", "short", "whole"),
  [
    # Twelve micro-batches a stage fill a pipeline, between two windows.
    (2, 4, None, 2 + 1, 2 * 2 + 6), (2, 4, 3, 3 + 1, 2 * 3 + 6),
    (4, 1, None, 5 + 1, 2 * 5 + 48),
    # At most 4,000 passes, beyond two iterations.
    (20, 20, None, 2 + 1, 2 * 2 + 10), (50, 40, None, 3 + 1, 2 * 3 + 4),
    (100, 100, None, 2 + 1, 2 * 2 + 2),
  ],
)  # fmt: skip
def test_late_table_is_measured_while_it_is_full(
  stages, number, window, short, whole, monkeypatch
):
  monkeypatch.setattr(
    _candidate, "make_table", lambda *given, **options: (*given, options)
  )
  choice = _candidate.Candidate("2bw", number, stages, window, False)
  for plan, iterations in ((None, short), ("a plan", whole)):
    assert _candidate.make_table_of(choice, plan, None) == (
      "2bw", stages, number, {"num_iterations": iterations}
    )  # fmt: skip
  choice = dataclasses.replace(choice, table="gpipe")
  made = _candidate.make_table_of(choice, None, None)
  assert made == ("gpipe", stages, number, {})


@pytest.mark.parametrize(
  ("table", "extra", "live", "saved"),
  [
    ("ours", 0, [3, 3, 2, 1], None), ("ours", 2, [5, 5, 4, 3], None),
    ("ours", -2, [1, 1, 1, 1], None), ("greedy", 0, [3, 3, 2, 1], None),
    ("zb_h2", 0, [3, 3, 3, 1], 3), ("zb_h2", 1, [4, 4, 4, 2], 4),
    ("zb_h2", -5, [1, 1, 1, 1], 1), ("zb_v", 0, None, 4),
    ("zb_v", -1, None, 3), ("zb_v", -9, None, 1),
  ],
)  # fmt: skip
def test_table_of_times_keeps_as_much_as_its_choice(
  table, extra, live, saved, monkeypatch
):
  """At least one micro-batch a stage, of a batch of three."""
  monkeypatch.setitem(
    _candidate.LISTED, table, lambda *given, **options: (*given, options)
  )
  choice = _candidate.Candidate(
    table, 3, 4, 1 if table == "ours" else None, False, extra_live=extra
  )
  times, number, options = _candidate.make_table_of(choice, None, None)
  assert times == [pipeline.StageTimes()] * (8 if table == "zb_v" else 4)
  found = options["max_live"]
  most = _candidate.most_live(choice, times)
  assert number == 3 and found == [max(1, x + extra) for x in most]
  assert live is None or found == live
  assert options.get("max_saved") == saved
  assert options.get("window") == (1 if table == "ours" else None)
  assert ("num_iterations" in options) == (table != "greedy")


def test_work_of_a_batch_is_divided_by_the_fastest_machines():
  machines = cluster.workers([1.0, 4.0, 2.0])
  costs = [_Cost(x, 1.0, 2.0, output_bytes=3.0) for x in "ab"]
  problem = _candidate.PlanProblem(costs, machines, 8, 2, 1.0, 5.0, 0, None)
  # Costs are of two samples, and a micro-batch has two of four, or eight.
  for number, factor in ((4, 1.0), (1, 4.0)):
    scaled, input_bytes = problem._scaled(number)
    assert [x.forward_s for x in scaled] == [factor] * 2
    assert input_bytes == factor * 5.0
  # Four times both layers' three seconds.
  assert problem.busy_s(1, False) == pytest.approx(24 / 4)
  assert problem.busy_s(2, False) == pytest.approx(24 / 6)
  assert problem.busy_s(3, False) == pytest.approx(24 / 7)
  assert problem.busy_s(1, True) == pytest.approx(32 / 4)


@pytest.mark.parametrize(
  ("nodes", "window", "seconds"),
  [
    # The first machine has four passes of 4 s, the other one of 6 s behind the
    # way to it and before that back.
    ("ab", None, 4 + 12 + 4 * 6), ("ab", 1, 4 + 12 + 4 * 6), ("ab", 2, 4 * 9),
    ("aa", None, 4 * 4 + 4 * 6),
  ],
)  # fmt: skip
def test_no_table_is_faster_than_a_machine_and_the_way_to_it(
  nodes, window, seconds, monkeypatch
):
  times = [
    pipeline.StageTimes(1.0, 3.0, 0.0, send=6.0),
    pipeline.StageTimes(2.0, 4.0, 0.0, send=0.0),
  ]
  asked = []

  def stage_times(found, machines, *, split):
    asked.append(split)
    return times

  monkeypatch.setattr(_candidate, "stage_times", stage_times)
  problem = _problem([_Cost(x, 1.0, 2.0) for x in "ab"])
  table = "gpipe" if window is None else "ours"
  choice = _candidate.Candidate(table, 4, 2, window, False)
  bottleneck_s = 9.0 if window == 2 else 0.5
  plan = types.SimpleNamespace(bottleneck_s=bottleneck_s, nodes=nodes)
  if window == 1:  # `ours` with a window of one waits for its update.
    choice = dataclasses.replace(choice, window=1)
  assert problem.least_s(choice, plan) == pytest.approx(seconds)
  zero = dataclasses.replace(choice, table="zb_h2", window=1)
  problem.least_s(zero, plan)
  assert asked[-1] is True and not any(asked[:-1])
  slow = types.SimpleNamespace(bottleneck_s=99.0, nodes=nodes)
  assert problem.least_s(choice, slow) == 4 * 99


def test_layout_must_be_wanted_and_fit():
  costs = [_Cost(x, 1.0, 2.0, parameter_bytes=1) for x in "ab"]
  nodes = [cluster.Node("large"), cluster.Node("small", memory_bytes=2.0)]
  machines = cluster.Cluster(tuple(nodes))

  def found(wanted, order, cuts):
    problem = _candidate.PlanProblem(costs, machines, 4, 4, 1.0, 0.0, 0, wanted)
    choice = _candidate.Candidate("gpipe", 1, 2, None, False, extra_live=-3)
    return problem.evaluated(choice, (order, cuts), 0.0)

  one = found(None, ("large",), ())
  assert (one.num_stages, one.extra_live, one.plan.cuts) == (1, 0, ())
  assert found([2], ("large",), ()) is None
  # Parameters, gradients and the optimizer's state take three bytes.
  assert found(None, ("large", "small"), (1,)) is None
