"""The tables and the picture of what late gradients cost, from its rows.

python experiments/pipeline/accuracy_report.py cifar10
"""

import functools
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import cluster, pipeline, training
from jdist.training import comparison

Runs: TypeAlias = Mapping[str, Sequence[comparison.Row]]
_BASE = "sync"
# The pipeline of a variant's iterations: the variant's prefix, the window of
# its table, and the part of the run that has the second of two tables.
_TABLES: dict[str, tuple[str, dict[str, int | None], float]] = {
  "gpipe": (_BASE, {}, 0.0),
  "1f1b": (_BASE, {}, 0.0),
  "ours, W=2": ("W=2", {"window": 2}, 0.0),
  "ours, W=S": ("W=S", {"window": None}, 0.0),
  "1f1b, then ours, W=2": ("half W=2", {}, 0.5),
  "1f1b, then ours, W=S": ("third W=S", {}, 1 / 3),
}
_COLOURS = {
  "": "#d55e00", "prediction": "#0072b2", "look-ahead": "#009e73",
  "prediction + look-ahead": "#7a4ea3", "rate by delay": "#cc79a7",
  "DC-ASGD": "#e69f00",
}  # fmt: skip


def differences(
  rows: Sequence[comparison.Row], base: Sequence[comparison.Row]
) -> tuple[comparison.Difference | None, comparison.Difference | None]:
  """Returns the gain in accuracy and in loss; None if a run diverged."""
  common = [row for row in base if row["seed"] in {x["seed"] for x in rows}]
  if not common or math.inf in map(studies.loss, (*rows, *common)):
    return None, None
  mean = comparison.mean(common, studies.loss)
  return (
    comparison.paired_difference(rows, base),
    comparison.paired_difference(
      rows, base, value=lambda row: 100 * studies.loss(row) / mean
    ),
  )


def within(found: comparison.Difference, base: Sequence[comparison.Row]) -> str:
  """Returns whether the mean is at most a deviation of the base below it.

  "yes, surely" means that the whole 95 % interval is.
  """
  spread = studies.mean_accuracy(base)[1]
  if found.mean < -spread:
    return "no"
  return "yes, surely" if found.low >= -spread else "yes, on average"


def table(runs: Runs, tuned: Mapping[str, comparison.Tuned]) -> str:
  """Returns a table of accuracies and losses, paired with synchronous runs."""
  lines = []
  for name, rows in runs.items():
    accuracy, spread = studies.mean_accuracy(rows)
    rate = f"{rows[0]['learning_rate']:g}"
    if name in tuned and tuned[name].end is not None:
      rate += f" ({tuned[name].end} tried)"
    cells = ["", "", ""]
    if name != _BASE:
      points, percent = differences(rows, runs[_BASE])
      if points is not None and percent is not None:
        near = within(points, runs[_BASE])
        cells = [points.interval(), near, percent.interval(1)]
    lines.append(
      f"{name} | {rate} | {len(rows)} | {accuracy:.2f} ± {spread:.2f} "
      f"| {cells[0]} | {cells[1]} "
      f"| {comparison.mean(rows, studies.loss):.4f} | {cells[2]}"
    )
  return studies.table(
    "variant | rate | seeds | test accuracy, % | points more than sync (95 % "
    "interval) | within its spread | test loss | loss, % more (95 % interval)",
    lines,
  )


