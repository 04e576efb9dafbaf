"""The tables and the picture of the comparison, from its rows.

python experiments/mp2/report.py mnist
python experiments/mp2/report.py mnist --accuracy 96 97
"""

import argparse
import pathlib
import statistics
import sys
from typing import TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import training
from jdist.training import comparison

Runs: TypeAlias = dict[str, list[comparison.Row]]

_BASE = "baseline"
# Most variants were run with these seeds.
_PAIRED = range(5)
# The picture shows this many points of accuracy below the best.
_SHOWN = 8.0
_LINKS = {"10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
# Counts of bytes, by their names in rows.
_COUNTS = {
  "uplink_bytes_as_published": "uplink as the paper counts",
  "uplink_bytes": "uplink, like for like",
  "both_bytes": "both directions, a server",
  "sent_bytes": "a ring, no server",
}


def _mean(rows: list[comparison.Row], key: str) -> float:
  return comparison.mean(rows, lambda row: row[key] / row["steps"])


def traffic_table(runs: Runs) -> str:
  """Returns a table of accuracies, and of bytes saved over the baseline."""
  base = runs[_BASE]
  lines = []
  for method, rows in studies.by_accuracy(runs):
    saved = [1 - _mean(rows, key) / _mean(base, key) for key in _COUNTS]
    lines.append(
      (
        method,
        "{:.2f} ± {:.2f}".format(*studies.mean_accuracy(rows)),
        len(rows),
        f"{rows[0]['learning_rate']:g}",
        *(f"{100 * x:.2f} %" for x in saved),
      )
    )
  titles = [f"saved: {name}" for name in _COUNTS.values()]
  return studies.table(
    " | ".join(["variant | test accuracy, % | seeds | learning rate", *titles]),
    lines,
  )


def paired_tables(runs: Runs) -> str:
  """Markdown: differences of the same seeds, to what each has to beat."""
  bases = (_BASE, "mp2, borrowed rear", "ours, 2 bits, borrowed rear")
  return "\n\n".join(
    studies.difference_table(runs, base, _PAIRED)
    for base in bases
    if base in runs
  )


def steps_to(rows: list[comparison.Row], accuracy: float) -> float | None:
  """Returns the steps until the mean over seeds has an accuracy, in percent."""
  curve = ((x, 100 * y) for x, y in studies.mean_curve(rows))
  return studies.reached_at(curve, accuracy)


def seconds_to(
  runs: Runs, times: dict[str, comparison.Row], accuracy: float, key: str
) -> dict[str, list[float] | None]:
  """Returns the seconds to an accuracy over each link; None if not reached.

  A step takes its computation, as measured for all workers on one machine,
  and then its bytes over one worker's link. Nothing is hidden, and the server's
  own link is no narrower than all of theirs together.
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
      steps * (ratio * base_s + 8 * _mean(rows, key) / bits_per_s)
      for bits_per_s in _LINKS.values()
    ]
  return found


def time_table(
  runs: Runs, times: dict[str, comparison.Row], accuracy: float
) -> str:
  """Returns a table of seconds, and of the part of the baseline's saved."""
  counts = ("both_bytes", "sent_bytes")
  tables = {key: seconds_to(runs, times, accuracy, key) for key in counts}
  lines = []
  for method, rows in runs.items():
    steps = steps_to(rows, accuracy)
    if steps is None:
      highest = 100 * max(y for _, y in studies.mean_curve(rows))
      empty = [""] * (len(counts) * len(_LINKS))
      lines.append([method, f"not reached, highest {highest:.2f} %", *empty])
      continue
    cells = []
    for key in counts:
      mine, base = tables[key][method] or [], tables[key][_BASE]
      for i, own in enumerate(mine):
        cells.append(f"{own:.1f} s")
        if base is not None and method != _BASE:
          cells[-1] += f" ({100 * (own / base[i] - 1):+.0f} %)"
    lines.append([method, f"{steps:.0f}", *cells])
  titles = [f"{_COUNTS[key]}, {link}" for key in counts for link in _LINKS]
  return studies.table(" | ".join(["variant", "steps", *titles]), lines)


def link_table(
  runs: Runs, measured: list[comparison.Row], accuracy: float
) -> str:
  """Returns a table of steps as measured over real links, and of run times."""
  times = {row["method"]: row for row in measured}
  some = times[_BASE]
  lines = []
  base_steps = steps_to(runs[_BASE], accuracy)
  for method, row in times.items():
    low, high = row["quartiles"]
    steps = steps_to(runs[method], accuracy) if method in runs else None
    run = ""
    if steps is not None:
      run = f"{steps * row['step_s']:.0f} s"
      if method != _BASE and base_steps is not None:
        ratio = row["ratio"] * steps / base_steps
        run += f" ({100 * (ratio - 1):+.0f} %)"
    lines.append(
      f"{method} | {1e3 * row['step_s']:.1f} | {row['ratio']:.3f} ({low:.3f} "
      f"to {high:.3f}) | {1e3 * row['modelled_s']:.1f} | {run}"
    )
  return studies.table(
    f"variant, {some['hosts']} hosts, links of {some['bits_per_s'] / 1e6:g} "
    f"Mbit/s | ms a step | of {_BASE}'s | modelled ms | to {accuracy:g} %",
    lines,
  )


# The counts of the picture's panels: the papers see one direction, links two.
_PANELS = {
  "uplink_bytes": "kB a step from a worker to a server",
  "both_bytes": "kB a step between a worker and a server, both directions",
}


def draw(runs: Runs, path: pathlib.Path) -> None:
  """Draws accuracy against the bytes of a step, one direction and both."""
  # A variant far below the best would compress the others into a line, so it is
  # drawn at the lower edge, each one below the last.
  means = {method: studies.mean_accuracy(rows) for method, rows in runs.items()}
  best = max(mean for mean, _ in means.values())
  shown = {x: found for x, found in means.items() if found[0] >= best - _SHOWN}
  lowest = min(mean - spread for mean, spread in shown.values())
  below = [x for x in runs if x not in shown]
  config, workers = runs[_BASE][0]["config"], runs[_BASE][0]["workers"]
  epochs = f"{config['epochs']:g} epoch" + "s" * (config["epochs"] != 1)
  with studies.picture(
    path, 1, len(_PANELS), sharex=True, sharey=True, figsize=(13, 5.4),
    grid={"lw": 0.8},
    title=f"{config['dataset']}, {config['model']}, N = {workers}, {epochs}; "
    "bars: standard deviation",
  ) as ((*panels,),):  # fmt: skip
    for axes, (key, title) in zip(panels, _PANELS.items(), strict=True):
      axes.spines[["top", "right"]].set_visible(True)
      labels = []
      for method, rows in runs.items():
        mean, spread = means[method]
        kilobytes = _mean(rows, key) / 1e3
        color = "#0072b2"
        if method.startswith(("ours", "mp2")):
          color = "#009e73" if method.startswith("mp2") else "#d55e00"
        if method in shown:
          axes.errorbar(
            kilobytes, mean, spread, fmt="o", color=color, capsize=3
          )
          labels.append((kilobytes, mean, method))
        else:
          y = lowest - (best - lowest) / 20 * (1 + below.index(method))
          axes.plot(kilobytes, y, "v", color=color)
          text = f"{method}: {mean:.1f} ± {spread:.1f}"
          labels.append((kilobytes, y, text))
      axes.set_xscale("log")
      axes.margins(x=0.65, y=0.1)
      axes.set_xlabel(title)
      studies.label_points(axes, labels)
    panels[0].set_ylabel("test accuracy, %")


# A line for each purpose of the rows of what was prepared.
_PREPARED = {
  "nowcaster": "nowcaster of {kind} entries: {less:.1%} less error than the "
  "last value repeated ({error:.3g} and {repeat_error:.3g}), on a run that was "
  "held out",
  "samples": "run {run}, rate {config[collect_rate]}: "
  "{validation_accuracy:.2%} on held-out images",
  "predictor": "predictor, {cut}, rank {rank}, learned from {runs} run(s) in "
  "{config[fit_epochs]} epochs: assembled networks {accuracy_own_run:.1%} with "
  "fronts of its own run, {accuracy_other_seed:.1%} of another seed's, "
  "{accuracy_untrained_fronts:.1%} with untrained ones",
  "moved": "predictor, {cut}, rank {rank}, learned from {runs} run(s) in "
  "{config[fit_epochs]} epochs, moved to {to}: assembled networks "
  "{accuracy:.1%}, the ordinary run there {ordinary_accuracy:.1%}",
  "cut": "{cut}: {accuracy:.1%} with fronts of its own run that were held out, "
  "{pushed_bytes:,} bytes pushed",
}


def prepared(rows: list[comparison.Row]) -> str:
  """Returns a line about the quality of each preparation."""
  lines = []
  for row in rows:
    if row["purpose"] in _PREPARED:
      more = {"runs": 1, **row}
      if "repeat_error" in row:
        more["less"] = 1 - row["error"] / row["repeat_error"]
      line = _PREPARED[row["purpose"]].format(**more).replace("%", " %")
      lines.append(f"- {line}{', chosen' if row.get('chosen') else ''}")
  return "\n".join(lines)


def once(rows: list[comparison.Row]) -> list[comparison.Row]:
  """Returns the last row of each preparation, which may have been repeated."""
  measured = {"purpose", "seed", "run", "runs", "kind", "cut", "rank", "to"}
  # Some preparations also depend on an option.
  trained = {"predictor": "fit_epochs", "moved": "fit_epochs"}
  trained["cut"] = "study_epochs"
  found = {}
  for row in rows:
    key = tuple(str(row.get(name)) for name in sorted(measured))
    key += (str(row["config"].get(trained.get(row["purpose"], ""))),)
    found.pop(key, None)
    found[key] = row
  return list(found.values())


def by_setting(rows: list[comparison.Row]) -> dict[str, Runs]:
  """Returns the tuned runs by setting, the preset's first.

  Settings differ in the number of workers and in the first weights.
  """

  def setting(row: comparison.Row) -> str:
    name = f"{row['config']['workers']} workers"
    if (seed := row["config"].get("start_seed")) is not None:
      name += f", first weights of seed {seed}"
    return name

  return {
    name: studies.best_runs(own)
    for name, own in studies.group(rows, setting).items()
  }


def main(folder: pathlib.Path) -> None:
  """Prints and draws the results of a preset."""
  parser = argparse.ArgumentParser(description="Tables and a picture, of rows.")
  parser.add_argument("preset", nargs="?", default="mnist")
  parser.add_argument(
    "--accuracy",
    nargs="*",
    type=float,
    help="the accuracies in percent to which times are shown; by default the "
    "baseline's mean less its spread",
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
  mean, spread = studies.mean_accuracy(runs[_BASE])
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
        studies.mean_accuracy(found[_BASE])[0]
      ]:
        print(f"\nTo {accuracy:.2f} %:\n\n{time_table(found, times, accuracy)}")
    else:
      print(f"no row of {_BASE}, with which the others could be compared")
  before = results / f"{name}-untuned-source.jsonl"
  if before.exists():
    _, old = next(iter(by_setting(training.read_rows(before)).items()))
    table = studies.difference_table(old | {_BASE: runs[_BASE]}, _BASE, _PAIRED)
    print(f"\nOf a source whose rate was not tuned:\n\n{table}")
  made = results / f"{name}-prepare.jsonl"
  if made.exists():
    print(f"\n{prepared(once(training.read_rows(made)))}")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
