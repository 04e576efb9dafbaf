"""Comparisons whose variants are tuned alike and run with equal seeds."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jdist import checks, signatures
from jdist.training.comparison import _rows


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Study:
  """Variants to compare, and the budget for tuning.

  Attributes:
    variants: The variants' names, in the order in which they run.
    learning_rates: The grid on which every variant is tuned. A single rate is
      not tuned.
    seeds: The seeds of the runs at a variant's best rate.
    max_extensions: The number of further rates, at most, by which the grid of a
      variant is extended if its best rate lies at an end.
    tuning_seeds: The seeds of tuning runs, one run each at every rate of the
      grid; a rate is ranked by their mean. None of them may be one of `seeds`.
      A single one says little if few samples are held out, or near rates that
      diverge.
    order: "variant" runs all seeds of a variant in turn. "seed" runs all
      variants of a seed in turn, so that other load on the machine slows them
      alike.

  Raises:
    ValueError: If a list is empty or has equal entries, or a tuning seed is
      compared.
  """

  variants: Sequence[str]
  learning_rates: Sequence[signatures.PositiveFloat]
  seeds: Sequence[int]
  max_extensions: signatures.NonNegativeInt = 2
  tuning_seeds: Sequence[int] = (10_000,)
  order: Literal["variant", "seed"] = "variant"

  def __post_init__(self) -> None:
    for name in ("variants", "learning_rates", "seeds", "tuning_seeds"):
      checks.check_distinct(name, getattr(self, name))
    if both := set(self.tuning_seeds) & set(self.seeds):
      raise ValueError(
        f"`tuning_seeds` must not be among `seeds`, got {sorted(both)} in "
        "both. A seed that has chosen a rate is biased in its favour."
      )


class Tuned(NamedTuple):
  """A variant's learning rate.

  Attributes:
    best: The best of the rates tried.
    tried: All rates tried, in increasing order.
    end: "lowest" or "highest" if the best rate lies at an end of those tried
      and a better one may lie beyond; None otherwise.
    diverged: Whether runs at all rates ended without a finite loss.
  """

  best: float
  tried: tuple[float, ...]
  end: Literal["lowest", "highest"] | None
  diverged: bool = False


_WORST = (-math.inf, -math.inf)


@signatures.checked
def quality(row: _rows.Row) -> tuple[float, float]:
  """Returns a row's rank: its accuracy, then its loss.

  Equal accuracies are common on few samples. A loss that is not finite, null in
  rows, is the worst, whatever the accuracy.
  """
  loss = _rows.entry(row, "test_loss")
  if loss is None or not math.isfinite(loss):
    return _WORST
  return _rows.entry(row, "accuracy"), -loss


@signatures.checked
def by_loss(row: _rows.Row) -> tuple[float, float]:
  """Returns a row's rank by its test loss; one that is not finite is worst."""
  accuracy, loss = quality(row)
  return loss, accuracy


Rank: TypeAlias = Callable[[_rows.Row], tuple[float, float]]


@signatures.checked
def mean_rank(
  rows: Sequence[_rows.Row], rank: Rank = quality
) -> tuple[float, float]:
  """Returns the mean rank of a rate's rows, one for each tuning seed.

  A single loss that is not finite makes it the worst rank.
  """
  if not rows:
    raise ValueError("`rows` must be one for each seed, got none.")
  # -inf in a single row makes the mean -inf, so that one diverged seed rejects
  # the rate.
  pairs = (checks.check_pair("rank", rank(x), "two numbers") for x in rows)
  first, second = zip(*pairs, strict=True)
  return statistics.fmean(first), statistics.fmean(second)