def sensitivity(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of the held-out loss at every rate that was tried."""
  tuning = [row for row in rows if row["purpose"] == "tuning"]
  rates = sorted({row["learning_rate"] for row in tuning})
  found = {
    (row["method"], row["learning_rate"]): f"{studies.loss(row):.4f}"
    for row in tuning
  }
  return studies.table(
    " | ".join(["variant", *(f"{rate:g}" for rate in rates)]),
    [
      (name, *(found.get((name, rate), "") for rate in rates))
      for name in dict.fromkeys(row["method"] for row in tuning)
    ],
  )


@functools.cache
def iteration_s(name: str, stages: int, microbatches: int) -> float:
  """Returns seconds of a table's iteration, of which one device takes 1.

  Equal stages, backward passes twice as long as forward passes, free links.
  """
  options = {k: stages if v is None else v for k, v in _TABLES[name][1].items()}
  part = 1 / (3 * stages * microbatches)
  times = pipeline.simulate(
    pipeline.make_table(
      name.partition(",")[0], stages, microbatches, num_iterations=12, **options
    ),
    [pipeline.LayerCost("stage", part, 2 * part)] * stages,
    cluster.workers([1.0] * stages),
  )
  return times.iteration_s


def seconds(
  name: str, stages: int, microbatches: int, steps: float, num_steps: int
) -> float:
  """Returns the simulated seconds of the first `steps` of a run."""
  first, _, second = name.partition(", then ")
  late = max(0.0, steps - num_steps * (1 - _TABLES[name][2])) if second else 0.0
  found = (steps - late) * iteration_s(first, stages, microbatches)
  if second:
    found += late * iteration_s(second, stages, microbatches)
  return found


def steps_to(rows: Sequence[comparison.Row], accuracy: float) -> float | None:
  """Returns the updates until the mean has an accuracy, in percent."""
  curve = ((x, 100 * y) for x, y in studies.mean_curve(rows))
  return studies.reached_at(curve, accuracy)


def fastest(runs: Runs, window: str) -> str | None:
  """Returns the variant of a window with the least mean loss, if any."""
  found = {
    name: comparison.mean(rows, studies.loss)
    for name, rows in runs.items()
    if name.partition(",")[0] == window
  }
  return min(found, key=lambda name: found[name], default=None)


def time_table(
  runs: Runs, stages: int, microbatches: Sequence[int] = (2, 4, 8)
) -> str:
  """Returns a table of the time to an accuracy relative to GPipe's."""
  target = 0.95 * studies.mean_accuracy(runs[_BASE])[0]
  steps = steps_to(runs[_BASE], target)
  assert steps is not None
  lines = []
  for name, (window, _, _) in _TABLES.items():
    shown = [window]
    quickest = fastest(runs, window) if window != _BASE else None
    if quickest not in (None, window):
      shown.append(str(quickest))
    for variant in [x for x in shown if x in runs]:
      own = steps_to(runs[variant], target)
      num_steps = runs[variant][0]["steps"]
      cells = []
      for m in microbatches:
        flushed = iteration_s("gpipe", stages, m)
        whole = seconds(name, stages, m, num_steps, num_steps)
        sooner = "never"
        if own is not None:
          taken = seconds(name, stages, m, own, num_steps)
          sooner = f"{steps * flushed / taken:.2f}x"
        cells.append(f"{num_steps * flushed / whole:.2f}x / {sooner}")
      reached = "never" if own is None else f"{own:.0f}"
      lines.append((name, variant, reached, *cells))
  head = [
    f"M={m}: iterations a second / time to accuracy, gpipe = 1"
    for m in microbatches
  ]
  titles = " | ".join(["table", "variant", "updates to it", *head])
  return (
    f"To {target:.1f} %, 95 % of the synchronous accuracy, with {stages} equal "
    f"stages:\n\n{studies.table(titles, lines)}"
  )


def draw(runs: Runs, path: pathlib.Path) -> None:
  """Draws test loss over epochs by window, and accuracy over simulated time."""
  config = runs[_BASE][0]["config"]
  stages, epochs = config["stages"], config["epochs"]
  with studies.picture(
    path, 1, 3, figsize=(13.0, 4.6),
    title=f"{config['dataset']}, {config['samples'] or 'all'} samples, "
    f"{config['model']}, batches of {config['batch_size']}: mean over seeds, "
    "each variant at its best rate",
  ) as (grid,):  # fmt: skip
    for axes, window, title in zip(
      grid, ("W=2", "W=S"), ("W = 2: a step late", f"W = S = {stages}"),
      strict=False,
    ):  # fmt: skip
      shown = {_BASE: ("#333333", "-")}
      late = "half" if window == "W=2" else "third"
      shown[f"{late} {window}, prediction"] = ("#56b4e9", "--")
      for fix, colour in _COLOURS.items():
        shown[f"{window}, {fix}" if fix else window] = (colour, "-")
      for name, (colour, style) in shown.items():
        if name in runs:
          curve = studies.mean_curve(runs[name], "loss")
          axes.plot(
            [epochs * x / curve[-1][0] for x, _ in curve],
            [y for _, y in curve], style, color=colour, label=name,
            marker="o", ms=3, lw=2.4 if name == _BASE else 1.3,
            zorder=3 - (name == _BASE),
          )  # fmt: skip
      axes.set_title(title, fontsize=11)
      axes.set_xlabel("epochs")
      axes.legend(frameon=False, fontsize=8)
    grid[0].set_ylabel("test loss")
    limits = [axes.get_ylim() for axes in grid[:2]]
    for axes in grid[:2]:
      axes.set_ylim(min(x for x, _ in limits), max(y for _, y in limits))
    _draw_time(grid[2], runs, stages)


def _draw_time(axes: Any, runs: Runs, stages: int) -> None:
  looks = {
    "gpipe": ("#333333", "-"), "ours, W=2": ("#0072b2", "-"),
    "ours, W=S": ("#d55e00", "--"), "1f1b, then ours, W=2": ("#56b4e9", "-"),
    "1f1b, then ours, W=S": ("#e69f00", "-"),
  }  # fmt: skip
  for name, (colour, style) in looks.items():
    window, _, _ = _TABLES[name]
    variant = window if window == _BASE else fastest(runs, window)
    if variant is None or variant not in runs:
      continue
    curve = studies.mean_curve(runs[variant])
    num_steps = runs[variant][0]["steps"]
    axes.plot(
      [seconds(name, stages, stages, step, num_steps) for step, _ in curve],
      [100 * y for _, y in curve], style, color=colour, marker="o", ms=3,
      label=f"{name.partition(', W')[0]}: {variant}",
    )  # fmt: skip
  axes.set_title(f"S = M = {stages}, simulated", fontsize=11)
  axes.set_xlabel("time, iterations of one device")
  axes.set_ylabel("test accuracy, %")
  axes.legend(frameon=False, fontsize=8)


def main(folder: pathlib.Path) -> None:
  """Prints and draws the results of a preset."""
  preset = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  rows = training.read_rows(results / f"accuracy_{preset}.jsonl")
  tuned = studies.tuned_rates(rows, comparison.by_loss)
  runs = studies.best_runs(rows, comparison.by_loss)
  if _BASE not in runs:
    raise SystemExit(f"There is no synchronous run of {preset} yet.")
  stages = runs[_BASE][0]["config"]["stages"]
  print(f"Each variant at its best rate:\n\n{table(runs, tuned)}\n")
  if _BASE in tuned:
    same = studies.runs_at(rows, dict.fromkeys(tuned, tuned[_BASE].best))
    print(f"All with sync's best rate, as far as run:\n\n{table(same, {})}\n")
    print(f"Held-out loss by rate:\n\n{sensitivity(rows)}\n")
  print(time_table(runs, stages))
  path = results / f"accuracy_{preset}.png"
  if studies.is_shown(path):
    draw(runs, path)


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
