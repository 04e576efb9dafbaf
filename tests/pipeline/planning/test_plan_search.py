"""The joint search: its choices and refusals."""

import dataclasses
import itertools
import math
import random
import types

import pytest

from jdist import cluster, pipeline
from jdist.pipeline.planning import _candidate, _plan_search, _simulator

pytest.importorskip("simpy")
_Cost = pipeline.LayerCost
_LAYERS = [
  _Cost(x, 1.0, 2.0, parameter_bytes=10, output_bytes=1, saved_bytes=20)
  for x in "abcdef"
]


def _machines(number=2, memory=math.inf, speed=1.0):
  nodes = [cluster.Node(f"n{i}", memory_bytes=memory) for i in range(number)]
  nodes[-1] = dataclasses.replace(nodes[-1], speed=speed)
  return cluster.Cluster(tuple(nodes))


def _plan(machines, batch_size=8, **options):
  return pipeline.plan(_LAYERS, machines, batch_size, **options)


def test_asynchronous_plan_reaches_the_bottleneck_with_the_least_delay():
  tables = {*pipeline.TABLES, "greedy"} - {"zb_h2", "zb_v"}
  best, rows = _plan(_machines(3), tables=sorted(tables), max_delay=None)
  # Six layers take 3 seconds a sample each, on three machines.
  assert best.samples_per_s == pytest.approx(1 / 6)
  assert best.plan.cuts == (2, 4) and best.delay == 1
  assert best.made.weights == "delayed"
  assert {x.table for x in rows} == tables
  rates = [x.samples_per_s for x in rows if x.times is not None]
  assert rates[1:] == sorted(rates[1:], reverse=True)
  assert max(rates) <= best.samples_per_s * 1.005


def test_default_plan_has_no_late_gradient_and_no_bubble():
  best, rows = _plan(_machines(3), recompute=[False])
  assert (best.table, best.delay) == ("zb_h2", 0)
  assert best.samples_per_s == pytest.approx(1 / 6, rel=0.005)
  assert {x.table for x in rows} == {*pipeline.TABLES, "greedy"}
  reasons = [x.reason for x in rows if x.table == "2bw" and x.num_stages == 3]
  assert any("late by 1 updates" in reason for reason in reasons)


def test_paci_is_planned_as_it_runs():
  # The backward pass runs the stage again: 12 seconds in place of 9.
  best, rows = _plan(_machines(2), tables=["paci"], max_delay=None)
  assert {x.recompute for x in rows if x.times is not None} == {True}
  assert best.samples_per_s == pytest.approx(1 / 12, rel=0.005)


def test_least_delay_decides_between_nearly_equal_tables():
  costs = [_Cost("a", 0.002, 0.004), _Cost("b", 1.0, 2.0)]
  best, (_, late) = pipeline.plan(
    costs, _machines(2), 8, tables=["1f1b", "2bw"], num_stages=[2],
    num_microbatches=[8], recompute=[False], max_delay=None,
  )  # fmt: skip
  # 1f1b fills and empties its first stage in each iteration.
  assert best.samples_per_s < late.samples_per_s
  assert (best.table, best.delay, late.delay) == ("1f1b", 0, 1)


def test_one_version_decides_between_equally_late_tables():
  table = pipeline.make_table("2bw", 2, 2)
  mixed = dataclasses.replace(table, weights="newest")
  costs = [_Cost("a", 1.0, 2.0, parameter_bytes=8)] * 2
  two, one = (
    _candidate.Candidate(
      x.name, 2, 2, None, False, made=x, delay=1,
      times=pipeline.simulate(x, costs, _machines(2)),
    )
    for x in (table, mixed)
  )  # fmt: skip
  assert max(one.times.memory_bytes) < max(two.times.memory_bytes)
  assert two.price() < one.price()
  in_time = [dataclasses.replace(x, delay=0) for x in (two, one)]
  assert in_time[1].price() < in_time[0].price()


def test_memory_that_fits_but_for_rounding_is_enough():
  costs = [_Cost(f"{x}", 1.0, 2.0, parameter_bytes=x) for x in (0.1, 0.2)]
  best, _ = pipeline.plan(costs, _machines(1, memory=0.9), 4, tables=["1f1b"])
  # Parameters, gradients and momentum.
  assert best.times.memory_bytes == (3 * (0.1 + 0.2),) > (0.9,)


