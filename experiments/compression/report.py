"""The tables and the pictures of the comparison, from its rows.

python experiments/compression/report.py cifar10
"""

import pathlib
import statistics
import sys
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import reporting

from jdist import training

Row: TypeAlias = dict[str, Any]

# Student's t, two-sided 95 %, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def paired(runs: dict[str, list[Row]], seeds: set[int]) -> str:
  """Differences to synchronous SGD with the same seeds, in points.

  Args:
    runs: the rows of each variant.
    seeds: those that count, for instance fresh ones.
  """
  base = {row["seed"]: row for row in runs["ssgd"] if row["seed"] in seeds}
  lines = [
    "| variant | points more than ssgd (mean, 95 % interval) | paired seeds "
    "| fewer bytes |",
    "|---|---|---|---|",
  ]
  for method, rows in runs.items():
    pairs = [(row, base[row["seed"]]) for row in rows if row["seed"] in base]
    if method == "ssgd" or not 2 <= len(pairs) <= len(_T) + 1:
      continue
    found = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
    half = _T[len(found) - 2] * statistics.stdev(found) / len(found) ** 0.5
    mean = statistics.mean(found)
    fewer = statistics.mean(b["sent_bytes"] / a["sent_bytes"] for a, b in pairs)
    lines.append(
      f"| {method} | {mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}) "
      f"| {len(found)} | {fewer:.1f}x |"
    )
  return "\n".join(lines)


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  reporting.main(folder, ours="powersgd rank 6")
  name = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  runs = reporting.compared(training.read_rows(results / f"{name}.jsonl"))
  if "ssgd" in runs:
    # From 10 on they are fresh: nothing was chosen by them.
    told = paired(runs, set(range(10, 1000)))
    if told.count("\n") > 1:
      print(f"\nPaired with synchronous SGD, seeds from 10 on:\n\n{told}")
  measured = results / f"{name}-times.jsonl"
  if measured.exists():
    times = {row["method"]: row for row in training.read_rows(measured)}
    print("\nSooner than synchronous SGD, by a factor, over links of\n")
    print(reporting.speed_table(reporting.speedups(runs, times), times))


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
