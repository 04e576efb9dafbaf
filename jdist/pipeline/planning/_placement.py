"""Placements: the order in which machines take the stages, and layouts."""

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import _costs
from jdist.pipeline.planning._bottleneck import Chain, Pairs
from jdist.pipeline.planning._plan import Footprint, Plan

# The machine of each device in order, and the cuts.
Layout: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
# The most layouts of a problem that is searched without gaps.
_MOST_LAYOUTS = 1000
# With more machines there are too many orders to try all of them.
_MOST_EXHAUSTIVE = 8
# How many orders with the best bottleneck are compared by their trips.
_MOST_TIES = 500
_ROUNDING = 1e-9
_Value = tuple[float, float]  # bottleneck, trip


@signatures.checked
def place(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  *,
  num_stages: signatures.PositiveInt | None = None,
  footprint: Footprint | None = None,
  num_microbatches: int = 1,
  evaluations: signatures.NonNegativeInt = 300,
  seed: signatures.Seed = 0,
) -> Plan:
  """Finds the machines, and their order, with the best partition.

  For up to eight machines the search is exact: branch and bound, with bounds
  that know the memory, and interchangeable machines tried once.  For more it is
  a local search.  It starts with chains over the fastest links, which keep the
  machines of a group together, and exchanges, moves and reverses machines,
  mostly at the bottleneck.

  Args:
    costs: The cost of each layer, for a micro-batch.
    machines: The machines to choose from.
    num_stages: The number of stages; by default the number of machines.
    footprint: The memory that a stage needs.
    num_microbatches: The number of micro-batches in an iteration, over which an
      optimizer's step is spread.
    evaluations: The number of orders that the local search tries.
    seed: The seed of the local search.

  Raises:
    ValueError: If there are fewer layers or machines than stages, or no order
      has a partition that fits into memory.
  """
  names = machines.names
  wanted = len(names) if num_stages is None else num_stages
  remedy = "Each stage has a machine: take fewer, or add machines."
  checks.check_int("num_stages", wanted, 1, len(names), remedy)
  chain = Chain(costs, machines, footprint, num_microbatches)
  chain.check_layers(wanted)
  search = _Search(chain, names, wanted)
  # A good order first gives the branch and bound a tight bound.
  search.start()
  if len(names) <= _MOST_EXHAUSTIVE:
    search.exhaust()
  else:
    search.improve(evaluations, seed)
  if search.best is None:
    by_memory = sorted(names, key=lambda x: -chain.node(x).memory_bytes)
    raise chain.explain(by_memory[:wanted])
  return chain.plan(*search.best)


class _Search:
  """The best order so far, and the searches for better ones."""

  def __init__(self, chain: Chain, names: Sequence[str], wanted: int):
    self._chain, self._names, self._wanted = chain, names, wanted
    self.best: tuple[tuple[str, ...], tuple[int, ...]] | None = None
    self._value: _Value = (math.inf, math.inf)
    self._ties = 0
    self._rest = functools.cache(self._least_rest)
    self._groups = interchangeable(chain, names)

  def _try(self, order: Sequence[str]) -> None:
    """Keeps an order if its best partition is better."""
    chain = self._chain
    # The bound lets most orders be given up early.
    found = chain.best_cuts(order, self._value[0] * (1 + _ROUNDING))
    if found is None:
      return
    bottleneck, trip, cuts = found
    # The partition only knows links shared by neighbouring cuts; distant cuts
    # may share one, too.
    busiest = chain.routes.busiest_s(order, chain.sent[list(cuts)])
    value = max(bottleneck, busiest), trip
    if _less(value, self._value):
      self._value, self.best = value, (tuple(order), cuts)

  def start(self) -> None:
    """Tries the given order, the fastest machines, and chains of fast links."""
    by_speed = sorted(self._names, key=lambda x: -self._chain.node(x).speed)
    self._try(self._names[: self._wanted])
    self._try(by_speed[: self._wanted])
    for first in list(self._unlike(by_speed))[:_MOST_EXHAUSTIVE]:
      order = [first]
      while len(order) < self._wanted:
        order.append(self._nearest(order[-1], set(order)))
      self._try(order)
      self._try(order[::-1])

  def _nearest(self, here: str, taken: set[str]) -> str:
    routes, node = self._chain.routes, self._chain.node
    return min(
      (x for x in self._names if x not in taken),
      key=lambda x: (
        routes.byte_s(here, x), routes.latency_s(here, x), -node(x).speed,
      ),
    )  # fmt: skip

  def improve(self, evaluations: int, seed: int) -> None:
    """Tries random changes of the best order."""
    if self.best is None:
      return
    generator = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    for _ in range(evaluations):
      order = self._neighbour(list(self.best[0]), generator)
      if tuple(order) not in seen:
        seen.add(tuple(order))
        self._try(order)

  def _neighbour(self, order: list[str], generator: random.Random) -> list[str]:
    free = [x for x in self._names if x not in order]
    # Half of the changes move the machine that limits the plan.
    i = self._busiest() if generator.random() < 0.5 else None
    i = generator.randrange(len(order)) if i is None else i
    j = generator.randrange(len(order) + len(free))
    if j >= len(order):
      order[i] = free[j - len(order)]
      return order
    move = generator.randrange(3)
    if move == 0:
      order[i], order[j] = order[j], order[i]
    elif move == 1:
      order.insert(j, order.pop(i))
    else:
      i, j = min(i, j), max(i, j)
      order[i : j + 1] = order[i : j + 1][::-1]
    return order

  def _busiest(self) -> int:
    assert self.best is not None
    order, cuts = self.best
    edges = [0, *cuts, len(self._chain.costs)]

    def seconds(i: int) -> float:
      ends = slice(edges[i + 1], edges[i + 1] + 1)
      pair = Pairs(np.array([edges[i]]), ends, order, i)
      return float(self._chain.stage_s(pair)[0, 0])

    return max(range(len(order)), key=seconds)

  def exhaust(self) -> None:
    """Tries all orders except those that cannot be better."""
    values = np.full(len(self._chain.work), math.inf)
    values[0] = 0.0
    self._grow([], values)

  def _grow(self, order: list[str], values: np.ndarray) -> None:
    """Tries the orders that begin with given machines.

    `values` has the least bottleneck of all their stages but the last one, for
    each position at which that one may start.
    """
    chain, stage = self._chain, len(order) - 1
    if len(order) == self._wanted:
      self._ties += 1
      self._try(order)
      return
    left = tuple(x for x in self._names if x not in order)
    rows = np.flatnonzero(values < self._value[0] * (1 + _ROUNDING))
    for name in self._unlike(left):
      longer, after = [*order, name], values
      if order:
        pairs = Pairs(rows, slice(1, None), longer, stage)
        after, _ = chain.extend(values, chain.stage_s(pairs), pairs)
      least = np.maximum(after, self._rest(name, left)).min()
      tied = _ROUNDING if self._ties < _MOST_TIES else -_ROUNDING
      if least < self._value[0] * (1 + tied):
        self._grow(longer, after)

  def _least_rest(self, name: str, left: tuple[str, ...]) -> np.ndarray:
    """Returns the least bottleneck of a machine's stage and those behind it.

    It is a lower bound for each position at which the stage may start, on the
    machine of `left` with this name: two cuts that share a link count alone.
    Bounds depend on sets of machines, which are far fewer than their orders.
    """
    chain, behind = self._chain, tuple(x for x in left if x != name)
    stage = len(self._names) - len(left)
    # Without a machine behind it a stage has no cut there.
    alone = [name] * (stage + 1)
    rows = np.arange(len(chain.work))
    costs = chain.stage_s(Pairs(rows, slice(0, None), alone, stage))
    if stage + 1 == self._wanted:
      return costs[:, -1]
    byte_s = chain.routes.byte_s
    rest = [
      np.maximum(chain.sent * byte_s(name, x), self._rest(x, behind))
      for x in self._unlike(behind)
    ]
    return np.maximum(costs, np.min(rest, axis=0)).min(axis=1)

  def _unlike(self, names: Iterable[str]) -> Iterator[str]:
    """Yields machines, one of each group that is interchangeable."""
    found = dict[str, str]()
    for name in names:
      found.setdefault(self._groups[name], name)
    return iter(found.values())


