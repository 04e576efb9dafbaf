"""Choices of a plan, a table and micro-batches, and what each of them takes."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jdist import cluster, signatures
from jdist.pipeline.planning import _bottleneck, _costs, _placement, _simulator
from jdist.pipeline.planning._placement import Layout
from jdist.pipeline.planning._plan import Footprint, Plan
from jdist.pipeline.schedule import _asynchronous_tables, _checker
from jdist.pipeline.schedule._list_schedule import (
  greedy,
  live_for_full_use,
  live_to_fill,
  StageTimes,
)
from jdist.pipeline.schedule._table import Table
from jdist.pipeline.schedule._table_registry import make_table, TABLES

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
# The orders of machines that are tried for so many stages in all.
_ORDERS = 4_800
# A table is partitioned again so often, for the memory that it then needs.
_TURNS = 3
# Up to so many live micro-batches, if memory is short, are tried one by one;
# beyond that every second or third one is.
LIVE = 32
# Relative differences of throughput that count as none, and of memory.
EQUAL, ROUNDING = 0.005, 1e-9


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

  def stage_nodes(self, order: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the machine of each stage from that of each device."""
    # A V returns to the first machine, other tables start there again.
    if self.table == "zb_v":
      return order + order[::-1]
    return order * CHUNKS.get(self.table, 1)

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
  routes = _bottleneck.Routes(machines)
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
  if name != "greedy" and TABLES[name].asynchronous:
    # An upper bound of the windows of all asynchronous tables.
    window = choice.window or 1 + math.ceil(choice.num_stages / number)
    full = math.ceil(_FULL * choice.num_stages / number)
    most = _MOST_PASSES // (choice.num_stages * number)
    full = max(min(full, most), min(4, 2 + most))
    # `simulate` leaves out the first half and the last `window` iterations.
    iterations = window + 1 if found is None else 2 * window + full
    options["num_iterations"] = iterations
  if name not in LISTED:
    return make_table(name, choice.num_stages, number, **options)
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


