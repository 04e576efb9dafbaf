"""Tables, rates and labels that the experiments share."""

import doctest
import importlib

import pytest

from tests.experiments import _loading

studies = _loading.shared("studies")


@pytest.mark.parametrize("name", ["_problem", "_tables"])
def test_examples_of_docstrings_hold(name):
  module = importlib.import_module(f"studies.{name}")
  found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
  assert found.attempted and not found.failed


def _tuned(method, rate, accuracy):
  return {
    "purpose": "tuning", "method": method, "learning_rate": rate,
    "accuracy": accuracy, "test_loss": 1.0,
  }  # fmt: skip


def _rows():
  found = {"low": (3, 2, 1), "high": (1, 2, 3), "inside": (1, 2, 1)}
  rows = [
    _tuned(method, rate, accuracy)
    for method, accuracies in found.items()
    for rate, accuracy in zip((0.1, 0.2, 0.4), accuracies, strict=True)
  ]
  return [*rows, _tuned("alone", 0.1, 0.5)]


def test_runs_at_other_rates_are_left_out():
  runs = [
    _tuned("inside", rate, 0.5) | {"purpose": "comparison", "seed": seed}
    for rate, seed in ((0.1, 0), (0.2, 0), (0.2, 1))
  ]
  found = studies.best_runs(_rows() + runs)
  assert found == {"inside": runs[1:]}


def test_rates_are_ranked_by_the_mean_over_tuning_seeds():
  seeds = {0.1: (0.7, 0.7), 0.2: (0.8, 0.7), 0.4: (0.9, 0.4)}
  rows = [
    _tuned("a", rate, accuracy)
    for rate, found in seeds.items()
    for accuracy in found
  ]
  assert studies.tuned_rates(rows)["a"].best == 0.2


def test_table_counts_the_given_seeds():
  def rows(accuracies, sent=100):
    return [
      {"seed": seed, "accuracy": accuracy, "sent_bytes": sent}
      for seed, accuracy in accuracies.items()
    ]

  runs = {
    "ssgd": rows({0: 0.5, 10: 0.5, 11: 0.5}),
    "int4": rows({0: 0.9, 10: 0.51, 11: 0.51}, sent=10),
  }
  table = studies.difference_table(runs, "ssgd", range(10, 20))
  assert table.splitlines()[2] == (
    "| int4 | +1.00 (+1.00 to +1.00) | 2 | 10.0x |"
  )
