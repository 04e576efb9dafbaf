"""A comparison: every variant is tuned alike, then run with the same seeds."""

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from jdist.training.comparison import _rows


@dataclasses.dataclass(frozen=True)
class Study:
  """Variants to compare, and the budget for tuning.

  Attributes:
    variants: by name, in the order in which they run.
    learning_rates: the grid that every variant is tuned on; a single rate is
      not tuned.
    seeds: a run each at a variant's best rate.
    max_extensions: by how many rates the grid of a variant goes on at most
      where its best rate lies at an end.
    tuning_seeds: of tuning runs, a run each at every rate of the grid, which
      is ranked by their mean; none must be one of `seeds`.  One alone says
      little where few samples are held out, or near rates that diverge.
    order: "variant" runs all seeds of a variant in turn; "seed" all variants
      of a seed, so that what else the machine does slows them alike.

  Raises:
    ValueError: when a list is empty, has equal entries, a rate is not positive
      or a tuning seed is compared.
  """

  variants: Sequence[str]
  learning_rates: Sequence[float]
  seeds: Sequence[int]
  max_extensions: int = 2
  tuning_seeds: Sequence[int] = (10_000,)
  order: Literal["variant", "seed"] = "variant"

  def __post_init__(self) -> None:
    for name in ("variants", "learning_rates", "seeds", "tuning_seeds"):
      values = getattr(self, name)
      if not values or len(set(values)) < len(values):
        raise ValueError(
          f"`{name}` must be one or more different values, got {values}."
        )
    if not all(0 < rate < math.inf for rate in self.learning_rates):
      raise ValueError(
        "`learning_rates` must be positive and finite, got "
        f"{self.learning_rates}."
      )
    if self.max_extensions < 0:
      raise ValueError(
        f"`max_extensions` must not be negative, got {self.max_extensions}. "
        "0 keeps to the grid."
      )
    if both := set(self.tuning_seeds) & set(self.seeds):
      raise ValueError(
        f"`tuning_seeds` must not be among `seeds`, got {sorted(both)} in "
        "both. A seed that has chosen a rate says nothing new of it."
      )


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of a comparison's command, by which it finds its rows again.

  Rows that are older than an option had its default.
  """

  FREE: ClassVar[tuple[str, ...]] = ("rates", "extensions", "seeds", "variants")
  """Options in which rows of one comparison may differ."""

  rates: tuple[float, ...] = (0.0125, 0.025, 0.05)
  """The grid of highest learning rates; each variant uses its own best one, by
  a run of the same length on held-out training samples."""

  extensions: int = 2
  """Further rates that a variant is tuned with at most, beyond an end of the
  grid that is its best."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """One run each at a variant's best rate."""

  variants: tuple[str, ...] = ()
  """Of the experiment's, in this order; all if none are named."""

  def ignores(self, variant: str) -> Collection[str]:
    """Returns options that a variant's runs do not depend on."""
    del variant
    return ()

  def rows(
    self, path: str | os.PathLike[str], setting: Any = None
  ) -> _rows.Rows:
    """Opens the rows of the command.

    Args:
      path: of the file; it need not be there.
      setting: a dataclass of what else names the comparison, where the command
        runs several.
    """
    config, defaults = (
      dataclasses.asdict(self),
      dataclasses.asdict(type(self)()),
    )
    if setting is not None:
      config |= dataclasses.asdict(setting)
      defaults |= {
        field.name: field.default
        for field in dataclasses.fields(setting)
        if field.default is not dataclasses.MISSING
      }
    return _rows.Rows(
      path, config, defaults=defaults, free=self.FREE, ignores=self.ignores
    )

  def study(self, variants: Collection[str]) -> Study:
    """Returns what is compared, of an experiment's variants.

    Raises:
      ValueError: when a named variant is none of the experiment's.
    """
    unknown = set(self.variants) - set(variants)
    if unknown:
      raise ValueError(
        f"`--variants` must be of {', '.join(variants)}, got "
        f"{', '.join(sorted(unknown))}."
      )
    return Study(
      self.variants or tuple(variants), self.rates, self.seeds, self.extensions
    )


class Tuned(NamedTuple):
  """A variant's learning rate.

  Attributes:
    best: of the rates tried.
    tried: all of them, in increasing order.
    end: "lowest" or "highest" where the best rate lies at an end of those
      tried, and a better one may lie beyond; None within.
    diverged: whether at each of them a run ended without a finite loss.
  """

  best: float
  tried: tuple[float, ...]
  end: Literal["lowest", "highest"] | None
  diverged: bool = False


