"""Placements: against all orders, and on clusters of levels."""

import dataclasses
import itertools
import random
import time
import types

import pytest

from jdist import cluster, pipeline
from jdist.pipeline.planning import _bottleneck, _placement
from tests.pipeline.planning import _small_clusters as small

_Cost = pipeline.LayerCost


def _levels(machines, each, inside, between):
  """Makes machines of several devices; links in bytes a second."""
  links = {}
  for m in range(machines):
    for i in range(each):
      links[f"m{m}d{i}", f"m{m}"] = cluster.Link(8 * inside)
    links[f"m{m}", "server"] = cluster.Link(8 * between)
  # The names are interleaved, so that the given order is a bad one.
  names = [f"m{m}d{i}" for i in range(each) for m in range(machines)]
  return cluster.Cluster(
    tuple(map(cluster.Node, names)), cluster.Topology(links)
  )


def test_large_cut_gets_the_fast_link():
  link = {
    ("a", "b"): cluster.Link(8.0),
    ("b", "c"): cluster.Link(800.0),
    ("a", "c"): cluster.Link(8.0),
  }
  machines = cluster.Cluster(
    tuple(map(cluster.Node, "abc")), cluster.Topology(link), server="a"
  )
  layers = [
    _Cost("p", 1.0, 2.0, output_bytes=100),
    _Cost("q", 1.0, 2.0, output_bytes=3),
    _Cost("r", 1.0, 2.0, output_bytes=0),
  ]
  plan = pipeline.place(layers, machines)
  assert set(plan.nodes[:2]) == {"b", "c"} and plan.bottleneck_s == 3.0


def test_placement_matches_brute_force():
  for seed in range(60):
    costs, machines, footprint, microbatches = small.case(seed)
    options = {"footprint": footprint, "num_microbatches": microbatches}
    wanted = min(
      small.brute_force(costs, machines, order, footprint, microbatches)
      for order in itertools.permutations(machines.names)
    )
    if wanted[0] == float("inf"):
      with pytest.raises(ValueError, match="No partition fits into memory"):
        pipeline.place(costs, machines, **options)
      continue
    plan = pipeline.place(costs, machines, **options)
    assert (plan.bottleneck_s, plan.trip_s) == pytest.approx(wanted), seed


def test_best_machines_are_chosen():
  costs = [_Cost(f"{i}", 1.0, 1.0) for i in range(6)]
  machines = cluster.workers([1.0, 4.0, 0.1, 2.0])
  plan = pipeline.place(costs, machines, num_stages=2)
  assert sorted(plan.nodes) == ["worker1", "worker3"]
  assert plan.bottleneck_s == 2.0


def test_machines_of_different_memory_are_both_tried():
  nodes = tuple(
    cluster.Node(name, memory_bytes=memory)
    for name, memory in (("small", 1.0), ("large", 1e3))
  )
  link = cluster.Topology({("small", "large"): cluster.Link(8.0)})
  machines = cluster.Cluster(nodes, link, server="small")
  layers = [_Cost("a", 1.0, 2.0, parameter_bytes=100)]
  assert pipeline.place(layers, machines, num_stages=1).nodes == ("large",)


def test_largest_machines_are_named_if_nothing_fits():
  nodes = tuple(cluster.Node(f"n{x}", memory_bytes=x * 1e9) for x in (1, 3, 2))
  layers = [_Cost(x, 1.0, 2.0, parameter_bytes=4e9) for x in "ab"]
  with pytest.raises(ValueError, match="alone needs 12 GB, and 'n2' has 2 GB"):
    pipeline.place(layers, cluster.Cluster(nodes), num_stages=2)


@pytest.mark.parametrize("fits", [True, False])
def test_tight_memory_leaves_few_orders_to_try(fits, monkeypatch):
  grow, tried = _placement._Search._grow, []

  def counted(search, order, values):
    tried.append(order)
    grow(search, order, values)

  monkeypatch.setattr(_placement._Search, "_grow", counted)
  # Each layer fills one machine: of 40,320 orders a single one fits.
  sizes = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
  costs = [
    _Cost(f"{i}", 1.0, 2.0, parameter_bytes=size, output_bytes=size)
    for i, size in enumerate(sizes)
  ]
  more = 0.0 if fits else 1.0
  costs[-1] = dataclasses.replace(costs[-1], working_bytes=more)
  nodes = tuple(
    cluster.Node(f"n{size:.0f}", speed=10 - size, memory_bytes=3 * size)
    for size in (3.0, 8.0, 1.0, 6.0, 4.0, 2.0, 7.0, 5.0)
  )
  links = {x.name: cluster.Link(8 * x.speed) for x in nodes}
  machines = cluster.Cluster(
    nodes, cluster.star(links, "switch"), server="switch"
  )
  if fits:
    nodes = pipeline.place(costs, machines).nodes
    assert nodes == tuple(f"n{size:.0f}" for size in sizes)
  else:
    with pytest.raises(ValueError, match="No partition fits into memory"):
      pipeline.place(costs, machines)
  assert len(tried) <= 10


