"""Variants are tuned on one grid, run with the same seeds, and each once."""

import jax
import jax.numpy as jnp
import pytest

import jdist
from jdist import data, training
from jdist.training import comparison
from jdist.training.comparison import _study
from tests import _refusals


def _measure(best, tried):
  """Accuracies that fall with the distance from a best rate."""

  def run(rate):
    tried.append(rate)
    ratio = max(rate / best, best / rate)
    return [{"accuracy": 1 / ratio, "test_loss": 1.0}]

  return run


@pytest.mark.parametrize(
  ("best", "extensions", "expected"),
  (
    (0.2, 2, comparison.Tuned(0.2, (0.1, 0.2, 0.4), None)),
    (0.05, 2, comparison.Tuned(0.05, (0.025, 0.05, 0.1, 0.2, 0.4), None)),
    (0.8, 2, comparison.Tuned(0.8, (0.1, 0.2, 0.4, 0.8, 1.6), None)),
    (3.2, 2, comparison.Tuned(1.6, (0.1, 0.2, 0.4, 0.8, 1.6), "highest")),
    (0.01, 1, comparison.Tuned(0.05, (0.05, 0.1, 0.2, 0.4), "lowest")),
    (0.4, 0, comparison.Tuned(0.4, (0.1, 0.2, 0.4), "highest")),
  ),
)
def test_grid_is_extended_at_its_best_end(best, extensions, expected):
  tried = []
  tuned = _study.tune((0.1, 0.4, 0.2), _measure(best, tried), extensions)
  assert tuned == expected
  assert sorted(tried) == list(expected.tried)  # Each once.


def test_loss_breaks_ties_and_divergence_is_worst():
  def row(accuracy, loss):
    return {"accuracy": accuracy, "test_loss": loss}

  ranked = [
    row(0.5, None), row(0.1, 0.5), row(0.5, 2.0), row(0.5, 1.0), row(0.6, 9.0),
  ]  # fmt: skip
  reverse = ranked[::-1]
  assert sorted(reverse, key=comparison.quality) == ranked
  assert comparison.quality(row(0.5, float("nan"))) == comparison.quality(
    row(0.5, None)
  )


def test_rate_may_be_chosen_by_the_loss():
  losses = {0.1: 0.3, 0.2: 0.2, 0.4: None}

  def measure(rate):
    return [{"accuracy": rate, "test_loss": losses[rate]}]

  tuned = _study.tune(sorted(losses), measure, 0, comparison.by_loss)
  assert tuned.best == 0.2


def test_rate_with_one_diverged_seed_is_not_chosen():
  losses = {0.1: (0.3, 0.3), 0.2: (0.2, 0.3), 0.4: (0.1, None)}

  def measure(rate):
    return [{"accuracy": 1.0, "test_loss": loss} for loss in losses[rate]]

  tuned = _study.tune(sorted(losses), measure, 0)
  assert (tuned.best, tuned.end) == (0.2, None)


@_refusals.table(
  *(
    ("learning_rates", lambda x=x: _study.tune([x, 0.1], _measure(1, [])), rule)
    for x, rule in ((0.0, "in (0, inf]"), (-1.0, "in (0, inf]"), (None, "list"))
  ),
  ("max_extensions", lambda: _study.tune([1.0], _measure(1, []), -1), ">= 0"),
  ("rows", lambda: _study.tune([1.0], lambda rate: None), "a list"),
  ("learning_rates", lambda: _study.tune([], _measure(1, [])), "one at least"),
  ("rows", lambda: _study.tune([1.0], lambda rate: []), "one for each seed"),
)
def test_grids_and_measurements_are_checked(argument, call, rule):
  _refusals.check(argument, call, rule)


_INF = float("inf")


def _fit(calls):
  def fit(trial):
    calls.append(trial)
    return {"accuracy": trial.learning_rate, "test_loss": 1.0}

  return fit


def make_study(**changes):
  options = {
    "variants": ("a", "b"), "learning_rates": (0.1, 0.2, 0.15),
    "seeds": (0, 1), "max_extensions": 1,
  }  # fmt: skip
  return comparison.Study(**(options | changes))


def test_interrupted_comparison_resumes(tmp_path):
  path, calls, limit = tmp_path / "rows.jsonl", [], 5

  class StoppedError(Exception):
    pass

  def stopping(trial):
    if len(calls) == limit:
      raise StoppedError
    return _fit(calls)(trial)

  with pytest.raises(StoppedError):
    comparison.compare(make_study(), comparison.Rows(path, {}), stopping)
  found = comparison.compare(
    make_study(), comparison.Rows(path, {}), _fit(calls)
  )
  assert len(calls) == len(set(calls)) == 2 * (3 + 1 + 2)
  assert len(training.read_rows(path)) == len(calls)
  # 0.2 / 0.15 beyond 0.2.
  best = 0.266667
  assert found.tuned["a"] == comparison.Tuned(
    best, (0.1, 0.15, 0.2, best), "highest"
  )
  assert [row["seed"] for row in found.rows["b"]] == [0, 1]
  assert {row["learning_rate"] for row in found.rows["b"]} == {best}
  # Once more: nothing is run.
  comparison.compare(make_study(), comparison.Rows(path, {}), pytest.fail)


