"""Partitions of a chain of layers with the least bottleneck."""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import _costs
from jdist.pipeline.planning._plan import (
  Footprint,
  make_stages,
  Plan,
  stage_bytes,
)

_Hop = tuple[str, str]

# The relative error that sums in another order may have.
_ROUNDING = 1e-9


class Pairs(NamedTuple):
  """A stage for each pair of positions at which it may start and end."""

  starts: np.ndarray
  ends: slice
  nodes: Sequence[str]
  stage: int

  def between(self, sums: np.ndarray) -> np.ndarray:
    """Returns what lies between the positions of each pair."""
    found: np.ndarray = sums[None, self.ends] - sums[self.starts, None]
    return found


class Chain:
  """The costs of a chain of layers as prefix sums.

  Position j lies behind the first j layers, so a stage's work is the difference
  of two positions' sums, for all pairs at once in NumPy.
  """

  def __init__(
    self,
    costs: Sequence[_costs.LayerCost],
    machines: cluster.Cluster,
    footprint: Footprint | None = None,
    num_microbatches: int = 1,
  ):
    self.costs = checks.check_list("costs", costs, "LayerCost")
    if not self.costs:
      raise ValueError("`costs` must be one layer's at least, got none.")
    checks.check_int("num_microbatches", num_microbatches, 1)
    self.footprint = footprint or Footprint()
    _costs.check_there(machines.nodes)
    self.routes = Routes(machines)
    nodes = {node.name: node for node in machines.nodes}
    # The search looks machines up many thousand times.
    self.node = nodes.__getitem__
    again = float(self.footprint.recompute)
    sums = [
      [
        x.compute_s + again * x.forward_s + x.update_s / num_microbatches,
        x.parameter_bytes,
        x.saved_bytes,
      ]
      for x in self.costs
    ]
    self.work, self._parameters, self._saved = np.concatenate(
      [np.zeros((1, 3)), np.cumsum(np.array(sums), axis=0)]
    ).T
    # The bytes that cross a cut at each position.
    self.sent = np.array([0.0] + [x.sent_bytes for x in self.costs])
    self._input = self.sent.copy()
    self._input[0] = self.footprint.input_bytes
    size = len(self.costs) + 1
    # A maximum has no prefix sum, so it is stored for each pair.
    self._working = np.zeros((size, size))
    for start in range(size - 1):
      self._working[start, start + 1 :] = np.maximum.accumulate(
        [x.working_bytes for x in self.costs[start:]]
      )

  def stage_s(self, pairs: Pairs) -> np.ndarray:
    """Returns the seconds of a stage for pairs of start and end positions.

    These are the largest of its computation, of the cut behind it, and of the
    link that both of its cuts share; infinite for an empty stage, or one that
    needs too much memory.
    """
    seconds = np.maximum(self._compute_s(pairs), self._sent_s(pairs))
    return np.where(self._fits(pairs) <= 1 + _ROUNDING, seconds, math.inf)

  def _compute_s(self, pairs: Pairs) -> np.ndarray:
    return pairs.between(self.work) / self.node(pairs.nodes[pairs.stage]).speed

  def _sent_s(self, pairs: Pairs) -> np.ndarray:
    starts, ends, nodes, stage = pairs
    # The last stage has no cut behind it.
    if stage + 1 == len(nodes):
      return np.zeros(1)
    here, after = nodes[stage], nodes[stage + 1]
    found = self.sent[None, ends] * self.routes.byte_s(here, after)
    if stage and (
      shared := self.routes.shared_byte_s(nodes[stage - 1], here, after)
    ):
      both = self.sent[starts, None] + self.sent[None, ends]
      found = np.maximum(found, both * shared)
    return found

  def _fits(self, pairs: Pairs) -> np.ndarray:
    """Returns the part of a machine's memory that stages need."""
    starts, ends, nodes, stage = pairs
    empty = np.arange(len(self.work))[None, ends] <= starts[:, None]
    limit = self.node(nodes[stage]).memory_bytes
    # Without a limit of memory only empty stages do not fit.
    if limit == math.inf:
      return np.where(empty, math.inf, 0.0)
    footprint, live = self.footprint, self.footprint.live(stage)
    found = pairs.between(self._parameters) * footprint.copies(stage)
    found = found + self._working[starts, ends]
    saved = pairs.between(self._saved)
    if footprint.recompute:
      found = found + saved + live * self._input[starts, None]
    else:
      found = found + live * saved
    return np.where(empty, math.inf, found / limit)

  def _trip_s(self, pairs: Pairs) -> np.ndarray:
    """Returns a micro-batch's seconds in a stage, over the cut and back."""
    _, ends, nodes, stage = pairs
    found = self._compute_s(pairs)
    if stage + 1 < len(nodes):
      way = nodes[stage], nodes[stage + 1]
      found = found + 2 * (
        self.sent[None, ends] * self.routes.byte_s(*way)
        + self.routes.latency_s(*way)
      )
    return found

  def best_cuts(
    self, nodes: Sequence[str], bound: float = math.inf
  ) -> tuple[float, float, tuple[int, ...]] | None:
    """Returns bottleneck, trip and cuts of the best partition below a bound.

    It has the shortest trip among those with the least bottleneck.
    """
    # The second search is for the least trip of stages within the bottleneck.
    least = self._least(nodes, self.stage_s, bound)
    if least is None:
      return None
    limit = least[0] * (1 + _ROUNDING)

    def trip_s(pairs: Pairs) -> np.ndarray:
      within = self.stage_s(pairs) <= limit
      return np.where(within, self._trip_s(pairs), math.inf)

    shortest = self._least(nodes, trip_s, limit, np.add)
    assert shortest is not None
    return least[0], *shortest

  def _least(
    self,
    nodes: Sequence[str],
    cost: Callable[[Pairs], np.ndarray],
    limit: float = math.inf,
    join: np.ufunc = np.maximum,
  ) -> tuple[float, tuple[int, ...]] | None:
    """Returns the least value over all partitions, and its cuts.

    A stage's cost is joined with that of the stages in front: by the maximum
    for a bottleneck, or by the sum for a trip.
    """
    speeds = [self.node(name).speed for name in nodes]
    behind = sum(speeds)
    # values[j]: the least value of the first stages if they end at position j.
    values = np.full(len(self.work), math.inf)
    values[0] = 0.0
    starts = []
    for stage, speed in enumerate(speeds):
      behind -= speed
      rows = np.flatnonzero(values < math.inf)
      if not rows.size:
        return None
      # The search visits only positions from which the rest of the machines can
      # still be in time; with many machines these are a few of all pairs.
      pairs = Pairs(rows, self.within(rows, limit, speed, behind), nodes, stage)
      values, start = self.extend(values, cost(pairs), pairs, join)
      if join is np.maximum:
        values[values > limit] = math.inf
      starts.append(start)
    if values[-1] == math.inf:
      return None
    # Follow the best start of each stage back from the last one's end.
    cuts = [len(self.costs)]
    for start in reversed(starts[1:]):
      cuts.append(int(start[cuts[-1]]))
    return float(values[-1]), tuple(cuts[:0:-1])

  def within(
    self, rows: np.ndarray, limit: float, speed: float, behind: float
  ) -> slice:
    """Returns the positions at which a stage may end, by computation alone.

    It starts at one of `rows` on a machine of this speed, and no stage takes
    longer than `limit`; `behind` is the sum of the speeds behind it.
    """
    first, end = int(rows[0]) + 1, len(self.work)
    if limit < math.inf:
      more = limit * (1 + _ROUNDING)
      # Work is not lost to rounding either.
      small = _ROUNDING * self.work[-1]
      left = self.work[-1] - more * behind - small
      first = max(first, int(np.searchsorted(self.work, left)))
      most = self.work[rows[-1]] + more * speed + small
      end = int(np.searchsorted(self.work, most, side="right"))
    return slice(first, max(first, end))

  def extend(
    self,
    values: np.ndarray,
    costs: np.ndarray,
    pairs: Pairs,
    join: np.ufunc = np.maximum,
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best values with a stage more, and where it begins."""
    found = np.full(len(values), math.inf)
    start = np.zeros(len(values), int)
    # The array is [starts, ends]; the best start of each end leads to the cuts.
    both = join(values[pairs.starts, None], costs)
    best = both.argmin(axis=0)
    found[pairs.ends] = both[best, np.arange(len(best))]
    start[pairs.ends] = pairs.starts[best]
    return found, start

  def busy_s(self, nodes: Sequence[str], cuts: Sequence[int]) -> list[float]:
    """Returns the seconds of each machine, and those of the busiest link."""
    # A machine may have several stages.
    busy = dict.fromkeys(nodes, 0.0)
    works = np.diff(self.work[[0, *cuts, -1]])
    for name, work in zip(nodes, works, strict=True):
      busy[name] += float(work) / self.node(name).speed
    return [*busy.values(), self.routes.busiest_s(nodes, self.sent[list(cuts)])]

  def plan(self, nodes: Sequence[str], cuts: Sequence[int]) -> Plan:
    """Returns a plan of given cuts; `Plan.bottleneck_s` counts every link."""
    stages = make_stages(self.costs, cuts, self.footprint)
    busy_s, sent = self.busy_s(nodes, cuts), self.sent[list(cuts)]
    trip_s = sum(
      num_bytes * self.routes.byte_s(*way) + self.routes.latency_s(*way)
      for way, num_bytes in zip(itertools.pairwise(nodes), sent, strict=True)
    )
    return Plan(
      tuple(map(int, cuts)),
      tuple(nodes),
      stages,
      max(busy_s),
      sum(busy_s[:-1]) + 2 * float(trip_s),
      stage_bytes(stages, self.footprint),
      self.footprint.recompute,
    )

  def check_layers(self, num_stages: int) -> None:
    """Raises a ValueError for fewer layers than stages."""
    self.footprint.check(num_stages)
    if len(self.costs) < num_stages:
      raise ValueError(
        "`costs` must be of one layer at least for each of the "
        f"{num_stages} stages, got {len(self.costs)}. Take fewer stages, or a "
        "model of more layers."
      )

  def explain(self, nodes: Sequence[str]) -> ValueError:
    """Returns the error that no partition fits into the machines' memory."""
    found = self._least(nodes, self._fits)
    slowest = min(self.node(name).speed for name in nodes)
    if found is None or self.work[-1] / slowest == math.inf:
      rule = "`costs` must have finite sums of seconds and bytes, got inf."
      return ValueError(f"{rule} Give those of each layer.")
    stages = make_stages(self.costs, found[1], self.footprint)
    needs = stage_bytes(stages, self.footprint)
    limits = [self.node(name).memory_bytes for name in nodes]
    # Name the worst stage of the best partition by memory, or a single layer if
    # that alone is too large: then no cut helps.
    i = max(range(len(nodes)), key=lambda i: needs[i] / limits[i])
    what, need = f"stage {i} of {len(nodes)}, {stages[i].name!r},", needs[i]
    edges = [0, *found[1], len(self.costs)]
    for j in range(edges[i], edges[i + 1]):
      layer = Pairs(np.array([j]), slice(j + 1, j + 2), nodes, i)
      alone = self._fits(layer)[0, 0]
      if alone > 1:
        what, need = f"layer {self.costs[j].name!r} alone", alone * limits[i]
    again = "" if self.footprint.recompute else "recomputation, "
    return ValueError(
      f"No partition fits into memory: {what} needs {need / 1e9:.3g} GB, and "
      f"{nodes[i]!r} has {limits[i] / 1e9:.3g} GB. Take more machines, {again}"
      "fewer versions of the parameters or fewer micro-batches in flight."
    )


@signatures.checked
def partition(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  *,
  nodes: Sequence[str] | None = None,
  cuts: Sequence[int] | None = None,
  footprint: Footprint | None = None,
  num_microbatches: int = 1,
) -> Plan:
  r"""Cuts layers into stages so that the busiest machine or link is least busy.

  Exact dynamic programming over the cuts:

  .. math:: A_s(j) = \min_{i < j} \max(A_{s-1}(i), t_s(i, j))

  where t is the largest of the seconds of stage s with layers i to j - 1: of
  its computation, of the cut behind it on its slowest link, and of both cuts on
  a link that they share.  Among equal bottlenecks the micro-batch's trip is the
  shortest.  Latency delays a message but does not occupy a link, so it counts
  in the trip only.

  Args:
    costs: The cost of each layer, for a micro-batch.
    machines: The cluster's speeds, memory and links.
    nodes: The machine of each stage, in order; by default all machines.
    cuts: Cuts to take instead of the best ones, to learn their seconds and
      memory, which may then be more than the machines have.
    footprint: The memory that a stage needs.
    num_microbatches: The number of micro-batches in an iteration, over which an
      optimizer's step is spread.

  Raises:
    ValueError: If there are fewer layers than stages, or no partition fits into
      memory.

  >>> layers = [_costs.LayerCost(n, 1.0, 2.0) for n in "abcd"]
  >>> print(partition(layers, cluster.workers([3.0, 1.0])))
  a to c on worker0 | d on worker1
  """
  names = tuple(machines.names if nodes is None else nodes)
  if not names:
    raise ValueError("`nodes` must be one machine at least, got none.")
  # The cluster refuses the name of another machine.
  for name in names:
    machines.node(name)
  chain = Chain(costs, machines, footprint, num_microbatches)
  chain.check_layers(len(names))
  if cuts is not None:
    edges = [0, *cuts, len(chain.costs)]
    if len(edges) != len(names) + 1 or any(np.diff(edges) <= 0):
      raise ValueError(
        f"`cuts` must grow and make a stage for each of {len(names)} machines "
        f"of {len(chain.costs)} layers, got {list(cuts)}."
      )
    return chain.plan(names, cuts)
  found = chain.best_cuts(names)
  if found is None:
    raise chain.explain(names)
  return chain.plan(names, found[2])


class Routes:
  """The seconds that messages between stages take on a cluster's links.

  Links are full duplex: between two stages outputs flow one way, and gradients
  of the same size the other way.
  """

  def __init__(self, machines: cluster.Cluster):
    self._topology = machines.topology
    # The searches ask for the same pairs of machines many thousand times.
    self.hops = functools.cache(self._hops)
    # The seconds a byte of the slowest link on a route.
    self.byte_s = functools.cache(
      lambda *ends: max((s for _, s, _ in self.hops(*ends)), default=0.0)
    )
    # The seconds that a message takes in addition to those of its bytes.
    self.latency_s = functools.cache(
      lambda *ends: sum(s for _, _, s in self.hops(*ends))
    )
    self.shared_byte_s = functools.cache(self._shared_byte_s)

  def _hops(
    self, one: str, other: str
  ) -> tuple[tuple[_Hop, float, float], ...]:
    """Returns each hop of a route with its seconds a byte and its latency."""
    if self._topology is None or one == other:
      return ()
    ways = self._topology.route(one, other)
    links = [(hop, self._topology.link(*hop)) for hop in ways]
    return tuple((x, 8 / y.bandwidth_bits_per_s, y.latency_s) for x, y in links)

  def _shared_byte_s(self, before: str, here: str, after: str) -> float:
    """Returns the seconds a byte of the slowest link that two cuts share."""
    # A machine receives outputs from the stage before and gradients from the
    # stage after by its own link, and sends both by it in return.
    after_hops = {hop for hop, _, _ in self.hops(after, here)}
    back_hops = {hop for hop, _, _ in self.hops(here, after)}
    return max(
      [s for hop, s, _ in self.hops(before, here) if hop in after_hops]
      + [s for hop, s, _ in self.hops(here, before) if hop in back_hops],
      default=0.0,
    )

  def busiest_s(
    self, nodes: Sequence[str], cut_bytes: Iterable[float]
  ) -> float:
    """Returns the seconds for which a micro-batch occupies the busiest link."""
    loads: dict[_Hop, float] = collections.defaultdict(float)
    for one, other, num_bytes in zip(nodes, nodes[1:], cut_bytes, strict=False):
      for way in ((one, other), (other, one)):
        for hop, seconds, _ in self.hops(*way):
          loads[hop] += seconds * num_bytes
    return max(loads.values(), default=0.0)