@dataclasses.dataclass
class PlanProblem:
  """The arguments of a plan, and what one choice of it takes.

  Attributes:
    max_delay: By how many updates gradients may be late; infinite for any.
    wanted: The numbers of stages that are allowed; None for any.
  """

  costs: Sequence[_costs.LayerCost]
  machines: cluster.Cluster
  batch_size: int
  samples: int
  optimizer_copies: float
  input_bytes: float
  max_delay: float
  wanted: Sequence[int] | None

  def __post_init__(self) -> None:
    self.chain = functools.cache(self._make_chain)
    # Orders of machines: for the least bottleneck, and within their memory.
    self._orders: dict[tuple[int, bool], list[tuple[str, ...]]] = {}
    self.free = all(math.isinf(x.memory_bytes) for x in self.machines.nodes)

  def busy_s(self, num_stages: int, recompute: bool) -> float:
    """Returns the seconds of a batch on the fastest machines without a wait."""
    speeds = sorted((x.speed for x in self.machines.nodes), reverse=True)
    work = self.chain(1, recompute).work[-1]
    return float(work) / sum(speeds[:num_stages])

  def place_s(self, number: int, recompute: bool) -> float:
    """Finds machines for stages, and returns a batch's least bottleneck."""
    costs, input_bytes = self._scaled(number)
    in_flight = tuple(range(number, 0, -1))  # The number that 1F1B keeps.
    footprint = Footprint(
      self.optimizer_copies, 1, in_flight, recompute, input_bytes
    )
    place = functools.partial(
      _placement.place, costs, num_stages=number, footprint=footprint,
      num_microbatches=number, evaluations=min(300, _ORDERS // number),
    )  # fmt: skip
    found = place(self._changed(math.inf))
    self._orders[number, recompute] = [found.nodes]
    if len({x.memory_bytes for x in self.machines.nodes}) > 1:
      # If no order fits here, fewer micro-batches in flight still may.
      with contextlib.suppress(ValueError):
        self._orders[number, recompute].append(place(self.machines).nodes)
    # It is placed with as many micro-batches as stages.
    return found.bottleneck_s * number

  def _changed(self, memory: float, speed: float = 1.0) -> cluster.Cluster:
    """Returns the machines with memory and speed multiplied."""
    nodes = tuple(
      dataclasses.replace(
        x, speed=x.speed * speed, memory_bytes=x.memory_bytes * memory
      )
      for x in self.machines.nodes
    )
    return dataclasses.replace(self.machines, nodes=nodes)

  def _scaled(self, number: int) -> tuple[list[_costs.LayerCost], float]:
    factor = self.batch_size / number / self.samples
    scaled = [x.scaled(factor) for x in self.costs]
    return scaled, factor * self.input_bytes

  def _make_chain(self, number: int, recompute: bool) -> _bottleneck.Chain:
    costs, input_bytes = self._scaled(number)
    footprint = Footprint(
      self.optimizer_copies, recompute=recompute, input_bytes=input_bytes
    )
    return _bottleneck.Chain(costs, self.machines, footprint, number)

  def partition(self, choice: Candidate, footprint: Footprint) -> Plan:
    """Cuts the layers for the best of the orders of machines found so far."""
    costs, input_bytes = self._scaled(choice.num_microbatches)
    footprint = dataclasses.replace(footprint, input_bytes=input_bytes)
    options: dict[str, Any] = {
      "footprint": footprint, "num_microbatches": choice.num_microbatches
    }  # fmt: skip
    # Each stage of a machine gets its part of the machine.
    chunks = CHUNKS.get(choice.table, 1)
    machines = self._changed(1 / chunks, 1 / chunks)
    whole = _bottleneck.Chain(costs, self.machines, **options)
    plans, errors = [], []
    orders = self._orders[choice.num_stages, choice.recompute]
    for order in orders:
      nodes = choice.stage_nodes(order)
      try:
        found = _bottleneck.partition(costs, machines, nodes=nodes, **options)
        plans.append(whole.plan(nodes, found.cuts))
      except ValueError as error:
        errors.append(error)
    if not plans and chunks == 1:
      # The orders are for as many micro-batches as stages; for this number, and
      # for what this table keeps, another order may fit.
      placed = _placement.place(
        costs, machines, num_stages=choice.num_stages, **options
      )
      orders.append(placed.nodes)
      return placed
    if not plans:
      raise errors[0]
    return min(plans, key=lambda x: (x.bottleneck_s, x.trip_s))

  def cut(self, choice: Candidate) -> Candidate:
    """Finds cuts for which the table that they lead to fits into memory."""
    _, report, _ = self._made(choice, None)
    # The table depends on the cuts by its stages' times, and the cuts on the
    # table by its memory; a few turns usually agree.
    for _ in range(_TURNS):
      footprint = Footprint(
        self.optimizer_copies, report.versions, report.live, choice.recompute
      )
      found = self.partition(choice, footprint)
      cut, report, fits = self._made(choice, found)
      if fits:
        return cut
    raise ValueError(
      f"No partition fits into memory with what table {choice.table} keeps of "
      "its stages."
    )

  def _made(
    self, choice: Candidate, found: Plan | None
  ) -> tuple[Candidate, _checker.TableReport, bool]:
    """Makes a table that is not too late, and finds whether it fits."""
    if choice.table == "paci" and not choice.recompute:
      # Its passes may read different parameters: what one saves is useless.
      raise ValueError("Table paci recomputes each stage in its backward pass.")
    made = make_table_of(choice, found, self.machines)
    if made.window - 1 > self.max_delay:
      raise ValueError(
        f"Gradients of table {choice.table} are late by {made.window - 1} "
        f"updates, more than `max_delay` {self.max_delay:.0f}."
      )
    report = _checker.table_needs(made)
    if found is None:
      return choice, report, False
    needs = _simulator.device_bytes(
      made, found.stages, report, self.optimizer_copies
    )
    choice = dataclasses.replace(
      choice, plan=found, made=made, delay=max(report.delays),
      samples_per_s=self.batch_size / self.least_s(choice, found),
    )  # fmt: skip
    return choice, report, self._fits(found, needs)

  def _fits(self, found: Plan, needs: Sequence[float]) -> bool:
    """Returns whether each machine holds so many bytes."""
    return all(
      need <= self.machines.node(name).memory_bytes * (1 + ROUNDING)
      for name, need in zip(found.nodes, needs, strict=False)
    )

  def least_s(self, choice: Candidate, found: Plan) -> float:
    """Returns seconds of a batch that no table of a plan takes less than.

    With a window of 1 the first stage waits for its own update: each device has
    all passes after the way of an input to it, before that of a gradient back.
    """
    number, entry = choice.num_microbatches, TABLES.get(choice.table)
    least_s = number * found.bottleneck_s
    # Tables that are made from times have windows of their own.
    if entry is not None and entry.asynchronous and choice.window != 1:
      return least_s
    split = choice.table[:2] == "zb"  # A zero bubble splits backward passes.
    times = stage_times(found, self.machines, split=split)
    trip_s, whole_s = 0.0, dict[str, float]()
    for time, node in zip(times, found.nodes, strict=True):
      pass_s = time.forward + time.backward
      whole_s[node] = whole_s.get(node, trip_s) + number * pass_s
      trip_s += pass_s + 2 * time.send
    return max(least_s, *whole_s.values())

  def simulated(self, choice: Candidate) -> Candidate:
    assert choice.made is not None and choice.plan is not None
    times = _simulator.run_table(
      choice.made, choice.plan.stages, self.machines, choice.nodes,
      self.optimizer_copies,
    )  # fmt: skip
    rate = self.batch_size / times.iteration_s
    # No table is faster than its bound; a higher rate only says that the
    # measured iterations were not the same part of the run.
    rate = min(rate, choice.samples_per_s)
    return dataclasses.replace(choice, times=times, samples_per_s=rate)

  def grown(
    self, choice: Candidate, rate: float = 0.0, worth: float = 0.0
  ) -> Iterator[Candidate]:
    """Yields a choice of given cuts while it may be faster than a rate.

    A table that is made from times keeps fewer micro-batches if memory is
    short, and more of them while that helps and its rate is at least `worth`.
    """
    found, before = choice.plan, 0.0
    assert found is not None
    most = self.batch_size / self.least_s(choice, found)
    # One more weight part that waits gains little; one a stage fills a bubble.
    step = choice.num_stages if choice.table in ZERO_BUBBLE else 1
    listed = choice.table in LISTED
    while most > rate * (1 + ROUNDING):
      extra, fits = choice.extra_live, True
      if choice.made is None:
        try:
          choice, report, fits = self._made(choice, found)
        except ValueError:  # Another number of stages has no such table.
          return
      if fits:
        yield (done := self.simulated(choice))
        now = done.samples_per_s
        enough = now >= most * (1 - EQUAL) or now <= before * (1 + EQUAL)
        if enough or extra < 0 or not listed or now < worth:
          return
        before, rate, extra = now, max(rate, now), 2 * extra or step
      elif before or not listed or max(report.live) == 1:
        return
      else:
        extra -= 1 + max(report.live) // LIVE
      choice = dataclasses.replace(choice, extra_live=extra, made=None)

  def evaluated(
    self, choice: Candidate, layout: Layout, rate: float
  ) -> Candidate | None:
    """Simulates a choice with other cuts and machines, if it may be faster."""
    order, cuts = layout
    if self.wanted and len(order) not in self.wanted:
      return None
    chain = self.chain(choice.num_microbatches, choice.recompute)
    found = chain.plan(choice.stage_nodes(order), cuts)
    # No table keeps less than one micro-batch, for which this plan is.
    if not self._fits(found, found.memory_bytes):
      return None
    # Another layout may have room for more micro-batches, or for fewer.
    choice = dataclasses.replace(
      choice, num_stages=len(order), extra_live=max(choice.extra_live, 0),
      plan=found, made=None,
    )  # fmt: skip
    grown = (x for x in self.grown(choice, rate) if x.samples_per_s > rate)
    return max(grown, key=lambda x: x.samples_per_s, default=None)