@pytest.mark.parametrize(("number", "each"), [(2, 4), (4, 4)])
def test_devices_of_a_machine_get_consecutive_stages(number, each):
  costs = [
    _Cost(f"{i}", 1.0, 2.0, output_bytes=100 if (i + 1) % each else 1)
    for i in range(number * each)
  ]
  machines = _levels(number, each, 1000.0, 2.0)
  plan = pipeline.place(costs, machines)
  assert plan.bottleneck_s == 3.0
  groups = [name[:2] for name in plan.nodes]
  assert len(list(itertools.groupby(groups))) == number


def test_link_shared_by_distant_cuts_counts_for_each():
  # In a ring a message passes the machines between its ends.
  pairs = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]
  ring = cluster.Topology(dict.fromkeys(pairs, cluster.Link(8.0)))
  machines = cluster.Cluster(tuple(map(cluster.Node, "acbd")), ring, server="a")
  costs = [_Cost(f"{i}", 1.0, 2.0, output_bytes=4) for i in range(4)]
  assert pipeline.partition(costs, machines).bottleneck_s > 4.0
  plan = pipeline.place(costs, machines)
  assert plan.bottleneck_s == 4.0
  steps = {(ord(a) - ord(b)) % 4 for a, b in itertools.pairwise(plan.nodes)}
  assert steps in ({1}, {3})


def test_search_over_many_machines_finds_the_known_optimum():
  # Each layer fits one speed: only one order has a bottleneck of 1.
  speeds = [1.0 + i for i in range(12)]
  costs = [
    _Cost(f"{i}", speed / 2, speed / 2) for i, speed in enumerate(speeds)
  ]
  random.Random(1).shuffle(speeds)
  machines = cluster.workers(speeds)
  order_as_given = pipeline.partition(costs, machines).bottleneck_s
  found = pipeline.place(costs, machines, evaluations=2000).bottleneck_s
  assert found < 0.6 * order_as_given and found < 1.5


def test_same_seed_gives_the_same_plan():
  costs = small.layers(random.Random(0), 20)
  machines = cluster.workers([1.0 + i % 4 for i in range(10)])
  plans = [
    pipeline.place(costs, machines, evaluations=50, seed=3) for _ in range(2)
  ]
  assert plans[0] == plans[1]


def test_placement_of_200_layers_on_64_machines_takes_seconds():
  generator = random.Random(0)
  costs = small.layers(generator, 200)
  links = {}
  for i in range(64):
    links[f"n{i}", f"m{i // 8}"] = cluster.Link(8 * 100.0)
    links[f"m{i // 8}", "server"] = cluster.Link(8 * 10.0)
  machines = cluster.Cluster(
    tuple(
      cluster.Node(f"n{i}", speed=generator.uniform(0.5, 2.0))
      for i in range(64)
    ),
    cluster.Topology(links),
  )
  start_s = time.process_time()
  plan = pipeline.place(costs, machines)
  assert time.process_time() - start_s < 10.0
  assert plan.bottleneck_s <= pipeline.partition(costs, machines).bottleneck_s


def test_orders_of_interchangeable_machines_are_tried_once():
  """Two machines are equal, a third one has a slower link."""
  groups = {"a": "a", "b": "a", "c": "c"}
  found = _placement.few_layouts(groups, 2, 1)
  orders = {order for order, _ in found}
  assert orders == {("a",), ("c",), ("a", "b"), ("a", "c"), ("c", "a")}
  link = cluster.Link(8e6)
  links = {"a": link, "b": link, "c": cluster.Link(4e6)}
  nodes = tuple(cluster.Node(name) for name in links)
  machines = cluster.Cluster(nodes, cluster.star(links, "server"))
  costs = [
    pipeline.LayerCost(f"{i}", 1.0, 2.0, output_bytes=1e6) for i in range(2)
  ]
  chain = _bottleneck.Chain(costs, machines, pipeline.Footprint(), 2)
  assert _placement.interchangeable(chain, machines.names) == groups


