"""PipeDream's planner, whose stages may have several machines, to compare with.

References:
  Narayanan et al., "PipeDream", SOSP 2019, arXiv:1806.03377.  Departure: only
  the innermost level looks at memory.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdist import cluster, pipeline


class Level(NamedTuple):
  """A level of a cluster, as PipeDream's planner sees it.

  Attributes:
    number: The number of machines of the level below, or devices, in each
      machine of this level.
    bytes_per_s: The bandwidth between them.
  """

  number: int
  bytes_per_s: float


class _Choice(NamedTuple):
  """The last stage of a level's best pipeline.

  Attributes:
    start: The first layer of the last stage.
    number: The number of machines of the last stage.
  """

  start: int
  number: int


# The stages of a pipeline: first layer, last layer plus one, machines.
_Stages = list[tuple[int, int, int]]


def partition(
  costs: Sequence[pipeline.LayerCost],
  machines: cluster.Cluster,
  levels: Sequence[tuple[int, float]],
  *,
  replicate: bool = True,
  footprint: pipeline.Footprint,
) -> tuple[pipeline.Plan, tuple[int, ...]]:
  r"""Cuts layers into stages of one or several machines.

  On each level, from the one inside the machines to the one between them,

  .. math:: A(i, j, m) = \min_{k, m'} \max\Big(A(i, k, m - m'),
    \frac{T(k + 1, j) + 4 (m' - 1) P / (B m')}{m'},
    \frac{2 a_k}{B m'}\Big)

  or all layers in one stage, :math:`(T + 4 (m - 1) P / (B m)) / m`, with T the
  seconds on a machine of the level below, B bytes a second, P bytes of
  parameters and a bytes over the cut.  Machines count as equal.

  Args:
    costs: The cost of each layer, for a micro-batch.
    machines: The machines in the order of their levels, the innermost together.
    levels: The numbers and bandwidths of `Level`, the innermost first.
    replicate: Whether a stage may have several machines, as published.
    footprint: The memory that a stage needs; the planner sets the versions of
      the parameters.

  Returns:
    The plan, in which each stage has the first of its machines, and the number
    of machines of each stage.

  Raises:
    ValueError: If levels do not make up the machines, or no pipeline fits into
      the smallest machine's memory.
  """
  if math.prod(number for number, _ in levels) != len(machines.nodes):
    raise ValueError(
      f"`levels` must make up the {len(machines.nodes)} machines, got "
      f"{' x '.join(str(number) for number, _ in levels) or 'none'}."
    )
  memory_bytes = min(node.memory_bytes for node in machines.nodes)
  planner = _LevelPlanner(costs, replicate, footprint, memory_bytes)
  for level in levels:
    planner.add(Level(*level))
  stages = planner.stages()
  if stages is None:
    raise ValueError(
      "PipeDream's planner finds no partition that fits into memory."
    )
  replicas = tuple(number for _, _, number in stages)
  versions = tuple(
    1 + math.ceil(sum(replicas[s + 1 :]) / number)
    for s, number in enumerate(replicas)
  )
  firsts = np.cumsum([0, *replicas[:-1]])
  plan = pipeline.partition(
    costs,
    machines,
    nodes=[machines.names[i] for i in firsts],
    cuts=[start for start, _, _ in stages[1:]],
    footprint=dataclasses.replace(
      footprint, versions=versions, in_flight=versions
    ),
  )
  merged, _ = merge_replicas(plan, replicas, machines)
  times = {"bottleneck_s": merged.bottleneck_s, "trip_s": merged.trip_s}
  return dataclasses.replace(plan, **times), replicas


class _LevelPlanner:
  """PipeDream's recursion, level by level."""

  def __init__(
    self,
    costs: Sequence[pipeline.LayerCost],
    replicate: bool,
    footprint: pipeline.Footprint,
    memory_bytes: float,
  ):
    self._replicate, self._footprint = replicate, footprint
    self._memory_bytes = memory_bytes
    size = self._num_layers = len(costs)
    self._parameters = self._sums([x.parameter_bytes for x in costs])
    self._saved = self._sums([x.saved_bytes for x in costs])
    self._sent = np.array([x.output_bytes for x in costs])
    again = footprint.recompute
    # Entry i, j: the seconds of layers i to j, infinite if there are none.
    self.seconds = self._sums(
      [x.compute_s + again * x.forward_s + x.update_s for x in costs]
    )
    self.seconds[np.tri(size, k=-1, dtype=bool)] = math.inf
    self._levels: list[tuple[int, dict[tuple[int, int, int], _Choice]]] = []

  def _sums(self, values: Sequence[float]) -> np.ndarray:
    """Returns the sums over layers i to j."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[None, 1:] - sums[:-1, None]

  def _last_s(self, level: Level, machines: int, used: int) -> np.ndarray:
    """Returns the seconds of a last stage on some of the machines used."""
    sync = 4 * (machines - 1) * self._parameters
    seconds = (self.seconds + sync / (level.bytes_per_s * machines)) / machines
    if not self._levels:
      versions = 1 + math.ceil((level.number - used) / machines)
      copies = versions + self._footprint.optimizer_copies + 1
      need = self._parameters * copies + self._saved * versions
      seconds = np.where(need <= self._memory_bytes, seconds, math.inf)
    return seconds

  def add(self, level: Level) -> None:
    """Plans for the machines of a level from those of the level below."""
    size = self._num_layers
    sent = 2 * self._sent / level.bytes_per_s
    choices: dict[tuple[int, int, int], _Choice] = {}
    best: list[np.ndarray] = []
    for used in range(1, level.number + 1):
      values = self._last_s(level, used, used)
      if used > 1 and not self._replicate:
        values = np.full((size, size), math.inf)
      ends = {
        (i, j): _Choice(i, used) for i in range(size) for j in range(size)
      }
      for number in range(1, used if self._replicate else min(used, 2)):
        last = self._last_s(level, number, used)
        for k in range(size - 1):
          # Layers i to k in front, k + 1 to j in the last stage.
          found = np.maximum(
            np.maximum(best[used - number - 1][:, k, None], last[None, k + 1]),
            sent[k] / number,
          )
          for i, j in np.argwhere(found < values):
            ends[i, j] = _Choice(k + 1, number)
          values = np.minimum(values, found)
      best.append(values)
      choices |= {(i, j, used): choice for (i, j), choice in ends.items()}
    self._levels.append((level.number, choices))
    self.seconds = best[-1]

  def stages(self) -> _Stages | None:
    """Returns the stages of the whole; None if nothing fits."""
    if self.seconds[0, -1] == math.inf:
      return None
    return self._flat(0, self._num_layers - 1, len(self._levels))

  def _flat(self, i: int, j: int, level: int) -> _Stages:
    """Returns the stages of layers i to j on one machine of a level."""
    if not level:
      return [(i, j + 1, 1)]
    used, choices = self._levels[level - 1]
    found: _Stages = []
    while used:
      start, number = choices[i, j, used]
      inner = self._flat(start, j, level - 1)
      found = [(a, b, each * number) for a, b, each in inner] + found
      used, j = used - number, start - 1
    return found


def merge_replicas(
  plan: pipeline.Plan, replicas: Sequence[int], machines: cluster.Cluster
) -> tuple[pipeline.Plan, cluster.Cluster]:
  """Makes one machine of all that share a stage, for a simulation.

  It is as fast as all together if they take micro-batches in turn at the
  slowest one's speed; the mean of their gradients takes the time of the
  planner's formula.  It has all their links to the next stage, which no other
  cut shares.

  Returns:
    The plan on these machines, and the machines.
  """
  edges = np.cumsum([0, *replicas])
  groups = [machines.names[a:b] for a, b in itertools.pairwise(edges)]
  nodes, stages, links = [], [], {}
  for i, (group, cost) in enumerate(zip(groups, plan.stages, strict=True)):
    number = len(group)
    speed = min(machines.node(x).speed for x in group)
    slowest = max(_route(machines, a, b)[0] for a in group for b in group)
    sync = 4 * (number - 1) * cost.parameter_bytes * slowest / number
    nodes.append(cluster.Node(f"stage{i}", speed=speed * number))
    stages.append(
      dataclasses.replace(cost, backward_s=cost.backward_s + sync * speed)
    )
    if i:
      ways = [_route(machines, a, b) for a in groups[i - 1] for b in group]
      byte_s = max(x for x, _ in ways)
      if byte_s:
        wide = min(number, len(groups[i - 1]))
        links[f"stage{i - 1}", f"stage{i}"] = cluster.Link(
          8 * wide / byte_s, max(x for _, x in ways)
        )
  merged = cluster.Cluster(
    tuple(nodes), cluster.Topology(links) if links else None, server="stage0"
  )
  found = pipeline.partition(stages, merged, cuts=range(1, len(stages)))
  kept = {
    name: getattr(plan, name) for name in ("cuts", "memory_bytes", "recompute")
  }
  return dataclasses.replace(found, **kept), merged


def _route(
  machines: cluster.Cluster, one: str, other: str
) -> tuple[float, float]:
  """Returns the seconds a byte of a route's slowest link, and its latency."""
  topology = machines.topology
  hops = () if topology is None else topology.route(one, other)
  links = [topology.link(*hop) for hop in hops]
  slowest = max((8 / x.bandwidth_bits_per_s for x in links), default=0.0)
  return slowest, sum(x.latency_s for x in links)
