"""Time that each variant adds to a step, measured in turns.

All workers share a machine and messages are copied in its memory, so that this
is the cost of compressing, decompressing and updating. The result is the median
of ratios to the synchronous variant of the same turn. That variant is measured
twice, which shows the noise of the machine. Reports model the time over links
from it.

Under `scripts/slow_network.py` each of several hosts has an equal part of the
workers, and messages go over its links. Then a whole step is measured, and
compared with the step of workers that send nothing.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jdist import cluster, collectives, profiling, training

_STEPS = 8  # The end of a round lies in each block.
# The name of the workers' own optimizer, without messages.
ALONE = "computation"


@dataclasses.dataclass(frozen=True)
class HostLinks:
  """The links between hosts, see `scripts/slow_network.py`.

  Attributes:
    hosts: The number of hosts.
    bits_per_s: The bandwidth of every host's link.
  """

  hosts: int
  bits_per_s: float

  @property
  def name(self) -> str:
    """The name of the links in rows and in files of rows."""
    if math.isinf(self.bits_per_s):
      return f"{self.hosts}xunlimited"
    return f"{self.hosts}x{self.bits_per_s / 1e6:g}mbit"


class Turn:
  """A variant's compiled step and its state."""

  def __init__(
    self,
    trainer: training.Trainer,
    step: Callable[..., Any],
    state: training.TrainState,
    batch: Any,
  ):
    workers, self.trainer, self.state = trainer.workers, trainer, state
    self.batch = workers.place(batch)
    program = workers.jit(step, donate_argnums=0)
    self.program = program.lower(self.state, self.batch).compile()
    self.messages = profiling.read_collectives(self.program)
    self.steps, self.rounds = 0, 0

  def take(self) -> float:
    """Runs a block and returns the seconds of a step."""
    started_s = time.perf_counter()
    for _ in range(_STEPS):
      self.state, metrics = self.program(self.state, self.batch)
      jax.block_until_ready(metrics)
    seconds = time.perf_counter() - started_s
    self.steps += _STEPS
    # The number is equal on all workers, and each host can read its own part.
    self.rounds = int(metrics["rounds"].addressable_data(0).ravel()[0])
    return seconds / _STEPS

  def trace(self) -> None:
    """Counts the messages of a step, by a further trace that takes long."""
    self.traffic = self.trainer.traffic(self.state, self.batch)

  def sent_bytes(self) -> float:
    """Returns the bytes of a worker in a step, the mean of those taken."""
    return self.traffic.sent_bytes(self.steps, self.rounds) / self.steps


def step_times(
  turns: Mapping[str, Any],
  config: dict[str, Any],
  *,
  base: str,
  blocks: int = 9,
  links: HostLinks | None = None,
) -> list[dict[str, Any]]:
  """Measures the steps of a comparison's variants.

  Args:
    turns: A `Turn` for each variant. With links one of them is `ALONE`.
    config: The options of the comparison, for the rows.
    base: The variant with which the others are compared.
    blocks: The number of turns of each variant.
    links: The links between the workers' hosts; None for one machine.

  Returns:
    A row for each variant on the first host, and no rows on the others.
  """
  if links is not None and not jax.process_index():
    # Traced now, because all other hosts would wait for a trace between turns.
    for turn in turns.values():
      turn.trace()
  found: dict[str, list[float]] = {name: [] for name in turns}
  # One block more than is counted warms the machine up.
  for block in range(blocks + 1):
    for name, turn in turns.items():
      seconds = turn.take()
      if block:
        found[name].append(seconds)
  if jax.process_index():
    return []
  rows = []
  for name, turn in turns.items():
    ratios = [
      mine / theirs
      for mine, theirs in zip(found[name], found[base], strict=True)
    ]
    row = training.make_row(
      config | {"blocks": blocks},
      0,
      method=name,
      workers=config["workers"],
      step_s=statistics.median(found[name]),
      ratio=statistics.median(ratios),
      quartiles=statistics.quantiles(ratios, n=4)[::2],
      messages_per_step=_messages(turn.messages, conditional=False),
      messages_per_round=_messages(turn.messages, conditional=True),
    )
    low, high = row["quartiles"]
    line = (
      f"{name:32s} {1e3 * row['step_s']:6.1f} ms, {row['ratio']:.3f} of {base} "
      f"({low:.3f} to {high:.3f})"
    )
    if links is not None:
      sent = turn.sent_bytes()
      alone_s = statistics.median(found[ALONE])
      # Nothing is hidden here, and unlike in reports the computation of the
      # method itself does not count.
      modelled_s = alone_s + 8 * sent / links.bits_per_s
      row |= dataclasses.asdict(links)
      row |= {"sent_bytes": sent, "modelled_s": modelled_s}
      line += f"; {sent / 1e3:.1f} kB, modelled {1e3 * modelled_s:.1f} ms"
    rows.append(row)
    print(line, flush=True)
  return rows


def _messages(
  sent: Sequence[collectives.Collective], *, conditional: bool
) -> int:
  """Counts messages in sequence; among phases, only those of the last one."""
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
  # The computation takes one thread, so that another is free for the network.
  flags = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
  collectives.start_processes(
    os.environ["JDIST_COORDINATOR"],
    hosts,
    int(os.environ["JDIST_PROCESS"]),
    cpu_devices_per_process=workers // hosts,
  )
  return HostLinks(hosts, float(os.environ.get("JDIST_BITS_PER_S", "inf")))
