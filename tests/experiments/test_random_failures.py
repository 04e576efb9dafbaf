"""Machines of the failure experiment fail at exponential times."""

import doctest
import itertools
import statistics
import sys

import pytest

from jdist import cluster
from tests.experiments import _loading


@pytest.fixture
def failures(monkeypatch):
  """The failure model's class."""
  path = "failures/random_failures.py"
  return _loading.load("random_failures", path, monkeypatch).Failures


def test_example_of_the_model_holds(failures):
  module = sys.modules["random_failures"]
  assert doctest.testmod(module).attempted
  assert not doctest.testmod(module).failed


def test_machines_are_up_and_down_for_exponential_times(failures):
  law = failures.of(0.2, 100.0, restart_s=3.0, seed=1)
  assert (law.up_s, law.down_s) == (80.0, 20.0)
  downs = [law.down_times(str(i), 1e4) for i in range(100)]
  lasting = [end - start for each in downs for start, end in each]
  assert statistics.mean(lasting) == pytest.approx(20.0, rel=0.05)
  # Exponential: the deviation is the mean.
  assert statistics.stdev(lasting) == pytest.approx(20.0, rel=0.05)
  up = [law.up_seconds(str(i), 1e4) for i in range(100)]
  assert statistics.mean(up) == pytest.approx(0.8e4, rel=0.02)
  # From the beginning on.
  away = sum(bool(each) and each[0][0] == 0.0 for each in downs)
  assert 10 <= away <= 30


def test_restarts_are_outages_but_no_time_down(failures):
  law = failures(up_s=5.0, down_s=5.0, restart_s=4.0)
  (node,) = law.apply(cluster.workers([1.0]), 200.0).nodes
  away = sum(x.end_s - x.start_s for x in node.outages)
  downs = law.down_times("worker0", 200.0)
  down = sum(end - start for start, end in downs)
  # A restart each, but for those in which it failed again.
  assert down < away <= down + 4.0 * len(downs)
  assert len(node.outages) < len(downs)
  pairs = itertools.pairwise(node.outages)
  assert all(a.end_s < b.start_s for a, b in pairs)


def test_machines_and_seeds_have_different_times(failures):
  law = failures(up_s=5.0, down_s=5.0)
  times = {law.down_times(name, 50.0) for name in "abc"}
  other = failures(up_s=5.0, down_s=5.0, seed=1)
  assert len(times | {other.down_times("a", 50.0)}) == 4
  assert law.down_times("a", 50.0) == law.down_times("a", 50.0)


@pytest.mark.parametrize(
  ("name", "given"),
  [
    ("up_s", {"up_s": 0.0}),
    ("down_s", {"down_s": -1.0}),
    ("restart_s", {"restart_s": -1.0}),
    ("seed", {"seed": -1}),
  ],
)
def test_invalid_times_raise(name, given, failures):
  with pytest.raises(ValueError, match=f"`{name}` must"):
    failures(**({"up_s": 1.0, "down_s": 1.0} | given))


def test_invalid_fractions_and_cycles_raise(failures):
  with pytest.raises(ValueError, match="`fraction` must"):
    failures.of(1.0, 10.0)
  with pytest.raises(ValueError, match="`cycle_s` must"):
    failures.of(0.2, -1.0)


def test_run_has_the_mean_of_its_last_evaluations(monkeypatch):
  _loading.enter("failures", monkeypatch)
  config = _loading.load("failures_config", "failures/config.py", monkeypatch)
  curve = [{"accuracy": x, "loss": 1 - x} for x in (0.0, 0.5, 1.0)]
  found = config.Config(last_marks=2).last(curve)
  assert found == {"accuracy": 0.75, "test_loss": 0.25}
