"""The tables and the picture of the comparison, from its rows.

python experiments/compression/report.py cifar10
python experiments/compression/report.py codecs  # what encoding costs
"""

import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jdist import training
from jdist.training import comparison


def against(runs: comparison.Runs, base: str) -> str:
  """Markdown: each variant beside the base, by the seeds that both have."""
  lines = [
    f"| variant | test accuracy, % | seeds | points more than {base} "
    "(mean, 95 % interval) | fewer bytes | learning rate |",
    "|---|---|---|---|---|---|",
  ]
  others = {row["seed"]: row for row in runs[base]}
  for name, rows in sorted(
    runs.items(), key=lambda item: -comparison.mean_accuracy(item[1])[0]
  ):
    mean, spread = comparison.mean_accuracy(rows)
    found = comparison.paired_difference(rows, runs[base])
    points = ""
    if found is not None and name != base:
      points = f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})"
    elif len(rows) == 1 and rows[0]["seed"] in others:
      other = others[rows[0]["seed"]]
      points = (
        f"{comparison.accuracy(rows[0]) - comparison.accuracy(other):+.2f}"
      )
    sent = [
      statistics.mean(row["sent_bytes"] for row in own)
      for own in (runs[base], rows)
    ]
    shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "")
    lines.append(
      f"| {name} | {shown} | {len(rows)} | {points} | {sent[0] / sent[1]:.1f}x "
      f"| {rows[0]['learning_rate']:g} |"
    )
  single = {rows[0]["seed"] for rows in runs.values() if len(rows) == 1}
  lines += [
    f"\nWith seed {seed} {base} has {comparison.accuracy(others[seed]):.2f} %."
    for seed in sorted(single & others.keys())
  ]
  return "\n".join(lines)


def by_rate(rows: Sequence[comparison.Row]) -> str:
  """Markdown: held-out accuracy at each rate, and that of tests beside it."""
  rates = sorted({row["learning_rate"] for row in rows})
  lines = [
    "| variant | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
    "|---|" + "---|" * len(rates),
  ]
  for name in dict.fromkeys(row["method"] for row in rows):
    cells = []
    for rate in rates:
      own = [
        row
        for row in rows
        if (row["method"], row["learning_rate"]) == (name, rate)
      ]
      held = [x for x in own if x["purpose"] == "tuning"]
      tests = [x for x in own if x["purpose"] == "comparison"]
      cell = " ".join(f"{comparison.accuracy(x):.2f}" for x in held)
      if tests:
        cell += f" (test {comparison.mean_accuracy(tests)[0]:.2f})"
      cells.append(cell)
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines)


def base_step(times: Mapping[str, comparison.Row]) -> str:
  """Text: how long synchronous SGD's step takes, and beside itself."""
  again = times["ssgd again"]
  low, high = again["quartiles"]
  return (
    f"A step of ssgd takes {1e3 * times['ssgd']['step_s']:.0f} ms, beside "
    f"itself {again['ratio']:.2f} ({low:.2f} to {high:.2f})."
  )


def codec_table(row: comparison.Row) -> str:
  """Markdown: what each codec takes, in copies of the same tensor."""
  lines = [
    "| codec | smaller by | encode, copies (quartiles) | decode |",
    "|---|---|---|---|",
    f"| none, a second copy | 1.0x | {_copies(row['copy_again'])} | |",
  ]
  for name, one in row["codecs"].items():
    cells = [_copies(one[part]) for part in ("encode", "decode")]
    lines.append(
      f"| {name} | {one['compression']:.1f}x | {' | '.join(cells)} |"
    )
  if "sort" in row:
    lines.append(f"| a sort of all entries | | {_copies(row['sort'])} | |")
  return "\n".join(lines)


def _copies(time: Mapping[str, Any]) -> str:
  low, high = time["quartiles"]
  return f"{time['median']:.2f} ({low:.2f} to {high:.2f})"


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  name = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  rows = training.read_rows(results / f"{name}.jsonl")
  if name == "codecs":
    print("\n\n".join(map(codec_table, rows)))
    return
  runs = comparison.best_runs(rows)
  if runs:
    comparison.report_experiment(folder, ours="powersgd rank 6")
  if "ssgd" in runs:
    print(f"\nBeside synchronous SGD:\n\n{against(runs, 'ssgd')}")
  print(f"\nAccuracy on held-out images by rate:\n\n{by_rate(rows)}")
  measured = results / f"{name}-times.jsonl"
  if measured.exists():
    times = {row["method"]: row for row in training.read_rows(measured)}
    print("\nSooner than synchronous SGD, by a factor, over links of\n")
    print(comparison.speed_table(comparison.speedups(runs, times), times))
    print(f"\n{base_step(times)}")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
