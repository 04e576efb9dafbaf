"""Slots of a grid, by the ticks in which micro-batches are alive."""

import collections
import itertools

import pytest

from jdist import pipeline
from jdist.pipeline.runtime import _grid


def _most(alive):
  """Returns the longest range of numbers that are alive in one tick."""
  numbers = collections.defaultdict(set)
  for number, (start, end) in alive.items():
    for tick in range(start, end + 1):
      numbers[tick].add(number)
  return max(max(x) - min(x) + 1 for x in numbers.values())


@pytest.mark.parametrize(
  ("stages", "microbatches", "late"),
  [*itertools.product((2, 3, 4), (1, 2, 4), (1, 2))],
)
def test_ring_holds_all_that_lives_in_a_window_without_a_flush(
  stages, microbatches, late
):
  """Stage s runs F in tick 2 m + L s, and B in 2 m + L (2 S - 2 - s) + 1.

  Micro-batches are counted through many iterations.
  """
  table = pipeline.ours(stages, microbatches, window=8, num_iterations=8)
  grid = _grid.make_grid(table, send_ticks=late)
  inputs, gradients = [], []
  for s in range(stages):
    forward = {m: 2 * m + late * s for m in range(60)}
    backward = {m: 2 * m + late * (2 * stages - 2 - s) + 1 for m in range(60)}
    # A message is stored at the end of the tick before its first use.
    inputs.append(
      _most({m: (forward[m] - (s > 0), backward[m]) for m in forward})
    )
    ends = s + 1 < stages
    gradients.append(
      _most({m: (backward[m] - ends, backward[m]) for m in forward})
    )
  assert grid.slots == max(inputs)
  assert grid.gradient_slots == max(gradients)
  assert grid.stash_slots == 1
  assert (len(grid.rows), grid.delay) == (2 * microbatches, 7)
