"""Time that each variant adds to a step, measured in turns.

All workers share a machine and messages are copied in its memory: this is the
cost of compressing, decompressing and updating.  The result is the median of
ratios to the synchronous variant of the same turn, beside that variant's ratio
to itself, the noise of the machine.  Reports model the time over links from it.

Under `scripts/slow_network.py` each of several hosts has as many of the
workers, and messages go over its links: a whole step is measured then, beside
that of workers who send nothing.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jdist import cluster, collectives, profiling
from jdist.training import _results
from jdist.training.comparison import _chains

_STEPS = 8  # With one round's end in them.
# The workers' own optimizer, without messages.
_ALONE = "computation"


@dataclasses.dataclass(frozen=True)
class HostLinks:
  """The links between hosts, see `scripts/slow_network.py`.

  Attributes:
    hosts: how many there are.
    bits_per_s: of every host's link.
  """

  hosts: int
  bits_per_s: float

  @property
  def name(self) -> str:
    """As rows and files of rows are called."""
    if math.isinf(self.bits_per_s):
      return f"{self.hosts}xunlimited"
    return f"{self.hosts}x{self.bits_per_s / 1e6:g}mbit"


def step_times(
  chains: _chains.Chains,
  *,
  base: str = "ssgd",
  blocks: int = 9,
  links: HostLinks | None = None,
) -> list[dict[str, Any]]:
  """Measures the steps of a comparison's variants.

  Args:
    chains: the comparison.
    base: the synchronous variant.
    blocks: how often each variant has its turn.
    links: between the hosts of the workers; None for one machine.

  Returns:
    A row for each variant; none on other hosts than the first.
  """
  options, workload = chains.options, chains.workload
  names = [*(options.variants or chains.variants)]
  again = f"{base} again"
  variants: Mapping[str, _chains.Variant] = {
    **chains.variants,
    again: chains.variants[base],
    _ALONE: lambda run: run.inner,
  }
  names = [base, again, *(name for name in names if name != base)]
  if links is not None:
    names.append(_ALONE)
  chains = type(chains)(options, variants, workload)
  rate = options.rates[len(options.rates) // 2]
  turns = {name: _Turn(chains, name, rate) for name in names}
  if links is not None and not jax.process_index():
    for turn in turns.values():
      turn.trace()  # While the others wait, and not behind them.
  found: dict[str, list[float]] = {name: [] for name in names}
  for block in range(blocks + 1):  # The first is to get warm.
    for name, turn in turns.items():
      seconds = turn.take()
      if block:
        found[name].append(seconds)
  if jax.process_index():
    return []
  # No variants, as each has its row, and no paths.
  config = {
    key: value
    for key, value in dataclasses.asdict(options).items()
    if key not in ("variants", "cache")
  }
  rows = []
  for name in names:
    ratios = [
      mine / theirs
      for mine, theirs in zip(found[name], found[base], strict=True)
    ]
    row = _results.make_row(
      config | {"blocks": blocks},
      0,
      method=name,
      workers=options.workers,
      step_s=statistics.median(found[name]),
      ratio=statistics.median(ratios),
      quartiles=statistics.quantiles(ratios, n=4)[::2],
      messages_per_step=_messages(turns[name].messages, conditional=False),
      messages_per_round=_messages(turns[name].messages, conditional=True),
    )
    low, high = row["quartiles"]
    line = (
      f"{name:32s} {1e3 * row['step_s']:6.1f} ms, {row['ratio']:.3f} of {base} "
      f"({low:.3f} to {high:.3f})"
    )
    if links is not None:
      sent = turns[name].sent_bytes()
      alone_s = statistics.median(found[_ALONE])
      # Nothing hidden. Unlike reports, without what a method computes.
      modelled_s = alone_s + 8 * sent / links.bits_per_s
      row |= dataclasses.asdict(links)
      row |= {"sent_bytes": sent, "modelled_s": modelled_s}
      line += f"; {sent / 1e3:.1f} kB, modelled {1e3 * modelled_s:.1f} ms"
    rows.append(row)
    print(line, flush=True)
  return rows


class _Turn:
  """A variant's compiled step and its state."""

  def __init__(self, chains: _chains.Chains, variant: str, rate: float):
    run = chains.prepare(variant, rate, seed=0, independent=variant == _ALONE)
    workers = chains.workload.workers
    self.state = run.state
    self.batch = workers.place(next(run.batches.iterate(0)))
    program = workers.jit(run.programs.step, donate_argnums=0)
    self.program = program.lower(self.state, self.batch).compile()
    self.messages = profiling.read_collectives(self.program)
    self.trainer = run.programs.trainer
    self.steps, self.rounds = 0, 0

  def take(self) -> float:
    """Runs a block and returns the seconds of a step."""
    started_s = time.perf_counter()
    for _ in range(_STEPS):
      self.state, metrics = self.program(self.state, self.batch)
      jax.block_until_ready(metrics)
    seconds = time.perf_counter() - started_s
    self.steps += _STEPS
    # The same for all workers; of an array of several hosts each has its own.
    self.rounds = int(metrics["rounds"].addressable_data(0).ravel()[0])
    return seconds / _STEPS

  def trace(self) -> None:
    """Finds the messages of a step: traced once more, which takes long."""
    self.traffic = self.trainer.traffic(self.state, self.batch)

  def sent_bytes(self) -> float:
    """Returns the bytes of a worker in a step, the mean of those taken."""
    return self.traffic.sent_bytes(self.steps, self.rounds) / self.steps


def _messages(
  sent: Sequence[collectives.Collective], *, conditional: bool
) -> int:
  """Counts messages that wait for each other; of a phase, the last one's."""
  last = max(
    (c.phase for c in sent if c.phase is not None),
    key=lambda phase: phase.start,
    default=None,
  )
  around = 0
  for c in sent:
    rare = c.conditional and c.phase is None
    if rare == conditional and c.phase in (None, last):
      ring = cluster.ring_messages(c.num_workers)
      around += c.count * (ring if c.kind == "all-reduce" else ring // 2)
  return around


def join_hosts(workers: int) -> HostLinks | None:
  """Joins the hosts of `scripts/slow_network.py`, if there are several."""
  if "JDIST_COORDINATOR" not in os.environ:
    return None
  hosts = int(os.environ["JDIST_PROCESSES"])
  if workers % hosts:
    raise ValueError(
      f"`--workers` must be a multiple of the {hosts} hosts, got {workers}."
    )
  # One thread for the computation: another is to be free for the network.
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"],
    hosts,
    int(os.environ["JDIST_PROCESS"]),
    cpu_devices_per_process=workers // hosts,
  )
  return HostLinks(hosts, float(os.environ.get("JDIST_BITS_PER_S", "inf")))
