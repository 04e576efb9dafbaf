"""Limits of stability by hand, and against training."""

import numpy as np
import optax
import pytest

from jdist import transforms
from tests.experiments import _loading
from tests.transforms._rounds import train


@pytest.fixture
def limit(monkeypatch):
  found = _loading.load("stability", "msdpu/stability.py", monkeypatch)
  return found.stability_limit


def test_limits_without_rounds_match_theory(limit):
  assert limit(momentum=0.0) == pytest.approx(2.0, rel=1e-3)
  # Heavy ball: 2 (1 + m); Nesterov: 2 (1 + m) / (1 + 2 m).
  assert limit(nesterov=False) == pytest.approx(3.8, rel=1e-3)
  assert limit() == pytest.approx(3.8 / 2.8, rel=1e-3)


def test_interval_does_not_change_the_limit_without_delay(limit):
  assert limit(8) == pytest.approx(limit(), rel=1e-3)


def test_delay_of_a_whole_round_has_the_lowest_limit(limit):
  late = [limit(8, d, carry=1 / 8) for d in (1, 2, None)]
  assert late == pytest.approx([1.27, 1.36, 0.025], rel=0.01)
  assert limit(1, 1, carry=1 / 8) == pytest.approx(0.32, rel=0.01)
  corrected = limit(8, None, carry=1 / 8, correction=0.1)
  assert corrected == pytest.approx(0.0526, rel=0.01)  # It damps the delay.


def test_full_carry_keeps_the_limit(limit):
  assert limit(8, None, carry=1.0) == pytest.approx(limit(), rel=1e-3)


@pytest.mark.parametrize("steps", [1, None])
def test_training_diverges_above_the_limit_only(steps, limit):
  # All targets are alike, so that four workers are one; its curvature is 1.
  targets = np.ones((400, 4), np.float32)
  bound = limit(4, steps, momentum=0.5, carry=0.25)
  for factor, stays in ((0.95, True), (1.1, False)):
    optimizer = transforms.local_steps(
      optax.sgd(factor * bound, momentum=0.5, nesterov=True),
      4,
      axis="worker",
      overlap=transforms.Delayed(steps, carry=0.25),
    )
    _, states = train(optimizer, targets)
    far = np.abs(states.anchor[-8:, 0] - 1).max()
    assert (far < 1) == stays


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"interval": 0}, "`interval` must be an int >= 1, got 0"),
    ({"interval": 2, "steps": 3}, "`steps` must be at most `interval`, 2"),
    ({"momentum": 1.0}, "`momentum` must be below 1, got 1.0"),
    ({"carry": 2.0}, r"`carry` must be in \[0, 1\], got 2.0"),
    ({"correction": -1.0}, "`correction` must be"),
  ],
)
def test_argument_out_of_range_is_refused(options, message, limit):
  with pytest.raises(ValueError, match=message):
    limit(**options)


@pytest.mark.parametrize("carry", [0.0, 1 / 64, 1 / 8, 0.5])
def test_mean_in_the_first_third_of_a_round_allows_most_of_the_rate(
  limit, carry
):
  whole = limit()
  assert limit(2, 1, carry=carry) > 0.66 * whole
  for interval in (3, 4, 5, 6, 8, 9, 15, 24):
    for late in {1, interval // 3}:
      assert limit(interval, late, carry=carry) > 0.86 * whole
  assert limit(10, 5, carry=1 / 64) < 0.14 * whole
