"""Nesterov's look-ahead with late gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import transforms

W = jnp.array([2.0, -1.0])


def train(chain, delay, steps):
  optimizer = transforms.delay_gradients(chain, delay)

  def step(carry, _):
    w, state = carry
    updates, state = optimizer.update(w, state, w)
    return (optax.apply_updates(w, updates), state), w

  return jax.lax.scan(step, (W, optimizer.init(W)), length=steps)[1]


def look_ahead(momentum, rate=0.3):
  return optax.chain(
    transforms.scale_by_look_ahead(momentum), optax.scale(-rate)
  )


@pytest.mark.parametrize("delay", [0, 2])
def test_it_is_nesterovs_method_at_the_points_of_its_look_ahead(delay):
  before = w = np.float64(W)
  points = [w]
  for t in range(11):
    y = points[-1]
    if t < delay:
      points.append(y)
      continue
    before, w = w, y - 0.3 * (1 - 0.8) * points[t - delay]
    points.append(w + 0.8 * (w - before))
  found = train(look_ahead(0.8), delay, 12)
  np.testing.assert_allclose(found, points, rtol=1e-4)


def test_without_momentum_it_is_gradient_descent_to_the_bit():
  found = train(look_ahead(0.0), 1, 8)
  chex.assert_trees_all_equal(found, train(optax.scale(-0.3), 1, 8))


def test_it_converges_where_whole_gradients_in_the_momentum_diverge():
  whole = optax.sgd(0.1, momentum=0.8, nesterov=True)
  assert np.abs(train(whole, 5, 300)[-1]).max() > 1.0
  assert np.abs(train(look_ahead(0.8, 0.1), 5, 300)[-1]).max() < 1e-3


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_out_of_range_is_refused(momentum):
  with pytest.raises(ValueError, match="`momentum` must be"):
    transforms.scale_by_look_ahead(momentum)
