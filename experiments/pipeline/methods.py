"""How each method cuts a model, places it and runs: by its paper, and by us."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pipedream_planner

from jdist import cluster, pipeline

BASELINES = ("naive", "gpipe", "1f1b", "pipedream", "2bw")
_COPIES = 1.0  # Momentum.
# Micro-batches a stage in which a full pipeline is measured.
_FULL = 12


@dataclasses.dataclass(frozen=True)
class Cell:
  """A network on machines.

  Attributes:
    costs: of each layer, for a micro-batch.
    machines: a stage each.
    levels: as PipeDream's planner sees them.
    number: of micro-batches.
    samples: of a micro-batch.
    input_bytes: of a micro-batch.
  """

  costs: Sequence[pipeline.LayerCost]
  machines: cluster.Cluster
  levels: Sequence[tuple[int, float]]
  number: int
  samples: int
  input_bytes: float

  @property
  def batch_size(self) -> int:
    """Samples of an update."""
    return self.number * self.samples

  def finer(self, factor: int) -> "Cell":
    """Returns the cell with more and smaller micro-batches of one batch."""
    return dataclasses.replace(
      self,
      costs=[x.scaled(1 / factor) for x in self.costs],
      number=self.number * factor,
      samples=self.samples // factor,
      input_bytes=self.input_bytes / factor,
    )

  def planned(
    self, tables: Sequence[str] | None, max_delay: int | None = None
  ) -> pipeline.Candidate:
    """Returns the joint search's best: of all tables, or of some."""
    whole = tables is not None and "pipedream" in tables
    best, _ = pipeline.plan(
      self.costs,
      self.machines,
      self.batch_size,
      samples=self.samples,
      tables=tables,
      num_microbatches=[1 if whole else self.number],
      max_delay=max_delay,
      optimizer_copies=_COPIES,
      input_bytes=self.input_bytes,
    )
    return best

  def bound_s(self) -> float:
    """Returns the least bottleneck of any contiguous partition.

    Over all orders and subsets of the machines, without a limit of memory.
    """
    free = dataclasses.replace(
      self.machines,
      nodes=tuple(
        dataclasses.replace(x, memory_bytes=math.inf)
        for x in self.machines.nodes
      ),
    )
    most = min(len(free.nodes), len(self.costs))
    return min(
      pipeline.place(
        self.costs, free, num_stages=n, num_microbatches=self.number
      ).bottleneck_s
      for n in range(1, most + 1)
    )


def ours(cell: Cell) -> dict[str, Any]:
  """The joint search over all tables, at the given micro-batches."""
  return _of_candidate(cell, cell.planned(None))


def in_time(cell: Cell) -> dict[str, Any]:
  """The joint search over all tables whose gradients are never late."""
  return _of_candidate(cell, cell.planned(None, max_delay=0))


def planned_over(cell: Cell, tables: Sequence[str]) -> dict[str, Any]:
  """The joint search over some tables."""
  return _of_candidate(cell, cell.planned(tables))


def by_our_plan(cell: Cell, method: str) -> dict[str, Any]:
  """A baseline's table with the joint search's cuts and machines for it."""
  return planned_over(cell, [method])


def by_its_paper(
  cell: Cell, method: str, *, replicate: bool = False
) -> dict[str, Any]:
  """A baseline with its paper's own partition, on machines as they come.

  PipeDream's planner takes care of levels of links; GPipe balances
  computation, and so do 1F1B and 2BW, whose paper cuts into equal blocks, and
  the naive one here.  PipeDream updates after each micro-batch, which is the
  whole batch here.  What does not fit into memory runs forward passes again.

  Args:
    cell: what is run.
    method: its table.
    replicate: whether PipeDream's stages may have several machines; then its
      micro-batch is the one that is fastest, so small that an update is of no
      more samples than the others'.

  Raises:
    ValueError: when it does not fit.
  """
  parts = [1] if method == "pipedream" else [cell.number]
  if replicate:
    parts = [x for x in range(1, cell.number + 1) if not cell.number % x]
  found, wrong = [], None
  for recompute, number in itertools.product((False, True), parts):
    if found and recompute:
      break
    try:
      each = _by_its_paper(cell, method, recompute, replicate, number)
    except ValueError as error:
      wrong = wrong or error
      continue
    # An update of replicas is of a micro-batch each, together no more than the
    # batch.
    if max(each["replicas"]) <= number:
      found.append(each)
  if not found:
    raise wrong or ValueError(f"{method} finds no plan.")
  return max(found, key=lambda x: x["samples_per_s"])


