"""The package that several experiments share: reports and examples."""

import doctest
import importlib

import pytest

from tests.experiments import _loading

_loading.shared("optax_chains")


def test_best_rate_at_an_end_of_the_grid_is_reported():
  commands = importlib.import_module("optax_chains._commands")
  found = {"low": (3, 2, 1), "high": (1, 2, 3), "inside": (1, 2, 1)}
  rows = [
    {
      "purpose": "tuning", "method": method, "learning_rate": rate,
      "accuracy": accuracy, "test_loss": 1.0,
    }
    for method, accuracies in found.items()
    for rate, accuracy in zip((0.1, 0.2, 0.4), accuracies, strict=True)
  ]  # fmt: skip
  alone = rows[0] | {"method": "alone"}
  assert commands._end_warnings([*rows, alone]) == [
    "Best at the lowest rate tried: low.",
    "Best at the highest rate tried: high.",
  ]


@pytest.mark.parametrize("name", ["_bytes_plot", "_one_core"])
def test_examples_hold(name):
  module = importlib.import_module(f"optax_chains.{name}")
  found = doctest.testmod(module)
  assert found.attempted and not found.failed
