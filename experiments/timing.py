"""Measures what each method adds to a step on this machine.

All workers share the machine and what they send is copied in its memory, so
that this is the cost of encoding, decoding and updating.  Methods take turns;
what is kept is the median of paired ratios to the synchronous variant, beside
that of this to itself, which is the noise of the machine.  Reports model the
time over links from it.
"""

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import comparing
import jax
import tyro

from jdist import cluster, collectives, training

_STEPS = 8  # With one round's end in them.


def measure(
  options: comparing.Config,
  variants: dict[str, comparing.Variant],
  comparison_type: type[comparing.Comparison] = comparing.Comparison,
  *,
  base: str = "ssgd",
  blocks: int = 9,
) -> list[dict[str, Any]]:
  """A row for each variant.

  Args:
    options: the comparison whose steps are measured.
    variants: by name.
    comparison_type: what prepares them.
    base: the synchronous one.
    blocks: how often each variant has its turn.
  """
  names = [*(options.variants or variants)]
  again = f"{base} again"
  variants = variants | {again: variants[base]}
  names = [base, again, *(name for name in names if name != base)]
  comparison = comparison_type(options, variants)
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
  # No variants, as each has its row, and nobody's folders.
  told = {
    key: value
    for key, value in dataclasses.asdict(options).items()
    if key not in ("variants", "cache")
  }
  for name in names:
    ratios = [
      mine / theirs
      for mine, theirs in zip(found[name], found[base], strict=True)
    ]
    rows.append(
      training.make_row(
        told | {"blocks": blocks},
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
      f"{name:30s} {1e3 * row['step_s']:6.1f} ms, {row['ratio']:.3f} of {base} "
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
  path = folder / "results" / f"{preset}-times.jsonl"
  measured = measure(chosen, variants, comparison_type, base=base)
  path.unlink(missing_ok=True)
  training.append_rows(path, measured)