def test_v_shaped_plan_returns_to_the_first_machine():
  best, _ = _plan(_machines(2), tables=["zb_v"], recompute=[False])
  assert best.plan.nodes == ("n0", "n1", "n1", "n0") and best.delay == 0
  # A cut between two stages of one machine costs no message.
  links = {f"n{i}": cluster.Link(8.0) for i in range(2)}
  machines = cluster.Cluster(
    _machines(2).nodes, cluster.star(links, "switch"), server="switch"
  )
  linked, _ = _plan(machines, tables=["zb_v"], recompute=[False])
  assert linked.samples_per_s <= best.samples_per_s


def test_synchronous_plan_takes_the_most_micro_batches():
  best, _ = _plan(_machines(2), tables=["naive", "gpipe", "1f1b"])
  assert (best.table, best.num_microbatches) == ("1f1b", 8)
  assert best.samples_per_s == pytest.approx(8 / ((8 + 1) * 9))
  row = best.row()
  assert row["cuts"] == (3,) and row["nodes"] == ("n0", "n1")
  assert row["iteration_s"] == pytest.approx(81) and row["delay"] == 0


def test_slow_machine_gets_fewer_layers_or_none():
  best, _ = _plan(_machines(2, speed=0.5), tables=["ours"], max_delay=1)
  assert best.samples_per_s == pytest.approx(1 / 12)
  assert [x.forward_s for x in best.plan.stages] == [0.5 * 8, 0.5 * 4] or (
    best.plan.cuts == (4,)
  )
  idle, _ = _plan(_machines(2, speed=0.01), tables=["ours"], max_delay=1)
  assert idle.num_stages == 1 and idle.plan.nodes == ("n0",)


def test_little_memory_leads_to_recomputation():
  # Two copies of the parameters and the gradients take 30 bytes each, and a
  # micro-batch of one sample 60.
  free, rows = _plan(_machines(2), tables=["gpipe", "1f1b"])
  assert not free.recompute and max(free.times.memory_bytes) == 90 + 120
  gpipe = next(x for x in rows if x.table == "gpipe")
  assert gpipe.times.memory_bytes == (90 + 480, 90 + 480)
  tight, _ = _plan(_machines(2, memory=180), tables=["gpipe", "1f1b"])
  assert tight.recompute and max(tight.times.memory_bytes) <= 180
  with pytest.raises(ValueError, match="No partition fits into memory"):
    _plan(_machines(2, memory=80), tables=["gpipe", "1f1b"])


def test_ours_keeps_fewer_micro_batches_if_memory_is_short():
  options = {"tables": ["ours", "greedy"], "recompute": [False]}
  options |= {"windows": [2], "num_microbatches": [8], "num_stages": [3]}
  options |= {"max_delay": 1}
  free, _ = pipeline.plan(_LAYERS[:3], _machines(3), 8, **options)
  assert free.times.memory_bytes == (100, 80, 60)
  tight, rows = pipeline.plan(
    _LAYERS[:3], _machines(3, memory=80), 8, **options
  )
  assert tight.table == "ours" and tight.extra_live == -1
  assert tight.times.memory_bytes == (80, 60, 60)
  assert tight.samples_per_s < free.samples_per_s
  assert rows[-1].extra_live == 0 and "memory" in rows[-1].reason


def test_ours_keeps_more_micro_batches_if_messages_delay_them():
  link = cluster.Link(8.0, latency_s=0.3)
  links = {f"n{i}": link for i in range(3)} | {"server": link}
  machines = cluster.Cluster(_machines(3).nodes, cluster.star(links, "switch"))
  costs = [_Cost(f"{x}", 0.3 * x, 0.7 * x) for x in (3, 4, 2)]
  best, rows = pipeline.plan(
    costs, machines, 8, tables=["ours"], recompute=[False], windows=[2],
    num_microbatches=[8], num_stages=[3], max_delay=None,
  )  # fmt: skip
  assert best.extra_live == 2 and best.samples_per_s == pytest.approx(0.25)
  assert [x.extra_live for x in rows] == [2, 1, 0]
  assert rows[-1].samples_per_s < 0.85 * best.samples_per_s