def test_every_tuning_seed_runs_at_every_rate(tmp_path):
  calls, told = [], []
  study = make_study(variants=("a",), tuning_seeds=(8, 9), max_extensions=0)
  rows = comparison.Rows(tmp_path / "rows.jsonl", {})
  found = comparison.compare(
    study, rows, _fit(calls), on_row=lambda trial, row: told.append(trial),
    on_tuned=lambda *tuned: told.append(tuned),
  )  # fmt: skip
  assert told == [*calls[:6], ("a", found.tuned["a"]), *calls[6:]]
  tuning = [(t.learning_rate, t.seed) for t in calls if t.purpose == "tuning"]
  rates = (0.1, 0.15, 0.2)
  assert tuning == [(rate, seed) for rate in rates for seed in (8, 9)]


@pytest.mark.parametrize(
  ("order", "expected"),
  (
    ("variant", [("a", 0), ("a", 1), ("b", 0), ("b", 1)]),
    ("seed", [("a", 0), ("b", 0), ("a", 1), ("b", 1)]),
  ),
)
def test_seeds_run_in_the_given_order(order, expected, tmp_path):
  calls = []
  study = make_study(order=order, learning_rates=(0.1,))
  rows = comparison.Rows(tmp_path / "rows.jsonl", {})
  comparison.compare(study, rows, _fit(calls))
  assert [(trial.variant, trial.seed) for trial in calls] == expected


@_refusals.table(
  ("variants", lambda: make_study(variants=()), "one or more different"),
  (
    "variants",
    lambda: make_study(variants=("a", "a")),
    "one or more different",
  ),
  ("learning_rates", lambda: make_study(learning_rates=(0.1, 0.0)), "(0, inf]"),
  ("learning_rates", lambda: make_study(learning_rates=(0.1, _INF)), "finite"),
  ("seeds", lambda: make_study(seeds=()), "one or more different"),
  (
    "max_extensions",
    lambda: make_study(max_extensions=-1),
    "an int >= 0",
  ),
  ("tuning_seeds", lambda: make_study(tuning_seeds=(1,)), "among `seeds`"),
  (
    "tuning_seeds",
    lambda: make_study(tuning_seeds=()),
    "one or more different",
  ),
)
def test_invalid_study_raises(argument, call, rule):
  _refusals.check(argument, call, rule)


@pytest.mark.parametrize("rank", [None, 1.0, (1.0,), "a"])
def test_rank_that_is_no_pair_raises(rank):
  rows = [{"accuracy": 0.5, "test_loss": 1.0}]
  with _refusals.refused("rank", "must return two numbers, got"):
    comparison.tune([0.1], lambda rate: rows, rank=lambda row: rank)


def test_lowest_of_equally_good_rates_is_taken():
  found = _study.best_of({0.4: (0.9, 1.0), 0.1: (0.5, 1.0), 0.2: (0.9, 1.0)})
  assert (found.best, found.end) == (0.2, None)


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}])
def test_workload_has_no_batch_of_which_a_rest_is_left_out(options):
  """Ten samples for four workers would be steps of eight."""
  number = 4 if not options else 2
  team = jdist.workers(number, substrate="vmap")
  with _refusals.refused("batch_size", "multiple of"):
    comparison.Workload.load(
      "synthetic", lambda *given: given, team, 10, **options
    )


def test_workload_has_the_split_for_tests():
  team = jdist.workers(2, substrate="vmap")
  found = comparison.Workload.load("synthetic", lambda *given: given, team, 8)
  train, test = data.load("synthetic"), data.load("synthetic", "test")
  assert len(found.train) == len(train) != len(found.test) == len(test)
  assert found.model(3) == (found.train, 3)


@pytest.mark.parametrize("augment", [False, True])
def test_workload_augments_training_alone(augment, monkeypatch):
  """A crop or a flip of all-different pixels moves some of them."""
  team = jdist.workers(2, substrate="vmap")
  found = comparison.Workload.load(
    "synthetic", lambda *given: given, team, 8, augment=augment
  )
  images = jnp.arange(4 * 8 * 8, dtype=jnp.float32).reshape(4, 8, 8, 1)
  batch = {"image": images, "label": jnp.zeros(4, jnp.int32)}
  plain = comparison.Workload.load("synthetic", lambda *given: given, team, 8)
  expected = plain.inputs()(batch, jax.random.key(0))
  given = found.inputs()(batch, jax.random.key(0))
  assert bool((given == expected).all()) != augment


@pytest.mark.parametrize("order", ["variant", "seed"])
def test_variant_without_a_finite_rate_is_not_compared(order, tmp_path):
  runs = []

  def fit(trial):
    runs.append((trial.purpose, trial.variant))
    loss = None if trial.variant == "wild" else 1.0
    return {"accuracy": 0.5, "test_loss": loss}

  study = comparison.Study(
    ("wild", "calm"), (0.1, 0.2), (1, 2), 0, (7,), order=order
  )
  rows = comparison.Rows(tmp_path / "rows.jsonl", {})
  found = comparison.compare(study, rows, fit)
  assert found.tuned["wild"].diverged and list(found.rows) == ["calm"]
  assert runs.count(("comparison", "calm")) == 2
  assert ("comparison", "wild") not in runs
