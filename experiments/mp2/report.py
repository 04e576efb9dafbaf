"""The tables and the picture of the comparison, from its rows.

python experiments/mp2/report.py mnist
python experiments/mp2/report.py mnist --accuracy 96 97
"""

import argparse
import pathlib
import statistics
from typing import Any, TypeAlias

from jdist import training
from jdist.training import comparison

Row: TypeAlias = dict[str, Any]
Runs: TypeAlias = dict[str, list[Row]]

_BASE = "baseline"
# Seeds that most variants were run with.
_PAIRED = range(5)
# Points of accuracy below the best that the picture shows.
_SHOWN = 8.0
_LINKS = ("10 Mbit/s", "100 Mbit/s", "1 Gbit/s")
# What is counted, by its name in rows; of `sent_bytes` the most is baseline's.
_COUNTS = {
  "uplink_bytes_as_published": "uplink as the paper counts",
  "uplink_bytes": "uplink, like for like",
  "both_bytes": "both directions, a server",
  "sent_bytes": "a ring, no server",
}


def _mean(rows: list[Row], key: str) -> float:
  return statistics.mean(row[key] / row["steps"] for row in rows)


def traffic_table(runs: Runs) -> str:
  """Markdown: accuracy, and what is saved of the baseline's bytes."""
  lines = [
    "| variant | test accuracy, % | seeds | learning rate | "
    + " | ".join(f"saved: {told}" for told in _COUNTS.values())
    + " |",
    "|---|---|---|---|" + "---|" * len(_COUNTS),
  ]
  base = runs[_BASE]
  for method, rows in sorted(
    runs.items(), key=lambda item: -comparison.mean_accuracy(item[1])[0]
  ):
    mean, spread = comparison.mean_accuracy(rows)
    saved = " | ".join(
      f"{100 * (1 - _mean(rows, key) / _mean(base, key)):.2f} %"
      for key in _COUNTS
    )
    lines.append(
      f"| {method} | {mean:.2f} ± {spread:.2f} | {len(rows)} "
      f"| {rows[0]['learning_rate']:g} | {saved} |"
    )
  return "\n".join(lines)


def paired_tables(runs: Runs) -> str:
  """Markdown: differences of the same seeds, to what each has to beat."""
  bases = (_BASE, "mp2, borrowed rear", "ours, 2 bits, borrowed rear")
  return "\n\n".join(
    comparison.difference_table(runs, base, _PAIRED)
    for base in bases
    if base in runs
  )


def mean_curve(rows: list[Row]) -> list[tuple[int, float]]:
  """Steps, and the mean accuracy over seeds in percent."""
  return [
    (points[0]["step"], 100 * statistics.mean(p["accuracy"] for p in points))
    for points in zip(*(row["curve"] for row in rows), strict=True)
  ]


def steps_to(rows: list[Row], accuracy: float) -> float | None:
  """Steps until the mean over seeds has an accuracy, in percent.

  Between two evaluations it is a straight line; None where it never does.
  """
  before_step, before = 0, 0.0
  for step, now in mean_curve(rows):
    if now >= accuracy:
      share = (accuracy - before) / (now - before)
      return before_step + share * (step - before_step)
    before_step, before = step, now
  return None


def seconds_to(
  runs: Runs, times: dict[str, Row], accuracy: float, key: str
) -> dict[str, list[float] | None]:
  """Seconds to an accuracy over each link; None where it is not reached.

  A step takes its computation, as measured for all workers on one machine,
  and then its bytes over one worker's link: nothing is hidden, and the
  server's own link is no narrower than all of theirs together.
  """
  measured = [row["train_s"] / row["steps"] for row in runs[_BASE]]
  base_s = (
    times[_BASE]["step_s"] if _BASE in times else statistics.median(measured)
  )
  found: dict[str, list[float] | None] = {}
  for method, rows in runs.items():
    steps = steps_to(rows, accuracy)
    if steps is None:
      found[method] = None
      continue
    ratio = times[method]["ratio"] if method in times else 1.0
    found[method] = [
      steps * (ratio * base_s + 8 * _mean(rows, key) / comparison.LINKS[link])
      for link in _LINKS
    ]
  return found


