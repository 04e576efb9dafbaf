"""Paired differences between variants, with intervals."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from jdist.training.comparison import _rows


class Difference(NamedTuple):
  """The mean of paired differences and its confidence interval.

  Attributes:
    mean: of the differences.
    low: the lower end of the interval.
    high: its upper end.
    num_pairs: how many there are.
  """

  mean: float
  low: float
  high: float
  num_pairs: int


def accuracy(row: _rows.Row) -> float:
  """Returns a row's test accuracy in percent."""
  return 100 * float(row["accuracy"])


def paired_difference(
  rows: Sequence[_rows.Row],
  base: Sequence[_rows.Row],
  *,
  value: Callable[[_rows.Row], float] = accuracy,
  confidence: float = 0.95,
) -> Difference | None:
  """Compares two variants by the seeds that both were run with.

  With differences d of n seeds the interval is mean(d) ± t std(d) / sqrt(n),
  t of Student's distribution with n - 1 degrees of freedom: of one seed
  initial parameters and batches are the same, and what they do cancels.

  Args:
    rows: of the variant.
    base: of the other one.
    value: what is compared.
    confidence: of the interval, two-sided, between 0 and 1.

  Returns:
    None with fewer than two seeds in common.

  Raises:
    ValueError: when a seed has several rows of a variant, which are no
      independent pairs, or `confidence` is no such number.

  >>> rows = [{"seed": s, "accuracy": a} for s, a in ((0, 0.91), (1, 0.93))]
  >>> base = [{"seed": s, "accuracy": 0.9} for s in (0, 1, 2)]
  >>> paired_difference(rows, base).mean.__round__(3)
  2.0
  """
  from scipy import special

  if not 0 < confidence < 1:
    raise ValueError(
      f"`confidence` must be between 0 and 1, got {confidence}: 0.95 is 95 %."
    )
  for name, given in (("rows", rows), ("base", base)):
    seeds = [row["seed"] for row in given]
    if len(set(seeds)) < len(seeds):
      raise ValueError(
        f"`{name}` must have one row for each seed, got seeds {seeds}. Take "
        "the rows of one setting, each trial once."
      )
  others = {row["seed"]: row for row in base}
  found = [
    value(row) - value(others[row["seed"]])
    for row in rows
    if row["seed"] in others
  ]
  if len(found) < 2:
    return None
  mean, n = statistics.mean(found), len(found)
  t = float(special.stdtrit(n - 1, (1 + confidence) / 2))
  half = t * statistics.stdev(found) / n**0.5
  return Difference(mean, mean - half, mean + half, n)


def difference_table(
  runs: Mapping[str, Sequence[_rows.Row]],
  base: str,
  seeds: Collection[int] | None = None,
) -> str:
  """Returns a Markdown table of the differences to a variant, in points.

  Args:
    runs: the rows of each variant.
    base: the variant that the others are compared with.
    seeds: those that count, for instance fresh ones; default all.
  """
  rows_of_base = [
    row for row in runs[base] if seeds is None or row["seed"] in seeds
  ]
  lines = [
    f"| variant | points more than {base} (mean, 95 % interval) "
    "| paired seeds | fewer bytes |",
    "|---|---|---|---|",
  ]
  for variant, rows in runs.items():
    found = paired_difference(rows, rows_of_base)
    if variant == base or found is None:
      continue
    sent = {row["seed"]: row["sent_bytes"] for row in rows}
    fewer = statistics.mean(
      row["sent_bytes"] / sent[row["seed"]]
      for row in rows_of_base
      if row["seed"] in sent
    )
    lines.append(
      f"| {variant} | {found.mean:+.2f} ({found.low:+.2f} to "
      f"{found.high:+.2f}) | {found.num_pairs} | {fewer:.1f}x |"
    )
  return "\n".join(lines)
