"""Writes the tables of the ladder's page, and its picture, from the rows.

    python experiments/records/report.py          # README.md and ladder.png
    python experiments/records/report.py --check  # fails if a number differs

All numbers of the page stand between markers and are written here.  A row whose
commit cannot be checked out is refused.
"""

import argparse
import collections
import pathlib
import statistics
import sys
from collections.abc import Sequence

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import run
import studies

from jdist import training
from jdist.training import comparison

Row = run.Row
FOLDER = run.FOLDER
MARGIN = 0.01
"""Nats within which the interval of a difference must lie, as the issue says
before the runs."""

BASE = "ssgd"


def read(path: pathlib.Path) -> list[Row]:
  """Reads rows; raises a ValueError for one of unknown or changed code."""
  rows = training.read_rows(path)
  for row in rows:
    run.check_commit(row["commit"])
  return rows


def of(rows: Sequence[Row], purpose: str, setting: str = "cpu") -> list[Row]:
  """Returns the rows of a purpose in a setting."""
  return [
    row
    for row in rows
    if (row["purpose"], row["config"]["setting"]) == (purpose, setting)
  ]


def loss(row: Row) -> float:
  """Returns the last validation loss, infinity for a run that diverged."""
  return float("inf") if row["val_loss"] is None else float(row["val_loss"])


def by_run(rows: Sequence[Row]) -> dict[tuple[int, str], list[Row]]:
  """Returns the rows by rung and method, the first rung first."""
  found = studies.group(rows, lambda row: (row["rung"], row["method"]))
  return dict(sorted(found.items()))


def difference(
  rows: Sequence[Row], base: Sequence[Row]
) -> comparison.Difference:
  """Returns the paired difference of losses in nats."""
  found = comparison.paired_difference(rows, base, value=loss)
  if found is None:
    raise ValueError("`rows` must share two seeds or more with `base`.")
  return found


def chosen(rows: Sequence[Row]) -> dict[int, str]:
  """Returns each rung's method: the lowest mean loss of the tuning seeds."""
  best: dict[int, tuple[float, str]] = {}
  compared = {(row["rung"], row["method"]) for row in of(rows, "comparison")}
  for (rung, method), own in by_run(of(rows, "tuning")).items():
    if (rung, method) in compared and rung > 1:
      found = min(run.means(own).values()), method
      best[rung] = min(best.get(rung, found), found)
  return {rung: method for rung, (_, method) in best.items()}


def _outer(row: Row) -> str:
  if row["rung"] == 1:
    return "-"
  return f"{row['outer_rate']:g}, {row['outer_momentum']:g}"


def _mean(rows: Sequence[Row]) -> str:
  values = [loss(row) for row in rows]
  found = comparison.paired_difference(
    [
      {"seed": row["seed"], "x": x} for row, x in zip(rows, values, strict=True)
    ],
    [{"seed": row["seed"], "x": 0.0} for row in rows],
    value=lambda row: row["x"],
  )
  if found is None:
    return f"{statistics.mean(values):.4f}"
  return f"{found.mean:.4f} ± {found.high - found.mean:.4f}"


def ladder_table(rows: Sequence[Row]) -> str:
  """Returns the table of all compared runs."""
  runs = by_run(of(rows, "comparison"))
  base, best = runs[1, BASE], chosen(rows)
  lines = []
  for (rung, method), own in runs.items():
    gap = difference(own, base).plus_minus(4) if method != BASE else "-"
    name = f"**{method}**" if best.get(rung) == method else method
    lines.append([
      "-" if rung == 1 else f"{rung}x", name, f"{own[0]['learning_rate']:g}",
      _outer(own[0]), own[0]["rounds"], f"{own[0]['ratio']:.1f}x",
      f"{own[0]['sent_bytes'] / 1e6:,.1f}", _mean(own), gap,
      f"{statistics.mean(x['program_s'] / x['program_runs'] for x in own):.1f}",
    ])  # fmt: skip
  return studies.table(
    "rung | method | rate | outer rate, momentum | means | fewer bytes | MB "
    "sent by a worker | validation loss, nat | less ssgd | s a run",
    lines,
  )


