"""The tables and the pictures of the comparison, from its rows.

python experiments/dbs_sgd/report.py mnist
"""

import collections
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import training
from jdist.training import comparison

Runs: TypeAlias = Mapping[str, Sequence[comparison.Row]]
# Runs by the sharing of the data, and by the speed.
Found: TypeAlias = Mapping[tuple[str, float], Runs]
_BASE = "asgd"
_COLOURS = {
  "asgd": "#0072b2", "dbs": "#d55e00", "dbs, by part": "#d55e00",
  "n-softsync": "#009e73", "n-softsync, rate/staleness": "#009e73",
  "bsp": "#333333", "ssp": "#999999", "ringmaster": "#cc79a7",
}  # fmt: skip
_AGES = (("mean_over_updates", 1), ("mean_over_nodes", 1), ("maximum", 0))


def _staleness(rows: Sequence[comparison.Row], name: str) -> float:
  return comparison.mean(rows, lambda row: row["staleness"][name])


def relative(runs: Runs, name: str, other: str) -> str:
  """Returns a loss relative to another one's, paired by seeds."""
  if other not in runs:
    return ""
  rows, base = runs[name], runs[other]
  if float("inf") in map(studies.loss, (*rows, *base)):
    return "diverged"
  mean = comparison.mean(base, studies.loss)
  found = comparison.paired_difference(
    rows, base, value=lambda row: 100 * studies.loss(row) / mean
  )
  return "" if found is None else found.plus_minus(0)


def table(runs: Runs, tuned: Mapping[str, comparison.Tuned]) -> str:
  """Returns a table of accuracies, losses and staleness."""
  lines = []
  for name in [x for x in _COLOURS if x in runs]:
    rows = runs[name]
    rate = f"{rows[0]['learning_rate']:g}"
    if name in tuned and tuned[name].end is not None:
      rate += f" ({tuned[name].end})"
    ages = (f"{_staleness(rows, key):.{digits}f}" for key, digits in _AGES)
    spread = comparison.mean_and_spread(rows, studies.loss)
    lines.append(
      (
        name,
        rate,
        "{:.4f} ± {:.4f}".format(*spread),
        "" if name == _BASE else relative(runs, name, _BASE),
        "{:.2f} ± {:.2f}".format(*studies.mean_accuracy(rows)),
        " / ".join(ages),
        f"{comparison.mean(rows, 'samples'):,.0f}",
        f"{comparison.mean(rows, 'discarded'):,.0f}",
      )
    )
  return studies.table(
    "variant | rate | test loss | loss, % more than asgd (95 % interval) "
    "| test accuracy, % | staleness: updates / nodes / maximum | samples "
    "| discarded",
    lines,
  )


def summary(found: Found) -> str:
  """Returns a table of DBS-SGD's loss relative to ASGD's and n-softsync's."""
  lines = []
  for (sharing, speed), runs in found.items():
    if not {"asgd", "dbs"} <= runs.keys():
      continue
    more = comparison.paired_difference(runs["dbs"], runs["asgd"])
    rates = [
      comparison.mean(runs[name], lambda row: row["samples"] / row["train_s"])
      for name in ("dbs", "asgd")
    ]
    lines.append(
      (
        sharing,
        f"{speed:g}x",
        *(
          relative(runs, "dbs", other)
          for other in ("asgd", "n-softsync", "n-softsync, rate/staleness")
        ),
        "" if more is None else more.plus_minus(),
        f"{rates[0] / rates[1]:.3f}",
      )
    )
  return studies.table(
    "data | speeds | dbs, % more loss than asgd | than n-softsync "
    "| than n-softsync, rate/staleness | points more accurate than asgd "
    "| samples a second, of asgd's",
    lines,
  )


def balance(found: Found) -> str:
  """Returns a table of how unequal iterations and staleness are, by speed."""

  def both(values: Sequence[float], digits: int) -> str:
    return " / ".join(f"{x:.{digits}f}" for x in values)

  lines = []
  for (sharing, speed), runs in found.items():
    if sharing == "shared" and {"asgd", "dbs"} <= runs.keys():
      pair = runs["asgd"], runs["dbs"]
      spreads = [comparison.mean(x, "iteration_spread") for x in pair]
      ages = [
        both([_staleness(x, key) for x in pair], digits)
        for key, digits in _AGES[1:]
      ]
      lines.append((f"{speed:g}x", both(spreads, 1), *ages))
  return studies.table(
    "speeds | slowest iteration over fastest: asgd / dbs "
    "| staleness, mean over nodes: asgd / dbs | maximum: asgd / dbs",
    lines,
  )


