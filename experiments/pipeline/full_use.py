"""Plans pipelines at full use without late gradients, at equal micro-batches.

    python experiments/pipeline/full_use.py hosts
    python experiments/pipeline/full_use.py hosts report

The cells of `run.py` with one, two and four times as many micro-batches of the
same batch.  Our search takes tables whose gradients are never late, so that its
updates are those of the unsplit model; every baseline has the same
micro-batches, with its paper's partition and with the one that our search finds
for its table.
"""

import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import methods
import report
import run
import studies

from jdist import training

FACTORS = (1, 2, 4)
_PARTITIONS = {"paper": "their papers' partitions", "ours": "our partitions"}


def _path(preset: str) -> pathlib.Path:
  return run.FOLDER / f"{preset}-full-use.jsonl"


def results(made: methods.Cell) -> list[dict[str, Any]]:
  """Returns what our search and the baselines come to, for each factor."""
  found = []
  for factor in FACTORS:
    cell = made.finer(factor)

    def row(
      method: str, partition: str, plan: Any, *args: Any,
      cell: methods.Cell = cell, factor: int = factor,
    ) -> None:  # fmt: skip
      try:
        result = plan(cell, *args)
      except ValueError as error:
        result = {"samples_per_s": 0.0, "reason": str(error)}
      names = {"method": method, "partition": partition, "factor": factor}
      found.append(names | result)

    row("ours", "in time", methods.in_time)
    for name in methods.BASELINES:
      row(name, "paper", methods.by_its_paper, name)
      row(name, "ours", methods.by_our_plan, name)
  return found


Rates = Mapping[tuple[str, str, int], float]


def rates(rows: Iterable[report.Row]) -> dict[report.Cell, dict[Any, float]]:
  """Returns the samples a second of each cell by method, partition, factor."""
  found: dict[report.Cell, dict[Any, float]] = {}
  for row in rows:
    cell = row["network"], row["topology"], row["stages"]
    key = row["method"], row["partition"], row["factor"]
    found.setdefault(cell, {})[key] = row["samples_per_s"]
  return found


def _best(cell: Rates, method: str, partition: str, factors: Any) -> float:
  return max(cell[method, partition, factor] for factor in factors)


def table(cells: Mapping[report.Cell, Rates]) -> str:
  """Returns the gains by micro-batches and by the baselines' partitions."""
  ways = [(f"{x} S" if x > 1 else "S", [x], [x]) for x in FACTORS]
  ways.append(("its best", [*FACTORS], [*FACTORS]))
  ways.append(("S, ours its best", [*FACTORS], [1]))
  lines = []
  for stages in sorted({cell[2] for cell in cells}, reverse=True):
    chosen = [x for cell, x in cells.items() if cell[2] == stages]
    for partition, words in _PARTITIONS.items():
      for name, ours, theirs in ways:
        gains = _gains(chosen, partition, ours, theirs)
        lines.append([stages, words, name, *gains])
  return studies.table(
    "stages | baselines with | M of each | mean | geometric | without naive | "
    "over the best baseline | least over it",
    lines,
  )


def _gains(
  cells: Sequence[Rates],
  partition: str,
  our_factors: Sequence[int],
  factors: Sequence[int],
) -> list[str]:
  every, plain, best = [], [], []
  for cell in cells:
    ours = _best(cell, "ours", "in time", our_factors)
    others = {
      name: _best(cell, name, partition, factors) for name in methods.BASELINES
    }
    gains = {name: ours / x for name, x in others.items() if x}
    every += gains.values()
    plain += [x for name, x in gains.items() if name != "naive"]
    best.append(min(gains.values()))
  return [
    f"**{statistics.mean(every):.2f}**",
    f"{statistics.geometric_mean(every):.2f}",
    f"{statistics.mean(plain):.2f}",
    f"{statistics.mean(best):.3f}",
    f"{min(best):.3f}",
  ]


def room(cells: Mapping[report.Cell, Rates], stages: int) -> str:
  """Returns a sentence on what is left to gain at equal micro-batches.

  The best rate of any of our plans in a cell, at any number of micro-batches
  and with late gradients or without, stands for a plan that never waits.
  """
  chosen = [x for cell, x in cells.items() if cell[2] == stages]
  means, full = [], []
  for factor in FACTORS:
    found = []
    for cell in chosen:
      own = [x for (_, partition, _), x in cell.items() if partition != "paper"]
      theirs = [cell[name, "paper", factor] for name in methods.BASELINES]
      found += [max(own) / x for x in theirs if x]
      full.append((factor, cell["ours", "in time", factor] / max(own)))
    times = f"{factor} S" if factor > 1 else "S"
    means.append(f"{statistics.mean(found):.2f} at M = {times}")
  least = min(x for factor, x in full if factor == 2)
  count = sum(factor == 2 and x > 0.995 for factor, x in full)
  return (
    f"Without any wait of ours the mean at {stages} stages would be "
    f"{', '.join(means)}. At 2 S {count} of {len(chosen)} cells are there, the "
    f"others at {least:.3f} at least."
  )


def taken(rows: Sequence[report.Row]) -> str:
  """Returns a sentence on the tables that our search took."""
  ours = [x for x in rows if x["method"] == "ours"]
  counts: dict[str, int] = {}
  for row in ours:
    counts[row["table"]] = counts.get(row["table"], 0) + 1
  names = ", ".join(f"{name} in {x}" for name, x in counts.items())
  late = max(row["delay"] for row in ours)
  return f"The search took {names} of {len(ours)} plans; delay {late} at most."


def show(preset: str) -> None:
  """Prints the table of the rows."""
  rows = training.read_rows(_path(preset))
  print(table(rates(rows)))
  print(room(rates(rows), 8))
  print(taken(rows))


if __name__ == "__main__":
  preset = sys.argv[1]
  if "report" in sys.argv[2:]:
    show(preset)
  else:
    run.main(_path(preset), config.PRESETS[preset][1], results)