def test_ours_widens_its_window_if_messages_wait_for_each_other():
  # Both cuts of a machine share its link, which is nearly as busy as it.
  links = {f"n{i}": cluster.Link(8.0) for i in range(4)}
  machines = cluster.Cluster(
    _machines(4).nodes, cluster.star(links, "switch"), server="switch"
  )
  costs = [
    _Cost(f"{i}", x, 2.0 * x, output_bytes=sent)
    for i, (x, sent) in enumerate([(2, 8), (3, 3), (1, 2), (4, 0)])
  ]
  options = {"tables": ["ours"], "num_microbatches": [4], "num_stages": [4]}
  options |= {"recompute": [False], "max_delay": None}
  best, rows = pipeline.plan(costs, machines, 4, **options)
  assert best.samples_per_s == pytest.approx(1 / best.plan.bottleneck_s)
  assert (best.send_factor, best.window) == (2.0, 3)
  alone = max(x.samples_per_s for x in rows if x.send_factor == 1.0)
  assert alone < 0.85 * best.samples_per_s
  # A given window is kept.
  two, _ = pipeline.plan(costs, machines, 4, windows=[2], **options)
  assert two.window == 2 and two.samples_per_s < best.samples_per_s


def test_two_stages_of_a_device_share_its_memory():
  best, _ = _plan(_machines(2), tables=["interleaved"], recompute=[False])
  assert best.plan.nodes == ("n0", "n1", "n0", "n1")
  needed = max(best.times.memory_bytes)
  _, rows = _plan(
    _machines(2, memory=needed - 1),
    tables=["interleaved", "1f1b"],
    recompute=[False],
    num_microbatches=[8],
    num_stages=[2],
  )
  (row,) = [x for x in rows if x.table == "interleaved"]
  assert row.times is None and "memory" in row.reason


def test_costs_refer_to_the_given_samples():
  one, _ = _plan(_machines(2), tables=["1f1b"])
  four, _ = _plan(_machines(2), tables=["1f1b"], samples=4)
  assert four.samples_per_s == pytest.approx(4 * one.samples_per_s)


def test_order_that_fits_with_more_micro_batches_is_found():
  costs = [_Cost(x, 1.0, 2.0, parameter_bytes=1, saved_bytes=1) for x in "ab"]
  nodes = [cluster.Node("small", memory_bytes=4.5)]
  nodes.append(cluster.Node("large", memory_bytes=10.0))
  best, _ = pipeline.plan(
    costs, cluster.Cluster(tuple(nodes)), 8, tables=["1f1b"],
    num_microbatches=[8], recompute=[False], num_stages=[2],
  )  # fmt: skip
  assert best.plan.nodes == ("large", "small")


def test_other_machines_may_keep_more_micro_batches_than_the_first():
  costs = [
    _Cost(f"{f}", f, 2 * f, parameter_bytes=size, saved_bytes=saved)
    for f, size, saved in ((3.0, 3, 1), (2.0, 1, 2), (1.0, 2, 3))
  ]
  nodes = [cluster.Node(f"n{x}", memory_bytes=x) for x in (21.0, 15.0)]
  best, _ = pipeline.plan(
    costs, cluster.Cluster(tuple(nodes)), 8, tables=["zb_h2"],
    num_microbatches=[8], recompute=[False],
  )  # fmt: skip
  # On n21 first a stage has room for two fewer micro-batches, and takes 120.
  assert best.plan.nodes == ("n15.0", "n21.0") and best.extra_live == -1
  assert 8 / best.samples_per_s == pytest.approx(75)


@pytest.mark.parametrize("table", ["greedy", "zb_h2", "ours"])
def test_layer_without_any_time_may_be_a_stage_of_its_own(table):
  costs = [_Cost("a", 1.0, 2.0, parameter_bytes=4)]
  costs.append(_Cost("reshape", parameter_bytes=4))
  nodes = [cluster.Node(f"n{i}", memory_bytes=12.0) for i in range(2)]
  best, _ = pipeline.plan(
    costs, cluster.Cluster(tuple(nodes)), 8, tables=[table]
  )
  assert best.plan.cuts == (1,)
  assert best.samples_per_s == pytest.approx(1 / 3)


