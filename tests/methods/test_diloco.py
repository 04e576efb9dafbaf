"""Methods with rounds that send few bytes."""

import jax
import numpy as np
import optax
import pytest

from jdist import methods, transforms
from tests.transforms._rounds import random_targets, train

RATE = 0.1
SGD = optax.sgd(RATE)


def largest_of_chunks(x, chunk, k):
  """Which entries are sent, in the order of their indices."""
  return np.concatenate(
    [
      start + np.sort(np.argsort(-np.abs(x[start : start + chunk]))[:k])
      for start in range(0, len(x), chunk)
    ]
  )


def two_bits(x):
  low, high = x.min(), x.max()
  q = np.round(3 * (x - low) / (high - low))
  return low * (1 - q / 3) + high * q / 3


def test_sparse_loco_is_that_of_numpy():
  targets = random_targets(15, 4, 16)
  optimizer = methods.sparse_loco(
    SGD, 3, 0.25, 0.8, axis="worker", decay=0.9, chunk=8
  )
  _, states = train(optimizer, targets)
  a, e, anchors = np.zeros(16), np.zeros((4, 16)), []
  for start in range(0, 15, 3):
    w = np.tile(a, (4, 1))
    for x in targets[start : start + 3]:
      w = w - RATE * (w - x)
    p = a - w + 0.9 * e
    s = np.zeros_like(p)
    for row, out in zip(p, s, strict=True):
      chosen = largest_of_chunks(row, 8, 2)
      out[chosen] = two_bits(row[chosen])
    e = p - s
    a = a - 0.8 * s.mean(0)
    anchors.append(a)
  found = states.anchor
  np.testing.assert_array_equal(found, np.repeat(found[:, :1], 4, 1))
  np.testing.assert_allclose(found[2::3, 0], anchors, 1e-4, 1e-5)


def distances(optimizer, steps=60):
  """How far the anchor is from the targets' mean, and was."""
  mean = np.random.default_rng(5).normal(size=(32, 32)).astype(np.float32)
  targets = 0.1 * random_targets(steps, 4, 32, 32) + mean
  _, states = train(optimizer, targets)
  found = np.asarray(states.anchor[:, 0])
  assert np.isfinite(found).all()
  return np.linalg.norm(found[-1] - mean), np.linalg.norm(mean)


def test_muloco_survives_two_bits():
  exact = methods.diloco(optax.contrib.muon(0.02), 4, axis="worker")
  coarse = methods.muloco(0.02, 4, axis="worker")
  fine = methods.muloco(0.02, 4, axis="worker", bits=16)
  with jax.numpy_dtype_promotion("standard"):  # Which Optax's Muon needs.
    wanted, start = distances(exact)
  assert wanted < 0.5 * start
  assert abs(distances(fine)[0] - wanted) < 1e-3 * start
  assert abs(distances(coarse)[0] - wanted) < 0.02 * start


def test_sparse_loco_gets_there_with_a_part_of_its_progress():
  sparse = methods.sparse_loco(SGD, 4, 0.25, axis="worker", chunk=64)
  found, start = distances(sparse)
  assert found < 0.1 * start


@pytest.mark.parametrize("make", [methods.sparse_loco, methods.muloco])
def test_residuals_are_each_workers_own_and_the_anchor_is_not(make):
  inner = SGD if make is methods.sparse_loco else RATE
  optimizer = make(inner, 2, axis="worker")
  _, states = train(optimizer, random_targets(4, 4, 32, 32))
  told = transforms.sharing(states).state
  assert (
    told.anchor is True and told.sync.compression.feedback.residual is False
  )
  residual = states.sync.compression.feedback.residual[-1]
  assert not np.array_equal(residual[0], residual[1])
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(states))


REJECTED = {
  "optimizer": (
    lambda: methods.sparse_loco(0.1, 2, axis=None),
    "`optimizer` must be an Optax transformation",
  ),
  "density": (
    lambda: methods.sparse_loco(SGD, 2, 2.0, axis=None),
    r"`ratio` must be in \(0, 1\], got 2.0",
  ),
  "decay": (
    lambda: methods.sparse_loco(SGD, 2, axis=None, decay=1.1),
    r"`decay` must be in \[0, 1\], got 1.1",
  ),
  "rate": (
    lambda: methods.muloco(-0.1, 2, axis=None),
    r"`learning_rate` must be in \(0, inf\], got -0.1",
  ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_is_refused(name):
  call, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    call()