def _by_its_paper(
  cell: Cell, method: str, recompute: bool, replicate: bool, parts: int
) -> dict[str, Any]:
  machines, number = cell.machines, cell.number
  costs = [x.scaled(number / parts) for x in cell.costs]
  footprint = pipeline.Footprint(
    _COPIES,
    recompute=recompute,
    input_bytes=cell.input_bytes * number / parts,
  )
  # PipeDream updates after each of its micro-batches.
  each = 1 if method == "pipedream" else parts
  if method == "pipedream":
    plan, replicas = pipedream_planner.partition(
      costs, machines, cell.levels, replicate=replicate, footprint=footprint
    )
  else:
    # Others cut as if devices were equal, links free and memory unlimited
    # (torchgpipe, arXiv:2004.09910).
    options = {"footprint": footprint, "num_microbatches": each}
    equal = cluster.workers([1.0] * len(machines.nodes))
    cuts = pipeline.partition(costs, equal, **options).cuts
    plan = pipeline.partition(costs, machines, cuts=cuts, **options)
    replicas = (1,) * plan.num_stages
  limit = min(x.memory_bytes for x in machines.nodes)
  run, there = plan, machines
  if max(replicas) > 1:
    run, there = pipedream_planner.merge_replicas(plan, replicas, machines)
  table = _table(method, plan.num_stages, each)
  times = pipeline.simulate(
    table, run.stages, there, nodes=run.nodes, optimizer_copies=_COPIES
  )
  if max(times.memory_bytes) > limit * (1 + 1e-9):
    raise ValueError(
      f"{method} needs {max(times.memory_bytes) / 1e9:.3g} GB of "
      f"{limit / 1e9:.3g} GB."
    )
  # A part of an iteration more or less is no speed.
  samples = cell.batch_size * each / parts
  rate = samples / max(times.iteration_s, run.bottleneck_s * each)
  return {
    "table": method,
    "cuts": plan.cuts,
    "nodes": machines.names if max(replicas) > 1 else plan.nodes,
    "replicas": replicas,
    "minibatch_samples": samples,
    "recompute": recompute,
    "window": None,
    "send_factor": 1.0,
    "delay": max(pipeline.check_table(table).delays),
    "samples_per_s": rate,
    "bottleneck_s": run.bottleneck_s / (number / parts),
    "iteration_s": times.iteration_s,
    "utilisation": dict(zip(run.nodes, times.utilisation, strict=True)),
    "memory_bytes": dict(zip(run.nodes, times.memory_bytes, strict=True)),
  }


def _table(method: str, num_stages: int, parts: int) -> pipeline.Table:
  if not pipeline.TABLES[method].asynchronous:
    return pipeline.make_table(method, num_stages, parts)
  window = 1 + math.ceil(num_stages / parts)
  iterations = 2 * window + max(4, math.ceil(_FULL * num_stages / parts))
  return pipeline.make_table(
    method, num_stages, parts, num_iterations=iterations
  )


def _of_candidate(cell: Cell, best: pipeline.Candidate) -> dict[str, Any]:
  assert best.plan is not None and best.times is not None
  share = cell.number / best.num_microbatches
  return {
    "table": best.table,
    "cuts": best.plan.cuts,
    "nodes": best.plan.nodes,
    "replicas": (1,) * best.plan.num_stages,
    "minibatch_samples": cell.batch_size,
    "recompute": best.recompute,
    "window": best.window,
    "send_factor": best.send_factor,
    "delay": best.delay,
    "samples_per_s": best.samples_per_s,
    "bottleneck_s": best.plan.bottleneck_s / share,
    "iteration_s": best.times.iteration_s,
    "utilisation": dict(zip(best.nodes, best.times.utilisation, strict=True)),
    "memory_bytes": dict(zip(best.nodes, best.times.memory_bytes, strict=True)),
  }
