"""Writes the tables and the picture of the successor's page from its rows.

python experiments/successor/report.py          # README.md and its picture
python experiments/successor/report.py --check  # fails if a number differs
"""

import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import run
import studies

from jdist.training import comparison

FOLDER = pathlib.Path(__file__).resolve().parent
# Methods and what each is compared with.
COMPARISONS = (*config.PAIRS.items(), ("powersgd rank 2", "top-k"))
Row = comparison.Row


def read() -> dict[str, list[Row]]:
  """Returns the rows of each preset that has some."""
  found = {x: studies.read(run.RESULTS / f"{x}.jsonl") for x in config.PRESETS}
  return {name: rows for name, rows in found.items() if rows}


def compared(rows: list[Row], method: str) -> list[Row]:
  """Returns the rows of a method's best momentum and rate, by seed."""
  own = [
    row
    for row in rows
    if row["purpose"] == "comparison" and row["method"].startswith(method)
  ]
  return sorted(own, key=lambda row: row["seed"])


def change(rows: list[Row], base: list[Row]) -> comparison.Difference:
  """Returns the paired change of the test loss in percent."""
  logs = comparison.paired_difference(
    [row | {"value": 0.0} for row in rows],
    [
      row | {"value": 1 - own["test_loss"] / row["test_loss"]}
      for own, row in zip(rows, base, strict=True)
    ],
    value=lambda row: 100 * row["value"],
  )
  assert logs is not None
  return logs


def pairs(rows: list[Row], method: str, base: str) -> tuple[list[Row], ...]:
  """Returns the rows of two methods with the seeds that both have."""
  found = compared(rows, method), compared(rows, base)
  both = set.intersection(*({row["seed"] for row in x} for x in found))
  return tuple([row for row in x if row["seed"] in both] for x in found)


def all_pairs(
  found: dict[str, list[Row]],
) -> Iterator[tuple[str, str, str, list[Row], list[Row]]]:
  """Yields networks, two methods each, and their pairs of rows."""
  for method, base in COMPARISONS:
    for name, rows in found.items():
      ours, theirs = pairs(rows, method, base)
      if len(ours) > 1:
        yield name, method, base, ours, theirs


def verdict(found: dict[str, list[Row]]) -> str:
  """Returns what came of each comparison on each network."""
  lines = []
  for name, method, base, ours, theirs in all_pairs(found):
    points = comparison.paired_difference(ours, theirs)
    assert points is not None
    wins = sum(
      x["test_loss"] < y["test_loss"] for x, y in zip(ours, theirs, strict=True)
    )
    more = comparison.mean(ours, "sent_bytes")
    more /= comparison.mean(theirs, "sent_bytes")
    lines.append((
      f"{method} less {base}", name, points.interval(),
      change(ours, theirs).interval(1), f"{wins} of {len(ours)}",
      f"{more:.2f}",
    ))  # fmt: skip
  return studies.table(
    "methods | network | points of accuracy | % of the test loss "
    "| pairs with a lower test loss | times the bytes",
    lines,
  )


def table(found: dict[str, list[Row]]) -> str:
  """Returns a line for each method of each network."""
  lines = []
  for name, rows in found.items():
    for method in config.METHODS:
      own = compared(rows, method)
      if not own:
        continue
      losses = [studies.loss(row) for row in own]
      mean, spread = studies.mean_accuracy(own)
      lines.append((
        name, own[0]["method"], f"{own[0]['learning_rate']:g}", len(own),
        f"{mean:.2f} ± {spread:.2f}", f"{statistics.mean(losses):.4f}",
        f"{comparison.mean(own, 'sent_bytes') / 1e6:.1f}",
      ))  # fmt: skip
  return studies.table(
    "network | method at its best point | rate | seeds | test accuracy, % "
    "| test loss | MB sent",
    lines,
  )


def tuning(found: dict[str, list[Row]]) -> str:
  """Returns the mean validation losses of all momenta and rates."""
  lines = []
  for name, rows in found.items():
    own = [row for row in rows if row["purpose"] == "tuning"]
    for method, some in studies.group(own, lambda x: x["method"]).items():
      at_rate = studies.group(some, lambda x: x["learning_rate"])
      losses = {
        rate: statistics.mean(map(studies.loss, at_rate[rate]))
        for rate in sorted(at_rate)
      }
      best = min(losses, key=losses.__getitem__)
      cells = [
        f"**{rate:g}: {x:.4f}**" if rate == best else f"{rate:g}: {x:.4f}"
        for rate, x in losses.items()
      ]
      lines.append((name, method, ", ".join(cells)))
  return studies.table("network | method | mean validation loss by rate", lines)


def setting(found: dict[str, list[Row]]) -> str:
  """Returns the setting of the rows."""
  rows = [row for x in found.values() for row in x]
  one = rows[0]["config"]
  nets = "; ".join(
    f"{name}: {x[0]['config']['epochs']:g} passes" for name, x in found.items()
  )
  return "\n".join((
    f"- {one['workers']} workers, {one['batch_size']} samples in a step, the "
    f"largest {100 * config.RATIO:g} % of the entries ({nets}).",
    f"- Tuning has the seeds {', '.join(map(str, config.TUNING_SEEDS))}; "
    "points and rates are ranked by the mean loss on held-out training "
    "samples.",
    f"- {len(rows)} rows, of the commits "
    f"{', '.join(sorted({row['commit'] for row in rows}))}, on "
    f"{', '.join(sorted({row['device'] for row in rows}))}.",
  ))  # fmt: skip


def draw(found: dict[str, list[Row]]) -> None:
  """Draws the change of the test loss in each pair."""
  path = run.RESULTS / "successor.png"
  shown = list(all_pairs(found))
  with studies.picture(path, figsize=(7.5, 1.4 + 0.45 * len(shown))) as grid:
    axes: Any = grid[0, 0]
    for at, (*_, ours, base) in enumerate(shown):
      each = [
        100 * (x["test_loss"] / y["test_loss"] - 1)
        for x, y in zip(ours, base, strict=True)
      ]
      mean = change(ours, base)
      axes.plot(each, [at] * len(each), "o", color="#0072b2", mfc="none")
      axes.errorbar(
        mean.mean, at, xerr=mean.high - mean.mean, fmt="D", color="#d55e00",
        capsize=4,
      )  # fmt: skip
    axes.axvline(0.0, color="#999999", lw=1)
    axes.set_yticks(
      range(len(shown)), [f"{name}: {method}" for name, method, *_ in shown]
    )
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlabel(
      "test loss more than top-k's with as many bits a value, %\n"
      "(circles: pairs, diamond: mean, 95 %)"
    )


def main() -> None:
  """Fills the page, and draws its picture."""
  found = read()
  parts = {
    "verdict": verdict(found),
    "table": table(found),
    "setting": setting(found),
  }
  pages = {"README.md": parts, "TUNING.md": {"tuning": tuning(found)}}
  studies.publish(
    {FOLDER / name: x for name, x in pages.items()}, lambda: draw(found)
  )


if __name__ == "__main__":
  main()
