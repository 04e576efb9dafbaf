"""The tables and the plot of a comparison of chains, from its rows."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jdist.training.comparison import _pictures, _rows, _study, _tables

Runs: TypeAlias = Mapping[str, Sequence[_rows.Row]]


def tuned_rates(
  rows: Sequence[_rows.Row], rank: _study.Rank = _study.quality
) -> dict[str, _study.Tuned]:
  """Returns each variant's learning rate, from its tuning rows."""
  tuning = [row for row in rows if row["purpose"] == "tuning"]
  return {
    method: _study.best_of(
      {
        rate: _study.mean_rank(seeds, rank)
        for rate, seeds in _tables.group(
          own, lambda row: row["learning_rate"]
        ).items()
      }
    )
    for method, own in _tables.group(tuning, lambda row: row["method"]).items()
  }


def runs_at(
  rows: Sequence[_rows.Row], rates: Mapping[str, float]
) -> dict[str, list[_rows.Row]]:
  """Returns the compared rows of each variant at its rate, or all its rows."""

  def chosen(row: _rows.Row) -> bool:
    rate = row["learning_rate"]
    # A variant without a rate was not tuned, and has rows of one rate alone.
    at_rate: bool = rates.get(row["method"], rate) == rate
    return row["purpose"] == "comparison" and at_rate

  return _tables.group(filter(chosen, rows), lambda row: row["method"])


def best_runs(
  rows: Sequence[_rows.Row], rank: _study.Rank = _study.quality
) -> dict[str, list[_rows.Row]]:
  """Returns the rows of each variant at its best rate, all seeds."""
  tuned = tuned_rates(rows, rank)
  return runs_at(rows, {name: one.best for name, one in tuned.items()})


def end_warnings(rows: Sequence[_rows.Row]) -> list[str]:
  """Returns a line for each end of the grid where a best rate lies."""
  tuned = tuned_rates(rows).items()
  found = []
  for end in ("lowest", "highest"):
    methods = [method for method, one in tuned if one.end == end]
    if methods:
      found.append(f"Best at the {end} rate tried: {', '.join(methods)}.")
  return found


def mean_accuracy(rows: Sequence[_rows.Row]) -> tuple[float, float]:
  """Returns mean and standard deviation over seeds, in percent."""
  return _tables.mean_and_spread(rows, _tables.accuracy)


def accuracy_table(runs: Runs) -> str:
  """Returns a Markdown table, the most accurate variant first."""
  # Bytes are relative to the variant that sends most, the synchronous one.
  most = max(row["sent_bytes"] for rows in runs.values() for row in rows)
  lines = []
  for method, rows in by_accuracy(runs):
    mean, spread = mean_accuracy(rows)
    sent = _tables.mean(rows, "sent_bytes")
    shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "")
    lines.append(
      f"{method} | {shown} | {len(rows)} | {_tables.mean(rows, 'rounds'):,.0f} "
      f"| {sent / 1e6:,.0f} | {most / sent:.1f}x "
      f"| {rows[0]['learning_rate']:g}"
    )
  return _tables.table(
    "variant | test accuracy, % (mean ± standard deviation) | seeds | rounds "
    "| MB sent | fewer bytes | learning rate",
    lines,
  )


def by_accuracy(runs: Runs) -> list[tuple[str, Sequence[_rows.Row]]]:
  """Returns the variants and their rows, the most accurate first."""
  return sorted(runs.items(), key=lambda item: -mean_accuracy(item[1])[0])


def plot_bytes(runs: Runs, path: str | os.PathLike[str], *, ours: str) -> None:
  """Draws accuracy over bytes, with the Pareto front.

  Args:
    runs: The rows of each variant.
    path: The path of the PNG.
    ours: The prefix of the names of variants that are marked.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  # Many variants need more room for their labels.
  size = (7.5, 4.8) if len(runs) < 12 else (10.5, 6.8)
  with _pictures.picture(path, figsize=size, grid={"lw": 0.8}) as grid:
    axes: Any = grid[0, 0]
    axes.spines[["top", "right"]].set_visible(True)
    labels = []
    for method, rows in runs.items():
      mean, spread = mean_accuracy(rows)
      sent = _tables.mean(rows, "sent_bytes") / 1e6
      labels.append((sent, mean, method))
      marked = method.startswith(ours)
      axes.errorbar(
        sent,
        mean,
        spread,
        fmt="D" if marked else "o",
        color="#d55e00" if marked else "#0072b2",
        capsize=3,
      )
    # A variant below the front needs more bytes for a lower accuracy.
    front = _front([(sent, mean) for sent, mean, _ in labels])
    axes.plot(*zip(*front, strict=True), color="#999999", lw=1, zorder=0)
    some: Any = next(iter(runs.values()))[0]
    # Methods differ in bytes by up to three orders of magnitude.
    axes.set_xscale("log")
    # Margins leave room for labels next to the outermost points.
    axes.margins(x=0.15, y=0.12)
    axes.set_xlabel(
      f"MB sent by each worker (N = {some['workers']}), log scale"
    )
    axes.set_ylabel("test accuracy, %")
    alpha = some["config"].get("alpha")
    skewed = "" if alpha is None else f" (labels skewed, alpha {alpha:g})"
    axes.set_title(
      f"{some['config']['dataset']}{skewed}, {some['config']['model']}, "
      f"{some['config']['epochs']:g} epochs; bars: standard deviation",
      fontsize=11,
    )
    _pictures.label_points(axes, labels)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
  """Returns the points (bytes, accuracy) of the Pareto front.

  >>> _front([(2, 0.6), (1, 0.5), (2, 0.7), (3, 0.65)])
  [(1, 0.5), (2, 0.7)]
  """
  front: list[tuple[float, float]] = []
  for sent, mean in sorted(points, key=lambda one: (one[0], -one[1])):
    if not front or mean > front[-1][1]:
      front.append((sent, mean))
  return front