def time_table(runs: Runs, times: dict[str, Row], accuracy: float) -> str:
  """Markdown: seconds, and how many of the baseline's are saved."""
  counts = ("both_bytes", "sent_bytes")
  tables = {key: seconds_to(runs, times, accuracy, key) for key in counts}
  lines = [
    "| variant | steps | "
    + " | ".join(f"{_COUNTS[key]}, {link}" for key in counts for link in _LINKS)
    + " |",
    "|---|---|" + "---|" * (len(counts) * len(_LINKS)),
  ]
  for method, rows in runs.items():
    steps = steps_to(rows, accuracy)
    if steps is None:
      highest = max(found for _, found in mean_curve(rows))
      lines.append(
        f"| {method} | not reached, highest {highest:.2f} % |"
        + " |" * (len(counts) * len(_LINKS))
      )
      continue
    cells = []
    for key in counts:
      mine, base = tables[key][method], tables[key][_BASE]
      for i in range(len(_LINKS)):
        if mine is None:
          cells.append("")
        elif base is None or method == _BASE:
          cells.append(f"{mine[i]:.1f} s")
        else:
          cells.append(
            f"{mine[i]:.1f} s ({100 * (mine[i] / base[i] - 1):+.0f} %)"
          )
    lines.append(f"| {method} | {steps:.0f} | {' | '.join(cells)} |")
  return "\n".join(lines)


def link_table(runs: Runs, measured: list[Row], accuracy: float) -> str:
  """Markdown: steps as measured over real links, and the time of so many."""
  times = {row["method"]: row for row in measured}
  some = times[_BASE]
  lines = [
    f"| variant, {some['hosts']} hosts, links of "
    f"{some['bits_per_s'] / 1e6:g} Mbit/s | ms a step | of {_BASE}'s "
    f"| modelled ms | to {accuracy:g} % |",
    "|---|---|---|---|---|",
  ]
  base_steps = steps_to(runs[_BASE], accuracy)
  for method, row in times.items():
    low, high = row["quartiles"]
    steps = steps_to(runs[method], accuracy) if method in runs else None
    told = ""
    if steps is not None:
      told = f"{steps * row['step_s']:.0f} s"
      if method != _BASE and base_steps is not None:
        ratio = row["ratio"] * steps / base_steps
        told += f" ({100 * (ratio - 1):+.0f} %)"
    lines.append(
      f"| {method} | {1e3 * row['step_s']:.1f} | {row['ratio']:.3f} ({low:.3f} "
      f"to {high:.3f}) | {1e3 * row['modelled_s']:.1f} | {told} |"
    )
  return "\n".join(lines)


