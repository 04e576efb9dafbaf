"""The tables and the plot of a comparison of chains, from its rows."""

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jdist import cluster
from jdist.training import _plots
from jdist.training.comparison import _differences, _labels, _rows, _study

Runs: TypeAlias = Mapping[str, Sequence[_rows.Row]]

_LATENCY_S = 50e-6
LINKS = {
  "10 Mbit/s": 1e7,
  "100 Mbit/s": 1e8,
  "1 Gbit/s": 1e9,
  "10 Gbit/s": 1e10,
  "100 Gbit/s": 1e11,
}


def tuned_rates(rows: Sequence[_rows.Row]) -> dict[str, _study.Tuned]:
  """Returns each variant's learning rate, from its tuning rows."""
  tried: dict[str, dict[float, list[_rows.Row]]] = {}
  for row in rows:
    if row["purpose"] == "tuning":
      own = tried.setdefault(row["method"], {})
      own.setdefault(row["learning_rate"], []).append(row)
  return {
    method: _study.best_of(
      {rate: _study.mean_rank(seeds) for rate, seeds in own.items()}
    )
    for method, own in tried.items()
  }


def best_runs(rows: Sequence[_rows.Row]) -> dict[str, list[_rows.Row]]:
  """Returns the rows of each variant at its best rate, all seeds."""
  tuned = tuned_rates(rows)
  found: dict[str, list[_rows.Row]] = {}
  for row in rows:
    method, rate = row["method"], row["learning_rate"]
    if row["purpose"] == "comparison" and (
      method not in tuned or tuned[method].best == rate
    ):
      found.setdefault(method, []).append(row)
  return found


def end_warnings(rows: Sequence[_rows.Row]) -> list[str]:
  """Returns a line for each end of the grid that is best for some variants."""
  tuned = tuned_rates(rows).items()
  found = []
  for end in ("lowest", "highest"):
    methods = [method for method, one in tuned if one.end == end]
    if methods:
      found.append(f"Best at the {end} rate tried: {', '.join(methods)}.")
  return found


def mean_accuracy(rows: Sequence[_rows.Row]) -> tuple[float, float]:
  """Returns mean and standard deviation over seeds, in percent."""
  found = [_differences.accuracy(row) for row in rows]
  spread = statistics.stdev(found) if len(found) > 1 else 0.0
  return statistics.mean(found), spread


def accuracy_table(runs: Runs) -> str:
  """Returns a Markdown table, the most accurate variant first."""
  lines = [
    "| variant | test accuracy, % (mean ± standard deviation) | seeds | rounds "
    "| MB sent | fewer bytes | learning rate |",
    "|---|---|---|---|---|---|---|",
  ]
  most = max(row["sent_bytes"] for rows in runs.values() for row in rows)

  for method, rows in sorted(
    runs.items(), key=lambda item: -mean_accuracy(item[1])[0]
  ):
    mean, spread = mean_accuracy(rows)
    shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "")
    sent = statistics.mean(row["sent_bytes"] for row in rows)
    rounds = statistics.mean(row["rounds"] for row in rows)
    lines.append(
      f"| {method} | {shown} | {len(rows)} | {rounds:,.0f} | {sent / 1e6:,.0f} "
      f"| {most / sent:.1f}x | {rows[0]['learning_rate']:g} |"
    )
  return "\n".join(lines)


def speedups(
  runs: Runs, times: Mapping[str, _rows.Row]
) -> dict[str, list[float]]:
  """Returns how much sooner than synchronous SGD a run ends, by bandwidth.

  Nothing is sent under computation: a step takes the sum of its computation,
  as measured, of its bytes over the link, and of its messages' latencies.

  Args:
    runs: the rows of each variant.
    times: the row of `step_times` of each.
  """
  plain_s = times["ssgd"]["step_s"]

  def step_s(method: str, bandwidth_bits_per_s: float) -> float:
    row, time = runs[method][0], times[method]
    per_step = row["rounds"] / row["steps"]
    link = cluster.Link(bandwidth_bits_per_s, _LATENCY_S)
    messages = time["messages_per_step"] + per_step * time["messages_per_round"]
    sent = row["sent_bytes"] / row["steps"]
    return time["ratio"] * plain_s + link.send_s(sent, messages)

  return {
    method: [
      step_s("ssgd", speed) / step_s(method, speed) for speed in LINKS.values()
    ]
    for method in runs
    if method in times
  }


def speed_table(
  found: Mapping[str, Sequence[float]], times: Mapping[str, _rows.Row]
) -> str:
  """Returns a Markdown table, the fastest over the slowest link first."""
  lines = [
    "| variant | computation of a step, of ssgd's (quartiles) | "
    + " | ".join(LINKS)
    + " |",
    "|---|---|" + "---|" * len(LINKS),
  ]
  for method, ratios in sorted(found.items(), key=lambda item: -item[1][0]):
    row = times[method]
    low, high = row["quartiles"]
    shown = " | ".join(f"{x:.2f}" for x in ratios)
    lines.append(
      f"| {method} | {row['ratio']:.2f} ({low:.2f} to {high:.2f}) | {shown} |"
    )
  return "\n".join(lines)


def plot_bytes(runs: Runs, path: str | os.PathLike[str], *, ours: str) -> None:
  """Draws accuracy against bytes; above and to the left is better.

  Args:
    runs: the rows of each variant.
    path: of the PNG.
    ours: variants whose names begin so are marked.

  Raises:
    ImportError: when matplotlib is missing.
  """
  plt = _plots.pyplot()
  # The more there are, the more room their labels need.
  size = (7.5, 4.8) if len(runs) < 12 else (10.5, 6.8)
  figure, axes = plt.subplots(figsize=size, layout="constrained")
  labels = []
  for method, rows in runs.items():
    mean, spread = mean_accuracy(rows)
    sent = statistics.mean(row["sent_bytes"] for row in rows) / 1e6
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
  front = _front([(sent, mean) for sent, mean, _ in labels])
  axes.plot(*zip(*front, strict=True), color="#999999", lw=1, zorder=0)
  some: Any = next(iter(runs.values()))[0]
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
  _labels.label_points(axes, labels)
  figure.savefig(path, dpi=130)
  plt.close(figure)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the points (bytes, accuracy) that no other is better than in both.

  >>> _front([(2, 0.6), (1, 0.5), (2, 0.7), (3, 0.65)])
  [(1, 0.5), (2, 0.7)]
  """
  front: list[tuple[float, float]] = []
  for sent, mean in sorted(points, key=lambda one: (one[0], -one[1])):
    if not front or mean > front[-1][1]:
      front.append((sent, mean))
  return front
