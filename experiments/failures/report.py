"""The tables and the picture of the experiment, from its rows.

python experiments/failures/report.py          # in time alone
python experiments/failures/report.py mnist    # with gradients, too
"""

import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import config

from jdist import training
from jdist.training import comparison

Row: TypeAlias = dict[str, Any]
_COLOURS = {
  "bsp, one job": "#999999", "bsp": "#333333", "bsp, backups": "#cc79a7",
  "ssp": "#e69f00", "asp": "#0072b2", "h_ps": "#d55e00",
  "h_ps, local step": "#f0a070", "decoupled_diloco": "#009e73",
}  # fmt: skip


def goodputs(rows: Sequence[Row], workers: int) -> str:
  """Markdown: goodput of each protocol by the part of the time down."""
  own = [row for row in rows if row["config"]["workers"] == workers]
  fractions = sorted({row["config"]["fraction"] for row in own})
  titles = " | ".join(f"{100 * x:g} % down" for x in fractions)
  lines = [f"| goodput, % | {titles} |", "|---|" + "---|" * len(fractions)]
  for variant in config.VARIANTS:
    found = {
      row["config"]["fraction"]: row for row in own if row["method"] == variant
    }
    cells = [
      f"{100 * found[x]['goodput']:.1f}" if x in found else ""
      for x in fractions
    ]
    lines.append(f"| {variant} | {' | '.join(cells)} |")
  return "\n".join(lines)


def _by_variant(rows: Sequence[Row], fraction: float) -> dict[str, list[Row]]:
  found: dict[str, list[Row]] = {}
  for row in rows:
    if row["purpose"] == "comparison" and row["config"]["fraction"] == fraction:
      found.setdefault(row["method"], []).append(row)
  return found


def trained(rows: Sequence[Row], fraction: float) -> str:
  """Markdown: accuracy with failures beside that of undisturbed runs."""
  calm, failing = _by_variant(rows, 0.0), _by_variant(rows, fraction)
  lines = [
    "| variant | rate | undisturbed: accuracy, % | least to most "
    f"| {100 * fraction:g} % down: accuracy, % | points more "
    "(95 % interval) | goodput, % | failures in a run |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for name in config.TRAINED:
    if name not in calm or name not in failing:
      continue
    before = [comparison.accuracy(row) for row in calm[name]]
    after = [comparison.accuracy(row) for row in failing[name]]
    more = comparison.paired_difference(failing[name], calm[name])
    points = (
      "" if more is None else f"{more.mean:+.2f} ± {more.high - more.mean:.2f}"
    )
    cells = [
      name,
      f"{calm[name][0]['learning_rate']:g}",
      _mean(before),
      f"{min(before):.2f} to {max(before):.2f}",
      _mean(after),
      points,
      f"{100 * statistics.mean(x['goodput'] for x in failing[name]):.1f}",
      f"{statistics.mean(x['failures'] for x in failing[name]):.0f}",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
  spread = statistics.stdev(values) if len(values) > 1 else 0.0
  return f"{statistics.mean(values):.2f} ± {spread:.2f}"


def draw(
  rows: Sequence[Row], with_gradients: Sequence[Row], path: pathlib.Path
) -> None:
  """Goodput over the time down, and accuracy with and without failures."""
  pyplot = training.pyplot()
  sizes = sorted({row["config"]["workers"] for row in rows})
  num = len(sizes) + bool(with_gradients)
  figure, grid = pyplot.subplots(
    1, num, squeeze=False, figsize=(4.2 * num, 4.4), layout="constrained"
  )
  for axes, workers in zip(grid[0], sizes, strict=False):
    for name in config.VARIANTS:
      points = sorted(
        (100 * row["config"]["fraction"], 100 * row["goodput"])
        for row in rows
        if row["method"] == name and row["config"]["workers"] == workers
      )
      axes.plot(
        *zip(*points, strict=True), color=_COLOURS[name], marker="o", ms=3,
        lw=2.2 if name == "decoupled_diloco" else 1.3, label=name,
      )  # fmt: skip
    axes.axhline(92, color="black", ls=":", lw=1)
    axes.set_ylim(0, 103)
    axes.set_xlabel("% of the time that a machine is down")
    axes.set_title(f"{workers} workers", fontsize=10)
  grid[0][0].set_ylabel("goodput, %")
  if with_gradients:
    _draw_accuracy(grid[0][-1], with_gradients)
  for axes in grid[0]:
    axes.grid(alpha=0.3, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
  handles, labels = grid[0][0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=7, frameon=False,
    fontsize=9,
  )  # fmt: skip
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


def _draw_accuracy(axes: Any, rows: Sequence[Row]) -> None:
  calm, failing = _by_variant(rows, 0.0), _by_variant(rows, 0.2)
  names = [x for x in config.TRAINED if x in calm and x in failing]
  for place, name in enumerate(names):
    for shift, own, filled in ((-0.12, calm, False), (0.12, failing, True)):
      values = [comparison.accuracy(row) for row in own[name]]
      axes.scatter(
        [place + shift] * len(values), values, s=22, lw=1.2,
        edgecolors=_COLOURS[name],
        facecolors=_COLOURS[name] if filled else "none",
      )  # fmt: skip
  axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
  axes.set_ylabel("test accuracy, %")
  axes.set_title("hollow: undisturbed; filled: 20 % down", fontsize=10)


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  results = folder / "results"
  rows = training.read_rows(results / "clock.jsonl")
  for workers in sorted({row["config"]["workers"] for row in rows}):
    print(f"\n### {workers} workers\n\n{goodputs(rows, workers)}")
  with_gradients: list[Row] = []
  if len(sys.argv) > 1:
    with_gradients = training.read_rows(results / f"{sys.argv[1]}.jsonl")
    print(f"\n### With gradients\n\n{trained(with_gradients, 0.2)}")
  draw(rows, with_gradients, results / "goodput.png")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
