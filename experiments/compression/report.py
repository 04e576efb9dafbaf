"""The tables and the pictures of the comparison, from its rows.

python experiments/compression/report.py cifar10
"""

import pathlib
import statistics
import sys
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import reporting

from jdist import cluster, training

Row: TypeAlias = dict[str, Any]

# Student's t, two-sided 95 %, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_LATENCY_S = 50e-6
_LINKS = {
  "10 Mbit/s": 1e7,
  "100 Mbit/s": 1e8,
  "1 Gbit/s": 1e9,
  "10 Gbit/s": 1e10,
  "100 Gbit/s": 1e11,
}


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


def speedups(
  runs: dict[str, list[Row]], times: dict[str, Row]
) -> dict[str, list[float]]:
  """How much sooner than synchronous SGD a run ends, by bandwidth.

  Nothing is sent under computation: the sum of a step's computation, as
  measured, of its bytes over the link, and of the latencies of its messages.
  """
  plain_s = times["ssgd"]["step_s"]

  def step_s(method: str, bandwidth_bits_per_s: float) -> float:
    row, told = runs[method][0], times[method]
    per_step = row["rounds"] / row["steps"]
    link = cluster.Link(bandwidth_bits_per_s, _LATENCY_S)
    messages = told["messages_per_step"] + per_step * told["messages_per_round"]
    sent = row["sent_bytes"] / row["steps"]
    return told["ratio"] * plain_s + link.send_s(sent, messages)

  return {
    method: [
      step_s("ssgd", speed) / step_s(method, speed) for speed in _LINKS.values()
    ]
    for method in runs
    if method in times
  }


def speed_table(found: dict[str, list[float]], times: dict[str, Row]) -> str:
  """Markdown, the fastest over the slowest link first."""
  lines = [
    "| variant | computation of a step, of ssgd's (quartiles) | "
    + " | ".join(_LINKS)
    + " |",
    "|---|---|" + "---|" * len(_LINKS),
  ]
  for method, ratios in sorted(found.items(), key=lambda item: -item[1][0]):
    row = times[method]
    low, high = row["quartiles"]
    told = " | ".join(f"{x:.2f}" for x in ratios)
    lines.append(
      f"| {method} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {told} |"
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
    print(speed_table(speedups(runs, times), times))


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
