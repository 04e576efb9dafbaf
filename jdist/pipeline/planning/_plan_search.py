"""The joint search over cuts, machines, tables, micro-batches and windows."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import _candidate, _costs, _placement
from jdist.pipeline.planning._candidate import (
  Candidate,
  CHUNKS,
  EQUAL,
  LISTED,
  LIVE,
  PlanProblem,
  ROUNDING,
)
from jdist.pipeline.planning._placement import few_layouts, Layout, near_layouts
from jdist.pipeline.planning._plan import Footprint
from jdist.pipeline.schedule import _checker
from jdist.pipeline.schedule._asynchronous_tables import least_window
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
# Up to so many numbers of stages are tried one by one; beyond that every second
# or third one is.
_NUMBERS = 8
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
  windows: Sequence[signatures.PositiveInt] | None = None,
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
    ("recompute", recompute), ("windows", (1,) if windows is None else windows),
    ("num_stages", (1,) if num_stages is None else num_stages),
  ):  # fmt: skip
    if not values:
      raise ValueError(f"`{field}` must be one at least, got {values!r}.")
  if windows is not None and "ours" not in tables:
    raise ValueError(
      "`windows` must be left out without the table ours, got "
      f"{list(windows)} for {', '.join(tables)}."
    )
  if set(tables) == {_EACH} and 1 not in num_microbatches:
    raise ValueError(
      f"`num_microbatches` must have 1 for {_EACH} alone, which updates after "
      f"each micro-batch, got {list(num_microbatches)}."
    )
  if not any(x.compute_s + x.update_s for x in costs):
    raise ValueError("`costs` must take time, got layers that take none.")
  problem = PlanProblem(
    costs, machines, batch_size, samples, optimizer_copies, input_bytes,
    math.inf if max_delay is None else max_delay, num_stages,
  )  # fmt: skip
  search = _Search(problem, windows)
  # With unlimited memory a stage that runs twice is never faster.
  once = problem.free and max_delay == 0
  for again in sorted(set(recompute))[: 1 if once else 2]:
    search.add(again, tables, num_microbatches)
  return search.result()


@dataclasses.dataclass
class _Search:
  """The candidates of a problem so far.

  With few machines it leaves out only what cannot be the best.
  """

  problem: PlanProblem
  # The windows that are allowed; None for any.
  windows: Sequence[int] | None

  def __post_init__(self) -> None:
    self._names = self.problem.machines.names
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
        batch_s = self.problem.busy_s(choice.num_stages, recompute)
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
    return self.problem.batch_size < batch_s * self._best * (1 - EQUAL)

  def _reject(self, choice: Candidate, reason: str) -> None:
    self._done.append(dataclasses.replace(choice, made=None, reason=reason))

  def _stages(self, recompute: bool) -> Iterator[tuple[int, float]]:
    """Yields numbers of stages, and the least bottleneck of a batch."""
    problem, least = self.problem, math.inf
    every = problem.wanted or self._few
    number = min(len(self._names), len(problem.costs))
    numbers = list(problem.wanted or [])
    while number and not problem.wanted:
      numbers.append(number)
      number -= max(1, number // _NUMBERS - 1)
    for number in numbers:
      busy_s = problem.busy_s(number, recompute)
      # Fewer machines have no smaller bottleneck than this.
      if self._is_slower(busy_s) or not (every or busy_s < least):
        continue
      batch_s = problem.place_s(number, recompute)
      less = batch_s < least * (1 - ROUNDING)
      least = min(least, batch_s)
      # A pipeline that fills and empties may be faster with fewer stages, even
      # if its bottleneck is not.
      if every or less:
        yield number, batch_s

  def _try(self, choice: Candidate) -> float:
    """Cuts and simulates a choice, and returns its bottleneck."""
    free = dataclasses.replace(choice, num_stages=1, extra_live=0)
    self._choices[free] = None
    try:
      choice = self.problem.cut(choice)
    except ValueError as error:
      self._reject(choice, str(error))
      return math.inf
    assert choice.plan is not None
    if self._is_slower(self.problem.batch_size / choice.samples_per_s):
      self._reject(choice, _SLOW)
    else:
      worth = 0.0 if self._few else _SLOWER * self._best
      for each in self.problem.grown(choice, worth=worth):
        self._best = max(self._best, each.samples_per_s)
        self._done.append(each)
    return choice.plan.bottleneck_s

  def _try_capped(self, choice: Candidate) -> None:
    """Tries each window, with fewer micro-batches if memory is short."""
    problem = self.problem
    try:
      found = problem.partition(choice, Footprint(0, 1, 1, choice.recompute))
    except ValueError:  # It is refused for the same reason again.
      self._try(dataclasses.replace(choice, window=1))
      return
    times = _candidate.times_of(choice, found, problem.machines)
    windows = self.windows if choice.table == "ours" else [1]
    if windows is None:
      least = least_window(times, choice.num_microbatches)
      windows = range(1, 1 + int(min(least, problem.max_delay + 1)))
    for window in windows:
      choice = dataclasses.replace(choice, window=window)
      # With unlimited memory these are the cuts: no table need be made.
      least_s = problem.least_s(choice, found)
      if problem.free and not self._few and self._is_slower(least_s):
        rate = problem.batch_size / least_s
        choice = dataclasses.replace(choice, plan=found, samples_per_s=rate)
        self._reject(choice, _SLOW)
        continue
      live = max(_candidate.most_live(choice, times))
      # Fewer live micro-batches need less memory and allow better cuts, until
      # the cuts are those without any limit.
      for extra in range(0, -live, -1 - live // LIVE):
        bottleneck = self._try(dataclasses.replace(choice, extra_live=extra))
        if bottleneck <= found.bottleneck_s * (1 + ROUNDING):
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
      most = self.problem.batch_size / self.problem.least_s(best, best.plan)
      rate, least = best.samples_per_s, 0.0 if self._few else self._best
      full = rate >= most * (1 - EQUAL) or rate < _SLOWER * least
      for factor in () if full else _SEND_FACTORS:
        choice = dataclasses.replace(best, extra_live=0, send_factor=factor)
        if self.windows is None and best.table == "ours":
          times = _candidate.times_of(choice, best.plan, self.problem.machines)
          least = least_window(times, best.num_microbatches)
          window = int(min(least, self.problem.max_delay + 1))
          choice = dataclasses.replace(choice, window=window)
        try:
          yield (again := self.problem.simulated(self.problem.cut(choice)))
        except ValueError:  # It does not fit into memory any more.
          break
        if not self._few and again.samples_per_s < rate:
          break
        rate = again.samples_per_s

  def _refined(self) -> Iterator[Candidate]:
    """Yields faster choices, of all layouts if few, else of near ones."""
    problem, found = self.problem, _by_rate(self._done)
    rate = found[-1].samples_per_s if found else 0.0
    chunks = {1, *CHUNKS.values()}
    groups = _placement.interchangeable(problem.chain(1, False), self._names)
    few = {x: few_layouts(groups, len(problem.costs), x) for x in chunks}
    jobs = []
    for choice in self._choices:
      # Micro-batches share the work of a batch, whatever their number is.
      chain = problem.chain(1, choice.recompute)
      for order, cuts in few[CHUNKS.get(choice.table, 1)]:
        least_s = max(chain.busy_s(choice.stage_nodes(order), cuts))
        jobs.append((least_s, (order, cuts), choice))
    for least_s, layout, choice in sorted(jobs, key=lambda x: x[0]):
      if least_s * rate >= problem.batch_size:
        break
      faster = problem.evaluated(choice, layout, rate)
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
    problem = self.problem
    most = _MOST_ACTIONS // sum(map(len, best.made.devices))
    chunks, start, improved = CHUNKS.get(best.table, 1), best, True
    seen = set[Layout]()
    while improved:
      assert best.plan is not None
      here, improved = (best.nodes, best.plan.cuts), False
      for layout in near_layouts(here, self._names, len(problem.costs), chunks):
        if layout not in seen and len(seen) < most:
          seen.add(layout)
          faster = problem.evaluated(start, layout, best.samples_per_s)
          if faster is not None:
            best, improved = faster, True
            yield faster
            break

  def result(self) -> tuple[Candidate, list[Candidate]]:
    """Returns the best candidate and all, after the search for faster ones."""
    self._done += list(self._slower_sends())
    self._done += list(self._refined())
    simulated = [x for x in self._done if x.times is not None]
    if not simulated:
      raise ValueError(self._done[0].reason)
    best = max(x.samples_per_s for x in simulated)
    fast = [x for x in simulated if x.samples_per_s >= best * (1 - EQUAL)]
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
