"""Costs of a model: batches that fit into memory."""

from jdist import cluster


def test_model_larger_than_memory_has_no_batch():
  model = cluster.Profile(1.0, bytes_of_model=100.0)
  assert model.max_samples(10.0) == 0 and model.max_samples(100.0) is None
  samples = cluster.Profile(1.0, bytes_per_sample=10.0, bytes_of_model=5.0)
  assert [samples.max_samples(x) for x in (4.0, 5.0, 36.0)] == [0, 0, 3]
  assert samples.max_samples(float("inf")) is None
