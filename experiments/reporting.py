"""The table and the picture of a comparison, from its rows."""

import pathlib
import statistics
import sys
from typing import Any

import comparing
import labelling

from jdist import cluster, training

_LATENCY_S = 50e-6
LINKS = {
  "10 Mbit/s": 1e7,
  "100 Mbit/s": 1e8,
  "1 Gbit/s": 1e9,
  "10 Gbit/s": 1e10,
  "100 Gbit/s": 1e11,
}


def best(rows: list[dict[str, Any]]) -> dict[str, float]:
  """Each variant's learning rate, from its tuning rows."""
  found: dict[str, dict[str, Any]] = {}
  for row in rows:
    if row["purpose"] == "tuning":
      other = found.get(row["method"], row)
      found[row["method"]] = max(other, row, key=comparing.quality)
  return {method: row["learning_rate"] for method, row in found.items()}


def at_an_end(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
  """Variants whose best rate is the lowest or the highest that was tried.

  Beyond it there may be a better one.
  """
  tried: dict[str, set[float]] = {}
  for row in rows:
    if row["purpose"] == "tuning":
      tried.setdefault(row["method"], set()).add(row["learning_rate"])
  found: dict[str, list[str]] = {"lowest": [], "highest": []}
  for method, rate in best(rows).items():
    rates = tried[method]
    if len(rates) > 1 and rate in (min(rates), max(rates)):
      found["lowest" if rate == min(rates) else "highest"].append(method)
  return found


def compared(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
  """The rows of each variant at its best rate, all seeds."""
  rates = best(rows)
  found: dict[str, list[dict[str, Any]]] = {}
  for row in rows:
    if row["purpose"] != "comparison":
      continue
    if row["learning_rate"] == rates.get(row["method"], row["learning_rate"]):
      found.setdefault(row["method"], []).append(row)
  return found


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
  """Markdown, the most accurate first."""
  lines = [
    "| variant | test accuracy, % (mean ± standard deviation) | seeds | rounds "
    "| MB sent | fewer bytes | learning rate |",
    "|---|---|---|---|---|---|---|",
  ]
  most = max(row["sent_bytes"] for rows in runs.values() for row in rows)

  def accuracies(rows: list[dict[str, Any]]) -> list[float]:
    return [100 * row["accuracy"] for row in rows]

  for method, rows in sorted(
    runs.items(), key=lambda item: -statistics.mean(accuracies(item[1]))
  ):
    found = accuracies(rows)
    told = f"{statistics.mean(found):.2f}"
    if len(found) > 1:
      told += f" ± {statistics.stdev(found):.2f}"
    sent = statistics.mean(row["sent_bytes"] for row in rows)
    rounds = statistics.mean(row["rounds"] for row in rows)
    lines.append(
      f"| {method} | {told} | {len(rows)} | {rounds:,.0f} | {sent / 1e6:,.0f} "
      f"| {most / sent:.1f}x | {rows[0]['learning_rate']:g} |"
    )
  return "\n".join(lines)


def speedups(
  runs: dict[str, list[dict[str, Any]]], times: dict[str, dict[str, Any]]
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
      step_s("ssgd", speed) / step_s(method, speed) for speed in LINKS.values()
    ]
    for method in runs
    if method in times
  }


def speed_table(
  found: dict[str, list[float]], times: dict[str, dict[str, Any]]
) -> str:
  """Markdown, the fastest over the slowest link first."""
  lines = [
    "| variant | computation of a step, of ssgd's (quartiles) | "
    + " | ".join(LINKS)
    + " |",
    "|---|---|" + "---|" * len(LINKS),
  ]
  for method, ratios in sorted(found.items(), key=lambda item: -item[1][0]):
    row = times[method]
    low, high = row["quartiles"]
    told = " | ".join(f"{x:.2f}" for x in ratios)
    lines.append(
      f"| {method} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {told} |"
    )
  return "\n".join(lines)


def draw(
  runs: dict[str, list[dict[str, Any]]], path: pathlib.Path, *, ours: str
) -> None:
  """Accuracy against bytes: what is above and to the left is better.

  Args:
    runs: the rows of each variant.
    path: of the picture.
    ours: how the names of the methods begin that are marked.
  """
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  # The more there are, the more room their names need.
  size = (7.5, 4.8) if len(runs) < 12 else (10.5, 6.8)
  figure, axes = pyplot.subplots(figsize=size, layout="constrained")
  points, labels = [], []
  for method, rows in runs.items():
    found = [100 * row["accuracy"] for row in rows]
    mean = statistics.mean(found)
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    sent = statistics.mean(row["sent_bytes"] for row in rows) / 1e6
    points.append((sent, mean))
    labels.append((sent, mean, method))
    marked = method.startswith(ours)
    axes.errorbar(
      sent,
      mean,
      spread,
      fmt="D" if marked else "o",
      color="#d55e00" if marked else "#0072b2",
      capsize=3,
    )
  front, highest = [], float("-inf")
  for sent, mean in sorted(points):
    if mean > highest:
      front.append((sent, mean))
      highest = mean
  axes.plot(*zip(*front, strict=True), color="#999999", lw=1, zorder=0)
  some = next(iter(runs.values()))[0]
  axes.set_xscale("log")
  axes.margins(x=0.15, y=0.12)
  axes.set_xlabel(f"MB sent by each worker (N = {some['workers']}), log scale")
  axes.set_ylabel("test accuracy, %")
  alpha = some["config"].get("alpha")
  skewed = "" if alpha is None else f" (labels skewed, alpha {alpha:g})"
  axes.set_title(
    f"{some['config']['dataset']}{skewed}, {some['config']['model']}, "
    f"{some['config']['epochs']:g} epochs; bars: standard deviation",
    fontsize=11,
  )
  axes.grid(alpha=0.3)
  labelling.label(axes, labels)
  figure.savefig(path, dpi=130)


def main(folder: pathlib.Path, *, ours: str) -> None:
  """Prints the table of the preset that the command line names, and draws.

  Args:
    folder: the experiment's.
    ours: see `draw`.
  """
  name = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  rows = training.read_rows(results / f"{name}.jsonl")
  runs = compared(rows)
  print(table(runs))
  for end, methods in at_an_end(rows).items():
    if methods:
      print(f"\nBest at the {end} rate tried: {', '.join(methods)}.")
  draw(runs, results / f"{name}.png", ours=ours)
