"""The search over cuts, machines, tables, micro-batches and windows at once."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jdist import checks, cluster
from jdist.pipeline import schedule
from jdist.pipeline.planning import (
  _bottleneck,
  _costs,
  _placement,
  _routes,
  _simulator,
)
from jdist.pipeline.planning._plan import Footprint, Plan, stage_bytes

# Of a device, in an interleaved table.
_CHUNKS = 2
# Micro-batches a stage, at most, where none are named.
_MOST_MICROBATCHES = 8
# Partitions of a table, each for the memory that the last one took.
_TURNS = 3
# What counts as equally fast, and what as beyond memory.
_EQUAL, _ROUNDING = 0.005, 1e-9


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A choice of everything, and what it comes to.

  Attributes:
    table: its name.
    num_microbatches: of the batch.
    num_stages: and machines.
    window: of `ours`, else None.
    recompute: whether stages keep their input only.
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
  plan: Plan | None = None
  made: schedule.Table | None = None
  times: _simulator.PipelineTimes | None = None
  samples_per_s: float = 0.0
  delay: int | None = None
  reason: str | None = None

  def row(self) -> dict[str, Any]:
    """Returns what a row of results has of it."""
    plan, times = self.plan, self.times
    return {
      "table": self.table,
      "num_microbatches": self.num_microbatches,
      "num_stages": self.num_stages,
      "window": self.window,
      "recompute": self.recompute,
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


def plan(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  batch_size: int,
  *,
  samples: int = 1,
  tables: Sequence[str] | None = None,
  num_microbatches: Sequence[int] | None = None,
  num_stages: Sequence[int] | None = None,
  windows: Sequence[int] | None = None,
  recompute: Sequence[bool] = (False, True),
  optimizer_copies: float = 1.0,
  input_bytes: float = 0.0,
) -> tuple[Candidate, list[Candidate]]:
  """Chooses partition, machines, table, micro-batches, window, recomputation.

  Each choice is cut for the least bottleneck under the memory that its table
  needs, and simulated.  The fastest is the best; among those equally fast the
  one with the least delay of the gradients, both passes of which read one
  version of the parameters, then that of the least memory.
  Those whose bottleneck alone makes them slower are not simulated.

  Args:
    costs: of each layer, for a micro-batch of `samples`; others take time and
      memory in proportion.
    machines: speeds, memory and links.
    batch_size: samples of an update, the same for all.
    samples: of the micro-batch that `costs` are of.
    tables: names of `TABLES`, or `"greedy"`; all if None.
    num_microbatches: which must divide the batch; if None all divisors up to
      eight times the machines.
    num_stages: as many as there are machines if None, and those that have a
      smaller bottleneck.
    windows: of `"ours"`; if None from 1 to the least that never waits.
    recompute: whether stages keep their input only: either, or both.
    optimizer_copies: what the optimizer keeps, in sizes of the parameters.
    input_bytes: of the model's input, for a micro-batch of `samples`.

  Returns:
    The best candidate, and all of them.

  Raises:
    ValueError: when micro-batches do not divide the batch, there are fewer
      layers than stages, or nothing fits into memory.
    ImportError: without SimPy.
  """
  checks.check_int("batch_size", batch_size, 1)
  checks.check_int("samples", samples, 1)
  known = (*schedule.TABLES, "greedy")
  tables = list(known if tables is None else tables)
  for name in tables:
    checks.check_choice("tables", name, known)
  if num_microbatches is None:
    most = _MOST_MICROBATCHES * len(machines.nodes)
    num_microbatches = [m for m in range(1, most + 1) if not batch_size % m]
  for number in num_microbatches:
    checks.check_int("num_microbatches", number, 1)
    if batch_size % number:
      raise ValueError(
        "`num_microbatches` must divide the batch, got "
        f"{number} for {batch_size} samples. Take "
        f"{math.gcd(number, batch_size)}, or a batch that is a multiple."
      )
  search = _Search(
    costs, machines, batch_size, samples, optimizer_copies, input_bytes
  )
  for again in recompute:
    for stages in search.stages(num_stages, again):
      for name in tables:
        for number in num_microbatches:
          search.add(name, number, stages, again, windows)
  return search.run()


@dataclasses.dataclass
class _Search:
  """The candidates, and what they have in common."""

  costs: Sequence[_costs.LayerCost]
  machines: cluster.Cluster
  batch_size: int
  samples: int
  optimizer_copies: float
  input_bytes: float

  def __post_init__(self) -> None:
    self._candidates: list[Candidate] = []
    # Of machines: for the least bottleneck, and under their memory.
    self._orders: dict[tuple[int, bool], list[tuple[str, ...]]] = {}
    self._error: ValueError | None = None

  def _scaled(self, number: int) -> tuple[list[_costs.LayerCost], float]:
    factor = self.batch_size / number / self.samples
    scaled = [x.scaled(factor) for x in self.costs]
    return scaled, factor * self.input_bytes

  def stages(
    self, wanted: Sequence[int] | None, recompute: bool
  ) -> Iterator[int]:
    """Goes through the numbers of stages, and finds machines for each."""
    most = len(self.machines.nodes)
    numbers = wanted or range(min(most, len(self.costs)), 0, -1)
    least = math.inf
    for number in numbers:
      found = self._place(number, recompute, self._changed(math.inf))
      self._orders[number, recompute] = [found.nodes]
      if len({x.memory_bytes for x in self.machines.nodes}) > 1:
        try:
          tight = self._place(number, recompute, self.machines)
          self._orders[number, recompute].append(tight.nodes)
        except ValueError as error:
          self._error = self._error or error
      # Micro-batches were as many as stages: of the same batch's seconds.
      batch_s = found.bottleneck_s * number
      if wanted or batch_s < least * (1 - _ROUNDING):
        least = batch_s
        yield number

  def _place(
    self, number: int, recompute: bool, machines: cluster.Cluster
  ) -> Plan:
    costs, input_bytes = self._scaled(number)
    # As 1F1B keeps them.
    in_flight = tuple(range(number, 0, -1))
    return _placement.place(
      costs,
      machines,
      num_stages=number,
      footprint=Footprint(
        self.optimizer_copies, 1, in_flight, recompute, input_bytes
      ),
      num_microbatches=number,
    )

  def _changed(self, memory: float, speed: float = 1.0) -> cluster.Cluster:
    """Returns the machines with so many times their memory and speed."""
    nodes = tuple(
      dataclasses.replace(
        x, speed=x.speed * speed, memory_bytes=x.memory_bytes * memory
      )
      for x in self.machines.nodes
    )
    return dataclasses.replace(self.machines, nodes=nodes)

  def add(
    self,
    table: str,
    number: int,
    stages: int,
    recompute: bool,
    windows: Sequence[int] | None,
  ) -> None:
    """Cuts the layers for a table, in each of its windows."""
    if table == "pipedream" and number > 1:
      return  # As published: an update after each.
    choice = Candidate(table, number, stages, None, recompute)
    try:
      if table != "ours":
        self._candidates.append(self._cut(choice))
        return
      if windows is None:
        free = self._partition(choice, Footprint(recompute=recompute))
        least = schedule.least_window(stage_times(free, self.machines), number)
        windows = range(1, least + 1)
      for window in windows:
        self._candidates.append(
          self._cut(dataclasses.replace(choice, window=window))
        )
    except ValueError as error:
      self._error = self._error or error
      self._candidates.append(dataclasses.replace(choice, reason=str(error)))

  def _cut(self, choice: Candidate) -> Candidate:
    """Finds cuts that fit into memory with what the table then keeps."""
    report = schedule.check_table(self._make(choice, None))
    for _ in range(_TURNS):
      footprint = Footprint(
        self.optimizer_copies, report.versions, report.live, choice.recompute
      )
      found = self._partition(choice, footprint)
      made = self._make(choice, found)
      report = schedule.check_table(made)
      left = self._left(found, report)
      if min(left) < 0 and choice.table in ("ours", "greedy"):
        # Fewer micro-batches in flight, as many as there is room for.
        made = self._make(choice, found, self._live(found, report))
        report = schedule.check_table(made)
        left = self._left(found, report)
      if min(left) >= 0:
        most = self.batch_size / found.bottleneck_s / choice.num_microbatches
        return dataclasses.replace(
          choice,
          plan=found,
          made=made,
          samples_per_s=most,
          delay=max(report.delays),
        )
    raise ValueError(
      f"No partition fits into memory with what table {choice.table} keeps of "
      "its stages."
    )

  def _partition(self, choice: Candidate, footprint: Footprint) -> Plan:
    costs, input_bytes = self._scaled(choice.num_microbatches)
    footprint = dataclasses.replace(footprint, input_bytes=input_bytes)
    options: dict[str, Any] = {
      "footprint": footprint,
      "num_microbatches": choice.num_microbatches,
    }
    # A machine has its part for each of its stages.
    chunks = _CHUNKS if choice.table == "interleaved" else 1
    machines = self._changed(1 / chunks, 1 / chunks)
    whole = _bottleneck.Chain(costs, self.machines, **options)
    plans = []
    for order in self._orders[choice.num_stages, choice.recompute]:
      nodes = order * chunks
      try:
        found = _bottleneck.partition(costs, machines, nodes=nodes, **options)
        plans.append(whole.plan(nodes, found.cuts))
      except ValueError as error:
        self._error = self._error or error
    if not plans:
      assert self._error is not None
      raise self._error
    return min(plans, key=lambda x: (x.bottleneck_s, x.trip_s))

  def _left(self, found: Plan, report: schedule.TableReport) -> list[float]:
    """Returns the bytes of the machine of each stage that nothing takes."""
    footprint = Footprint(self.optimizer_copies, report.versions, report.live)
    needs = stage_bytes(found.stages, footprint)
    taken: dict[str, float] = collections.defaultdict(float)
    for node, need in zip(found.nodes, needs, strict=True):
      taken[node] += need
    limits = {x.name: x.memory_bytes for x in self.machines.nodes}
    return [
      limits[x] * (1 + _ROUNDING) - taken[x] if taken[x] else 0.0
      for x in found.nodes
    ]

  def _live(self, found: Plan, report: schedule.TableReport) -> list[int]:
    """Returns how many micro-batches of those kept each stage has room for."""
    fewer = [
      live if left >= 0 else live - math.ceil(-left / stage.saved_bytes)
      for live, left, stage in zip(
        report.live, self._left(found, report), found.stages, strict=True
      )
      if stage.saved_bytes or left >= 0
    ]
    if len(fewer) < found.num_stages:
      return list(report.live)
    return [max(1, x) for x in fewer]

  def _make(
    self,
    choice: Candidate,
    found: Plan | None,
    max_live: Sequence[int] | None = None,
  ) -> schedule.Table:
    """Makes the table, of equal stages before there is a plan."""
    name, number = choice.table, choice.num_microbatches
    if name in ("greedy", "ours"):
      times = [schedule.StageTimes()] * choice.num_stages
      if found is not None:
        times = stage_times(found, self.machines)
      if name == "greedy":
        return schedule.greedy(times, number, max_live=max_live)
      assert choice.window is not None
      return schedule.ours(
        times,
        number,
        window=choice.window,
        # Enough to be full, and as many again.
        num_iterations=2 * choice.window + 4,
        max_live=max_live,
      )
    options = {}
    if schedule.TABLES[name].asynchronous:
      ahead = 1 + math.ceil(choice.num_stages / number)
      options["num_iterations"] = 2 * ahead + 4
    return schedule.make_table(name, choice.num_stages, number, **options)

  def run(self) -> tuple[Candidate, list[Candidate]]:
    """Simulates those that may be the best, the most promising first."""
    done: list[Candidate] = []
    best = 0.0
    for choice in sorted(self._candidates, key=lambda x: -x.samples_per_s):
      slower = choice.samples_per_s < best * (1 - _EQUAL)
      if choice.made is None or choice.plan is None:
        done.append(choice)
        continue
      if slower:
        done.append(
          dataclasses.replace(choice, made=None, reason="a slower bottleneck")
        )
        continue
      times = _simulator.simulate(
        choice.made,
        choice.plan.stages,
        self.machines,
        nodes=choice.plan.nodes[: len(choice.made.devices)],
        optimizer_copies=self.optimizer_copies,
      )
      rate = self.batch_size / times.iteration_s
      best = max(best, rate)
      done.append(dataclasses.replace(choice, times=times, samples_per_s=rate))
    simulated = [x for x in done if x.times is not None]
    if not simulated:
      assert self._error is not None
      raise self._error

    def rank(choice: Candidate) -> tuple[float, ...]:
      assert choice.times is not None and choice.made is not None
      assert choice.delay is not None
      mixed = choice.delay > 0 and choice.made.weights == "newest"
      memory = max(choice.times.memory_bytes)
      return choice.delay, mixed, memory, -choice.samples_per_s

    fast = [x for x in simulated if x.samples_per_s >= best * (1 - _EQUAL)]
    first = min(fast, key=rank)
    others = sorted(
      (x for x in done if x is not first),
      key=lambda x: (x.times is None, -x.samples_per_s),
    )
    return first, [first, *others]


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
