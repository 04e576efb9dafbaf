"""The tables and the picture of the comparison, from its rows.

python experiments/msdpu/report.py cifar10
python experiments/msdpu/report.py overlap  # what streaming hides between hosts
"""

import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import optax_chains
import studies

from jdist import training
from jdist.training import comparison

# Fresh seeds, by which nothing was chosen.
_FRESH = range(100, 1000)
# Variants that others are paired with. Two of them send the same bytes as MSDPU
# without its delay and correction.
_BASES = (
  "ssgd",
  "local_sgd, MSDPU's rounds, int4",
  "local_sgd, MSDPU's rounds",
)


def validation_table(tried: list[comparison.Row]) -> str:
  """Returns a table of runs on held-out images, a line for each rate."""
  most = max(row["sent_bytes"] for row in tried)
  groups: dict[tuple[str, float], list[comparison.Row]] = {}
  for row in sorted(tried, key=lambda x: (x["method"], x["learning_rate"])):
    groups.setdefault((row["method"], row["learning_rate"]), []).append(row)
  return studies.table(
    "variant | learning rate | held-out accuracy, % | rounds | fewer bytes",
    [
      f"{method} | {rate:g} "
      f"| {statistics.fmean(map(comparison.accuracy, rows)):.2f} "
      f"| {rows[0]['rounds']:,} | {most / rows[0]['sent_bytes']:.1f}x"
      for (method, rate), rows in groups.items()
    ],
  )


def overlap_table(rows: list[comparison.Row]) -> str:
  """Returns a table of measured steps and of their parts."""
  lines = []
  found = [row for row in rows if row["config"]["blocks"] >= 20]
  for number, row in enumerate(found, 1):
    steps, jax = row["steps"], row["versions"]["jax"]
    compute_ms = steps["computation"]["step_ms"]
    for name in ("ssgd", "streamed H=1", "streamed H=4"):
      step = steps[name]
      longer, both = step["all_hidden_ms"], step["none_hidden_ms"]
      hidden = (both - step["step_ms"]) / (both - longer)
      lines.append(
        f"{number} | {jax} | {name} | {step['step_ms']:.0f} "
        f"| {compute_ms:.0f} / {both - compute_ms:.0f} "
        f"| {step['over_all_hidden']:.2f} | {step['over_none_hidden']:.2f} "
        f"| {100 * hidden:.0f}"
      )
  return studies.table(
    "run | JAX | step | ms | computation / communication, ms | over the longer "
    "of both | over their sum | hidden of the shorter, %",
    lines,
  )


def main(folder: pathlib.Path) -> None:
  """Prints and draws the results of a preset."""
  preset = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  rows = training.read_rows(folder / "results" / f"{preset}.jsonl")
  if preset == "overlap":
    print(overlap_table(rows))
    return
  optax_chains.report_experiment(folder, ours="msdpu")
  runs = studies.best_runs(rows)
  # Without synchronous SGD, the variants are parts of MSDPU.
  for base in _BASES if "ssgd" in runs else ("msdpu, int4",):
    if base not in runs:
      continue
    table = studies.difference_table(runs, base, _FRESH)
    if table.count("\n") > 1:
      print(f"\nPaired with {base}, seeds from {_FRESH[0]} on:\n\n{table}")
  if tried := [row for row in rows if row["purpose"] == "tuning"]:
    number = len({row["seed"] for row in tried})
    seeds = "one seed" if number == 1 else f"the mean of {number} seeds"
    print(f"\nOn held-out images, {seeds}:\n\n{validation_table(tried)}")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
