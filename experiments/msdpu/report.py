"""The tables and the picture of the comparison, from its rows.

python experiments/msdpu/report.py cifar10
python experiments/msdpu/report.py overlap  # what streaming hides between hosts
"""

import pathlib
import sys
from typing import Any

from jdist import training
from jdist.training import comparison

# Fresh ones: nothing was chosen by them.
_FRESH = range(100, 1000)
# What others are paired with: the same bytes without delay and correction, too.
_BASES = (
  "ssgd",
  "local_sgd, MSDPU's rounds, int4",
  "local_sgd, MSDPU's rounds",
)


def validation_table(rows: list[dict[str, Any]]) -> str:
  """Returns each variant's runs on held-out images, one for each rate."""
  tried = [row for row in rows if row["purpose"] == "tuning"]
  most = max(row["sent_bytes"] for row in tried)
  lines = [
    "| variant | learning rate | held-out accuracy, % | rounds | fewer bytes |",
    "|---|---|---|---|---|",
  ]
  for row in sorted(
    tried, key=lambda row: (row["method"], row["learning_rate"])
  ):
    lines.append(
      f"| {row['method']} | {row['learning_rate']:g} | "
      f"{comparison.accuracy(row):.2f} | {row['rounds']:,} | "
      f"{most / row['sent_bytes']:.1f}x |"
    )
  return "\n".join(lines)


def overlap_table(rows: list[dict[str, Any]]) -> str:
  """Returns the steps of runs of twenty blocks, beside what they consist of."""
  lines = [
    "| run | step | ms | computation / communication, ms "
    "| over the longer of both | over their sum | hidden of the shorter, % |",
    "|---|---|---|---|---|---|---|",
  ]
  found = [row["steps"] for row in rows if row["config"]["blocks"] >= 20]
  for number, steps in enumerate(found, 1):
    for name in ("ssgd", "streamed H=1", "streamed H=4"):
      step = steps[name]
      longer, both = step["all_hidden_ms"], step["none_hidden_ms"]
      hidden = (both - step["step_ms"]) / (both - longer)
      parts = steps["computation"]["step_ms"], both
      lines.append(
        f"| {number} | {name} | {step['step_ms']:.0f} "
        f"| {parts[0]:.0f} / {parts[1] - parts[0]:.0f} "
        f"| {step['over_all_hidden']:.2f} | {step['over_none_hidden']:.2f} "
        f"| {100 * hidden:.0f} |"
      )
  return "\n".join(lines)


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  preset = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  rows = training.read_rows(folder / "results" / f"{preset}.jsonl")
  if preset == "overlap":
    print(overlap_table(rows))
    return
  comparison.report_experiment(folder, ours="msdpu")
  runs = comparison.best_runs(rows)
  # Parts are taken from MSDPU.
  for base in _BASES if "ssgd" in runs else ("msdpu, int4",):
    if base not in runs:
      continue
    table = comparison.difference_table(runs, base, _FRESH)
    if table.count("\n") > 1:
      print(f"\nPaired with {base}, seeds from {_FRESH[0]} on:\n\n{table}")
  if any(row["purpose"] == "tuning" for row in rows):
    print(f"\nOn held-out images, one seed:\n\n{validation_table(rows)}")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
