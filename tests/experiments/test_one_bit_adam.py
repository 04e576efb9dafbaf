"""1-bit Adam, which is a chain of public parts, against NumPy."""

import numpy as np
import pytest

from jdist import transforms
from tests.experiments import _loading
from tests.methods._by_hand import descended, Exchange, sign
from tests.transforms._rounds import random_targets, train

RATE, WORKERS, SHAPE = 0.1, 4, (8, 4)


@pytest.fixture
def method(monkeypatch):
  path = "compression/one_bit_adam.py"
  return _loading.load("one_bit_adam", path, monkeypatch).one_bit_adam


def l2_signs(x):
  return np.sqrt((x**2).mean(-1, keepdims=True)) * sign(x)


def adam_of_signs(warmup_steps):
  def steps_of(shape):
    m, v, e = np.zeros(shape[1]), np.zeros(shape[1]), np.zeros(shape)
    exchange, t = Exchange(shape, l2_signs), 0

    def step(g):
      nonlocal m, v, e, t
      if t < warmup_steps:
        m = 0.9 * m + 0.1 * g.mean(0)
        v = 0.99 * v + 0.01 * g.mean(0) ** 2
      else:
        p = 0.9 * m + 0.1 * g + e
        m, share = exchange(p)
        e = p - share
      t += 1
      return -RATE * m / (np.sqrt(v) + 1e-8)

    return step

  return steps_of


def test_method_matches_numpy(method):
  targets = random_targets(12, WORKERS, *SHAPE)
  params, states = train(method(RATE, 4, axis="worker", b2=0.99), targets)
  wanted = descended(targets, adam_of_signs(4))
  np.testing.assert_array_equal(params, np.repeat(params[:, :1], WORKERS, 1))
  np.testing.assert_allclose(params[:, 0], wanted, 1e-4, 1e-5)
  assert transforms.sharing(states).params is True


@pytest.mark.slow
def test_warm_up_is_adam_without_bias_correction(method):
  targets = random_targets(10, WORKERS, *SHAPE)
  optimizer = method(RATE, 10, axis="worker", eps=1e-3)
  found, _ = train(optimizer, targets)

  def plain(shape):
    m, v = 0.0, 0.0

    def step(g):
      nonlocal m, v
      m = 0.9 * m + 0.1 * g.mean(0)
      v = 0.999 * v + 0.001 * g.mean(0) ** 2
      return -RATE * m / (np.sqrt(v) + 1e-3)

    return step

  np.testing.assert_allclose(found[:, 0], descended(targets, plain), 1e-4, 1e-5)


@pytest.mark.slow
def test_parameters_without_gradients_stay(method):
  targets = random_targets(8, WORKERS, *SHAPE)
  targets[:4, :, 0, 0] = 0.0  # Where the parameters begin.
  optimizer = method(RATE, 4, axis="worker")
  params, states = train(optimizer, targets)
  assert not params[:, :, 0, 0].any() and np.isfinite(params).all()
  told = transforms.sharing(states).state[0]
  assert told.mu is True and told.nu is True and told.step is True
  assert told.compression.feedback.residual is False
