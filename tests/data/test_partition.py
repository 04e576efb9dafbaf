"""Every sample has one owner, and labels are skewed as stated."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jdist import data
from jdist.data import _sample_stream

seeds = st.integers(0, 2**40)


@st.composite
def splits(draw):
  labels = draw(st.lists(st.integers(-3, 5), min_size=1, max_size=60))
  return np.array(labels), draw(st.integers(1, len(labels)))


@hypothesis.given(
  splits(),
  st.sampled_from([None, 1e-300, 1e-3]) | st.floats(1e-2, 1e6),
  seeds,
)
def test_every_sample_has_one_owner_and_parts_are_equal(split, alpha, seed):
  labels, num_workers = split
  parts = data.partition(labels, num_workers, alpha=alpha, seed=seed)
  together = np.sort(np.concatenate(parts))
  np.testing.assert_array_equal(together, np.arange(len(labels)))
  sizes = [len(part) for part in parts]
  assert len(parts) == num_workers and max(sizes) - min(sizes) <= 1
  again = data.partition(labels, num_workers, alpha=alpha, seed=seed)
  for part, same in zip(parts, again, strict=True):
    np.testing.assert_array_equal(part, same)


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_first_workers_own_what_is_left(alpha):
  parts = data.partition(np.arange(11) % 3, 4, alpha=alpha, seed=0)
  assert [len(part) for part in parts] == [3, 3, 3, 2]


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_another_seed_gives_another_split(alpha):
  labels = np.arange(1000) % 10
  first = data.partition(labels, 8, alpha=alpha, seed=0)
  second = data.partition(labels, 8, alpha=alpha, seed=1)
  assert any(set(a) != set(b) for a, b in zip(first, second, strict=True))


def shares(alpha):
  """Fraction of each class on each worker, [workers, classes]."""
  labels = np.arange(20000) % 10
  parts = data.partition(labels, 10, alpha=alpha, seed=0)
  counts = [np.bincount(labels[part], minlength=10) for part in parts]
  return np.array(counts) / 2000


def test_small_alpha_skews_and_large_alpha_does_not():
  assert np.median((shares(0.01) > 0.02).sum(axis=1)) <= 2
  np.testing.assert_allclose(shares(1e6), 0.1, atol=0.03)
  np.testing.assert_allclose(shares(None), 0.1, atol=0.03)


@pytest.mark.parametrize("alpha", [1e-300, 1e300, 1.7e308])
def test_smallest_and_largest_alpha_give_parts(alpha):
  labels = np.arange(1000) % 10
  parts = data.partition(labels, 4, alpha=alpha, seed=0)
  assert sorted(np.concatenate(parts)) == list(range(1000))


def test_first_worker_draws_from_the_stated_distribution():
  # Dirichlet(a, ..., a) over K classes has variance (1/K)(1 - 1/K)/(K a + 1)
  # per share; with 4 workers of 40 classes nothing runs out for the first.
  labels, alpha = np.arange(4000) % 4, 2.0
  first = [
    np.bincount(
      labels[data.partition(labels, 40, alpha=alpha, seed=seed)[0]],
      minlength=4,
    )
    / 100
    for seed in range(300)
  ]
  np.testing.assert_allclose(np.mean(first, axis=0), 0.25, atol=0.03)
  spread = 0.25 * 0.75 / (4 * alpha + 1)
  # Counts of 100 draws have a binomial variance in addition.
  spread += (0.25 * 0.75 - spread) / 100
  assert abs(np.var(first, axis=0).mean() / spread - 1) < 0.15


def test_mix_that_vanishes_on_what_is_left_follows_its_numbers():
  rng = np.random.default_rng(0)
  counts = _sample_stream._draw_counts(
    rng, np.array([1.0, 1e-150, 1e-300]), np.array([0, 100, 900]), 100
  )
  assert counts.sum() == 100 and counts[0] == 0
  # Ten are expected of the first of the two, with a deviation of three.
  assert 0 < counts[1] < 25
