"""The tables of a comparison, from its rows."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from jdist.training import comparison
from studies import _tables

Rank: TypeAlias = Callable[[comparison.Row], tuple[float, float]]

Runs: TypeAlias = Mapping[str, Sequence[comparison.Row]]


def tuned_rates(
  rows: Sequence[comparison.Row], rank: Rank = comparison.quality
) -> dict[str, comparison.Tuned]:
  """Returns each variant's learning rate, from its tuning rows."""
  # Compared rows are measured on the test set, which must not choose a rate.
  tuning = [row for row in rows if row["purpose"] == "tuning"]
  found = {}
  for method, own in _tables.group(tuning, lambda row: row["method"]).items():
    at_rate = _tables.group(own, lambda row: row["learning_rate"])
    # The rates have been run, so that the grid is not extended.
    found[method] = comparison.tune(
      tuple(at_rate), at_rate.__getitem__, max_extensions=0, rank=rank
    )
  return found


def runs_at(
  rows: Sequence[comparison.Row], rates: Mapping[str, float]
) -> dict[str, list[comparison.Row]]:
  """Returns the compared rows of each variant at its rate, or all its rows."""

  def chosen(row: comparison.Row) -> bool:
    rate = row["learning_rate"]
    # A variant without a rate was not tuned, and has rows of one rate alone.
    at_rate: bool = rates.get(row["method"], rate) == rate
    return row["purpose"] == "comparison" and at_rate

  return _tables.group(filter(chosen, rows), lambda row: row["method"])


def best_runs(
  rows: Sequence[comparison.Row], rank: Rank = comparison.quality
) -> dict[str, list[comparison.Row]]:
  """Returns the rows of each variant at its best rate, all seeds."""
  tuned = tuned_rates(rows, rank)
  return runs_at(rows, {name: one.best for name, one in tuned.items()})


def mean_accuracy(rows: Sequence[comparison.Row]) -> tuple[float, float]:
  """Returns mean and standard deviation over seeds, in percent."""
  return comparison.mean_and_spread(rows, comparison.accuracy)


def accuracy_table(runs: Runs) -> str:
  """Returns a Markdown table, the most accurate variant first."""
  # Bytes are relative to the variant that sends most, the synchronous one.
  most = max(row["sent_bytes"] for rows in runs.values() for row in rows)
  lines = []
  for method, rows in by_accuracy(runs):
    mean, spread = mean_accuracy(rows)
    sent = comparison.mean(rows, "sent_bytes")
    rounds = comparison.mean(rows, "rounds")
    shown = f"{mean:.2f}" + (f" ± {spread:.2f}" if len(rows) > 1 else "")
    lines.append(
      f"{method} | {shown} | {len(rows)} | {rounds:,.0f} "
      f"| {sent / 1e6:,.0f} | {most / sent:.1f}x "
      f"| {rows[0]['learning_rate']:g}"
    )
  return _tables.table(
    "variant | test accuracy, % (mean ± standard deviation) | seeds | rounds "
    "| MB sent | fewer bytes | learning rate",
    lines,
  )


def by_accuracy(runs: Runs) -> list[tuple[str, Sequence[comparison.Row]]]:
  """Returns the variants and their rows, the most accurate first."""
  return sorted(runs.items(), key=lambda item: -mean_accuracy(item[1])[0])


def difference_table(
  runs: Mapping[str, Sequence[comparison.Row]],
  base: str,
  seeds: Collection[int] | None = None,
) -> str:
  """Returns a Markdown table of the differences to a variant, in points.

  Args:
    runs: The rows of each variant.
    base: The variant with which the others are compared.
    seeds: The seeds that count, for instance fresh ones; by default all.
  """
  rows_of_base = [
    row for row in runs[base] if seeds is None or row["seed"] in seeds
  ]
  lines = []
  for variant, rows in runs.items():
    found = comparison.paired_difference(rows, rows_of_base)
    if variant == base or found is None:
      continue
    sent = {row["seed"]: row["sent_bytes"] for row in rows}
    fewer = statistics.mean(
      row["sent_bytes"] / sent[row["seed"]]
      for row in rows_of_base
      if row["seed"] in sent
    )
    lines.append((variant, found.interval(), found.num_pairs, f"{fewer:.1f}x"))
  return _tables.table(
    f"variant | points more than {base} (mean, 95 % interval) | paired seeds "
    "| fewer bytes",
    lines,
  )
