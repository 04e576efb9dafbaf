"""The tables and the picture of the experiment, from its rows.

python experiments/failures/report.py          # in time alone
python experiments/failures/report.py mnist    # with gradients, too
"""

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import studies

from jdist import training
from jdist.training import comparison

_BAR = 92  # Percent of goodput that README.md asks for.
_COLOURS = {
  "bsp, one job": "#999999", "bsp": "#333333", "bsp, backups": "#cc79a7",
  "ssp": "#e69f00", "asp": "#0072b2", "h_ps": "#d55e00",
  "h_ps, local step": "#f0a070", "decoupled_diloco": "#009e73",
}  # fmt: skip


def goodputs(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of goodput by protocol and by the part of the time down."""
  fractions = sorted({row["config"]["fraction"] for row in rows})
  found = {
    (row["method"], row["config"]["fraction"]): f"{100 * row['goodput']:.1f}"
    for row in rows
  }
  return studies.table(
    " | ".join(["goodput, %", *(f"{100 * x:g} % down" for x in fractions)]),
    ((name, *(found.get((name, x), "") for x in fractions))
     for name in config.VARIANTS),
  )  # fmt: skip


def _by_variant(
  rows: Sequence[comparison.Row], fraction: float
) -> dict[str, list[comparison.Row]]:
  own = [row for row in rows if row["config"]["fraction"] == fraction]
  return studies.runs_at(own, {})


def trained(rows: Sequence[comparison.Row], fraction: float) -> str:
  """Returns a table of accuracies with failures and without."""
  calm, failing = _by_variant(rows, 0.0), _by_variant(rows, fraction)
  lines = []
  for name in [x for x in config.TRAINED if x in calm and x in failing]:
    before, after = calm[name], failing[name]
    more = comparison.paired_difference(after, before)
    accuracies = list(map(comparison.accuracy, before))
    means = [
      "{:.2f} ± {:.2f}".format(*studies.mean_accuracy(x))
      for x in (before, after)
    ]
    lines.append(
      f"{name} | {before[0]['learning_rate']:g} | {means[0]} "
      f"| {min(accuracies):.2f} to {max(accuracies):.2f} | {means[1]} "
      f"| {'' if more is None else more.plus_minus()} "
      f"| {100 * comparison.mean(after, 'goodput'):.1f} "
      f"| {comparison.mean(after, 'failures'):.0f}"
    )
  return studies.table(
    "variant | rate | undisturbed: accuracy, % | least to most "
    f"| {100 * fraction:g} % down: accuracy, % | points more (95 % interval) "
    "| goodput, % | failures in a run",
    lines,
  )


def draw(
  by_size: dict[int, list[comparison.Row]],
  with_gradients: Sequence[comparison.Row],
  path: pathlib.Path,
) -> None:
  """Draws goodput over the time down, and accuracy with failures."""
  num = len(by_size) + bool(with_gradients)
  with studies.picture(path, 1, num, figsize=(4.2 * num, 4.4), legend=4) as (
    grid,
  ):
    for axes, (workers, rows) in zip(grid, by_size.items(), strict=False):
      runs = studies.group(rows, lambda row: row["method"])
      for name in config.VARIANTS:
        points = sorted(
          (100 * row["config"]["fraction"], 100 * row["goodput"])
          for row in runs[name]
        )
        axes.plot(
          *zip(*points, strict=True), color=_COLOURS[name], marker="o", ms=3,
          lw=2.2 if name == "decoupled_diloco" else 1.3, label=name,
        )  # fmt: skip
      axes.axhline(
        _BAR, color="black", ls=":", lw=1, label=f"the bar, {_BAR} %"
      )
      axes.set_ylim(0, 103)
      axes.set_xlabel("% of the time that a machine is down")
      axes.set_title(f"{workers} workers", fontsize=10)
    grid[0].set_ylabel("goodput, %")
    if with_gradients:
      _draw_accuracy(grid[-1], with_gradients)


def _draw_accuracy(axes: Any, rows: Sequence[comparison.Row]) -> None:
  calm, failing = _by_variant(rows, 0.0), _by_variant(rows, 0.2)
  names = [x for x in config.TRAINED if x in calm and x in failing]
  for place, name in enumerate(names):
    for shift, own, filled in ((-0.12, calm, False), (0.12, failing, True)):
      values = list(map(comparison.accuracy, own[name]))
      axes.scatter(
        [place + shift] * len(values), values, s=22, lw=1.2,
        edgecolors=_COLOURS[name],
        facecolors=_COLOURS[name] if filled else "none",
      )  # fmt: skip
  axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
  axes.set_ylabel("test accuracy, %")
  axes.set_title("hollow: undisturbed; filled: 20 % down", fontsize=10)


def main(folder: pathlib.Path) -> None:
  """Prints and draws all results, those with gradients if a preset is named."""
  results = folder / "results"
  rows = training.read_rows(results / "clock.jsonl")
  by_size = studies.group(rows, lambda row: row["config"]["workers"])
  by_size = dict(sorted(by_size.items()))
  for workers, own in by_size.items():
    print(f"\n### {workers} workers\n\n{goodputs(own)}")
  with_gradients: list[comparison.Row] = []
  if len(sys.argv) > 1:
    with_gradients = training.read_rows(results / f"{sys.argv[1]}.jsonl")
    print(f"\n### With gradients\n\n{trained(with_gradients, 0.2)}")
  draw(by_size, with_gradients, results / "goodput.png")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