def draw(found: Found, path: pathlib.Path) -> None:
  """Draws the test loss over virtual time, by sharing and by speed."""
  sharings = list(dict.fromkeys(sharing for sharing, _ in found))
  speeds = list(dict.fromkeys(speed for _, speed in found))
  # A single speed gives one row of axes instead of one column.
  upright = len(speeds) > 1
  shape = (len(sharings), len(speeds)) if upright else (1, len(sharings))
  config = next(iter(next(iter(found.values())).values()))[0]["config"]
  with studies.picture(
    path, *shape, sharey="row" if upright else False, legend=4,
    figsize=(1.5 + 3.2 * shape[1], 1.5 + 2.7 * shape[0]),
    grid={"which": "both"},
    title=f"{config['dataset']}, {config['model']}, {config['workers']} "
    "workers: mean over seeds, each variant at its best rate",
  ) as grid:  # fmt: skip
    for (sharing, speed), runs in found.items():
      place = sharings.index(sharing), speeds.index(speed)
      axes = grid[place if upright else place[::-1]]
      for name in [x for x in _COLOURS if x in runs]:
        curve = studies.mean_curve(runs[name], "loss", "train_s")
        axes.plot(
          *zip(*curve, strict=True), color=_COLOURS[name], label=name,
          lw=2.2 if name == "dbs" else 1.2, ls=_style(name),
        )  # fmt: skip
      axes.set_yscale("log")
      for which in ("major", "minor"):
        getattr(axes.yaxis, f"set_{which}_formatter")(lambda x, _: f"{x:g}")
      axes.tick_params(axis="y", which="minor", labelsize=7)
      axes.set_title(f"{sharing}, {speed:g}x", fontsize=10)
    for row in grid:
      row[0].set_ylabel("test loss")
    for axes in grid[-1]:
      axes.set_xlabel("virtual seconds")


def draw_staleness(runs: Runs, path: pathlib.Path, title: str) -> None:
  """Draws which part of the gradients was at least how stale."""
  with studies.picture(path, figsize=(7.5, 4.4), grid={"lw": 0.8}) as (
    (axes,),
  ):
    # Variants of one protocol may have one curve, and bsp's is a point.
    alike: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in [x for x in _COLOURS if x in runs]:
      counts: collections.Counter[int] = collections.Counter()
      for row in runs[name]:
        for age, count in row["staleness"]["counts"].items():
          counts[int(age)] += count
      points = tuple(
        (age, sum(counts[x] for x in counts if x >= age) / counts.total())
        for age in sorted(counts)
      )
      alike.setdefault(points, []).append(name)
    for points, names in alike.items():
      axes.step(
        *zip(*points, strict=True), where="post", color=_COLOURS[names[0]],
        lw=2.2 if "dbs" in names else 1.2, ls=_style(names[0]),
        label=" = ".join(names),
        marker="" if points[1:] else "o",
      )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1.3)
    axes.set_xlabel("staleness: updates since the parameters were sent")
    axes.set_ylabel("part of the gradients at least so stale")
    axes.set_title(title, fontsize=11)
    axes.legend(frameon=False, fontsize=9)


def _style(name: str) -> str:
  """Returns a line's style: what lies under a broken line stays visible."""
  return ":" if name == "bsp" else "--" if "," in name else "-"


def _setting(row: comparison.Row) -> tuple[str, float]:
  return row["config"].get("sharing", "shared"), row["config"]["speed"]


def _place(item: tuple[tuple[str, float], Any]) -> tuple[int, float]:
  (sharing, speed), _ = item
  return ("shared", "owned", "skewed").index(sharing), speed


def clock_table(rows: Sequence[comparison.Row]) -> str:
  """Returns the table of the virtual clock's own time."""
  return studies.table(
    "protocol | links | processor seconds | ten thousand workers to a hundred "
    "| memory",
    [
      f"{row['protocol']} | {row['link'].replace('_', ' ')} "
      f"| {row['processor_s']:.1f} | {row['ratio_of_10000_to_100']:.2f} "
      f"({min(row['ratios']):.2f} to {max(row['ratios']):.2f}) "
      f"| {row['memory_of_ten_times']:.2f}x"
      for row in rows
    ],
  )


def main(folder: pathlib.Path) -> None:
  """Prints and draws the results of a preset, or prints those of the clock."""
  preset = sys.argv[1] if len(sys.argv) > 1 else "mnist"
  results = folder / "results"
  rows = training.read_rows(results / f"{preset}.jsonl")
  if preset == "clock":
    print(clock_table(rows))
    return
  found, one_rate, parts = {}, {}, []
  for setting, own in sorted(studies.group(rows, _setting).items(), key=_place):
    tuned = studies.tuned_rates(own, comparison.by_loss)
    runs = found[setting] = studies.best_runs(own, comparison.by_loss)
    sharing, speed = setting
    parts.append(f"\n### {sharing}, {speed:g}x\n\n{table(runs, tuned)}")
    if _BASE in tuned:
      rates = dict.fromkeys((row["method"] for row in own), tuned[_BASE].best)
      same = one_rate[setting] = studies.runs_at(own, rates)
      parts.append(f"\nAll with asgd's best rate:\n\n{table(same, {})}")
  print(f"Each variant at its best rate:\n\n{summary(found)}\n")
  print(f"All with asgd's best rate:\n\n{summary(one_rate)}\n")
  print(f"Iterations and staleness:\n\n{balance(found)}")
  print("\n".join(parts))
  draw(found, results / f"{preset}.png")
  shared = [key for key in found if key[0] == "shared"]
  middle = max(shared, default=next(iter(found)))
  if ("shared", 8.0) in found:
    middle = ("shared", 8.0)
  path = results / f"{preset}-staleness.png"
  if studies.is_shown(path):
    title = f"Staleness, {middle[0]} samples, speeds of {middle[1]:g}x"
    draw_staleness(found[middle], path, title)


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
