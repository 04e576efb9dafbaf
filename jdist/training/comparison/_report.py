"""The tables of a comparison, from its rows."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jdist.training.comparison import _rows, _study, _tables

Runs: TypeAlias = Mapping[str, Sequence[_rows.Row]]


def tuned_rates(
  rows: Sequence[_rows.Row], rank: _study.Rank = _study.quality
) -> dict[str, _study.Tuned]:
  """Returns each variant's learning rate, from its tuning rows."""
  # Compared rows are measured on the test set, which must not choose a rate.
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
