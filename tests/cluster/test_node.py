"""Machines change their speed, and batches have costs."""

import math
import random
import statistics

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jdist import cluster
from tests import _refusals


@hypothesis.given(
  st.lists(
    st.tuples(
      st.floats(0, 20), st.floats(0.1, 10), st.sampled_from([0.25, 0.5, 2])
    ),
    max_size=4,
  ),
  st.floats(0, 20),
  st.floats(0.1, 30),
)
def test_work_is_the_integral_of_the_speed(slowdowns, start, work):
  node = cluster.Node(
    "a",
    speed=3.0,
    slowdowns=tuple(
      cluster.Slowdown(begin, factor, begin + length)
      for begin, length, factor in slowdowns
    ),
  )
  end = node.end_s(start, work)
  edges = {start, end}
  for slow in node.slowdowns:
    edges |= {t for t in (slow.start_s, slow.end_s) if start < t < end}
  done, edges = 0.0, sorted(edges)
  for left, right in zip(edges, edges[1:], strict=False):  # noqa: RUF007
    speed, middle = 3.0, (left + right) / 2
    for slow in node.slowdowns:
      if slow.start_s <= middle < slow.end_s:
        speed *= slow.factor
    done += speed * (right - left)
  assert done == pytest.approx(work, rel=1e-6)


def test_work_on_a_machine_that_stands_still_does_not_end():
  slow = (cluster.Slowdown(0.0, 1e-200), cluster.Slowdown(1.0, 1e-200, 9.0))
  assert cluster.Node("a", slowdowns=slow[:1]).end_s(0.0, 1.0) > 1e199
  node = cluster.Node("a", slowdowns=(slow[0], cluster.Slowdown(0.0, 1e-200)))
  assert node.end_s(0.0, 1.0) == math.inf  # The product of the factors is 0.


def test_jitter_does_not_change_the_mean():
  node, generator = cluster.Node("a", jitter=0.5), random.Random(0)
  drawn = [node.draw(generator) for _ in range(20_000)]
  assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.02)
  logarithms = [math.log(each) for each in drawn]
  assert statistics.stdev(logarithms) == pytest.approx(0.5, abs=0.01)


def test_batch_larger_than_memory_raises():
  machines = cluster.Cluster(
    (cluster.Node("big"), cluster.Node("small", memory_bytes=1e9))
  )
  profile = cluster.Profile(1.0, bytes_per_sample=1e8, bytes_of_model=2e8)
  machines.check_batches(profile, 8)
  machines.check_batches(profile, np.int64(8))
  machines.check_batches(profile, np.array([90, 8]))
  with _refusals.refused("samples", "be an int or a list of 2, got [8]. Give"):
    machines.check_batches(profile, [8])
  with pytest.raises(ValueError, match="'small' has 1 GB: 8 samples fit"):
    machines.check_batches(profile, 9)


def test_machine_is_away_from_the_start_of_an_outage_until_its_end():
  node = cluster.Node("a", outages=(cluster.Outage(1.0, 2.0),))
  times = (0.0, 0.99, 1.0, 1.99, 2.0)
  assert list(map(node.available, times)) == [True, True, False, False, True]
