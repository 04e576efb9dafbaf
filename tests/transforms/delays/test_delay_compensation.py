"""Late gradients, corrected for what the parameters have moved since."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import transforms

W = jnp.array([2.0, -1.0])


def train(optimizer, steps, gradient=lambda w: w, start=W):
  def step(carry, _):
    w, state = carry
    updates, state = optimizer.update(gradient(w), state, w)
    return (optax.apply_updates(w, updates), state), w

  (w, _), path = jax.lax.scan(
    step, (start, optimizer.init(start)), length=steps
  )
  return np.append(path, w[None], 0)


def late(strength, delay, rate=0.1):
  chain = optax.chain(
    transforms.compensate_delay(strength, delay), optax.sgd(rate)
  )
  return transforms.delay_gradients(chain, delay)


@pytest.mark.parametrize("delay", [1, 3])
def test_it_is_the_loop_that_keeps_the_parameters_of_each_gradient(delay):
  w, pending = [np.float64(W)], []
  for t in range(10):
    pending.append((w[t], w[t]))  # The gradient is the parameters.
    if t < delay:
      w.append(w[t])
      continue
    g, then = pending[t - delay]
    w.append(w[t] - 0.1 * (g + 0.5 * g * g * (w[t] - then)))
  np.testing.assert_allclose(train(late(0.5, delay), 10), w, rtol=1e-5)


def test_with_the_curvature_for_its_square_it_is_the_present_gradient():
  # Where g * g is the curvature, of |w| here with a slope of 1 and lambda 0,
  # or of w ** 2 / 2 where |g| is 1: g + 1 * (now - then) = now.
  found = transforms.compensated(
    jnp.array([1.0, -1.0]), 1.0, jnp.array([0.7, -1.2]), jnp.array([1.0, -1.0])
  )
  np.testing.assert_allclose(found, [0.7, -1.2], rtol=1e-6)


def test_it_holds_a_rate_at_which_the_delay_alone_diverges():
  # The bound of delay 3 is 2 sin(pi / 14) = 0.445, near the start |g| is 1.
  start = jnp.array([1.0])
  plain = train(late(0.0, 3, 0.5), 60, start=start)
  fixed = train(late(1.0, 3, 0.5), 60, start=start)
  assert np.abs(fixed[-10:]).max() < 0.5 * np.abs(plain[-10:]).max()


@pytest.mark.parametrize(("strength", "delay"), [(0.0, 2), (0.5, 0)])
def test_no_strength_and_no_delay_are_no_compensation(strength, delay):
  plain = transforms.delay_gradients(optax.sgd(0.1), delay)
  chex.assert_trees_all_equal(train(late(strength, delay), 6), train(plain, 6))


def test_each_leaf_looks_back_by_its_own_delay():
  params = {"a": W, "b": W}
  fix = transforms.compensate_delay(0.5, {"a": 2, "b": 0})
  state = fix.init(params)
  assert jax.tree.map(jnp.shape, state.past) == {"a": (2, 2), "b": ()}
  moved = jax.tree.map(lambda x: x + 1.0, params)
  ones = jax.tree.map(jnp.ones_like, params)
  _, state = fix.update(ones, state, params)
  updates, _ = fix.update(ones, state, moved)
  # What "a" was before the first update is all that there was then.
  np.testing.assert_array_equal(updates["a"], [1.5, 1.5])
  np.testing.assert_array_equal(updates["b"], [1.0, 1.0])


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (
      lambda: transforms.compensate_delay(-1.0, 1),
      r"`strength` must be in \[0, inf\], got -1.0",
    ),
    (
      lambda: transforms.compensate_delay(1.0, -1),
      "`steps` must be an int >= 0, got -1",
    ),
    (
      lambda: transforms.compensate_delay(1.0, {"a": 1}).init(W),
      "`steps` must be a number, or a tree of numbers",
    ),
    (
      lambda: transforms.compensate_delay(1.0, 1).update(
        W, transforms.compensate_delay(1.0, 1).init(W)
      ),
      "`params` must be given to `update` of `compensate_delay`",
    ),
  ],
)
def test_what_does_not_fit_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()