def levers_table(rows: Sequence[Row]) -> str:
  """Returns the table of all that was tuned, by the tuning seeds."""
  lines = []
  for (rung, method), own in by_run(of(rows, "tuning")).items():
    tried = run.means(own)
    best = min(tried, key=tried.__getitem__)
    rates = sorted({row["learning_rate"] for row in own})
    row = next(x for x in own if run.point_of(x)._replace(seed=None) == best)
    by_outer = collections.defaultdict(lambda: float("inf"))
    for point, x in tried.items():
      outer = f"{point.outer_rate:g}, {point.outer_momentum:g}"
      by_outer[outer] = min(by_outer[outer], x)
    others = "; ".join(f"{k}: {x:.3f}" for k, x in by_outer.items())
    lines.append([
      "-" if rung == 1 else f"{rung}x", method, row["rounds"],
      f"{rates[0]:g} to {rates[-1]:g}", f"{best.rate:g}", _outer(row),
      f"{tried[best]:.4f}", "-" if rung == 1 else others,
      len({x["seed"] for x in own}),
    ])  # fmt: skip
  return studies.table(
    "rung | method | means | rates | best rate | best outer | loss of the "
    "tuning seeds | lowest loss by outer rate, momentum | seeds",
    lines,
  )


def verdict(rows: Sequence[Row]) -> str:
  """Returns the sentences that say which rungs hold."""
  runs, best = by_run(of(rows, "comparison")), chosen(rows)
  held, broken = [], []
  for rung, method in sorted(best.items()):
    found = difference(runs[rung, method], runs[1, BASE])
    (held if found.high <= MARGIN else broken).append((rung, method, found))
  base = _mean(runs[1, BASE])
  text = [f"Synchronous AdamW ends at {base} nat."]
  for words, some in (
    ("holds", held), ("does not hold", broken)
  ):  # fmt: skip
    for rung, method, found in some:
      text.append(
        f"The rung of {rung}x {words} with {method}: its loss less that of "
        f"ssgd is {found.interval(4)}."
      )
  mark = of(rows, "comparison", "mark")
  if mark:
    text.append(
      "One worker alone, which is the public setting, ends at "
      f"{_mean(mark)} nat."
    )
  return "\n".join(f"- {line}" for line in text)


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Draws the differences to synchronous AdamW against the bytes."""
  from matplotlib import figure

  runs = by_run(of(rows, "comparison"))
  base = runs[1, BASE]
  picture = figure.Figure(figsize=(7.5, 4.2), layout="constrained")
  axes = picture.subplots()
  lines = studies.group([key for key in runs if key[0] > 1], lambda key: key[1])
  colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#333333", "#e69f00")
  for i, (method, keys) in enumerate(lines.items()):
    found = [difference(runs[key], base) for key in keys]
    axes.errorbar(
      [runs[key][0]["ratio"] for key in keys],
      [x.mean for x in found],
      [x.high - x.mean for x in found],
      marker="o", ms=4, lw=1.2, capsize=3, label=method,
      color=colours[i % len(colours)],
    )  # fmt: skip
  if (1, "ssgd-muon") in runs:
    other = difference(runs[1, "ssgd-muon"], base)
    axes.axhline(
      other.mean, color="#777777", ls=":", lw=1, label="ssgd with Muon"
    )
  axes.axhspan(-MARGIN, MARGIN, color="#dddddd", lw=0, label="±0.01 nat")
  axes.axhline(0, color="black", lw=0.8)
  axes.set_xscale("log")
  rungs = sorted({key[0] for key in runs if key[0] > 1})
  axes.set_xticks(rungs, [f"{rung}x" for rung in rungs])
  axes.minorticks_off()
  axes.set_xlabel("fewer bytes than ssgd in float32")
  axes.set_ylabel("validation loss less that of ssgd, nat")
  axes.legend(fontsize=8, frameon=False)
  picture.savefig(path, dpi=150)


def filled(page: str, parts: dict[str, str]) -> str:
  """Returns a page with new text between the markers of each part."""
  for name, text in parts.items():
    first, last = f"<!-- rows: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = page.partition(first)
    inside, found, after = rest.partition(last)
    if not found:
      raise ValueError(f"`page` must have {first} and {last}.")
    del inside
    page = f"{before}{first}\n{text}\n{last}{after}"
  return page


def main() -> int:
  """Writes the page, or returns 1 if it is not what the rows say."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--check", action="store_true")
  check = parser.parse_args().check
  rows = read(FOLDER / "results" / "ladder.jsonl")
  parts = {
    "verdict": verdict(rows),
    "ladder": ladder_table(rows),
    "levers": levers_table(rows),
  }
  for text in parts.values():
    print(text + "\n")
  page = FOLDER / "README.md"
  new = filled(page.read_text(), parts)
  if check:
    return int(new != page.read_text())
  page.write_text(new)
  draw(rows, FOLDER / "results" / "ladder.png")
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
