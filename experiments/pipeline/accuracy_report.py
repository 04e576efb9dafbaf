"""The tables and the picture of what late gradients cost, from its rows.

python experiments/pipeline/accuracy_report.py cifar10
"""

import itertools
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jdist import cluster, pipeline, training
from jdist.training import comparison

Row: TypeAlias = dict[str, Any]
Runs: TypeAlias = Mapping[str, Sequence[Row]]
_BASE = "sync"
# Of which pipeline a variant's iterations are: a table, its window, and for how
# much of the run the second of two tables.
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


def best(rows: Sequence[Row]) -> tuple[Runs, dict[str, comparison.Tuned]]:
  """Each variant's rows at its best rate, by held-out loss, and that rate."""
  tried: dict[str, dict[float, tuple[float, float]]] = {}
  for row in rows:
    if row["purpose"] == "tuning":
      own = tried.setdefault(row["method"], {})
      own[row["learning_rate"]] = comparison.by_loss(row)
  tuned = {name: comparison.best_of(own) for name, own in tried.items()}
  return at_rates(rows, {name: x.best for name, x in tuned.items()}), tuned


def at_rates(rows: Sequence[Row], rates: Mapping[str, float]) -> Runs:
  """The compared rows of each variant at a rate, all rates where none is."""
  found: dict[str, list[Row]] = {}
  for row in rows:
    name, rate = row["method"], row["learning_rate"]
    if row["purpose"] == "comparison" and rates.get(name, rate) == rate:
      found.setdefault(name, []).append(row)
  return found


def loss(row: Row) -> float:
  """Test loss; that of a diverged run, which rows have as null, is infinite."""
  return math.inf if row["test_loss"] is None else float(row["test_loss"])


def differences(
  rows: Sequence[Row], base: Sequence[Row]
) -> tuple[comparison.Difference | None, comparison.Difference | None]:
  """Returns how much more accuracy and loss are; None where one diverged."""
  common = [row for row in base if row["seed"] in {x["seed"] for x in rows}]
  if not common or math.inf in map(loss, (*rows, *common)):
    return None, None
  mean = statistics.mean(map(loss, common))
  return (
    comparison.paired_difference(rows, base),
    comparison.paired_difference(
      rows, base, value=lambda row: 100 * loss(row) / mean
    ),
  )


def within(found: comparison.Difference, base: Sequence[Row]) -> str:
  """Returns whether the mean is at most a deviation of the base below it.

  And whether the interval says that it is: 95 % of it lie above.
  """
  spread = comparison.mean_accuracy(base)[1]
  if found.mean < -spread:
    return "no"
  return "yes, surely" if found.low >= -spread else "yes, on average"


def table(runs: Runs, tuned: Mapping[str, comparison.Tuned]) -> str:
  """Markdown: accuracy and loss of each variant beside the synchronous run."""
  lines = [
    "| variant | rate | seeds | test accuracy, % | points more than sync "
    "(95 % interval) | within its spread | test loss | loss, % more "
    "(95 % interval) |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for name, rows in runs.items():
    accuracy, spread = comparison.mean_accuracy(rows)
    rate = f"{rows[0]['learning_rate']:g}"
    if name in tuned and tuned[name].end is not None:
      rate += f" ({tuned[name].end} tried)"
    cells = ["", "", ""]
    if name != _BASE:
      points, percent = differences(rows, runs[_BASE])
      if points is not None and percent is not None:
        cells = [
          _interval(points, 2), within(points, runs[_BASE]),
          _interval(percent, 1),
        ]  # fmt: skip
    lines.append(
      f"| {name} | {rate} | {len(rows)} | {accuracy:.2f} ± {spread:.2f} "
      f"| {cells[0]} | {cells[1]} | {statistics.mean(map(loss, rows)):.4f} "
      f"| {cells[2]} |"
    )
  return "\n".join(lines)


def _interval(found: comparison.Difference, digits: int) -> str:
  return (
    f"{found.mean:+.{digits}f} ({found.low:+.{digits}f} to "
    f"{found.high:+.{digits}f})"
  )


def sensitivity(rows: Sequence[Row]) -> str:
  """Markdown: the held-out loss at every rate that was tried."""
  tuning = [row for row in rows if row["purpose"] == "tuning"]
  rates = sorted({row["learning_rate"] for row in tuning})
  found = {(row["method"], row["learning_rate"]): loss(row) for row in tuning}
  lines = [
    "| variant | " + " | ".join(f"{rate:g}" for rate in rates) + " |",
    "|---|" + "---|" * len(rates),
  ]
  for name in dict.fromkeys(row["method"] for row in tuning):
    cells = [
      f"{found[name, rate]:.4f}" if (name, rate) in found else ""
      for rate in rates
    ]
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines)