_WORST = (-math.inf, -math.inf)


def quality(row: _rows.Row) -> tuple[float, float]:
  """Returns a row's rank: its accuracy, and of equal ones the loss.

  Equal accuracies are common on few samples.  A loss that is not finite, null
  in rows, is the worst, whatever the accuracy.
  """
  loss = row["test_loss"]
  if loss is None or not math.isfinite(loss):
    return _WORST
  return row["accuracy"], -loss


def by_loss(row: _rows.Row) -> tuple[float, float]:
  """Returns a row's rank: its test loss, a finite one before others."""
  accuracy, loss = quality(row)
  return loss, accuracy


Rank: TypeAlias = Callable[[_rows.Row], tuple[float, float]]


def mean_rank(
  rows: Sequence[_rows.Row], rank: Rank = quality
) -> tuple[float, float]:
  """Returns the mean rank of a rate's rows, one for each seed of tuning.

  A loss that is not finite makes it the worst.
  """
  first, second = zip(*map(rank, rows), strict=True)
  return statistics.fmean(first), statistics.fmean(second)


def tune(
  learning_rates: Sequence[float],
  measure: Callable[[float], Sequence[_rows.Row]],
  max_extensions: int = 2,
  rank: Rank = quality,
) -> Tuned:
  """Finds the best learning rate, and lets the grid go on at its ends.

  Where the best of the rates is the lowest or the highest, the next one in the
  ratio of the last two is tried, until the best lies within or the limit is
  reached.

  Args:
    learning_rates: the grid.
    measure: runs one rate, returns its rows, one for each seed.
    max_extensions: further rates at most.
    rank: of a row; the rate with the highest mean is best.
  """

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
    # As one would write it: 0.4 and not 0.4000000000000001.
    further = float(f"{further:.6g}")
    tried[further] = mean(further)
  return best_of(tried)


def best_of(tried: Mapping[float, tuple[float, float]]) -> Tuned:
  """Returns the best of the learning rates tried, by their qualities."""
  rates = tuple(sorted(tried))
  best = max(rates, key=lambda rate: tried[rate])
  end: Literal["lowest", "highest"] | None = None
  if len(rates) > 1 and best in (rates[0], rates[-1]):
    end = "lowest" if best == rates[0] else "highest"
  return Tuned(best, rates, end, tried[best] == _WORST)


class Compared(NamedTuple):
  """The outcome of a comparison.

  Attributes:
    rows: of all seeds, by variant, without variants that diverged at every
      learning rate tried.
    tuned: each variant's learning rate.
  """

  rows: dict[str, list[_rows.Row]]
  tuned: dict[str, Tuned]


def compare(
  study: Study,
  rows: _rows.Rows,
  fit: _rows.Fit,
  *,
  rank: Rank = quality,
  on_row: Callable[[_rows.Trial, _rows.Row], None] = lambda trial, row: None,
  on_tuned: Callable[[str, Tuned], None] = lambda variant, tuned: None,
) -> Compared:
  """Runs a study: the rate of each variant first, then the seeds.

  A trial whose row is there is not run again, so that the same call goes on
  where another was stopped.

  Args:
    study: what is compared.
    rows: the file of rows.
    fit: runs a trial; what a variant is, a chain, a protocol or a pipeline,
      only it knows.  Trials whose purpose is "tuning" must not touch the test
      set.
    rank: of a tuning row, by which the best rate is chosen.
    on_row: is called with each row that has been added.
    on_tuned: is called with each variant's learning rate.
  """

  def run(*named: Any) -> _rows.Row:
    trial = _rows.Trial(*named)
    row = rows.find(trial)
    if row is None:
      row = rows.add(trial, fit(trial))
      on_row(trial, row)
    return row

  def tuned(variant: str) -> Tuned:
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

  if study.order == "variant":
    for variant in study.variants:
      result.tuned[variant] = tuned(variant)
      if not result.tuned[variant].diverged:
        compare_seeds([variant], study.seeds)
  else:
    result.tuned.update({name: tuned(name) for name in study.variants})
    kept = [x for x in study.variants if not result.tuned[x].diverged]
    compare_seeds(kept, study.seeds)
  return result
