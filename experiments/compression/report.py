"""The tables and the picture of the comparison, from its rows.

python experiments/compression/report.py cifar10
python experiments/compression/report.py codecs  # what encoding costs
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import optax_chains
import studies

from jdist import cluster, training
from jdist.training import comparison

_LATENCY_S = 50e-6
_LINKS = {
  "10 Mbit/s": 1e7,
  "100 Mbit/s": 1e8,
  "1 Gbit/s": 1e9,
  "10 Gbit/s": 1e10,
  "100 Gbit/s": 1e11,
}


def against(runs: studies.Runs, base: str) -> str:
  """Returns a table of differences to the base, paired by seeds."""
  others = {row["seed"]: row for row in runs[base]}
  sent = comparison.mean(runs[base], "sent_bytes")
  lines = []
  for name, rows in studies.by_accuracy(runs):
    mean, spread = studies.mean_accuracy(rows)
    found = comparison.paired_difference(rows, runs[base])
    points = ""
    if found is not None and name != base:
      points = found.interval()
    elif len(rows) == 1 and rows[0]["seed"] in others:
      other = comparison.accuracy(others[rows[0]["seed"]])
      points = f"{mean - other:+.2f}"
    shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "")
    lines.append(
      f"{name} | {shown} | {len(rows)} | {points} "
      f"| {sent / comparison.mean(rows, 'sent_bytes'):.1f}x "
      f"| {rows[0]['learning_rate']:g}"
    )
  table = studies.table(
    f"variant | test accuracy, % | seeds | points more than {base} (mean, "
    "95 % interval) | fewer bytes | learning rate",
    lines,
  )
  single = {rows[0]["seed"] for rows in runs.values() if len(rows) == 1}
  notes = [
    f"\nWith seed {seed} {base} has {comparison.accuracy(others[seed]):.2f} %."
    for seed in sorted(single & others.keys())
  ]
  return "\n".join([table, *notes])


def by_rate(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of held-out and test accuracies at each rate."""
  rates = sorted({row["learning_rate"] for row in rows})

  def cell(own: Sequence[comparison.Row], rate: float) -> str:
    own = [x for x in own if x["learning_rate"] == rate]
    tests = [x for x in own if x["purpose"] == "comparison"]
    found = " ".join(
      f"{comparison.accuracy(x):.2f}" for x in own if x["purpose"] == "tuning"
    )
    if tests:
      found += f" (test {studies.mean_accuracy(tests)[0]:.2f})"
    return found

  return studies.table(
    " | ".join(["variant", *(f"{rate:g}" for rate in rates)]),
    (
      (name, *(cell(own, rate) for rate in rates))
      for name, own in studies.group(rows, lambda x: x["method"]).items()
    ),
  )


def codec_table(row: comparison.Row) -> str:
  """Returns a table of encoding times, in copies of the same tensor."""

  def copies(time: Mapping[str, Any]) -> str:
    low, high = time["quartiles"]
    return f"{time['median']:.2f} ({low:.2f} to {high:.2f})"

  lines = [("none, a second copy", "1.0x", copies(row["copy_again"]), "")]
  for name, one in row["codecs"].items():
    times = copies(one["encode"]), copies(one["decode"])
    lines.append((name, f"{one['compression']:.1f}x", *times))
  if "sort" in row:
    lines.append(("a sort of all entries", "", copies(row["sort"]), ""))
  return studies.table(
    "codec | smaller by | encode, copies (quartiles) | decode", lines
  )


def speedups(runs: studies.Runs, times: Mapping[str, comparison.Row]) -> str:
  """Returns a table of speedups over synchronous SGD, by bandwidth.

  Nothing is sent during computation: a step takes the sum of its computation,
  as measured, of its bytes over the link, and of its messages' latencies.
  """
  plain_s = times["ssgd"]["step_s"]

  def step_s(method: str, bandwidth_bits_per_s: float) -> float:
    row, time = runs[method][0], times[method]
    per_step = row["rounds"] / row["steps"]
    link = cluster.Link(bandwidth_bits_per_s, _LATENCY_S)
    messages = time["messages_per_step"] + per_step * time["messages_per_round"]
    sent = row["sent_bytes"] / row["steps"]
    return time["ratio"] * plain_s + link.send_s(sent, messages)

  found = {
    method: [step_s("ssgd", x) / step_s(method, x) for x in _LINKS.values()]
    for method in runs
    if method in times
  }
  lines = []
  for method, ratios in sorted(found.items(), key=lambda item: -item[1][0]):
    row = times[method]
    low, high = row["quartiles"]
    own = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"
    lines.append([method, own, *(f"{x:.2f}" for x in ratios)])
  titles = "variant | computation of a step, of ssgd's (quartiles)"
  return studies.table(" | ".join([titles, *_LINKS]), lines)


def main(folder: pathlib.Path) -> None:
  """Prints and draws the results of a preset."""
  name = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  rows = training.read_rows(results / f"{name}.jsonl")
  if name == "codecs":
    print("\n\n".join(map(codec_table, rows)))
    return
  runs = studies.best_runs(rows)
  if runs:
    optax_chains.report_experiment(folder, ours="powersgd rank 6")
  if "ssgd" in runs:
    print(f"\nBeside synchronous SGD:\n\n{against(runs, 'ssgd')}")
  print(f"\nAccuracy on held-out images by rate:\n\n{by_rate(rows)}")
  measured = results / f"{name}-times.jsonl"
  if measured.exists():
    times = {row["method"]: row for row in training.read_rows(measured)}
    print("\nSooner than synchronous SGD, by a factor, over links of\n")
    print(speedups(runs, times))
    again = times["ssgd again"]
    low, high = again["quartiles"]
    print(
      f"\nA step of ssgd takes {1e3 * times['ssgd']['step_s']:.0f} ms, beside "
      f"itself {again['ratio']:.2f} ({low:.2f} to {high:.2f})."
    )


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