@pytest.mark.parametrize(
  ("one", "other", "less"),
  [
    ((1.0, 3.0), (2.0, 1.0), True),
    ((2.0, 1.0), (1.0, 3.0), False),
    # The first numbers differ by rounding alone, so that the second decide.
    ((1.0, 2.0), (1.0 - 1e-12, 3.0), True),
    ((1.0, 3.0), (1.0 + 1e-12, 2.0), False),
    ((1.0, 2.0), (1.0 + 1e-12, 2.0 + 1e-12), False),
  ],
)
def test_values_are_compared_beyond_rounding(one, other, less):
  assert _placement._less(one, other) == less


# -- The local search, by hand.


def _search(names, wanted, **parts):
  made = object.__new__(_placement._Search)
  made._names, made._wanted, made.best = tuple(names), wanted, None
  made._groups = {name: name for name in names}
  vars(made).update(parts)
  return made


def _chain(speeds, byte_s=None, latency_s=None):
  """Returns a chain whose links take these seconds, by their ends."""
  find = lambda table: lambda x, y: (table or {}).get(x + y, 1.0)  # noqa: E731
  return types.SimpleNamespace(
    node=lambda name: types.SimpleNamespace(speed=speeds[name]),
    routes=types.SimpleNamespace(
      byte_s=find(byte_s), latency_s=find(latency_s)
    ),
  )


@pytest.mark.parametrize(
  ("byte_s", "latency_s", "nearest"),
  [
    ({"ab": 3.0, "ac": 2.0, "ad": 0.5}, {}, "c"),
    # Then the latency counts, and then the speed.
    ({}, {"ab": 0.5}, "b"),
    ({}, {}, "c"),
  ],
)
def test_next_machine_of_a_chain_is_behind_the_fastest_link(
  byte_s, latency_s, nearest
):
  speeds = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 9.0}
  search = _search("abcd", 3, _chain=_chain(speeds, byte_s, latency_s))
  assert search._nearest("a", {"a", "d"}) == nearest


def test_search_starts_with_the_fastest_machines_and_links():
  speeds = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 3.0}
  chain = _chain(speeds, {"cb": 0.5, "bd": 0.5, "da": 0.25, "ba": 0.75})
  tried, search = [], _search("abcd", 3, _chain=chain)
  search._groups["d"] = "c"  # One of two that are alike begins a chain.
  search._try = lambda order: tried.append("".join(order))
  search.start()
  assert tried[:2] == ["abc", "cdb"]
  assert tried[2:] == ["cbd", "dbc", "bda", "adb", "acb", "bca"]


class _Drawn:
  """A generator whose numbers are given."""

  def __init__(self, *numbers):
    self.numbers = list(numbers)

  def random(self):
    return self.numbers.pop(0)

  def randrange(self, end):
    number = self.numbers.pop(0)
    assert 0 <= number < end
    return number


@pytest.mark.parametrize(
  ("drawn", "order"),
  [
    # The busiest machine, number 1, is exchanged for a free one.
    ((0.4, 4), "aecd"), ((0.4, 5), "afcd"),
    # It changes its place with another one, moves there, or the part between
    # them is reversed.
    ((0.4, 3, 0), "adcb"), ((0.4, 3, 1), "acdb"), ((0.4, 3, 2), "adcb"),
    # Any other machine does.
    ((0.5, 0, 3, 0), "dbca"), ((0.5, 0, 3, 1), "bcda"),
    ((0.5, 0, 3, 2), "dcba"),
    ((0.5, 3, 0, 1), "dabc"), ((0.5, 3, 0, 2), "dcba"), ((0.5, 2, 4), "abed"),
  ],
)  # fmt: skip
def test_order_changes_by_one_step(drawn, order):
  generator = _Drawn(*drawn)
  search = _search("abcdef", 4, _busiest=lambda: 1)
  assert "".join(search._neighbour(list("abcd"), generator)) == order
  assert not generator.numbers


def test_busiest_machine_has_the_longest_stage():
  costs = [_Cost(x, 1.0, 0.0, output_bytes=0.0) for x in "wxyz"]
  machines = cluster.workers([1.0, 1.0, 4.0])
  chain = _bottleneck.Chain(costs, machines, None, 1)
  search = _search(machines.names, 3, _chain=chain)
  for cuts, busiest in (((1, 3), 1), ((2, 3), 0), ((1, 2), 0)):
    search.best = machines.names, cuts
    assert search._busiest() == busiest


def test_local_search_tries_each_order_once():
  tried, orders = [], iter(["ba", "ba", "ab", "ba"])
  search = _search("ab", 2, _neighbour=lambda order, _: list(next(orders)))
  search._try = lambda order: tried.append("".join(order))
  search.improve(4, seed=0)  # No order fits.
  assert not tried
  search.best = ("a", "b"), (1,)
  search.improve(4, seed=0)
  assert tried == ["ba", "ab"]