def draw(runs: Runs, path: pathlib.Path) -> None:
  """Accuracy against the bytes of a step in both directions."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
  # What is far below would press all others into a line: it stands at the edge,
  # under all others.
  means = {
    method: comparison.mean_accuracy(rows) for method, rows in runs.items()
  }
  best = max(mean for mean, _ in means.values())
  shown = [found for found in means.values() if found[0] >= best - _SHOWN]
  lowest = min(mean - spread for mean, spread in shown)
  lowest -= (best - lowest) / 20
  labels = []
  for method, rows in runs.items():
    mean, spread = means[method]
    kilobytes = _mean(rows, "both_bytes") / 1e3
    color = "#0072b2"
    if method.startswith("ours"):
      color = "#d55e00"
    elif method.startswith("mp2"):
      color = "#009e73"
    if means[method] not in shown:
      axes.plot(kilobytes, lowest, "v", color=color)
      labels.append((kilobytes, lowest, f"{method}: {mean:.1f} ± {spread:.1f}"))
      continue
    axes.errorbar(
      kilobytes, mean, spread, fmt="o", color=color, capsize=3
    )  # fmt: skip
    labels.append((kilobytes, mean, method))
  some = runs[_BASE][0]
  axes.set_xscale("log")
  axes.margins(x=0.65, y=0.1)
  axes.set_xlabel("kB a step between a worker and a server, both directions")
  axes.set_ylabel("test accuracy, %")
  axes.set_title(
    f"{some['config']['dataset']}, {some['config']['model']}, N = "
    f"{some['workers']}, {some['config']['epochs']:g} epochs; bars: standard "
    "deviation",
    fontsize=11,
  )
  axes.grid(alpha=0.3)
  comparison.label_points(axes, labels)
  figure.savefig(path, dpi=130)


def prepared(rows: list[Row]) -> str:
  """Markdown: how good what was prepared is."""
  lines = []
  for row in rows:
    if row["purpose"] == "nowcaster":
      ratio = row["error"] / row["repeat_error"]
      lines.append(
        f"- nowcaster of {row['kind']} entries: {100 * (1 - ratio):.1f} % less "
        f"error than the last value repeated ({row['error']:.3g} and "
        f"{row['repeat_error']:.3g}), on a run that was held out"
      )
    elif row["purpose"] == "samples":
      lines.append(
        f"- run {row['run']}, rate {row['config']['collect_rate']}: "
        f"{100 * row['validation_accuracy']:.2f} % on held-out images"
      )
    elif row["purpose"] == "predictor":
      lines.append(
        f"- predictor, {row['cut']}, rank {row['rank']}, learned from "
        f"{row.get('runs', 1)} run(s) in {row['config']['fit_epochs']} epochs: "
        "assembled networks "
        f"{100 * row['accuracy_own_run']:.1f} % with fronts of its own run, "
        f"{100 * row['accuracy_other_seed']:.1f} % of another seed's, "
        f"{100 * row['accuracy_untrained_fronts']:.1f} % with untrained ones"
      )
    elif row["purpose"] == "moved":
      lines.append(
        f"- predictor, {row['cut']}, rank {row['rank']}, learned from "
        f"{row['runs']} run(s) in {row['config']['fit_epochs']} epochs, moved "
        f"to {row['to']}: assembled networks "
        f"{100 * row['accuracy']:.1f} %, the ordinary run there "
        f"{100 * row['ordinary_accuracy']:.1f} %"
      )
    elif row["purpose"] == "cut":
      lines.append(
        f"- {row['cut']}: {100 * row['accuracy']:.1f} % with fronts of its own "
        f"run that were held out, {row['pushed_bytes']:,} bytes pushed"
        + (", chosen" if row["chosen"] else "")
      )
  return "\n".join(lines)


def once(rows: list[Row]) -> list[Row]:
  """Of what was prepared again the last row."""
  measured = {"purpose", "seed", "run", "runs", "kind", "cut", "rank", "to"}
  # What it depends on besides.
  trained = {"predictor": "fit_epochs", "moved": "fit_epochs"}
  trained["cut"] = "study_epochs"
  found = {}
  for row in rows:
    key = tuple(str(row.get(name)) for name in sorted(measured))
    key += (str(row["config"].get(trained.get(row["purpose"], ""))),)
    found.pop(key, None)
    found[key] = row
  return list(found.values())


def by_setting(rows: list[Row]) -> dict[str, Runs]:
  """The tuned runs, for each way in which they were made, the preset's first.

  Rows may be of another number of workers, and of the same first weights.
  """
  found: dict[str, list[Row]] = {}
  for row in rows:
    config = row["config"]
    name = f"{config['workers']} workers"
    if (seed := config.get("start_seed")) is not None:
      name += f", first weights of seed {seed}"
    found.setdefault(name, []).append(row)
  return {name: comparison.best_runs(own) for name, own in found.items()}


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  parser = argparse.ArgumentParser(description="Tables and a picture, of rows.")
  parser.add_argument("preset", nargs="?", default="mnist")
  parser.add_argument(
    "--accuracy",
    nargs="*",
    type=float,
    help="in percent, to which times are told; default the baseline's mean "
    "less its spread",
  )
  chosen = parser.parse_args()
  name, results = chosen.preset, folder / "results"
  rows = training.read_rows(results / f"{name}.jsonl")
  (_, runs), *others = by_setting(rows).items()
  if _BASE not in runs:
    raise SystemExit(f"There is no tuned run of {_BASE} in {name}'s rows yet.")
  print(f"{traffic_table(runs)}\n\nPaired:\n\n{paired_tables(runs)}")
  measured = results / f"{name}-times.jsonl"
  times = {}
  if measured.exists():
    times = {row["method"]: row for row in training.read_rows(measured)}
  mean, spread = comparison.mean_accuracy(runs[_BASE])
  links = [training.read_rows(p) for p in results.glob(f"{name}-*bit.jsonl")]
  for accuracy in chosen.accuracy or [mean - spread]:
    print(f"\nTo {accuracy:.2f} %:\n")
    print(time_table(runs, times, accuracy))
    for found in sorted(links, key=lambda rows: rows[0]["bits_per_s"]):
      print(f"\n{link_table(runs, found, accuracy)}")
  draw(runs, results / f"{name}.png")
  for setting, found in others:
    print(f"\n{setting}:\n")
    if _BASE in found:
      print(f"{traffic_table(found)}\n\nPaired:\n\n{paired_tables(found)}")
      for accuracy in chosen.accuracy or [
        comparison.mean_accuracy(found[_BASE])[0]
      ]:
        print(f"\nTo {accuracy:.2f} %:\n\n{time_table(found, times, accuracy)}")
    else:
      print(f"no row of {_BASE}, with which the others could be compared")
  before = results / f"{name}-untuned-source.jsonl"
  if before.exists():
    _, old = next(iter(by_setting(training.read_rows(before)).items()))
    table = comparison.difference_table(
      old | {_BASE: runs[_BASE]}, _BASE, _PAIRED
    )
    print(f"\nOf a source whose rate was not tuned:\n\n{table}")
  made = results / f"{name}-prepare.jsonl"
  if made.exists():
    print(f"\n{prepared(once(training.read_rows(made)))}")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
