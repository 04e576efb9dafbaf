"""The joint search over cuts, machines, tables, micro-batches and windows."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import (
  _bottleneck,
  _candidate,
  _costs,
  _placement,
  _simulator,
)
from jdist.pipeline.planning._candidate import Candidate, CHUNKS, LISTED
from jdist.pipeline.planning._layouts import few_layouts, Layout, near_layouts
from jdist.pipeline.planning._plan import Footprint, Plan
from jdist.pipeline.schedule import _checker
from jdist.pipeline.schedule._asynchronous_tables import least_window
from jdist.pipeline.schedule._table import Table
from jdist.pipeline.schedule._table_registry import TABLES

# The most micro-batches per machine that are tried by default.
_MOST_MICROBATCHES = 8
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
# The orders of machines that are tried for so many stages in all.
_ORDERS = 4_800
# A table is partitioned again so often, for the memory that it then needs.
_TURNS = 3
# Up to so many live micro-batches, if memory is short, and numbers of stages
# are tried one by one; beyond that every second or third one is.
_LIVE, _NUMBERS = 32, 8
# Relative differences of throughput that count as none, and of memory.
_EQUAL, _ROUNDING = 0.005, 1e-9
_SLOW = "a slower bottleneck"


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
  needs, and then simulated, unless a lower bound of its time exceeds that of
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
    math.inf if max_delay is None else max_delay, num_stages, windows,
  )  # fmt: skip
  # With unlimited memory a stage that runs twice is never faster.
  once = search.free and max_delay == 0
  for again in sorted(set(recompute))[: 1 if once else 2]:
    search.add(again, tables, num_microbatches)
  return search.result()


@dataclasses.dataclass
class _Search:
  """The candidates so far, and the arguments that they have in common.

  With few machines it leaves out only what cannot be the best.
  """

  costs: Sequence[_costs.LayerCost]
  machines: cluster.Cluster
  batch_size: int
  samples: int
  optimizer_copies: float
  input_bytes: float
  max_delay: float
  # The numbers of stages and windows that are allowed; None for any.
  wanted: Sequence[int] | None
  windows: Sequence[int] | None

  def __post_init__(self) -> None:
    self._chain = functools.cache(self._make_chain)
    # Orders of machines: for the least bottleneck, and within their memory.
    self._orders: dict[tuple[int, bool], list[tuple[str, ...]]] = {}
    self._names = self.machines.names
    self.free = all(math.isinf(x.memory_bytes) for x in self.machines.nodes)
    self._few = len(self._names) <= _FEW
    self._done: list[Candidate] = []
    self._best = 0.0
    # Tables, micro-batches, windows and recomputation, without a layout.
    self._choices: dict[Candidate, None] = {}

  def add(
    self, recompute: bool, tables: Sequence[str], numbers: Sequence[int]
  ) -> None:
    """Tries all choices, the most promising first."""
    # Many micro-batches fill a pipeline best, and so does a zero bubble.
    found = sorted(
      (
        (batch_s, -number, Candidate(name, number, stages, None, recompute))
        for stages, batch_s in self._stages(recompute)
        for name in tables
        for number in numbers
        if name != _EACH or number == 1
      ),
      key=lambda x: (*x[:2], self._few or x[2].table[:2] != "zb"),
    )
    rates: dict[tuple[str, int], float] = {}
    for batch_s, _, choice in found:
      key = choice.table, choice.num_stages
      if choice.table in CHUNKS:  # Several stages of a machine have other cuts.
        batch_s = self._busy_s(choice.num_stages, recompute)
      if self._is_slower(batch_s) or rates.get(key) == 0.0:
        self._reject(choice, _SLOW)
      else:
        before = len(self._done)
        (self._try_capped if choice.table in LISTED else self._try)(choice)
        tried = [x for x in self._done[before:] if x.plan is not None]
        if tried and not self._few:
          rate = max(x.samples_per_s for x in tried)
          # Still fewer micro-batches would make it slower again.
          less = rate < max(rates.get(key, 0.0), _SLOWER * self._best)
          rates[key] = 0.0 if less else rate

  def _is_slower(self, batch_s: float) -> bool:
    """Returns whether another candidate is certainly faster."""
    return self.batch_size < batch_s * self._best * (1 - _EQUAL)

  def _reject(self, choice: Candidate, reason: str) -> None:
    self._done.append(dataclasses.replace(choice, made=None, reason=reason))

  def _stages(self, recompute: bool) -> Iterator[tuple[int, float]]:
    """Yields numbers of stages, and the least bottleneck of a batch."""
    few, least = self._few, math.inf
    number = min(len(self._names), len(self.costs))
    numbers = list(self.wanted or [])
    while number and not self.wanted:
      numbers.append(number)
      number -= max(1, number // _NUMBERS - 1)
    for number in numbers:
      busy_s = self._busy_s(number, recompute)
      # Fewer machines have no smaller bottleneck than this.
      if self._is_slower(busy_s) or not (self.wanted or few or busy_s < least):
        continue
      batch_s = self._place_s(number, recompute)
      less = batch_s < least * (1 - _ROUNDING)
      least = min(least, batch_s)
      # A pipeline that fills and empties may be faster with fewer stages, even
      # if its bottleneck is not.
      if self.wanted or few or less:
        yield number, batch_s

  def _try(self, choice: Candidate) -> float:
    """Cuts and simulates a choice, and returns its bottleneck."""
    free = dataclasses.replace(choice, num_stages=1, extra_live=0)
    self._choices[free] = None
    try:
      choice = self._cut(choice)
    except ValueError as error:
      self._reject(choice, str(error))
      return math.inf
    assert choice.plan is not None
    if self._is_slower(self.batch_size / choice.samples_per_s):
      self._reject(choice, _SLOW)
    else:
      worth = 0.0 if self._few else _SLOWER * self._best
      for each in self._grown(choice, worth=worth):
        self._best = max(self._best, each.samples_per_s)
        self._done.append(each)
    return choice.plan.bottleneck_s

  def _try_capped(self, choice: Candidate) -> None:
    """Tries each window, with fewer micro-batches if memory is short."""
    try:
      found = self._partition(choice, Footprint(0, 1, 1, choice.recompute))
    except ValueError:  # It is refused for the same reason again.
      self._try(dataclasses.replace(choice, window=1))
      return
    times = _candidate.times_of(choice, found, self.machines)
    windows = self.windows if choice.table == "ours" else [1]
    if windows is None:
      least = least_window(times, choice.num_microbatches)
      windows = range(1, 1 + int(min(least, self.max_delay + 1)))
    for window in windows:
      choice = dataclasses.replace(choice, window=window)
      # With unlimited memory these are the cuts: no table need be made.
      least_s = self._least_s(choice, found)
      if self.free and not self._few and self._is_slower(least_s):
        rate = self.batch_size / least_s
        choice = dataclasses.replace(choice, plan=found, samples_per_s=rate)
        self._reject(choice, _SLOW)
        continue
      live = max(_candidate.most_live(choice, times))
      # Fewer live micro-batches need less memory and allow better cuts, until
      # the cuts are those without any limit.
      for extra in range(0, -live, -1 - live // _LIVE):
        bottleneck = self._try(dataclasses.replace(choice, extra_live=extra))
        if bottleneck <= found.bottleneck_s * (1 + _ROUNDING):
          break

  def _slower_sends(self) -> Iterator[Candidate]:
    """Yields the best tables again, made for slower messages.

    Messages that wait for each other on a link take longer than the first table
    assumes, so more micro-batches and iterations must be in progress.
    """
    firsts = {
      x.table: x
      for x in _by_rate(self._done)
      if x.table in LISTED and x.table != "greedy"
    }
    for best in firsts.values():
      assert best.plan is not None
      most = self.batch_size / self._least_s(best, best.plan)
      rate, least = best.samples_per_s, 0.0 if self._few else self._best
      full = rate >= most * (1 - _EQUAL) or rate < _SLOWER * least
      for factor in () if full else _SEND_FACTORS:
        choice = dataclasses.replace(best, extra_live=0, send_factor=factor)
        if self.windows is None and best.table == "ours":
          times = _candidate.times_of(choice, best.plan, self.machines)
          least = least_window(times, best.num_microbatches)
          window = int(min(least, self.max_delay + 1))
          choice = dataclasses.replace(choice, window=window)
        try:
          yield (again := self._simulated(self._cut(choice)))
        except ValueError:  # It does not fit into memory any more.
          break
        if not self._few and again.samples_per_s < rate:
          break
        rate = again.samples_per_s

  def _refined(self) -> Iterator[Candidate]:
    """Yields faster choices, of all layouts if few, else of near ones."""
    found = _by_rate(self._done)
    rate = found[-1].samples_per_s if found else 0.0
    chunks = {1, *CHUNKS.values()}
    groups = _placement.interchangeable(self._chain(1, False), self._names)
    few = {x: few_layouts(groups, len(self.costs), x) for x in chunks}
    jobs = []
    for choice in self._choices:
      # Micro-batches share the work of a batch, whatever their number is.
      chain = self._chain(1, choice.recompute)
      for order, cuts in few[CHUNKS.get(choice.table, 1)]:
        least_s = max(chain.busy_s(_stage_nodes(choice, order), cuts))
        jobs.append((least_s, (order, cuts), choice))
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
    chunks, start, improved = CHUNKS.get(best.table, 1), best, True
    seen = set[Layout]()
    while improved:
      assert best.plan is not None
      here, improved = (best.nodes, best.plan.cuts), False
      for layout in near_layouts(here, self._names, len(self.costs), chunks):
        if layout not in seen and len(seen) < most:
          seen.add(layout)
          faster = self._evaluated(start, layout, best.samples_per_s)
          if faster is not None:
            best, improved = faster, True
            yield faster
            break

  def _busy_s(self, num_stages: int, recompute: bool) -> float:
    """Returns the seconds of a batch on the fastest machines without a wait."""
    speeds = sorted((x.speed for x in self.machines.nodes), reverse=True)
    work = self._chain(1, recompute).work[-1]
    return float(work) / sum(speeds[:num_stages])

  def _place_s(self, number: int, recompute: bool) -> float:
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

  def _partition(self, choice: Candidate, footprint: Footprint) -> Plan:
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
      orders.append(placed.nodes)
      return placed
    if not plans:
      raise errors[0]
    return min(plans, key=lambda x: (x.bottleneck_s, x.trip_s))

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
        return dataclasses.replace(
          choice, plan=found, made=made, delay=max(report.delays),
          samples_per_s=self.batch_size / self._least_s(choice, found),
        )  # fmt: skip
    raise ValueError(
      f"No partition fits into memory with what table {choice.table} keeps of "
      "its stages."
    )

  def _made(
    self, choice: Candidate, found: Plan | None
  ) -> tuple[Table, _checker.TableReport, bool]:
    """Makes a table that is not too late, and finds whether it fits."""
    if choice.table == "paci" and not choice.recompute:
      # Its passes may read different parameters: what one saves is useless.
      raise ValueError("Table paci recomputes each stage in its backward pass.")
    made = _candidate.make_table_of(choice, found, self.machines)
    if made.window - 1 > self.max_delay:
      raise ValueError(
        f"Gradients of table {choice.table} are late by {made.window - 1} "
        f"updates, more than `max_delay` {self.max_delay:.0f}."
      )
    report = _checker.table_needs(made)
    if found is None:
      return made, report, False
    needs = _simulator.device_bytes(
      made, found.stages, report, self.optimizer_copies
    )
    return made, report, self._fits(found, needs)

  def _fits(self, found: Plan, needs: Sequence[float]) -> bool:
    """Returns whether each machine holds so many bytes."""
    return all(
      need <= self.machines.node(name).memory_bytes * (1 + _ROUNDING)
      for name, need in zip(found.nodes, needs, strict=False)
    )

  def _least_s(self, choice: Candidate, found: Plan) -> float:
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
    times = _candidate.stage_times(found, self.machines, split=split)
    trip_s, whole_s = 0.0, dict[str, float]()
    for time, node in zip(times, found.nodes, strict=True):
      pass_s = time.forward + time.backward
      whole_s[node] = whole_s.get(node, trip_s) + number * pass_s
      trip_s += pass_s + 2 * time.send
    return max(least_s, *whole_s.values())

  def _simulated(self, choice: Candidate) -> Candidate:
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

  def _grown(
    self, choice: Candidate, rate: float = 0.0, worth: float = 0.0
  ) -> Iterator[Candidate]:
    """Yields a choice of given cuts while it may be faster than a rate.

    A table that is made from times keeps fewer micro-batches if memory is
    short, and more of them while that helps and its rate is at least `worth`.
    """
    found, before = choice.plan, 0.0
    assert found is not None
    most = self.batch_size / self._least_s(choice, found)
    # One more weight part that waits gains little; one a stage fills a bubble.
    step = choice.num_stages if choice.table in _candidate.ZERO_BUBBLE else 1
    listed = choice.table in LISTED
    while most > rate * (1 + _ROUNDING):
      extra, fits = choice.extra_live, True
      if choice.made is None:
        try:
          made, report, fits = self._made(choice, found)
        except ValueError:  # Another number of stages has no such table.
          return
        choice = dataclasses.replace(
          choice, made=made, delay=max(report.delays), samples_per_s=most
        )
      if fits:
        yield (done := self._simulated(choice))
        now = done.samples_per_s
        enough = now >= most * (1 - _EQUAL) or now <= before * (1 + _EQUAL)
        if enough or extra < 0 or not listed or now < worth:
          return
        before, rate, extra = now, max(rate, now), 2 * extra or step
      elif before or not listed or max(report.live) == 1:
        return
      else:
        extra -= 1 + max(report.live) // _LIVE
      choice = dataclasses.replace(choice, extra_live=extra, made=None)

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
      plan=found, made=None,
    )  # fmt: skip
    grown = (x for x in self._grown(choice, rate) if x.samples_per_s > rate)
    return max(grown, key=lambda x: x.samples_per_s, default=None)

  def result(self) -> tuple[Candidate, list[Candidate]]:
    """Returns the best candidate and all, after the search for faster ones."""
    self._done += list(self._slower_sends())
    self._done += list(self._refined())
    simulated = [x for x in self._done if x.times is not None]
    if not simulated:
      raise ValueError(self._done[0].reason)
    best = max(x.samples_per_s for x in simulated)
    fast = [x for x in simulated if x.samples_per_s >= best * (1 - _EQUAL)]
    first = min(fast, key=Candidate.price)
    assert first.made is not None
    # The search only makes tables that can run: the best one is proven.
    _checker.check_table(first.made)
    others = sorted(
      (x for x in self._done if x is not first),
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