def interchangeable(chain: Chain, names: Sequence[str]) -> dict[str, str]:
  """Maps each machine to the first one with which it is interchangeable."""

  def way(one: str, other: str) -> tuple[object, ...]:
    # A route's links, without the name of the machine's own.
    hops = chain.routes.hops(one, other)
    own = hops[0][0] if hops else None
    return tuple((None if hop == own else hop, *rates) for hop, *rates in hops)

  def alike(one: str, other: str) -> bool:
    a, b = chain.node(one), chain.node(other)
    if (a.speed, a.memory_bytes) != (b.speed, b.memory_bytes):
      return False
    rest = (x for x in names if x not in (one, other))
    return all(way(one, x) == way(other, x) for x in rest)

  return {x: next(y for y in names if x == y or alike(x, y)) for x in names}


def _less(one: _Value, other: _Value) -> bool:
  """Returns whether a value is less by more than rounding errors."""
  for a, b in zip(one, other, strict=True):
    if not math.isclose(a, b, rel_tol=_ROUNDING):
      return a < b
  return False


def few_layouts(
  groups: Mapping[str, str], num_layers: int, chunks: int
) -> list[Layout]:
  """Returns all layouts, or none of a problem with too many.

  Machines of one group stay in their order: others have the same times.
  """
  every = (
    (order, cuts)
    for number in range(1, 1 + min(len(groups), num_layers // chunks))
    for order in itertools.permutations(groups, number)
    for cuts in itertools.combinations(
      range(1, num_layers), number * chunks - 1
    )
  )
  found = list(itertools.islice(every, _MOST_LAYOUTS + 1))
  if len(found) > _MOST_LAYOUTS:
    return []
  members: dict[str, list[str]] = {}
  for name, group in groups.items():
    members.setdefault(group, []).append(name)

  def first(order: tuple[str, ...]) -> bool:
    unused = {group: iter(own) for group, own in members.items()}
    return all(next(unused[groups[x]]) == x for x in order)

  return [x for x in found if first(x[0])]


def near_layouts(
  layout: Layout, names: Sequence[str], num_layers: int, chunks: int
) -> Iterator[Layout]:
  """Yields layouts that differ by one cut, two machines, or one stage."""
  order, cuts = layout
  edges = [0, *cuts, num_layers]
  for i in range(len(cuts)):
    for cut in (cuts[i] - 1, cuts[i] + 1):
      if edges[i] < cut < edges[i + 2]:
        yield order, (*cuts[:i], cut, *cuts[i + 1 :])
  for i, j in itertools.combinations(range(len(order)), 2):
    swapped = list(order)
    swapped[i], swapped[j] = order[j], order[i]
    yield tuple(swapped), cuts
  free = [x for x in names if x not in order]
  for i, name in itertools.product(range(len(order)), free):
    yield (*order[:i], name, *order[i + 1 :]), cuts
  if chunks == 1:
    for i, j in itertools.product(range(len(order)), range(len(cuts))):
      yield order[:i] + order[i + 1 :], cuts[:j] + cuts[j + 1 :]
