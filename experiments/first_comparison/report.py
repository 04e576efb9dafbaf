"""The table of the comparison, from its rows.

python experiments/first_comparison/report.py
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import training

if __name__ == "__main__":
  results = pathlib.Path(__file__).resolve().parent / "results"
  compared = training.read_rows(results / "rows.jsonl")
  tried = training.read_rows(results / "tuning.jsonl")
  rows = [{"purpose": "comparison"} | row for row in compared]
  rows += [{"purpose": "tuning"} | row for row in tried]
  print(studies.accuracy_table(studies.best_runs(rows)))
  for row in training.read_rows(results / "bench_step.jsonl"):
    for name in ("step_ratio", "noise_ratio"):
      found = row[name]
      low, high = found["quartiles"]
      print(f"{name}: {found['median']:.3f}, {low:.3f} to {high:.3f}")
    print(
      f"short: {row['step_ratio']['median']:.2f}, "
      f"{row['noise_ratio']['median']:.2f}"
    )
    more = row["peak_bytes"]["jdist"] / row["peak_bytes"]["hand"] - 1
    print(f"peak memory: {100 * more:+.1f} %")
