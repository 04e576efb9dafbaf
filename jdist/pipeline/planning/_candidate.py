"""Choices of a plan, a table and micro-batches, with their results."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jdist import cluster, signatures
from jdist.pipeline.planning import _routes, _simulator
from jdist.pipeline.planning._plan import Plan
from jdist.pipeline.schedule import _asynchronous_tables, _table_registry
from jdist.pipeline.schedule._list_schedule import (
  greedy,
  live_for_full_use,
  live_to_fill,
  StageTimes,
)
from jdist.pipeline.schedule._table import Table

# The micro-batches per stage over which a full pipeline is measured.
_FULL = 12
# The forward passes over which it is measured at most, beyond 2 iterations.
_MOST_PASSES = 4_000
# Tables that are made from the times of stages, so that they depend on cuts.
LISTED: dict[str, Callable[..., Table]] = {
  "greedy": greedy,
  "ours": _asynchronous_tables.ours,
  "zb_h2": _asynchronous_tables.zb_h2,
  "zb_v": _asynchronous_tables.zb_v,
}
ZERO_BUBBLE = ("zb_h2", "zb_v")
# The stages of a device, where it has several.
CHUNKS = {"interleaved": 2, "zb_v": 2}


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A choice of everything, and its result.

  Attributes:
    table: The name of the table.
    num_microbatches: The number of micro-batches of the batch.
    num_stages: The number of stages, and of machines.
    window: The window of `ours`; 1 for other tables that are
      made from times, else None.
    recompute: Whether stages keep their input only.
    extra_live: How many more micro-batches a stage of a table that is made from
      times may keep than by default; negative if memory is short.
    send_factor: How much longer a message is assumed to take than one that is
      alone on its links, when the table is made.
    plan: The cuts and machines; None if none fits.
    made: The table; None if the candidate was not simulated.
    times: The times of the simulation.
    samples_per_s: The throughput; an upper bound if not simulated.
    delay: By how many updates gradients are late at most.
    reason: The reason for which it was not simulated.
  """

  table: str
  num_microbatches: int
  num_stages: int
  window: int | None
  recompute: bool
  extra_live: int = 0
  send_factor: float = 1.0
  plan: Plan | None = None
  made: Table | None = None
  times: _simulator.PipelineTimes | None = None
  samples_per_s: float = 0.0
  delay: int | None = None
  reason: str | None = None

  @property
  def nodes(self) -> tuple[str, ...]:
    """The machine of each device of the table."""
    return () if self.plan is None else self.plan.nodes[: self.num_stages]

  def price(self) -> tuple[float, ...]:
    """Returns the order among equally fast ones: delay, versions, memory."""
    assert self.times is not None and self.made is not None
    assert self.delay is not None
    # PACI's passes may read different versions, a second source of error.
    mixed = self.delay > 0 and self.made.weights == "newest"
    memory = max(self.times.memory_bytes)
    return self.delay, mixed, memory, -self.samples_per_s

  def row(self) -> dict[str, Any]:
    """Returns the candidate as a row of results."""
    # Whole plans, tables and traces would be too large for a line of JSON.
    large = ("plan", "made", "times")
    names = [x.name for x in dataclasses.fields(self) if x.name not in large]
    row = {name: getattr(self, name) for name in names}
    for part, fields in (
      (self.plan, ("cuts", "nodes", "bottleneck_s")),
      (self.times, ("iteration_s", "memory_bytes", "utilisation")),
    ):
      row |= {name: part and getattr(part, name) for name in fields}
    return row


@signatures.checked
def stage_times(
  found: Plan,
  machines: cluster.Cluster,
  send_factor: float = 1.0,
  *,
  split: bool = False,
) -> list[StageTimes]:
  """Returns the seconds of a plan's stages, from which tables are made.

  Args:
    found: The plan.
    machines: The machines that it names.
    send_factor: How much longer a message takes than one that is alone on its
      links.
    split: Whether the backward pass is split, so that its two parts have times
      of their own.
  """
  routes = _routes.Routes(machines)
  times = []
  for i, (cost, name) in enumerate(zip(found.stages, found.nodes, strict=True)):
    # The last stage sends nothing.
    send = 0.0
    if i + 1 < found.num_stages:
      way = name, found.nodes[i + 1]
      send = cost.sent_bytes * routes.byte_s(*way) + routes.latency_s(*way)
    speed = machines.node(name).speed
    assert cost.weight_s is not None
    backward = cost.input_s if split else cost.backward_s
    times.append(
      StageTimes(
        cost.forward_s / speed,
        backward / speed,
        cost.weight_s / speed,
        send * send_factor,
      )
    )
  return times


def most_live(choice: Candidate, times: Sequence[StageTimes]) -> list[int]:
  """Returns how many micro-batches each stage may keep by default."""
  default = live_to_fill if choice.table in ZERO_BUBBLE else live_for_full_use
  most = choice.num_microbatches * (choice.window or 1)
  return [min(x, most) for x in default(times)]


def make_table_of(
  choice: Candidate, found: Plan | None, machines: cluster.Cluster
) -> Table:
  """Makes a table; without a plan a short one to count what stages keep."""
  name, number = choice.table, choice.num_microbatches
  options: dict[str, Any] = {}
  if name != "greedy" and _table_registry.TABLES[name].asynchronous:
    # An upper bound of the windows of all asynchronous tables.
    window = choice.window or 1 + math.ceil(choice.num_stages / number)
    full = math.ceil(_FULL * choice.num_stages / number)
    most = _MOST_PASSES // (choice.num_stages * number)
    full = max(min(full, most), min(4, 2 + most))
    # `simulate` leaves out the first half and the last `window` iterations.
    iterations = window + 1 if found is None else 2 * window + full
    options["num_iterations"] = iterations
  if name not in LISTED:
    return _table_registry.make_table(
      name, choice.num_stages, number, **options
    )
  times = times_of(choice, found, machines)
  live, extra = most_live(choice, times), choice.extra_live
  options["max_live"] = [max(1, x + extra) for x in live]
  if name in ZERO_BUBBLE:
    saved = choice.num_stages if name == "zb_v" else max(live)
    options["max_saved"] = max(1, saved + extra)
  elif name == "ours":
    options["window"] = choice.window or 1
  return LISTED[name](times, number, **options)


def times_of(
  choice: Candidate, found: Plan | None, machines: cluster.Cluster
) -> list[StageTimes]:
  """Returns the times of a candidate's stages, equal ones without a plan."""
  if found is None:
    return [StageTimes()] * (choice.num_stages * CHUNKS.get(choice.table, 1))
  split = choice.table in ZERO_BUBBLE
  return stage_times(found, machines, choice.send_factor, split=split)
