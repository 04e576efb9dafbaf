"""Measures what each method adds to a step on this machine.

All workers share the machine and what they send is copied in its memory, so
that this is the cost of encoding, decoding and updating.  Methods take turns;
what is kept is the median of paired ratios to the synchronous variant, beside
that of this to itself, which is the noise of the machine.  Reports model the
time over links from it.

Where `scripts/slow_network.py` runs it on several hosts, each has as many of
the workers, and what they send goes over its links: a step then is measured
whole, beside that of workers who send nothing.
"""

import dataclasses
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import comparing
import jax
import tyro

from jdist import cluster, collectives, profiling, training

_STEPS = 8  # With one round's end in them.
# The workers' own optimizer, and nothing sent.
_ALONE = "computation"


class Link(NamedTuple):
  """Between hosts, see `scripts/slow_network.py`.

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


def measure(
  options: comparing.Config,
  variants: dict[str, comparing.Variant],
  comparison_type: type[comparing.Comparison] = comparing.Comparison,
  *,
  base: str = "ssgd",
  blocks: int = 9,
  link: Link | None = None,
) -> list[dict[str, Any]]:
  """A row for each variant; none on other hosts than the first.

  Args:
    options: the comparison whose steps are measured.
    variants: by name.
    comparison_type: what prepares them.
    base: the synchronous one.
    blocks: how often each variant has its turn.
    link: between the hosts whose workers these are; None for one machine.
  """
  names = [*(options.variants or variants)]
  again = f"{base} again"
  variants = variants | {again: variants[base], _ALONE: lambda run: run.inner}
  names = [base, again, *(name for name in names if name != base)]
  if link is not None:
    names.append(_ALONE)
  comparison = comparison_type(options, variants)
  rate = options.rates[len(options.rates) // 2]
  turns = {name: _Turn(comparison, name, rate) for name in names}
  if link is not None and not jax.process_index():
    for turn in turns.values():
      turn.trace()  # While the others wait, and not behind them.
  found: dict[str, list[float]] = {name: [] for name in names}
  for block in range(blocks + 1):  # The first is to get warm.
    for name, turn in turns.items():
      seconds = turn.take()
      if block:
        found[name].append(seconds)
  if jax.process_index():  # The first one tells.
    return []
  # No variants, as each has its row, and nobody's folders.
  told = {
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
    row = training.make_row(
      told | {"blocks": blocks},
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
    if link is not None:
      sent = turns[name].sent_bytes()
      alone_s = statistics.median(found[_ALONE])
      # Nothing hidden. Not quite as reports have it, who also count what a
      # method computes.
      modelled_s = alone_s + 8 * sent / link.bits_per_s
      row |= link._asdict() | {"sent_bytes": sent, "modelled_s": modelled_s}
      line += f"; {sent / 1e3:.1f} kB, modelled {1e3 * modelled_s:.1f} ms"
    rows.append(row)
    print(line, flush=True)
  return rows


class _Turn:
  """A variant's program, and how far it is."""

  def __init__(
    self, comparison: comparing.Comparison, variant: str, rate: float
  ):
    run, workers = comparison.prepare(variant, rate, seed=0), comparison.workers
    self.state = run.state
    self.batch = workers.place(next(run.batches.iterate(0)))
    program = workers.jit(run.step, donate_argnums=0)
    self.program = program.lower(self.state, self.batch).compile()
    self.messages = profiling.read_collectives(self.program)
    self.workers, self.step = workers, run.step
    self.steps, self.rounds = 0, 0

  def take(self) -> float:
    """Runs a block; seconds a step."""
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
    """Looks at what a step sends: traced once more, which takes long."""
    trainer = training.Trainer(self.workers, self.step)
    self.traffic = trainer.traffic(self.state, self.batch)

  def sent_bytes(self) -> float:
    """What a worker has sent in a step, the mean of those taken."""
    return self.traffic.sent_bytes(self.steps, self.rounds) / self.steps


def _messages(
  sent: Sequence[collectives.Collective], *, conditional: bool
) -> int:
  """Messages that have to wait for each other; of a phase, the last one's."""
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


def main(
  folder: pathlib.Path,
  presets: comparing.Presets,
  variants: dict[str, comparing.Variant],
  comparison_type: type[comparing.Comparison] = comparing.Comparison,
  *,
  base: str = "ssgd",
) -> None:
  """Measures the preset that the command line names; see `comparing.main`."""
  chosen = tyro.extras.overridable_config_cli(presets)
  preset = next(word for word in sys.argv[1:] if word in presets)
  link = _join(chosen.workers)
  measured = measure(chosen, variants, comparison_type, base=base, link=link)
  if not measured:
    return
  name = "times" if link is None else link.name
  path = folder / "results" / f"{preset}-{name}.jsonl"
  path.unlink(missing_ok=True)
  training.append_rows(path, measured)


def _join(workers: int) -> Link | None:
  """Joins the hosts, if there are several."""
  if "JDIST_COORDINATOR" not in os.environ:
    return None
  hosts = int(os.environ["JDIST_PROCESSES"])
  if workers % hosts:
    raise SystemExit(
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
  return Link(hosts, float(os.environ.get("JDIST_BITS_PER_S", "inf")))
