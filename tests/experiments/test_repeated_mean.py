"""Feedback that predicts each mean to be the last one, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs, reducers, transforms
from tests.experiments import _loading

WORKERS, SIZE, ENTRIES, ROUNDS = 3, 12, 2, 6


def by_hand(inputs, share):
  """The outputs of all rounds, and the workers' last residuals."""
  residual, mean, outputs = np.zeros((WORKERS, SIZE)), np.zeros(SIZE), []
  for x in inputs:
    wanted = x + residual - share * mean
    sent = np.zeros_like(wanted)
    for worker, row in enumerate(wanted):
      largest = np.argsort(-np.abs(row))[:ENTRIES]
      sent[worker, largest] = row[largest]
    residual = wanted - sent
    mean = share * mean + sent.mean(0)
    outputs.append(mean)
  return np.array(outputs), residual


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_outputs_and_residuals_match_numpy(share):
  module = _loading.alone("repeated_mean", "successor/repeated_mean.py")
  feedback = module.RepeatedMean(share)
  inputs = np.random.default_rng(0).normal(size=(ROUNDS, WORKERS, SIZE))
  average = transforms.average_gradients(
    "worker",
    reducers.Compression(
      reducers.compressed(codecs.TopK(k=ENTRIES)), feedback
    ),
  )  # fmt: skip
  state = jax.vmap(lambda _: average.init(jnp.zeros(SIZE)))(jnp.arange(WORKERS))
  step = jax.jit(jax.vmap(average.update, axis_name="worker"))
  outputs, residual = by_hand(inputs, share)
  for x, wanted in zip(inputs, outputs, strict=True):
    found, state = step(jnp.asarray(x, jnp.float32), state)
    for worker in found:
      np.testing.assert_allclose(worker, wanted, atol=2e-6)
  kept = [
    x.residual
    for x in jax.tree.leaves(
      state, is_leaf=lambda x: isinstance(x, module.RepeatedMeanState)
    )
    if isinstance(x, module.RepeatedMeanState)
  ]
  np.testing.assert_allclose(kept[0], residual, atol=2e-6)
  # All that went in has come out, or is still to be sent.
  np.testing.assert_allclose(
    inputs.sum(0).mean(0), outputs.sum(0) + residual.mean(0), atol=2e-6
  )
