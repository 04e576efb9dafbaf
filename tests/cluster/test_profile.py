"""Costs of a model: fitted times, and batches that fit into memory."""

import pytest

from jdist import cluster


def test_negative_batch_time_is_fitted_as_zero():
  found = cluster.Profile.fit([10, 20], [0.05, 0.2])
  # The slope through the origin is sum(x y) / sum(x x) = (0.5 + 4) / 500.
  assert found.seconds_per_batch == 0.0
  assert found.seconds_per_sample == pytest.approx(0.009)
  flat = cluster.Profile.fit([10, 20], [0.2, 0.1])
  assert flat.seconds_per_sample == 0.0
  assert flat.seconds_per_batch == pytest.approx(0.15)


def test_model_larger_than_memory_has_no_batch():
  model = cluster.Profile(1.0, bytes_of_model=100.0)
  assert model.max_samples(10.0) == 0 and model.max_samples(100.0) is None
  samples = cluster.Profile(1.0, bytes_per_sample=10.0, bytes_of_model=5.0)
  assert [samples.max_samples(x) for x in (4.0, 5.0, 36.0)] == [0, 0, 3]
  assert samples.max_samples(float("inf")) is None


def test_measurement_fits_the_medians():
  times = iter([9.0, 9.0, 1.0, 2.0, 1.2, 2.4])
  found = cluster.Profile.measure(lambda _: next(times), [1, 2], repeats=2)
  assert found.seconds_per_sample == pytest.approx(1.1)
