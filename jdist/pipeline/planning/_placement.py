"""The order in which machines take the stages of a pipeline."""

import math
import random
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jdist import checks, cluster
from jdist.pipeline.planning import _costs
from jdist.pipeline.planning._bottleneck import Chain
from jdist.pipeline.planning._plan import Footprint, Plan

# With more machines the orders are too many to go through.
_MOST_EXHAUSTIVE = 8
# Orders as good as the best one, of which the shortest trip is looked for.
_MOST_TIES = 500
_ROUNDING = 1e-9
# Bottleneck, trip.
_Value = tuple[float, float]
_NOTHING: _Value = (math.inf, math.inf)


def place(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  *,
  num_stages: int | None = None,
  footprint: Footprint | None = None,
  num_microbatches: int = 1,
  evaluations: int = 300,
  seed: int = 0,
) -> Plan:
  """Finds the machines and their order whose best partition is the best.

  Up to eight machines every order counts: branch and bound, machines that are
  alike taken once.  Beyond, the search starts with chains over the fastest
  links, so that machines of a group follow each other, and exchanges, moves
  and reverses, where the bottleneck is more often than elsewhere.

  Args:
    costs: of each layer, for a micro-batch.
    machines: from which to choose.
    num_stages: as many as there are machines if None.
    footprint: what a stage takes of memory.
    num_microbatches: over which an optimizer's step is spread.
    evaluations: orders that the search beyond eight machines tries.
    seed: of that search.

  Returns:
    The plan, as `partition` gives it for the order.

  Raises:
    ValueError: when there are fewer layers or machines than stages, or no
      order has a partition that fits into memory.
  """
  checks.check_int("evaluations", evaluations, 0)
  checks.check_seed(seed)
  names = machines.names
  wanted = len(names) if num_stages is None else num_stages
  checks.check_int("num_stages", wanted, 1)
  if wanted > len(names):
    raise ValueError(
      f"`num_stages` must be at most the {len(names)} machines, got {wanted}."
    )
  chain = Chain(costs, machines, footprint, num_microbatches)
  chain.check_layers(wanted)
  search = _Search(chain, names, wanted)
  small = len(names) <= _MOST_EXHAUSTIVE
  search.start()
  search.improve(min(evaluations, 30) if small else evaluations, seed)
  if small:
    search.exhaust()
  if search.best is None:
    by_memory = sorted(names, key=lambda x: -chain.node(x).memory_bytes)
    raise chain.explain(by_memory[:wanted])
  return chain.plan(*search.best)


class _Search:
  """The best order so far, and the ways to better ones."""

  def __init__(self, chain: Chain, names: Sequence[str], wanted: int):
    self._chain, self._names, self._wanted = chain, names, wanted
    self.best: tuple[tuple[str, ...], tuple[int, ...]] | None = None
    self._value = _NOTHING
    self._ties = 0

  def _try(self, order: Sequence[str]) -> bool:
    """Keeps an order if its best partition is better."""
    chain = self._chain
    found = chain.best_cuts(order, self._value[0] * (1 + _ROUNDING))
    if found is None:
      return False
    bottleneck, trip, cuts = found
    # Cuts that do not follow each other may share a link, too.
    busiest = chain.routes.busiest_s(order, chain.sent[list(cuts)])
    value = max(bottleneck, busiest), trip
    if not _less(value, self._value):
      return False
    self._value, self.best = value, (tuple(order), cuts)
    return True

  def start(self) -> None:
    """Tries the order as given, the fastest machines, and chains of links."""
    by_speed = sorted(self._names, key=lambda x: -self._chain.node(x).speed)
    self._try(self._names[: self._wanted])
    self._try(by_speed[: self._wanted])
    firsts = self._unlike(by_speed)
    for first in list(firsts)[:_MOST_EXHAUSTIVE]:
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
    """Tries orders that differ a little from the best one."""
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
    return max(
      range(len(order)),
      key=lambda i: self._chain.stage_s(
        np.array([edges[i]]), slice(edges[i + 1], edges[i + 1] + 1), order, i
      )[0, 0],
    )

  def exhaust(self) -> None:
    """Goes through all orders but those that cannot be better."""
    values = np.full(len(self._chain.work), math.inf)
    values[0] = 0.0
    self._grow([], values)

  def _grow(self, order: list[str], values: np.ndarray) -> None:
    """Goes through the orders that begin with one.

    Args:
      order: the machines so far.
      values: the least bottleneck of all stages but the last of them, by where
        that one begins.
    """
    chain, stage = self._chain, len(order) - 1
    limit = self._value[0] * (1 + _ROUNDING)
    rows = np.flatnonzero(values < limit)

    def worth(bottleneck: float) -> bool:
      best = self._value[0]
      if bottleneck < best * (1 - _ROUNDING):
        return True
      return bottleneck < best * (1 + _ROUNDING) and self._ties < _MOST_TIES

    if not rows.size:
      return
    speed = chain.node(order[-1]).speed if order else 0.0
    if len(order) == self._wanted:
      columns = slice(len(values) - 1, len(values))
      last = chain.stage_s(rows, columns, order, stage)[:, 0]
      bottleneck = np.maximum(values[rows], last).min()
      if worth(bottleneck):
        self._ties += 1
        self._try(order)
      return
    left = [x for x in self._names if x not in order]
    speeds = sorted((chain.node(x).speed for x in left), reverse=True)
    behind = sum(speeds[: self._wanted - len(order)])
    for name in self._unlike(left):
      longer = [*order, name]
      after = values
      if order:
        columns = chain.within(rows, limit, speed, behind)
        costs = chain.stage_s(rows, columns, longer, stage)
        after, _ = chain.extend(values, costs, rows, columns)
      rest = (chain.work[-1] - chain.work) / behind
      if worth(np.maximum(after, rest).min()):
        self._grow(longer, after)

  def _unlike(self, names: Iterable[str]) -> Iterator[str]:
    """Goes through machines of which no two could change places."""
    found: list[str] = []
    for name in names:
      if not any(self._alike(name, other) for other in found):
        found.append(name)
        yield name

  def _alike(self, one: str, other: str) -> bool:
    a, b = self._chain.node(one), self._chain.node(other)
    if (a.speed, a.memory_bytes) != (b.speed, b.memory_bytes):
      return False
    return all(
      self._way(one, x) == self._way(other, x)
      for x in self._names
      if x not in (one, other)
    )

  def _way(self, one: str, other: str) -> tuple[object, ...]:
    """Returns a way's links, and where it goes once it has left a machine."""
    hops = self._chain.routes.hops(one, other)
    own = hops[0][0] if hops else None
    return tuple((None if hop == own else hop, *rates) for hop, *rates in hops)


def _less(one: _Value, other: _Value) -> bool:
  """Returns whether a value is less by more than rounding."""
  for a, b in zip(one, other, strict=True):
    if a < b * (1 - _ROUNDING):
      return True
    if a > b * (1 + _ROUNDING):
      return False
  return False
