"""Rows of trials are found again, where everything that matters agrees."""

import math
import operator

import pytest

from jdist import training
from jdist.training import comparison
from tests import _refusals

_TRIAL = comparison.Trial("comparison", "ssgd", 0.1, 0)


def _write(path, config, **changes):
  row = {
    "purpose": "comparison", "method": "ssgd", "learning_rate": 0.1, "seed": 0,
    "config": config, **changes,
  }  # fmt: skip
  training.append_rows(path, [row])
  return row


@pytest.fixture
def path(tmp_path):
  return tmp_path / "rows.jsonl"


def test_rows_of_this_comparison_are_found_again(path):
  config = {"rates": (0.0125, 0.025, 0.05)}
  _write(path, config)
  found = comparison.Rows(path, config).find(_TRIAL)
  assert found["config"]["rates"] == [0.0125, 0.025, 0.05]  # Now a list.


@pytest.mark.parametrize(
  "change",
  ({"learning_rate": 0.2}, {"seed": 1}, {"purpose": "tuning"},
   {"variant": "diloco"}),
)  # fmt: skip
def test_other_trials_have_other_rows(change, path):
  config = {"epochs": 5.0}
  _write(path, config)
  trial = _TRIAL._replace(**change)
  assert comparison.Rows(path, config).find(trial) is None


def test_older_rows_have_the_default_of_a_new_option(path):
  old = {"epochs": 5.0}
  row = _write(path, old)
  new = {"epochs": 5.0, "optimizer": "sgd"}

  def find(config):
    return comparison.Rows(path, config, defaults=new).find(_TRIAL)

  assert find(new) == row
  assert find(new | {"optimizer": "adam"}) is None


def test_rows_with_a_removed_option_are_ignored(path):
  _write(path, {"epochs": 5.0, "dropped": 0.5})
  assert comparison.Rows(path, {"epochs": 5.0}).find(_TRIAL) is None


def test_free_or_ignored_options_may_differ(path):
  row = _write(path, {"epochs": 5.0, "seeds": [0], "bits": 4})
  config = {"epochs": 5.0, "seeds": (0, 1), "bits": 8}

  def find(**options):
    return comparison.Rows(path, config, **options).find(_TRIAL)

  assert find() is None and find(free=("seeds",)) is None
  by_variant = {"ssgd": ("bits",)}
  assert find(free=("seeds",), ignores=by_variant.__getitem__) == row


def test_tuning_rows_may_have_their_own_file(tmp_path):
  rows = comparison.Rows(
    tmp_path / "rows.jsonl", {}, tuning=tmp_path / "tuning.jsonl"
  )
  rows.add(_TRIAL, {"accuracy": 0.5})
  tuning = _TRIAL._replace(purpose="tuning")
  assert rows.find(tuning) is None
  rows.add(tuning, {"accuracy": 0.25})
  # Rows of before had no purpose: the file says it.
  for name in ("rows", "tuning"):
    (row,) = training.read_rows(tmp_path / f"{name}.jsonl")
    del row["purpose"]
    (tmp_path / f"{name}.jsonl").unlink()
    training.append_rows(tmp_path / f"{name}.jsonl", [row])
  again = comparison.Rows(
    tmp_path / "rows.jsonl", {}, tuning=tmp_path / "tuning.jsonl"
  )
  assert again.find(_TRIAL)["accuracy"] == 0.5
  assert again.find(tuning)["accuracy"] == 0.25
  # In a single file they are of the comparison.
  single = comparison.Rows(tmp_path / "rows.jsonl", {})
  assert single.find(_TRIAL)["accuracy"] == 0.5 and len(single) == 1


def test_mean_counts_every_row():
  rows = [{"x": 1.0}, {"x": 2.0}, {"x": 6.0}]
  assert comparison.mean(rows, "x") == 3.0
  assert comparison.mean_and_spread(rows, "x")[0] == 3.0


def test_spread_is_that_of_a_sample():
  """Its square is divided by one less than the number of values."""
  found = comparison.mean_and_spread([{"x": 1.0}, {"x": 3.0}], "x")
  assert found == pytest.approx((2.0, 2**0.5))


@pytest.mark.parametrize("end", [math.inf, -math.inf, math.nan])
def test_value_that_is_not_finite_has_no_spread(end):
  rows = [{"x": x, "seed": seed} for seed, x in enumerate((1.0, end))]
  found = comparison.mean_and_spread(rows, "x")
  assert found == pytest.approx((end, 0.0), nan_ok=True)
  base = [{"x": 0.0, "seed": seed} for seed in (0, 1)]
  value = operator.itemgetter("x")
  found = comparison.paired_difference(rows, base, value=value)
  assert found[:3] == pytest.approx((end, end, end), nan_ok=True)


_PAIR = [{"seed": 0, "accuracy": 0.5}, {"seed": 1, "accuracy": 0.5}]
# A file has null for a number that is not finite.
_NULL = [_PAIR[0], {"seed": 1, "accuracy": None, "loss": None}]


@_refusals.table(
  ("value", lambda: comparison.accuracy(_NULL[1]), "a number, got None"),
  ("value", lambda: comparison.paired_difference(_PAIR, _NULL), "a number"),
  (
    "value",
    lambda: comparison.paired_difference(
      [*_NULL[1:], {"seed": 2, "loss": 1.0}],
      [{"seed": n, "loss": 1.0} for n in (1, 2)],
      value=lambda row: row["loss"],
    ),
    "a number, got None",
  ),
  (
    "row",
    lambda: comparison.paired_difference([{"accuracy": 1.0}], _PAIR),
    "an entry 'seed'",
  ),
)
def test_rows_without_a_number_are_refused(argument, call, rule):
  _refusals.check(argument, call, rule)


def test_option_that_a_row_lacks_differs_from_none(path):
  _write(path, {"epochs": 5.0})
  config = {"epochs": 5.0, "file": None}
  assert comparison.Rows(path, config).find(_TRIAL) is None