def test_first_of_equally_fast_candidates_counts():
  # Later ones keep more micro-batches for the same speed.
  _, (one, *_) = _plan(_machines(2), tables=["1f1b"])
  same = dataclasses.replace(one, extra_live=1)
  slow = dataclasses.replace(one, samples_per_s=one.samples_per_s / 2)
  assert _plan_search._by_rate([one, same, slow]) == [slow, same, one]


def test_plan_of_many_machines_simulates_few_tables(monkeypatch):
  simulate, passes = _simulator.run_table, []

  def counted(table, *args, **options):
    passes.append(sum(map(len, table.devices)))
    return simulate(table, *args, **options)

  monkeypatch.setattr(_simulator, "run_table", counted)
  draw = random.Random(5)
  costs = [
    _Cost(
      f"{i}", draw.uniform(0.2, 2), draw.uniform(0.4, 4),
      output_bytes=draw.uniform(0.1, 2),
    )
    for i in range(60)
  ]  # fmt: skip
  speeds = [draw.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(20)]
  machines = cluster.workers(speeds, link=cluster.Link(24.0, 0.02))
  best, rows = pipeline.plan(costs, machines, 32)
  assert best.times is not None and len(rows) > len(passes)
  # There are 13 tables, 6 numbers of micro-batches and 20 of stages.
  assert len(passes) < 40 and sum(passes) < 150_000


def test_plan_of_two_tables_is_as_fast_as_that_of_the_faster_one():
  draw = random.Random(1)
  costs = []
  for i in range(draw.randint(9, 12)):
    forward = draw.uniform(0.1, 2)
    costs.append(
      _Cost(
        f"{i}", forward, forward * draw.choice([1, 2, 2.5]),
        output_bytes=draw.uniform(0.1, 3), parameter_bytes=draw.uniform(1, 10),
        saved_bytes=draw.uniform(1, 10),
      )
    )  # fmt: skip
  speeds = [draw.choice([0.5, 1, 1, 2, 3]) for _ in range(draw.randint(4, 6))]
  links = {
    f"n{i}": cluster.Link(
      8 * draw.choice([0.5, 1, 3, 10]), 0.1 * draw.randrange(2)
    )
    for i in range(len(speeds))
  }
  links["server"] = cluster.Link(8.0)
  nodes = tuple(map(cluster.Node, links, speeds))
  machines = cluster.Cluster(nodes, cluster.star(links, "switch"))

  def rate(*tables):
    found, _ = pipeline.plan(
      costs, machines, 8, tables=tables, num_microbatches=[8], recompute=[False]
    )
    return found.samples_per_s

  # At first, by bottlenecks alone, "ours" is the faster one here.
  assert rate("ours", "zb_h2") == rate("zb_h2") > 1.05 * rate("ours")


def _unlike(seed):
  """Draws layers and machines of unlike speeds, links and memory."""
  draw = random.Random(seed)
  costs = []
  for i in range(draw.randint(3, 5)):
    forward = draw.uniform(0.2, 2.0)
    costs.append(
      _Cost(
        f"{i}", forward, forward * draw.choice([1, 2, 2.5]),
        parameter_bytes=draw.uniform(1, 10), saved_bytes=draw.uniform(1, 5),
        output_bytes=draw.uniform(0.1, 2.0),
      )
    )  # fmt: skip
  nodes, links = [], {}
  for i in range(draw.randint(2, 3)):
    memory = draw.uniform(60, 120) if seed % 2 else math.inf
    speed = draw.choice([0.5, 1.0, 1.0, 2.0])
    nodes.append(cluster.Node(f"n{i}", speed=speed, memory_bytes=memory))
    links[f"n{i}"] = cluster.Link(8 * draw.choice([1.0, 3.0, 10.0]), 0.02)
  topology = cluster.star(links, "switch")
  return costs, cluster.Cluster(tuple(nodes), topology, server="switch")


