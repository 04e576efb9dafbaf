"""The table of the comparison, from its rows.

python experiments/first_comparison/report.py
"""

import pathlib

from jdist import training
from jdist.training import comparison

if __name__ == "__main__":
  results = pathlib.Path(__file__).resolve().parent / "results"
  compared = training.read_rows(results / "rows.jsonl")
  tried = training.read_rows(results / "tuning.jsonl")
  rows = [{"purpose": "comparison"} | row for row in compared]
  rows += [{"purpose": "tuning"} | row for row in tried]
  print(comparison.accuracy_table(comparison.best_runs(rows)))
