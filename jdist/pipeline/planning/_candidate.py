"""A choice of plan, table and micro-batches, and what it comes to."""

import dataclasses
from typing import Any

from jdist import cluster
from jdist.pipeline import schedule
from jdist.pipeline.planning import _routes, _simulator
from jdist.pipeline.planning._plan import Plan


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A choice of everything, and what it comes to.

  Attributes:
    table: its name.
    num_microbatches: of the batch.
    num_stages: and machines.
    window: of `ours`; 1 of `greedy`, else None.
    recompute: whether stages keep their input only.
    extra_live: micro-batches that a stage of `ours` or `greedy` may keep beyond
      those that do if nothing ever waits; fewer if memory is short.
    plan: cuts and machines; None if nothing fits.
    made: the table; None if the candidate was not simulated.
    times: of the simulation.
    samples_per_s: at the whole batch; at most this much if not simulated.
    delay: of the gradients at most, in updates.
    reason: for not being simulated.
  """

  table: str
  num_microbatches: int
  num_stages: int
  window: int | None
  recompute: bool
  extra_live: int = 0
  plan: Plan | None = None
  made: schedule.Table | None = None
  times: _simulator.PipelineTimes | None = None
  samples_per_s: float = 0.0
  delay: int | None = None
  reason: str | None = None

  @property
  def nodes(self) -> tuple[str, ...]:
    """The machine of each device of the table."""
    return () if self.plan is None else self.plan.nodes[: self.num_stages]

  def row(self) -> dict[str, Any]:
    """Returns what a row of results has of it."""
    plan, times = self.plan, self.times
    return {
      "table": self.table,
      "num_microbatches": self.num_microbatches,
      "num_stages": self.num_stages,
      "window": self.window,
      "recompute": self.recompute,
      "extra_live": self.extra_live,
      "samples_per_s": self.samples_per_s,
      "delay": self.delay,
      "reason": self.reason,
      "cuts": plan and plan.cuts,
      "nodes": plan and plan.nodes,
      "bottleneck_s": plan and plan.bottleneck_s,
      "iteration_s": times and times.iteration_s,
      "memory_bytes": times and times.memory_bytes,
      "utilisation": times and times.utilisation,
    }


def stage_times(
  found: Plan, machines: cluster.Cluster
) -> list[schedule.StageTimes]:
  """Returns the seconds of a plan's stages, by which tables are made."""
  routes = _routes.Routes(machines)
  times = []
  for i, (cost, name) in enumerate(zip(found.stages, found.nodes, strict=True)):
    send = 0.0
    if i + 1 < found.num_stages:
      way = name, found.nodes[i + 1]
      send = cost.output_bytes * routes.byte_s(*way) + routes.latency_s(*way)
    speed = machines.node(name).speed
    times.append(
      schedule.StageTimes(
        cost.forward_s / speed, cost.backward_s / speed, send=send
      )
    )
  return times