@pytest.mark.parametrize("seed", range(8))
def test_plan_is_as_fast_as_the_best_of_all_cuts_and_machines(seed):
  costs, machines = _unlike(seed)
  name, number = [("1f1b", 4), ("gpipe", 2), ("zb_h1", 4)][seed % 3]
  fastest = math.inf
  for stages in range(1, min(len(costs), len(machines.names)) + 1):
    table = pipeline.make_table(name, stages, number)
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
      for nodes in itertools.permutations(machines.names, stages):
        found = pipeline.partition(costs, machines, nodes=nodes, cuts=cuts)
        times = pipeline.simulate(table, found.stages, machines, nodes=nodes)
        limits = (machines.node(x).memory_bytes for x in nodes)
        if all(x <= y for x, y in zip(times.memory_bytes, limits, strict=True)):
          fastest = min(fastest, times.iteration_s)
  best, _ = pipeline.plan(
    costs, machines, number, tables=[name], num_microbatches=[number],
    recompute=[False],
  )  # fmt: skip
  assert number / best.samples_per_s == pytest.approx(fastest)


def _fastest(costs, machines, tables, numbers, batch_size):
  """Returns the least seconds of a batch over all choices that fit."""
  fastest = math.inf
  counts = range(1, min(len(costs), len(machines.names)) + 1)
  for name, number, again, stages in itertools.product(
    tables, numbers, (False, True), counts
  ):
    table = pipeline.make_table(name, stages, number)
    scaled = [x.scaled(batch_size / number) for x in costs]
    for cuts, nodes in itertools.product(
      itertools.combinations(range(1, len(costs)), stages - 1),
      itertools.permutations(machines.names, stages),
    ):
      found = pipeline.partition(
        scaled, machines, nodes=nodes, cuts=cuts,
        footprint=pipeline.Footprint(recompute=again),
      )  # fmt: skip
      times = pipeline.simulate(table, found.stages, machines, nodes=nodes)
      limits = (machines.node(x).memory_bytes for x in nodes)
      if all(x <= y for x, y in zip(times.memory_bytes, limits, strict=True)):
        fastest = min(fastest, times.iteration_s)
  return fastest