@signatures.checked
def tune(
  learning_rates: Sequence[signatures.PositiveFloat],
  measure: Callable[[float], Sequence[_rows.Row]],
  max_extensions: signatures.NonNegativeInt = 2,
  rank: Rank = quality,
) -> Tuned:
  """Finds the best learning rate, and extends the grid at its ends.

  If the best rate is the lowest or the highest, the next rate in the ratio of
  the last two is tried, until the best lies within or the limit is reached.

  Args:
    learning_rates: The grid.
    measure: A function that runs one rate and returns a row for each seed.
    max_extensions: The number of further rates, at most.
    rank: The rank of a row. The rate with the highest mean rank is best.
  """
  if not len(learning_rates):
    raise ValueError("`learning_rates` must be one at least, got none.")

  def mean(rate: float) -> tuple[float, float]:
    return mean_rank(measure(rate), rank)

  tried = {rate: mean(rate) for rate in sorted(learning_rates)}
  for _ in range(max_extensions):
    found = best_of(tried)
    if found.end is None:
      break
    low, *_, high = found.tried
    if found.end == "lowest":
      further = low / (found.tried[1] / low)
    else:
      further = high * (high / found.tried[-2])
    # Rounded to 0.4 instead of 0.4000000000000001, so that the rate is found
    # again in rows.
    further = float(f"{further:.6g}")
    # The geometric grid continues, so that each extension costs one rate.
    tried[further] = mean(further)
  return best_of(tried)


def best_of(tried: Mapping[float, tuple[float, float]]) -> Tuned:
  """Returns the best of the learning rates tried, by their ranks."""
  rates = tuple(sorted(tried))
  # `max` keeps the first of equals: the lowest rate, which is the most stable.
  best = max(rates, key=lambda rate: tried[rate])
  end: Literal["lowest", "highest"] | None = None
  if len(rates) > 1 and best in (rates[0], rates[-1]):
    end = "lowest" if best == rates[0] else "highest"
  return Tuned(best, rates, end, tried[best] == _WORST)


class Compared(NamedTuple):
  """The outcome of a comparison.

  Attributes:
    rows: The rows of all seeds by variant, without variants that diverged at
      every learning rate.
    tuned: The learning rate of each variant.
  """

  rows: dict[str, list[_rows.Row]]
  tuned: dict[str, Tuned]


@signatures.checked
def compare(
  study: Study,
  rows: _rows.Rows,
  fit: _rows.Fit,
  *,
  rank: Rank = quality,
  on_row: Callable[[_rows.Trial, _rows.Row], None] = lambda trial, row: None,
  on_tuned: Callable[[str, Tuned], None] = lambda variant, tuned: None,
) -> Compared:
  """Runs a study: first the tuning of each variant, then the seeds.

  A trial that has a row is not run again, so that the same call continues an
  interrupted comparison.

  Args:
    study: The variants, rates and seeds.
    rows: The file of rows.
    fit: A function that runs a trial, of a chain, a protocol or a pipeline. It
      must not use the test set in trials whose purpose is "tuning".
    rank: The rank of a tuning row, by which the best rate is chosen.
    on_row: Called with each new row.
    on_tuned: Called with each variant's learning rate.
  """

  def run(*named: Any) -> _rows.Row:
    trial = _rows.Trial(*named)
    # Each row is written as soon as its run has ended.
    row = rows.find(trial)
    if row is None:
      found = fit(trial)
      checks.check_type("fit(trial)", found, Mapping, "a dict of measurements")
      row = rows.add(trial, found)
      on_row(trial, row)
    return row

  def tuned(variant: str) -> Tuned:
    # A single rate needs no run to be chosen.
    if len(study.learning_rates) == 1:
      rate = study.learning_rates[0]
      return Tuned(rate, (rate,), None)
    found = tune(
      study.learning_rates,
      lambda rate: [
        run("tuning", variant, rate, seed) for seed in study.tuning_seeds
      ],
      study.max_extensions,
      rank,
    )
    on_tuned(variant, found)
    return found

  result = Compared({}, {})

  def compare_seeds(variants: Sequence[str], seeds: Sequence[int]) -> None:
    for seed in seeds:
      for variant in variants:
        best = result.tuned[variant].best
        row = run("comparison", variant, best, seed)
        result.rows.setdefault(variant, []).append(row)

  # A variant that diverged at every rate has no rate to be compared at.
  if study.order == "variant":
    for variant in study.variants:
      result.tuned[variant] = tuned(variant)
      if not result.tuned[variant].diverged:
        compare_seeds([variant], study.seeds)
  # All rates must be known before the variants of a seed run in turn.
  else:
    result.tuned.update({name: tuned(name) for name in study.variants})
    kept = [x for x in study.variants if not result.tuned[x].diverged]
    compare_seeds(kept, study.seeds)
  return result
