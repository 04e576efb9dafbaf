"""Rounds of methods, against NumPy, and refusals."""

import jax
import numpy as np
import optax

import jdist
from jdist import transforms
from tests.transforms._rounds import random_targets, train

RATE = 0.1
SGD = optax.sgd(RATE)
MOMENTUM = optax.sgd(RATE, momentum=0.9)


def gradient(w, x):
  return w - x


def rounds_of(x, interval):
  """The targets [steps, workers] of each whole round."""
  for start in range(0, len(x) - interval + 1, interval):
    yield start + interval, x[start : start + interval]


def check_rounds(optimizer, reference):
  """That every round ends where the reference says."""
  targets = random_targets(24)
  params, states = train(optimizer, targets)
  found = list(reference(targets.astype(np.float64)))
  assert len(found) >= 6
  for t, w, a in found:
    np.testing.assert_allclose(params[t - 1], w, 1e-5, 1e-6)
    np.testing.assert_allclose(states.anchor[t - 1], [a] * 4, 1e-5, 1e-6)
  # All methods tell their rounds in the same words.
  last = jax.tree.map(lambda x: x[-1], states)
  np.testing.assert_array_equal(jdist.anchor(last, params[-1]), last.anchor)
  assert transforms.rounds(last, 0).tolist() == [len(found)] * 4


def check_same(one, other):
  """That two methods take the same steps."""
  targets = random_targets(18, 4, 5)
  found, wanted = train(one, targets)[0], train(other, targets)[0]
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)
