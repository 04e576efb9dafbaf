"""The tables and the pictures of the comparison, from its rows.

python experiments/dbs_sgd/report.py mnist
"""

import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jdist import training
from jdist.training import comparison

Row: TypeAlias = dict[str, Any]
Runs: TypeAlias = Mapping[str, Sequence[Row]]
_BASE = "asgd"
_COLOURS = {
  "asgd": "#0072b2", "dbs": "#d55e00", "dbs, by part": "#e69f00",
  "n-softsync": "#009e73", "n-softsync, rate/staleness": "#66c2a5",
  "bsp": "#333333", "ssp": "#999999", "ringmaster": "#cc79a7",
}  # fmt: skip


def settings(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
  """The rows by whose the data are, and by the speed."""
  found: dict[tuple[str, float], list[Row]] = {}
  for row in rows:
    config = row["config"]
    key = (config.get("sharing", "shared"), config["speed"])
    found.setdefault(key, []).append(row)
  return found


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
  """The compared rows of each variant at a rate."""
  found: dict[str, list[Row]] = {}
  for row in rows:
    method = row["method"]
    if row["purpose"] == "comparison" and row["learning_rate"] == rates.get(
      method, row["learning_rate"]
    ):
      found.setdefault(method, []).append(row)
  return found


def loss(row: Row) -> float:
  """Test loss; that of a diverged run, which rows have as null, is infinite."""
  return float("inf") if row["test_loss"] is None else row["test_loss"]


def _mean(rows: Sequence[Row], value: Any) -> tuple[float, float]:
  found = [value(row) for row in rows]
  if len(found) < 2 or float("inf") in found:
    return statistics.mean(found), 0.0
  return statistics.mean(found), statistics.stdev(found)


def _relative(rows: Sequence[Row], base: Sequence[Row]) -> str:
  """The loss relative to the base's, paired by seeds, with its interval."""
  if any(loss(row) == float("inf") for row in (*rows, *base)):
    return "diverged"
  mean = statistics.mean(map(loss, base))
  found = comparison.paired_difference(
    rows, base, value=lambda row: 100 * loss(row) / mean
  )
  if found is None:
    return ""
  return f"{found.mean:+.0f} ± {found.high - found.mean:.0f}"


def table(
  runs: Runs, tuned: Mapping[str, comparison.Tuned] | None = None
) -> str:
  """Markdown: accuracy and loss beside the base's, staleness, what was used."""
  lines = [
    "| variant | rate | test loss | loss, % more than asgd (95 % interval) "
    "| test accuracy, % | staleness: updates / nodes / maximum | samples "
    "| discarded |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for name in [x for x in _COLOURS if x in runs]:
    rows = runs[name]
    (value, spread), (accuracy, of_accuracy) = (
      _mean(rows, one) for one in (loss, comparison.accuracy)
    )
    stale = [row["staleness"] for row in rows]
    ages = " / ".join(
      f"{statistics.mean(one[key] for one in stale):.{digits}f}"
      for key, digits in (
        ("mean_over_updates", 1), ("mean_over_nodes", 1), ("maximum", 0),
      )
    )  # fmt: skip
    rate = f"{rows[0]['learning_rate']:g}"
    if tuned is not None and name in tuned and tuned[name].end is not None:
      rate += f" ({tuned[name].end})"
    more = "" if name == _BASE else _relative(rows, runs.get(_BASE, ()))
    samples = statistics.mean(row["samples"] for row in rows)
    dropped = statistics.mean(row["discarded"] for row in rows)
    lines.append(
      f"| {name} | {rate} | {value:.4f} ± {spread:.4f} | {more} "
      f"| {accuracy:.2f} ± {of_accuracy:.2f} | {ages} | {samples:,.0f} "
      f"| {dropped:,.0f} |"
    )
  return "\n".join(lines)


def summary(found: Mapping[tuple[str, float], Runs]) -> str:
  """Markdown: DBS-SGD's loss beside ASGD's and n-softsync's, all settings."""
  lines = [
    "| data | speeds | dbs, % more loss than asgd | than n-softsync "
    "| than n-softsync, rate/staleness | points more accurate than asgd "
    "| samples a second, of asgd's |",
    "|---|---|---|---|---|---|---|",
  ]
  for (sharing, speed), runs in found.items():
    if not {"asgd", "dbs"} <= runs.keys():
      continue
    cells = [
      _relative(runs["dbs"], runs[other]) if other in runs else ""
      for other in ("asgd", "n-softsync", "n-softsync, rate/staleness")
    ]
    more = comparison.paired_difference(runs["dbs"], runs["asgd"])
    points = (
      "" if more is None else f"{more.mean:+.2f} ± {more.high - more.mean:.2f}"
    )
    rates = [
      statistics.mean(row["samples"] / row["train_s"] for row in runs[name])
      for name in ("dbs", "asgd")
    ]
    lines.append(
      f"| {sharing} | {speed:g}x | {' | '.join(cells)} | {points} "
      f"| {rates[0] / rates[1]:.3f} |"
    )
  return "\n".join(lines)


def balance(found: Mapping[tuple[str, float], Runs]) -> str:
  """Markdown: how unlike iterations and their staleness are, by speed."""
  lines = [
    "| speeds | slowest iteration over fastest: asgd / dbs "
    "| staleness, mean over nodes: asgd / dbs | maximum: asgd / dbs |",
    "|---|---|---|---|",
  ]

  def both(runs: Runs, value: Any, digits: int) -> str:
    means = (statistics.mean(map(value, runs[x])) for x in ("asgd", "dbs"))
    return " / ".join(f"{x:.{digits}f}" for x in means)

  for (sharing, speed), runs in found.items():
    if sharing == "shared" and {"asgd", "dbs"} <= runs.keys():
      cells = [
        both(runs, lambda row: row["iteration_spread"], 1),
        both(runs, lambda row: row["staleness"]["mean_over_nodes"], 1),
        both(runs, lambda row: row["staleness"]["maximum"], 0),
      ]
      lines.append(f"| {speed:g}x | {' | '.join(cells)} |")
  return "\n".join(lines)


def draw(found: Mapping[tuple[str, float], Runs], path: pathlib.Path) -> None:
  """Test loss over virtual time, by whose the data are and by speed."""
  pyplot = training.pyplot()
  sharings = list(dict.fromkeys(sharing for sharing, _ in found))
  speeds = list(dict.fromkeys(speed for _, speed in found))
  # Of one speed there is one row.
  upright = len(speeds) > 1
  shape = (len(sharings), len(speeds)) if upright else (1, len(sharings))
  figure, grid = pyplot.subplots(
    *shape, squeeze=False, sharey="row" if upright else False,
    figsize=(1.5 + 3.2 * shape[1], 1.5 + 2.7 * shape[0]),
    layout="constrained",
  )  # fmt: skip
  for (sharing, speed), runs in found.items():
    place = sharings.index(sharing), speeds.index(speed)
    axes = grid[place if upright else place[::-1]]
    for name in [x for x in _COLOURS if x in runs]:
      curves = [row["curve"] for row in runs[name]]
      points = list(zip(*curves, strict=True))
      axes.plot(
        [statistics.mean(p["train_s"] for p in point) for point in points],
        [
          statistics.mean(
            float("nan") if p["loss"] is None else p["loss"] for p in point
          )
          for point in points
        ],
        color=_COLOURS[name],
        lw=2.2 if name == "dbs" else 1.2,
        ls="--" if name == "bsp" else "-",
        label=name,
      )
    axes.set_yscale("log")
    for one in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
      one(lambda value, _: f"{value:g}")
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.set_title(f"{sharing}, {speed:g}x", fontsize=10)
    axes.grid(alpha=0.3, which="both", lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
  for row in grid:
    row[0].set_ylabel("test loss")
  for axes in grid[-1]:
    axes.set_xlabel("virtual seconds")
  config = next(iter(next(iter(found.values())).values()))[0]["config"]
  figure.suptitle(
    f"{config['dataset']}, {config['model']}, {config['workers']} workers: "
    "mean over seeds, each variant at its best rate",
    fontsize=11,
  )
  handles, labels = grid[0][0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=4, frameon=False,
    fontsize=9,
  )  # fmt: skip
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


def draw_staleness(runs: Runs, path: pathlib.Path, title: str) -> None:
  """How many of the gradients in updates were how stale, at least."""
  pyplot = training.pyplot()
  figure, axes = pyplot.subplots(figsize=(7.5, 4.4), layout="constrained")
  for name in [x for x in _COLOURS if x in runs]:
    counts: dict[int, int] = {}
    for row in runs[name]:
      for age, count in row["staleness"]["counts"].items():
        counts[int(age)] = counts.get(int(age), 0) + count
    left, points = sum(counts.values()), []
    whole = left
    for age in sorted(counts):
      points.append((age, left / whole))
      left -= counts[age]
    axes.step(
      *zip(*points, strict=True), where="post", color=_COLOURS[name],
      lw=2.2 if name == "dbs" else 1.2, label=name,
    )  # fmt: skip
  axes.set_yscale("log")
  axes.set_ylim(1e-4, 1.3)
  axes.set_xlabel("staleness: updates since the parameters were sent")
  axes.set_ylabel("part of the gradients at least so stale")
  axes.set_title(title, fontsize=11)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(frameon=False, fontsize=9)
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  preset = sys.argv[1] if len(sys.argv) > 1 else "mnist"
  results = folder / "results"
  by_setting = settings(training.read_rows(results / f"{preset}.jsonl"))
  order = ("shared", "owned", "skewed")
  keys = sorted(by_setting, key=lambda key: (order.index(key[0]), key[1]))
  found: dict[tuple[str, float], Runs] = {}
  one_rate: dict[tuple[str, float], Runs] = {}
  parts = []
  for sharing, speed in keys:
    rows = by_setting[sharing, speed]
    runs, tuned = best(rows)
    found[sharing, speed] = runs
    parts.append(f"\n### {sharing}, {speed:g}x\n\n{table(runs, tuned)}")
    if _BASE in tuned:
      rate = tuned[_BASE].best
      same = at_rates(rows, dict.fromkeys(variants_of(rows), rate))
      one_rate[sharing, speed] = same
      parts.append(f"\nAll with asgd's best rate:\n\n{table(same)}")
  print(f"Each variant at its best rate:\n\n{summary(found)}\n")
  print(f"All with asgd's best rate:\n\n{summary(one_rate)}\n")
  print(f"Iterations and staleness:\n\n{balance(found)}")
  print("\n".join(parts))
  draw(found, results / f"{preset}.png")
  middle = max((key for key in keys if key[0] == "shared"), default=keys[0])
  if ("shared", 8.0) in found:
    middle = ("shared", 8.0)
  draw_staleness(
    found[middle],
    results / f"{preset}-staleness.png",
    f"Staleness, {middle[0]} samples, speeds of {middle[1]:g}x",
  )


def variants_of(rows: Sequence[Row]) -> list[str]:
  """The variants of which there are rows."""
  return list(dict.fromkeys(row["method"] for row in rows))


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