@pytest.mark.slow
def test_hundred_plans_are_near_the_best_of_all_choices():
  ratios, wanted = [], []
  for seed in range(100, 200):
    costs, machines = _unlike(seed)
    draw = random.Random(seed)
    tables = draw.sample(["gpipe", "1f1b", "zb_h1", "eager_1f1b"], 2)
    numbers = draw.sample([1, 2, 4, 8], 2)
    fastest = _fastest(costs, machines, tables, numbers, 8)
    wanted.append(fastest < math.inf)
    try:
      best, _ = pipeline.plan(
        costs, machines, 8, tables=tables, num_microbatches=numbers
      )
    except ValueError:
      assert fastest == math.inf, seed  # Nothing that fits is refused.
      continue
    ratios.append(8 / best.samples_per_s / fastest)
  # A plan may take up to half a percent for less memory.
  assert sorted(ratios)[len(ratios) // 2] < 1.001 and max(ratios) < 1.05
  assert sum(wanted) == len(ratios) > 90


@pytest.mark.parametrize(
  ("place_s", "wanted"),
  [
    # With 24 and more, every second one is tried, with 32 every third one.
    (float, [32, 29, 27, 25, *range(23, 0, -1)]),
    # A number that is no faster than a larger one is left out.
    (lambda number: 1.0, [32]),
    (lambda number: 1.0 if number > 20 else 0.5, [32, 20]),
  ],
)
def test_numbers_of_stages_that_are_tried(place_s, wanted):
  names = tuple(f"n{i}" for i in range(32))
  problem = types.SimpleNamespace(
    machines=types.SimpleNamespace(names=names), wanted=None, costs=[0.0] * 40,
    batch_size=8, busy_s=lambda number, recompute: 0.1,
    place_s=lambda number, recompute: place_s(number),
  )  # fmt: skip
  search = _plan_search._Search(problem, None)
  assert [x[0] for x in search._stages(False)] == wanted


@pytest.mark.parametrize(("batch_s", "slower"), [(1.003, False), (1.01, True)])
def test_half_a_percent_makes_no_choice_slower(batch_s, slower):
  problem = types.SimpleNamespace(batch_size=8)
  search = types.SimpleNamespace(problem=problem, _best=8.0)
  assert _plan_search._Search._is_slower(search, batch_s) == slower


def test_inputs_of_micro_batches_take_memory():
  options = {"tables": ["1f1b"], "recompute": [True], "num_stages": [1]}
  options |= {"num_microbatches": [8]}
  machines = _machines(1, memory=1000)
  best, _ = _plan(machines, input_bytes=100, **options)
  assert best.recompute and best.plan.nodes == ("n0",)
  with pytest.raises(ValueError, match="No partition fits into memory"):
    _plan(machines, input_bytes=1000, **options)


@pytest.mark.parametrize(
  ("rates", "tried"),
  [
    # More micro-batches first; fewer ones only while they are no slower.
    ({8: 16.0, 4: 16.0, 2: 16.0, 1: 16.0}, [8, 4, 2, 1]),
    ({8: 18.0, 4: 17.0, 2: 17.0, 1: 17.0}, [8, 4]),
    ({8: 16.0, 4: 18.0, 2: 17.0, 1: 20.0}, [8, 4, 2]),
    # Plans slower than three quarters of the best are not tried again.
    ({8: 15.0, 4: 16.0, 2: 0.0, 1: 0.0}, [8, 4, 2]),
    ({8: 14.0, 4: 20.0, 2: 20.0, 1: 20.0}, [8]),
  ],
)
@pytest.mark.parametrize("few", [False, True])
def test_fewer_micro_batches_are_tried_while_they_help(few, rates, tried):
  names = tuple(f"n{i}" for i in range(8 if few else 9))
  problem = types.SimpleNamespace(
    machines=types.SimpleNamespace(names=names), batch_size=10**9
  )
  search = _plan_search._Search(problem, None)
  search._stages = lambda recompute: [(2, 1.0)]
  search._best, found = 20.0, []

  def noted(choice):
    found.append(choice.num_microbatches)
    rate = rates[choice.num_microbatches]
    search._done.append(
      dataclasses.replace(choice, plan="a plan", samples_per_s=rate)
    )

  search._try = noted
  search._try_capped = pytest.fail
  search.add(False, ["1f1b"], [1, 2, 4, 8])
  assert found == ([8, 4, 2, 1] if few else tried)
  left = [x.num_microbatches for x in search._done if x.reason is not None]
  assert left == [x for x in (8, 4, 2, 1) if x not in found]


def test_fewer_micro_batches_are_tried_while_their_best_window_helps():
  names = tuple(f"n{i}" for i in range(9))
  problem = types.SimpleNamespace(
    machines=types.SimpleNamespace(names=names), batch_size=10**9
  )
  search = _plan_search._Search(problem, None)
  search._stages = lambda recompute: [(2, 1.0)]
  search._best, found = 20.0, []
  rates = {8: (17.0, 1.0, 16.0), 4: (2.0, 16.5), 2: (20.0,), 1: (20.0,)}

  def noted(choice):
    found.append(choice.num_microbatches)
    search._done += [
      dataclasses.replace(choice, plan="a plan", samples_per_s=rate)
      for rate in rates[choice.num_microbatches]
    ]

  search._try, search._try_capped = pytest.fail, noted
  search.add(False, ["ours"], [1, 2, 4, 8])
  # The best of 8 is less slow than three quarters, and that of 4 is slower.
  assert found == [8, 4]


@pytest.mark.parametrize("few", [False, True])
def test_slower_sends_of_slow_tables_are_tried_by_few_machines_only(few):
  names = tuple(f"n{i}" for i in range(8 if few else 9))
  problem = types.SimpleNamespace(
    machines=types.SimpleNamespace(names=names), batch_size=10**9,
    least_s=lambda choice, plan: 1.0, cut=lambda choice: choice,
    simulated=lambda choice: choice,
  )  # fmt: skip
  search = _plan_search._Search(problem, [1])
  search._best = 20.0
  # Three quarters of the best rate, and less.
  search._done = [
    _candidate.Candidate(
      table, 8, 2, None, False, plan="a plan", times="times",
      samples_per_s=rate,
    )
    for table, rate in (("zb_h2", 15.0), ("zb_v", 14.0))
  ]  # fmt: skip
  found = {x.table for x in search._slower_sends()}
  assert found == ({"zb_h2", "zb_v"} if few else {"zb_h2"})
