"""Paired differences and their intervals."""

import statistics

import pytest

from jdist.training import comparison
from tests import _refusals


def _rows(accuracies, sent=100):
  return [
    {"seed": seed, "accuracy": accuracy, "sent_bytes": sent}
    for seed, accuracy in accuracies.items()
  ]


_TWO = _rows({0: 0.5, 1: 0.6})


def _compared(rows=_TWO, base=_TWO, **options):
  return comparison.paired_difference(rows, base, **options)


def test_interval_matches_hand_computation():
  # Differences of 1, 2 and 3 points; t with 2 degrees of freedom is 4.3027.
  rows = _rows({0: 0.91, 1: 0.72, 2: 0.53, 7: 0.1})
  base = _rows({2: 0.50, 1: 0.70, 0: 0.90, 8: 0.2})
  found = comparison.paired_difference(rows, base)
  half = 4.302653 / 3**0.5
  assert found == pytest.approx((2.0, 2.0 - half, 2.0 + half, 3))


def test_pairs_cancel_the_effect_of_seeds():
  spread = {0: 0.5, 1: 0.7, 2: 0.9}
  rows = _rows({seed: x + 0.01 for seed, x in spread.items()})
  base = _rows(spread)
  found = comparison.paired_difference(rows, base)
  assert found.high - found.low < 1e-6 < statistics.stdev(spread.values())


def test_single_pair_has_no_interval():
  rows = _rows({0: 0.5, 1: 0.5})
  assert comparison.paired_difference(rows, _rows({1: 0.4, 2: 0.4})) is None


@_refusals.table(
  *(
    ("confidence", lambda x=x: _compared(confidence=x), rule)
    for x, rule in zip(
      (95, 1, 0, -0.5, float("nan")),
      ["in (0, 1)"] * 4 + ["finite"],
      strict=True,
    )
  ),
  ("rows", lambda: _compared(rows=2 * _TWO), "one row for each seed, got"),
  ("base", lambda: _compared(base=2 * _TWO), "one row for each seed, got"),
)
def test_invalid_pairs_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
