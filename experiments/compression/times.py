"""Measures what each method adds to a step on this machine.

    python experiments/compression/times.py cifar10

All workers share the machine and what they send is copied in its memory, so
that this is the cost of encoding, decoding and updating.  Methods take turns;
what is kept is the median of paired ratios to synchronous SGD, beside that of
synchronous SGD to itself, which is the noise of the machine.  `report.py`
models the time over links from it.
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import comparing
import config
import jax
import tyro

from jdist import cluster, collectives, training

_STEPS = 8  # With one round's end in them.
_AGAIN = "ssgd again"


def measure(options: comparing.Config, blocks: int) -> list[dict[str, Any]]:
  """A row for each variant.

  Args:
    options: the comparison whose steps are measured.
    blocks: how often each variant has its turn.
  """
  names = [*(options.variants or config.VARIANTS)]
  variants = config.VARIANTS | {_AGAIN: config.VARIANTS["ssgd"]}
  names = ["ssgd", _AGAIN, *(name for name in names if name != "ssgd")]
  comparison = comparing.Comparison(options, variants)
  rate = options.rates[len(options.rates) // 2]
  workers, runs, sent = comparison.workers, {}, {}
  for name in names:
    run = comparison.prepare(name, rate, seed=0)
    batch = workers.place(next(run.batches.iterate(0)))
    program = workers.jit(run.step, donate_argnums=0)
    program = program.lower(run.state, batch).compile()
    runs[name] = [program, run.state, batch]
    sent[name] = collectives.read_collectives(program)
  found: dict[str, list[float]] = {name: [] for name in names}
  for turn in range(blocks + 1):  # The first is to get warm.
    for name, (program, state, batch) in runs.items():
      started_s = time.perf_counter()
      for _ in range(_STEPS):
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
      runs[name][1] = state
      if turn:
        found[name].append((time.perf_counter() - started_s) / _STEPS)
  rows = []
  for name in names:
    ratios = [
      mine / theirs
      for mine, theirs in zip(found[name], found["ssgd"], strict=True)
    ]
    rows.append(
      training.make_row(
        dataclasses.asdict(options) | {"variants": (), "blocks": blocks},
        0,
        method=name,
        workers=options.workers,
        step_s=statistics.median(found[name]),
        ratio=statistics.median(ratios),
        quartiles=statistics.quantiles(ratios, n=4)[::2],
        messages_per_step=_messages(sent[name], conditional=False),
        messages_per_round=_messages(sent[name], conditional=True),
      )
    )
    row = rows[-1]
    low, high = row["quartiles"]
    print(
      f"{name:30s} {1e3 * row['step_s']:6.1f} ms, {row['ratio']:.3f} of ssgd "
      f"({low:.3f} to {high:.3f})",
      flush=True,
    )
  return rows


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


if __name__ == "__main__":
  chosen = tyro.extras.overridable_config_cli(config.PRESETS)
  preset = next(word for word in sys.argv[1:] if word in config.PRESETS)
  folder = pathlib.Path(__file__).resolve().parent / "results"
  path = folder / f"{preset}-times.jsonl"
  measured = measure(chosen, blocks=9)
  path.unlink(missing_ok=True)
  training.append_rows(path, measured)
