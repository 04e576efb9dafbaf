"""The tables and the picture of the comparison, from its rows.

python experiments/compression/report.py cifar10
"""

import pathlib
import sys

from jdist import training
from jdist.training import comparison

# Fresh ones: nothing was chosen by them.
_FRESH = range(10, 1000)


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  comparison.report_experiment(folder, ours="powersgd rank 6")
  name = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  runs = comparison.best_runs(training.read_rows(results / f"{name}.jsonl"))
  if "ssgd" in runs:
    table = comparison.difference_table(runs, "ssgd", _FRESH)
    if table.count("\n") > 1:
      print(f"\nPaired with synchronous SGD, seeds from 10 on:\n\n{table}")
  measured = results / f"{name}-times.jsonl"
  if measured.exists():
    times = {row["method"]: row for row in training.read_rows(measured)}
    print("\nSooner than synchronous SGD, by a factor, over links of\n")
    print(comparison.speed_table(comparison.speedups(runs, times), times))


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
