"""Evaluation: what counts, and what does not."""

import jax.numpy as jnp
import numpy as np
import optax

from jdist import data, training
from tests.training import _tiny


def test_nan_in_padding_is_ignored():
  def apply(params, state, images, train):
    # Of padding, zeros, this is 0 / 0.
    flat = images.reshape(len(images), -1)
    return flat / jnp.linalg.norm(flat, axis=-1, keepdims=True) @ params, state

  test = data.load("digits", "test").select(np.arange(5))
  team = _tiny.team("vmap")
  batches = data.evaluation_batches(test, team.num_workers, 4)
  params = np.random.default_rng(0).normal(size=(64, 10)).astype(np.float32)
  found = training.Evaluator(team, apply, batches).measure(params)
  logits, _ = apply(params, {}, jnp.float32(test.images), train=False)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, test.labels)
  np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)
  assert found["accuracy"] == np.mean(np.argmax(logits, -1) == test.labels)
