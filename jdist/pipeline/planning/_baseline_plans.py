"""Partitions of other papers, to compare with."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from jdist import checks, cluster
from jdist.pipeline.planning import _costs, _routes
from jdist.pipeline.planning._bottleneck import Chain
from jdist.pipeline.planning._plan import Footprint, Plan


def even_partition(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  *,
  by: Literal["layers", "compute"] = "layers",
  nodes: Sequence[str] | None = None,
  footprint: Footprint | None = None,
  num_microbatches: int = 1,
) -> Plan:
  """Cuts layers as if machines were equal, links free and memory without end.

  Args:
    costs: of each layer, for a micro-batch.
    machines: speeds, memory and links, which the plan's numbers are of.
    by: `"layers"`, as many in each stage; `"compute"`, the least longest
      computation.
    nodes: the machine of each stage, in order; all of them if None.
    footprint: what a stage takes of memory.
    num_microbatches: over which an optimizer's step is spread.

  Raises:
    ValueError: when there are fewer layers than stages.

  References:
    Huang et al., "GPipe", NeurIPS 2019, arXiv:1811.06965, and Kim et al.,
    "torchgpipe", arXiv:2004.09910, which balances measured times.
  """
  checks.check_choice("by", by, ("layers", "compute"))
  names = tuple(machines.names if nodes is None else nodes)
  chain = Chain(costs, machines, footprint, num_microbatches)
  chain.check_layers(len(names))
  if by == "layers":
    parts = range(1, len(names))
    cuts = [round(i * len(costs) / len(names)) for i in parts]
    return chain.plan(names, cuts)
  equal = cluster.workers([1.0] * len(names))
  found = Chain(costs, equal, footprint, num_microbatches).best_cuts(
    equal.names
  )
  assert found is not None
  return chain.plan(names, found[2])


class Level(NamedTuple):
  """A level of a cluster, as PipeDream's planner sees it.

  Attributes:
    number: machines of the level below, or devices, in each of its own.
    bytes_per_s: between them.
  """

  number: int
  bytes_per_s: float


class _Choice(NamedTuple):
  """End of a level's best pipeline of some layers.

  Attributes:
    start: the first layer of the last stage; that of the whole for one stage.
    number: of machines of the last stage.
  """

  start: int
  number: int


# The stages of a pipeline: first layer, last layer and one more, machines.
_Stages = list[tuple[int, int, int]]


def pipedream_partition(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  levels: Sequence[Level],
  *,
  replicate: bool = True,
  footprint: Footprint | None = None,
) -> Plan:
  r"""Cuts layers as PipeDream's planner does, into stages of several machines.

  On each level, from the one inside the machines to the one between them,

  .. math:: A(i, j, m) = \min_{k, m'} \max\Big(A(i, k, m - m'),
    \frac{T(k + 1, j) + 4 (m' - 1) P / (B m')}{m'},
    \frac{2 a_k}{B m'}\Big)

  or all layers in one stage, :math:`(T + 4 (m - 1) P / (B m)) / m`, with T the
  seconds of a machine of the level below, B bytes a second, P bytes of
  parameters and a bytes over the cut.  Machines count as equal.

  Args:
    costs: of each layer, for a micro-batch.
    machines: in the order of their levels, the innermost together.
    levels: the innermost first.
    replicate: whether a stage may have several machines, as published.
    footprint: what a stage takes of memory; the versions of the parameters are
      the planner's own.

  Returns:
    The plan, which has `replicas`.

  Raises:
    ValueError: when levels do not make up the machines, or no pipeline fits
      into the smallest machine's memory.

  References:
    Narayanan et al., "PipeDream", SOSP 2019, arXiv:1806.03377.  Departure: only
    the innermost level looks at memory.
  """
  footprint = footprint or Footprint()
  levels = [Level(*x) for x in checks.check_list("levels", levels, "Level")]
  if math.prod(x.number for x in levels) != len(machines.nodes):
    raise ValueError(
      f"`levels` must make up the {len(machines.nodes)} machines, got "
      f"{' x '.join(str(x.number) for x in levels) or 'none'}."
    )
  chain = Chain(costs, machines, footprint)
  if not replicate:
    chain.check_layers(len(machines.nodes))
  planner = _LevelPlanner(chain, replicate)
  for level in levels:
    planner.add(level)
  stages = planner.stages()
  if stages is None:
    raise chain.explain(machines.names[: min(len(costs), len(machines.nodes))])
  replicas = tuple(number for _, _, number in stages)
  versions = tuple(
    1 + math.ceil(sum(replicas[s + 1 :]) / number)
    for s, number in enumerate(replicas)
  )
  chain = Chain(
    costs,
    machines,
    dataclasses.replace(footprint, versions=versions, in_flight=versions),
  )
  plan = chain.plan(
    machines.names[: len(stages)], [start for start, _, _ in stages[1:]]
  )
  plan = dataclasses.replace(plan, nodes=machines.names, replicas=replicas)
  merged, _ = merge_replicas(plan, machines)
  return dataclasses.replace(
    plan, bottleneck_s=merged.bottleneck_s, trip_s=merged.trip_s
  )


class _LevelPlanner:
  """PipeDream's recursion, level by level."""

  def __init__(self, chain: Chain, replicate: bool):
    self._chain, self._replicate = chain, replicate
    size = len(chain.costs)
    self._num_layers = size
    self._parameters = self._sums([x.parameter_bytes for x in chain.costs])
    self._saved = self._sums([x.saved_bytes for x in chain.costs])
    # Of all layers from one to another; infinite for none.
    self.seconds = self._sums(list(np.diff(chain.work)))
    self.seconds[np.tri(size, k=-1, dtype=bool)] = math.inf
    self._levels: list[tuple[int, dict[tuple[int, int, int], _Choice]]] = []

  def _sums(self, values: Sequence[float]) -> np.ndarray:
    """Returns sums over layers i to j."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return sums[None, 1:] - sums[:-1, None]

  def _last_s(self, level: Level, machines: int, used: int) -> np.ndarray:
    """Returns the seconds of a last stage, with machines of those used."""
    sync = 4 * (machines - 1) * self._parameters
    seconds = (self.seconds + sync / (level.bytes_per_s * machines)) / machines
    if not self._levels:
      versions = 1 + math.ceil((level.number - used) / machines)
      copies = versions + self._chain.footprint.optimizer_copies + 1
      need = self._parameters * copies + self._saved * versions
      limit = self._chain.least_memory()
      seconds = np.where(need <= limit, seconds, math.inf)
    return seconds

  def add(self, level: Level) -> None:
    """Plans for machines of a level, from those of the level below."""
    size = self._num_layers
    sent = 2 * self._chain.sent[1:] / level.bytes_per_s
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
  plan: Plan, machines: cluster.Cluster
) -> tuple[Plan, cluster.Cluster]:
  """Makes one machine of all that share a stage, for a simulation.

  It is as fast as all together if they take micro-batches in turn, with the
  slowest one's speed; the mean of their gradients takes the time of the
  planner's formula.  It has all their links to the next stage, and none
  of these is shared with another cut.

  Returns:
    The plan on these machines, and they.
  """
  routes = _routes.Routes(machines)
  replicas = plan.replicas or (1,) * plan.num_stages
  edges = np.cumsum([0, *replicas])
  groups = [plan.nodes[a:b] for a, b in itertools.pairwise(edges)]
  nodes, stages, links = [], [], {}
  for i, (group, cost) in enumerate(zip(groups, plan.stages, strict=True)):
    number = len(group)
    speed = min(machines.node(x).speed for x in group)
    slowest = max(routes.byte_s(a, b) for a in group for b in group)
    sync = 4 * (number - 1) * cost.parameter_bytes * slowest / number
    nodes.append(cluster.Node(f"stage{i}", speed=speed * number))
    stages.append(
      dataclasses.replace(cost, backward_s=cost.backward_s + sync * speed)
    )
    if i:
      ways = [(a, b) for a in groups[i - 1] for b in group]
      byte_s = max(routes.byte_s(*way) for way in ways)
      if byte_s:
        wide = min(number, len(groups[i - 1]))
        links[f"stage{i - 1}", f"stage{i}"] = cluster.Link(
          8 * wide / byte_s, max(routes.latency_s(*way) for way in ways)
        )
  merged = cluster.Cluster(
    tuple(nodes), cluster.Topology(links) if links else None, server="stage0"
  )
  found = Chain(stages, merged).plan(merged.names, range(1, len(stages)))
  return (
    dataclasses.replace(
      found,
      cuts=plan.cuts,
      memory_bytes=plan.memory_bytes,
      recompute=plan.recompute,
    ),
    merged,
  )
