"""The joint search over cuts, machines, tables, micro-batches and windows."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import _bottleneck, _costs, _placement, _simulator
from jdist.pipeline.planning._candidate import (
  Candidate,
  CHUNKS,
  LISTED,
  make_table_of,
  stage_times,
  ZERO_BUBBLE,
)
from jdist.pipeline.planning._layouts import (
  few_layouts,
  Layout,
  near_layouts,
)
from jdist.pipeline.planning._plan import Footprint, Plan
from jdist.pipeline.schedule._asynchronous_tables import least_window
from jdist.pipeline.schedule._checker import check_table, TableReport
from jdist.pipeline.schedule._table import Table
from jdist.pipeline.schedule._table_registry import TABLES

# The most micro-batches per machine that are tried by default.
_MOST_MICROBATCHES = 8
# How often a table is partitioned again for the memory that it then needs.
_TURNS = 3
# How much longer messages may take than one that is alone on its links.
_SEND_FACTORS = (1.5, 2.0, 3.0, 4.0)
# The table that updates after each micro-batch, as published.
_EACH = "pipedream"
# How many tables, with recomputation or without, are searched again by their
# simulated times, and how much slower than the best one they may be before.
_REFINED, _SLOWER = 6, 0.75
# The actions of all simulated tables together that a local search may take.
_MOST_ACTIONS = 60_000
# With more machines only numbers of stages with a smaller bottleneck are tried.
_FEW = 8
# Relative differences of throughput that count as none, and of memory.
_EQUAL, _ROUNDING = 0.005, 1e-9


@signatures.checked
def plan(
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  batch_size: signatures.PositiveInt,
  *,
  samples: signatures.PositiveInt = 1,
  tables: Sequence[str] | None = None,
  num_microbatches: Sequence[signatures.PositiveInt] | None = None,
  num_stages: Sequence[signatures.PositiveInt] | None = None,
  windows: Sequence[int] | None = None,
  recompute: Sequence[bool] = (False, True),
  max_delay: signatures.NonNegativeInt | None = 0,
  optimizer_copies: float = 1.0,
  input_bytes: float = 0.0,
) -> tuple[Candidate, list[Candidate]]:
  """Chooses partition, machines, table, micro-batches, window, recomputation.

  Each choice is cut for the least bottleneck within the memory that its table
  needs, and then simulated, unless its bottleneck alone makes it slower than
  another one.  The fastest tables are then searched again by their simulated
  times: small problems over all cuts, orders of machines and choices, others by
  steps.  Among equally fast choices the best one has the least delay of
  gradients, then both passes on one version of the parameters, then the least
  memory.  Times are those of `simulate`: of processes, not of one program.

  Args:
    costs: The cost of each layer for a micro-batch of `samples`; time and
      memory of other sizes are taken in proportion.
    machines: The cluster's speeds, memory and links.
    batch_size: The number of samples of an update, the same for all choices.
    samples: The number of samples to which `costs` refer.
    tables: Names of `TABLES`, or `"greedy"`; all by default.
    num_microbatches: Numbers of micro-batches, which must divide the batch; by
      default all divisors up to eight times the number of machines.
    num_stages: Numbers of stages; by default the number of machines, and
      smaller ones that have a smaller bottleneck.
    windows: Windows of `"ours"`; by default from 1 to the least that never
      waits, and wider ones if messages wait for each other.
    recompute: Whether stages keep their input only: one value or both.
    max_delay: By how many updates gradients may be late.  The default leaves
      out all tables whose gradients are late, because these cost accuracy; None
      allows any delay.
    optimizer_copies: The optimizer's state in sizes of the parameters.
    input_bytes: The bytes of the model's input for a micro-batch of `samples`.

  Returns:
    The best candidate, and all candidates.

  Raises:
    ValueError: If micro-batches do not divide the batch, there are fewer layers
      than stages, or nothing fits into memory.
    ImportError: If SimPy is missing.
  """
  known = (*TABLES, "greedy")
  tables = list(known if tables is None else tables)
  for name in tables:
    checks.check_choice("tables", name, known)
  if num_microbatches is None:
    most = _MOST_MICROBATCHES * len(machines.nodes)
    num_microbatches = [m for m in range(1, most + 1) if not batch_size % m]
  for number in num_microbatches:
    if batch_size % number:
      raise ValueError(
        "`num_microbatches` must divide the batch, got "
        f"{number} for {batch_size} samples. Take "
        f"{math.gcd(number, batch_size)}, or a batch that is a multiple."
      )
  for field, values in (
    ("tables", tables), ("num_microbatches", num_microbatches),
    ("recompute", recompute),
  ):  # fmt: skip
    if not values:
      raise ValueError(f"`{field}` must be one at least, got {values!r}.")
  if set(tables) == {_EACH} and 1 not in num_microbatches:
    raise ValueError(
      f"`num_microbatches` must have 1 for {_EACH} alone, which updates after "
      f"each micro-batch, got {list(num_microbatches)}."
    )
  if not any(x.compute_s + x.update_s for x in costs):
    raise ValueError("`costs` must take time, got layers that take none.")
  search = _Search(
    costs, machines, batch_size, samples, optimizer_copies, input_bytes,
    windows is None, math.inf if max_delay is None else max_delay,
    num_stages,
  )  # fmt: skip
  for again in recompute:
    for stages in search.stages(again):
      for name in tables:
        for number in num_microbatches:
          search.add(Candidate(name, number, stages, None, again), windows)
  return search.run()


@dataclasses.dataclass
class _Search:
  """The candidates, and the arguments that they have in common."""

  costs: Sequence[_costs.LayerCost]
  machines: cluster.Cluster
  batch_size: int
  samples: int
  optimizer_copies: float
  input_bytes: float
  # Whether windows are chosen by the search.
  widens: bool
  max_delay: float
  # The numbers of stages that are allowed; None for any.
  wanted: Sequence[int] | None

  def __post_init__(self) -> None:
    self._candidates: list[Candidate] = []
    # Tables, micro-batches, windows and recomputation, without a layout.
    self._choices: dict[Candidate, None] = {}
    self._chain = functools.cache(self._make_chain)
    # Orders of machines: for the least bottleneck, and within their memory.
    self._orders: dict[tuple[int, bool], list[tuple[str, ...]]] = {}

  def _scaled(self, number: int) -> tuple[list[_costs.LayerCost], float]:
    factor = self.batch_size / number / self.samples
    scaled = [x.scaled(factor) for x in self.costs]
    return scaled, factor * self.input_bytes

  def stages(self, recompute: bool) -> Iterator[int]:
    """Yields numbers of stages, after finding machines for each."""
    most = len(self.machines.nodes)
    numbers = self.wanted or range(min(most, len(self.costs)), 0, -1)
    least = math.inf
    for number in numbers:
      found = self._place(number, recompute, self._changed(math.inf))
      self._orders[number, recompute] = [found.nodes]
      if len({x.memory_bytes for x in self.machines.nodes}) > 1:
        # If no order fits here, fewer micro-batches in flight still may.
        with contextlib.suppress(ValueError):
          tight = self._place(number, recompute, self.machines)
          self._orders[number, recompute].append(tight.nodes)
      # Each number was placed with as many micro-batches as stages, so this
      # makes the seconds of one batch of them.
      batch_s = found.bottleneck_s * number
      less = batch_s < least * (1 - _ROUNDING)
      least = min(least, batch_s)
      # A pipeline that fills and empties may be faster with fewer stages, even
      # if its bottleneck is not.
      if self.wanted or less or most <= _FEW:
        yield number

  def _place(
    self, number: int, recompute: bool, machines: cluster.Cluster
  ) -> Plan:
    costs, input_bytes = self._scaled(number)
    # The number that 1F1B keeps.
    in_flight = tuple(range(number, 0, -1))
    footprint = Footprint(
      self.optimizer_copies, 1, in_flight, recompute, input_bytes
    )
    return _placement.place(
      costs, machines, num_stages=number, footprint=footprint,
      num_microbatches=number,
    )  # fmt: skip

  def _changed(self, memory: float, speed: float = 1.0) -> cluster.Cluster:
    """Returns the machines with memory and speed multiplied."""
    nodes = tuple(
      dataclasses.replace(
        x, speed=x.speed * speed, memory_bytes=x.memory_bytes * memory
      )
      for x in self.machines.nodes
    )
    return dataclasses.replace(self.machines, nodes=nodes)

  def add(self, choice: Candidate, windows: Sequence[int] | None) -> None:
    """Adds the candidates of a table, one for each of its windows."""
    if choice.table == "paci" and not choice.recompute:
      # Its passes may read different parameters, so what one saves is useless.
      reason = "Table paci runs every stage again in its backward passes."
      self._candidates.append(dataclasses.replace(choice, reason=reason))
    elif choice.table in LISTED:
      self._add_capped(choice, windows)
    elif choice.table != _EACH or choice.num_microbatches == 1:
      self._append(choice)

  def _append(self, choice: Candidate) -> float:
    """Adds a candidate and returns its bottleneck."""
    free = dataclasses.replace(choice, num_stages=1, extra_live=0)
    self._choices[free] = None
    try:
      choice = self._cut(choice)
    except ValueError as error:
      choice = dataclasses.replace(choice, reason=str(error))
    self._candidates.append(choice)
    return math.inf if choice.plan is None else choice.plan.bottleneck_s

  def _add_capped(
    self, choice: Candidate, windows: Sequence[int] | None
  ) -> None:
    """Adds each window, with fewer micro-batches if memory is short."""
    free = Footprint(0, 1, 1, choice.recompute)
    try:
      found = self._partition(choice, free)
      if choice.table != "ours":
        windows = [1]
      elif windows is None:
        times = stage_times(found, self.machines)
        least = least_window(times, choice.num_microbatches)
        windows = range(1, 1 + int(min(least, self.max_delay + 1)))
      each = [dataclasses.replace(choice, window=x) for x in windows]
      made = [make_table_of(x, found, self.machines) for x in each]
    except ValueError:  # It is refused for the same reason again.
      self._append(dataclasses.replace(choice, window=1))
      return
    for choice, table in zip(each, made, strict=True):
      most = max(check_table(table).live)
      # Fewer live micro-batches need less memory and allow better cuts, until
      # the cuts are those without any limit.
      for extra in range(0, -most, -1):
        bottleneck = self._append(dataclasses.replace(choice, extra_live=extra))
        if bottleneck <= found.bottleneck_s * (1 + _ROUNDING):
          break

  def _cut(self, choice: Candidate) -> Candidate:
    """Finds cuts for which the table that they lead to fits into memory."""
    _, report, _ = self._made(choice, None)
    # The table depends on the cuts by its stages' times, and the cuts on the
    # table by its memory; a few turns usually agree.
    for _ in range(_TURNS):
      footprint = Footprint(
        self.optimizer_copies, report.versions, report.live, choice.recompute
      )
      found = self._partition(choice, footprint)
      made, report, fits = self._made(choice, found)
      if fits:
        most = self.batch_size / found.bottleneck_s / choice.num_microbatches
        return dataclasses.replace(
          choice, plan=found, made=made, samples_per_s=most,
          delay=max(report.delays),
        )  # fmt: skip
    raise ValueError(
      f"No partition fits into memory with what table {choice.table} keeps of "
      "its stages."
    )

  def _made(
    self, choice: Candidate, found: Plan | None
  ) -> tuple[Table, TableReport, bool]:
    """Makes a table that is not too late, and finds whether it fits."""
    made = make_table_of(choice, found, self.machines)
    report = check_table(made)
    if max(report.delays) > self.max_delay:
      raise ValueError(
        f"Gradients of table {choice.table} are late by {max(report.delays)} "
        f"updates, more than `max_delay` {self.max_delay:.0f}."
      )
    if found is None:
      return made, report, False
    needs = _simulator.device_bytes(
      made, found.stages, report, self.optimizer_copies
    )
    return made, report, self._fits(found, needs)

  def _partition(self, choice: Candidate, footprint: Footprint) -> Plan:
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
    for order in self._orders[choice.num_stages, choice.recompute]:
      nodes = _stage_nodes(choice, order)
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
      self._orders[choice.num_stages, choice.recompute].append(placed.nodes)
      return placed
    if not plans:
      raise errors[0]
    return min(plans, key=lambda x: (x.bottleneck_s, x.trip_s))

  def _fits(self, found: Plan, needs: Sequence[float]) -> bool:
    """Returns whether each machine holds so many bytes."""
    return all(
      need <= self.machines.node(name).memory_bytes * (1 + _ROUNDING)
      for name, need in zip(found.nodes, needs, strict=False)
    )

  def _simulated(self, choice: Candidate) -> Candidate:
    assert choice.made is not None and choice.plan is not None
    times = _simulator.simulate(
      choice.made, choice.plan.stages, self.machines, nodes=choice.nodes,
      optimizer_copies=self.optimizer_copies,
    )  # fmt: skip
    rate = self.batch_size / times.iteration_s
    # No table is faster than its bottleneck; a higher rate only says that the
    # measured iterations were not the same part of the run.
    rate = min(rate, choice.samples_per_s)
    return dataclasses.replace(choice, times=times, samples_per_s=rate)

  def _grown(self, choice: Candidate, rate: float = 0.0) -> Iterator[Candidate]:
    """Yields a choice of given cuts while it may be faster than a rate.

    A table that is made from times keeps fewer micro-batches if memory is
    short, and more of them while that helps.
    """
    found, before = choice.plan, 0.0
    assert found is not None
    most = self.batch_size / found.bottleneck_s / choice.num_microbatches
    # One more weight part that waits gains little; one a stage fills a bubble.
    step = choice.num_stages if choice.table in ZERO_BUBBLE else 1
    listed = choice.table in LISTED
    while most > rate * (1 + _ROUNDING):
      extra = choice.extra_live
      try:
        made, report, fits = self._made(choice, found)
      except ValueError:  # Another number of stages has no such table.
        return
      if fits:
        choice = dataclasses.replace(
          choice, made=made, delay=max(report.delays), samples_per_s=most
        )
        yield (done := self._simulated(choice))
        now = done.samples_per_s
        enough = now >= most * (1 - _EQUAL) or now <= before * (1 + _EQUAL)
        if enough or extra < 0 or not listed:
          return
        before, rate, extra = now, max(rate, now), 2 * extra or step
      elif before or not listed or max(report.live) == 1:
        return
      else:
        extra -= 1
      choice = dataclasses.replace(choice, extra_live=extra)

  def _slower_sends(self, done: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yields the best tables again, made for slower messages.

    Messages that wait for each other on a link take longer than the first table
    assumes, so more micro-batches and iterations must be in progress.
    """
    firsts = {
      x.table: x
      for x in _by_rate(done)
      if x.table in LISTED and x.table != "greedy"
    }
    for best in firsts.values():
      assert best.plan is not None
      most = self.batch_size / best.plan.bottleneck_s / best.num_microbatches
      full = best.samples_per_s >= most * (1 - _EQUAL)
      for factor in () if full else _SEND_FACTORS:
        window = best.window
        if self.widens and best.table == "ours":
          times = stage_times(best.plan, self.machines, factor)
          least = least_window(times, best.num_microbatches)
          window = int(min(least, self.max_delay + 1))
        choice = dataclasses.replace(
          best, window=window, extra_live=0, send_factor=factor
        )
        try:
          yield self._simulated(self._cut(choice))
        except ValueError:  # It does not fit into memory any more.
          break

  def _refined(self, done: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yields faster choices, of all layouts if few, else of near ones."""
    found = _by_rate(done)
    rate = found[-1].samples_per_s if found else 0.0
    names, layers = self.machines.names, len(self.costs)
    few = {x: few_layouts(names, layers, x) for x in {1, *CHUNKS.values()}}
    jobs = [
      (least_s, layout, choice)
      for choice in self._choices
      for layout in few[CHUNKS.get(choice.table, 1)]
      if (least_s := self._least_s(choice, layout)) * rate < self.batch_size
    ]
    for least_s, layout, choice in sorted(jobs, key=lambda x: x[0]):
      if least_s * rate >= self.batch_size:
        break
      faster = self._evaluated(choice, layout, rate)
      if faster is not None:
        rate = faster.samples_per_s
        yield faster
    firsts = {(x.table, x.recompute): x for x in found}.values()
    for choice in sorted(firsts, key=lambda x: -x.samples_per_s)[:_REFINED]:
      if choice.samples_per_s < _SLOWER * rate:
        return
      if not few[CHUNKS.get(choice.table, 1)]:
        yield from self._climbed(choice)

  def _climbed(self, best: Candidate) -> Iterator[Candidate]:
    """Yields ever faster layouts, each near the one before.

    The least bottleneck decides the time of a full pipeline, but not of one
    that fills and empties in each iteration, and not of messages that wait for
    each other.
    """
    assert best.made is not None
    most = _MOST_ACTIONS // sum(map(len, best.made.devices))
    names, layers = self.machines.names, len(self.costs)
    chunks, start, improved = CHUNKS.get(best.table, 1), best, True
    seen = set[Layout]()
    while improved:
      assert best.plan is not None
      here, improved = (best.nodes, best.plan.cuts), False
      for layout in near_layouts(here, names, layers, chunks):
        if layout not in seen and len(seen) < most:
          seen.add(layout)
          faster = self._evaluated(start, layout, best.samples_per_s)
          if faster is not None:
            best, improved = faster, True
            yield faster
            break

  def _least_s(self, choice: Candidate, layout: Layout) -> float:
    """Returns the seconds of a batch on its busiest machine or link."""
    # Micro-batches share the work of a batch, whatever their number is.
    chain = self._chain(1, choice.recompute)
    return max(chain.busy_s(_stage_nodes(choice, layout[0]), layout[1]))

  def _make_chain(self, number: int, recompute: bool) -> _bottleneck.Chain:
    costs, input_bytes = self._scaled(number)
    footprint = Footprint(
      self.optimizer_copies, recompute=recompute, input_bytes=input_bytes
    )
    return _bottleneck.Chain(costs, self.machines, footprint, number)

  def _evaluated(
    self, choice: Candidate, layout: Layout, rate: float
  ) -> Candidate | None:
    """Simulates a choice with other cuts and machines, if it may be faster."""
    order, cuts = layout
    if self.wanted and len(order) not in self.wanted:
      return None
    chain = self._chain(choice.num_microbatches, choice.recompute)
    found = chain.plan(_stage_nodes(choice, order), cuts)
    # No table keeps less than one micro-batch, for which this plan is.
    if not self._fits(found, found.memory_bytes):
      return None
    # Another layout may have room for more micro-batches, or for fewer.
    choice = dataclasses.replace(
      choice, num_stages=len(order), extra_live=max(choice.extra_live, 0),
      plan=found,
    )  # fmt: skip
    grown = (x for x in self._grown(choice, rate) if x.samples_per_s > rate)
    return max(grown, key=lambda x: x.samples_per_s, default=None)

  def run(self) -> tuple[Candidate, list[Candidate]]:
    """Simulates those that may be the best, the most promising first."""
    done: list[Candidate] = []
    best = 0.0
    for choice in sorted(self._candidates, key=lambda x: -x.samples_per_s):
      if choice.made is None:
        done.append(choice)
      elif choice.samples_per_s < best * (1 - _EQUAL):
        done.append(
          dataclasses.replace(choice, made=None, reason="a slower bottleneck")
        )
      else:
        for each in self._grown(choice):
          best = max(best, each.samples_per_s)
          done.append(each)
    done += list(self._slower_sends(done))
    done += list(self._refined(done))
    simulated = [x for x in done if x.times is not None]
    if not simulated:
      raise ValueError(done[0].reason)
    best = max(x.samples_per_s for x in simulated)
    fast = [x for x in simulated if x.samples_per_s >= best * (1 - _EQUAL)]
    first = min(fast, key=Candidate.price)
    others = sorted(
      (x for x in done if x is not first),
      key=lambda x: (x.times is None, -x.samples_per_s),
    )
    return first, [first, *others]


def _by_rate(done: Sequence[Candidate]) -> list[Candidate]:
  """Returns the candidates with times, the fastest last.

  The first of equally fast ones, which keeps the least, stands behind them.
  """
  simulated = [x for x in reversed(done) if x.times is not None]
  return sorted(simulated, key=lambda x: x.samples_per_s)


def _stage_nodes(choice: Candidate, order: tuple[str, ...]) -> tuple[str, ...]:
  """Returns the machine of each stage from that of each device."""
  # A V returns to the first machine, other tables start there again.
  if choice.table == "zb_v":
    return order + order[::-1]
  return order * CHUNKS.get(choice.table, 1)