def iteration_s(name: str, stages: int, microbatches: int) -> float:
  """Simulated seconds of a table's iteration, where one device takes 1.

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
  """Simulated seconds of the first steps of a run of so many."""
  first, _, second = name.partition(", then ")
  late = max(0.0, steps - num_steps * (1 - _TABLES[name][2])) if second else 0.0
  found = (steps - late) * iteration_s(first, stages, microbatches)
  if second:
    found += late * iteration_s(second, stages, microbatches)
  return found


def steps_to(rows: Sequence[Row], accuracy: float) -> float | None:
  """Updates until the mean over seeds has an accuracy, in percent."""
  points = [(0.0, 0.0)]
  for point in zip(*(row["curve"] for row in rows), strict=True):
    step = statistics.mean(p["step"] for p in point)
    points.append((step, 100 * statistics.mean(p["accuracy"] for p in point)))
  for (start, low), (end, high) in itertools.pairwise(points):
    if high >= accuracy:
      return start + (end - start) * (accuracy - low) / (high - low)
  return None


def fastest(runs: Runs, window: str) -> str | None:
  """The variant of a window with the least mean loss; None if there is none."""
  found = {
    name: statistics.mean(map(loss, rows))
    for name, rows in runs.items()
    if name.partition(",")[0] == window
  }
  return min(found, key=lambda name: found[name], default=None)


def time_table(
  runs: Runs, stages: int, microbatches: Sequence[int] = (2, 4, 8)
) -> str:
  """Markdown: how much sooner than GPipe a pipeline has an accuracy."""
  target = 0.95 * comparison.mean_accuracy(runs[_BASE])[0]
  steps = steps_to(runs[_BASE], target)
  assert steps is not None
  head = " | ".join(
    f"M={m}: iterations a second / time to accuracy, gpipe = 1"
    for m in microbatches
  )
  lines = [
    f"To {target:.1f} %, 95 % of the synchronous accuracy, with {stages} equal "
    "stages:\n",
    f"| table | variant | updates to it | {head} |",
    "|---|---|---|" + "---|" * len(microbatches),
  ]
  for name, (window, _, _) in _TABLES.items():
    shown = [_BASE] if window == _BASE else [window]
    quickest = fastest(runs, window) if window != _BASE else None
    if quickest not in (None, window):
      shown.append(str(quickest))
    for variant in [x for x in shown if x in runs]:
      own, all_steps = (
        steps_to(runs[variant], target),
        runs[variant][0]["steps"],
      )
      cells = []
      for m in microbatches:
        flushed = iteration_s("gpipe", stages, m)
        whole = seconds(name, stages, m, all_steps, all_steps)
        sooner = "never"
        if own is not None:
          taken = seconds(name, stages, m, own, all_steps)
          sooner = f"{steps * flushed / taken:.2f}x"
        cells.append(f"{all_steps * flushed / whole:.2f}x / {sooner}")
      reached = "never" if own is None else f"{own:.0f}"
      lines.append(f"| {name} | {variant} | {reached} | {' | '.join(cells)} |")
  return "\n".join(lines)


def draw(runs: Runs, path: pathlib.Path) -> None:
  """Test loss over epochs by window, and accuracy over simulated time."""
  pyplot = training.pyplot()
  figure, grid = pyplot.subplots(
    1, 3, figsize=(13.0, 4.6), layout="constrained"
  )
  config = runs[_BASE][0]["config"]
  stages, epochs = config["stages"], config["epochs"]
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
        x, y = _curve(runs[name], "loss")
        x = [epochs * step / x[-1] for step in x]
        axes.plot(
          x, y, style, color=colour, label=name, marker="o", ms=3,
          lw=2.4 if name == _BASE else 1.3, zorder=3 - (name == _BASE),
        )  # fmt: skip
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("epochs")
    axes.legend(frameon=False, fontsize=8)
  grid[0].set_ylabel("test loss")
  low = min(axes.get_ylim()[0] for axes in grid[:2])
  high = max(axes.get_ylim()[1] for axes in grid[:2])
  for axes in grid[:2]:
    axes.set_ylim(low, high)
  _draw_time(grid[2], runs, stages)
  for axes in grid:
    axes.grid(alpha=0.3, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
  figure.suptitle(
    f"{config['dataset']}, {config['samples'] or 'all'} samples, "
    f"{config['model']}, batches of {config['batch_size']}: mean over seeds, "
    "each variant at its best rate",
    fontsize=11,
  )
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


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
    x, y = _curve(runs[variant], "accuracy")
    num_steps = runs[variant][0]["steps"]
    time = [seconds(name, stages, stages, step, num_steps) for step in x]
    axes.plot(
      time, [100 * value for value in y], style, color=colour, marker="o", ms=3,
      label=f"{name.partition(', W')[0]}: {variant}",
    )  # fmt: skip
  axes.set_title(f"S = M = {stages}, simulated", fontsize=11)
  axes.set_xlabel("time, iterations of one device")
  axes.set_ylabel("test accuracy, %")
  axes.legend(frameon=False, fontsize=8)


def _curve(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
  points = list(zip(*(row["curve"] for row in rows), strict=True))

  def mean(of: Callable[[Row], Any]) -> list[float]:
    return [
      statistics.mean(math.nan if of(p) is None else of(p) for p in point)
      for point in points
    ]

  return mean(lambda p: p["step"]), mean(lambda p: p[key])


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  preset = sys.argv[1] if len(sys.argv) > 1 else "cifar10"
  results = folder / "results"
  rows = training.read_rows(results / f"accuracy_{preset}.jsonl")
  runs, tuned = best(rows)
  if _BASE not in runs:
    raise SystemExit(f"There is no synchronous run of {preset} yet.")
  stages = runs[_BASE][0]["config"]["stages"]
  print(f"Each variant at its best rate:\n\n{table(runs, tuned)}\n")
  if _BASE in tuned:
    same = at_rates(rows, dict.fromkeys(tuned, tuned[_BASE].best))
    print(f"All with sync's best rate, as far as run:\n\n{table(same, {})}\n")
    print(f"Held-out loss by rate:\n\n{sensitivity(rows)}\n")
  print(time_table(runs, stages))
  draw(runs, results / f"accuracy_{preset}.png")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
