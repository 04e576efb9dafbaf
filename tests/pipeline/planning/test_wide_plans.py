"""Plans are as fast as the best of all choices, in cases of every kind."""

import math

import pytest

from jdist import cluster, pipeline
from tests.pipeline.planning import _wide_cases

pytest.importorskip("simpy")


def _ratio(seed):
  """Returns a plan's seconds over the least ones; None if nothing fits."""
  problem = _wide_cases.case(seed)
  fastest = _wide_cases.fastest(problem)
  try:
    best, _ = pipeline.plan(**problem)
  except ValueError:
    assert fastest == math.inf, seed  # Nothing that fits is refused.
    return None
  return problem["batch_size"] / best.samples_per_s / fastest


# Here the least bottleneck leads to other machines, cuts, micro-batches, a
# recomputation or a memory that are 1.04 to 1.32 times slower.
@pytest.mark.parametrize("seed", [118, 306, 315, 433, 468])
def test_plan_is_the_fastest_of_all_choices(seed):
  # A plan may take half a percent for less memory.
  assert _ratio(seed) < 1.006


@pytest.mark.slow
def test_hundred_wide_cases_are_near_the_fastest_of_all_choices():
  found = {seed: _ratio(seed) for seed in (*range(60, 159), 461)}
  ratios = sorted(x for x in found.values() if x is not None)
  assert ratios[len(ratios) // 2] < 1.001 and ratios[-1] < 1.006
  assert len(ratios) > 80


def test_table_that_is_too_long_leaves_the_others():
  best, rows = pipeline.plan(
    [pipeline.LayerCost("a", 1.0, 2.0)], cluster.workers([1.0]), 25_020,
    tables=["zb_h2"], num_microbatches=[1, 25_020], recompute=[False],
  )  # fmt: skip
  assert best.num_microbatches == 1
  assert "at most 100,000" in rows[-1].reason


def test_layouts_of_more_stages_are_not_later_than_allowed():
  # On two machines pipedream is late by one update, on three by two.
  costs = [pipeline.LayerCost(f"{i}", 1.0, 2.0) for i in range(3)]
  best, _ = pipeline.plan(
    costs, cluster.workers([1.0] * 3), 1, tables=["pipedream"],
    num_microbatches=[1], max_delay=1,
  )  # fmt: skip
  assert best.delay == max(pipeline.check_table(best.made).delays) == 1
