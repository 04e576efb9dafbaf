"""A model's costs, measured."""

import numpy as np
import pytest

from jdist import data, models, profiling, training


@pytest.fixture(scope="module")
def profile():
  model = models.build("mlp", input_shape=(8, 8, 1), num_classes=10)
  digits = data.load("digits")
  return profiling.profile_model(
    training.classification_loss(model.apply, normalize=digits.normalize),
    model.params,
    lambda size: data.SampleStream(digits, 1, seed=0).batch(0, 0, size),
    (64, 256, 1024),
    repeats=2,
    name="mlp",
  )


def test_messages_are_as_large_as_the_parameters(profile):
  assert profile.pull_bytes == profile.push_bytes == 4 * 9610
  assert profile.name == "mlp"


def test_memory_grows_with_the_batch(profile):
  # Of its time no more: a busy machine may be slower in the smaller batches.
  assert profile.compute_s(1024) >= profile.compute_s(64) > 0
  # An image, its label and mask at least; and at most what all layers hold.
  assert 64 + 8 <= profile.bytes_per_sample < 64 * 1024
  assert profile.bytes_of_model >= 4 * 9610  # The parameters.
  assert np.isfinite(profile.memory_bytes(4096))
