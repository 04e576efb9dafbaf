"""Gradients late by a number of steps, for each leaf."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import transforms

PARAMS = {"early": jnp.array([2.0, -1.0]), "late": {"w": jnp.array(3.0)}}
DELAYS = {"early": 2, "late": 1}
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def run(optimizer, params, steps):
  """Trains on half of the squares; all parameters, and the last state."""

  @jax.jit
  def step(params, state):
    updates, state = optimizer.update(params, state, params)
    return optax.apply_updates(params, updates), state

  state, found = optimizer.init(params), [params]
  for _ in range(steps):
    params, state = step(params, state)
    found.append(params)
  return found, state


def reference(start, delay, steps):
  """Momentum with the gradient of `delay` updates ago, of one number."""
  w, v = [float(start)], 0.0
  for t in range(steps):
    if t >= delay:
      v = 0.9 * v + w[t - delay]
    w.append(w[t] - 0.1 * v if t >= delay else w[t])
  return np.array(w)


def test_each_leaf_has_its_own_delay():
  found, _ = run(transforms.delay_gradients(MOMENTUM, DELAYS), PARAMS, 12)
  for leaf, start, delay in (
    ([p["early"][0] for p in found], 2.0, 2),
    ([p["late"]["w"] for p in found], 3.0, 1),
  ):
    np.testing.assert_allclose(leaf, reference(start, delay, 12), rtol=1e-5)


def test_leaf_before_its_first_gradient_keeps_its_state():
  # A decay in front of the momentum would move it without any gradient.
  optimizer = optax.chain(optax.add_decayed_weights(0.1), MOMENTUM)
  optimizer = transforms.delay_gradients(optimizer, {"early": 3, "late": 0})
  found, state = run(optimizer, PARAMS, 3)
  chex.assert_trees_all_equal(found[3]["early"], PARAMS["early"])
  assert found[3]["late"]["w"] < 2.5
  trace = optax.tree.get(state, "trace")
  assert not trace["early"].any() and trace["late"]["w"] > 0


def test_schedule_starts_with_the_first_gradient():
  first = optax.sgd(lambda count: jnp.where(count == 0, 0.5, 0.0))
  found, _ = run(transforms.delay_gradients(first, 2), PARAMS, 4)
  half = jax.tree.map(lambda w: 0.5 * w, PARAMS)
  chex.assert_trees_all_equal(found[2:], [PARAMS, half, half])


def test_count_advances_with_the_first_gradient_of_any_leaf():
  first = optax.sgd(lambda count: jnp.where(count == 0, 0.5, 0.0))
  found, _ = run(transforms.delay_gradients(first, DELAYS), PARAMS, 4)
  assert found[-1]["late"]["w"] == 1.5
  chex.assert_trees_all_equal(found[-1]["early"], PARAMS["early"])


def test_each_leaf_keeps_as_many_gradients_as_its_delay():
  optimizer = transforms.delay_gradients(MOMENTUM, {"early": 3, "late": 0})
  pending = optimizer.init(PARAMS).pending
  assert jax.tree.map(jnp.shape, pending) == {
    "early": (3, 2),
    "late": {"w": ()},
  }
  assert len(jax.tree.leaves(pending)) == 1


def test_tree_of_equal_delays_equals_their_number():
  one = run(transforms.delay_gradients(MOMENTUM, 2), PARAMS, 8)
  tree = {"early": 2, "late": {"w": 2}}
  chex.assert_trees_all_equal(
    one, run(transforms.delay_gradients(MOMENTUM, tree), PARAMS, 8)
  )


@pytest.mark.parametrize(
  "steps",
  [
    0,
    np.int32(0),
    {"early": 0, "late": 0},
    {"early": 0, "late": {"w": 0}},
    {"early": np.int64(0), "late": {"w": 0}},
  ],
)
def test_zero_delay_equals_the_optimizer_to_the_bit(steps):
  plain = run(MOMENTUM, PARAMS, 5)
  chex.assert_trees_all_equal(
    plain, run(transforms.delay_gradients(MOMENTUM, steps), PARAMS, 5)
  )


def test_drain_applies_all_gradients_of_every_leaf():
  optimizer = transforms.delay_gradients(MOMENTUM, DELAYS)
  found, state = run(optimizer, PARAMS, 6)
  drained, state = transforms.drain(optimizer, state, found[-1])
  for leaf, start, delay in (
    (drained["early"][0], 2.0, 2),
    (drained["late"]["w"], 3.0, 1),
  ):
    # The gradients that were pending are those of the run.
    w = list(reference(start, delay, 6))
    v = (w[5] - w[6]) / 0.1
    for old in w[6 - delay : 6]:
      v = 0.9 * v + old
      w.append(w[-1] - 0.1 * v)
    np.testing.assert_allclose(leaf, w[-1], rtol=1e-5)
  again, same = transforms.drain(optimizer, state, drained)
  chex.assert_trees_all_equal((again, same), (drained, state))


def test_parts_of_a_partition_have_the_delays_of_their_leaves():
  """Momenta of a part hold masks in place of the other leaves."""
  parts = {"one": MOMENTUM, "other": MOMENTUM}
  labels = {"early": "one", "late": {"w": "other"}}
  found = []
  for optimizer in (MOMENTUM, optax.partition(parts, labels)):
    delayed = transforms.delay_gradients(optimizer, DELAYS)
    params, state = run(delayed, PARAMS, 5)
    params, state = transforms.drain(delayed, state, params[-1])
    found.append((params, jax.tree.leaves(state.inner)))
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_array_equal(a, b)


def test_drain_decays_weights_as_its_updates_leave_them():
  decayed = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))
  optimizer = transforms.delay_gradients(decayed, 2)
  found, state = run(optimizer, PARAMS, 6)
  w = found[-1]
  for gradient in found[4:6]:
    w = jax.tree.map(lambda w, g: w - 0.1 * (g + 0.5 * w), w, gradient)
  drained, _ = transforms.drain(optimizer, state, found[-1])
  chex.assert_trees_all_close(drained, w, rtol=1e-6)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_delay_diverges_just_above_its_stable_rate(delay):
  # Of w <- w - lr * w[delay ago]: lr < 2 sin(pi / (4 delay + 2)).
  bound = 2 * np.sin(np.pi / (4 * delay + 2))
  for rate, converges in ((0.95 * bound, True), (1.05 * bound, False)):
    optimizer = transforms.delay_gradients(optax.sgd(rate), delay)
    # Under a scan, which wants a state of one form.
    w = jnp.array(1.0)

    def step(carry, _, optimizer=optimizer):
      w, state = carry
      updates, state = optimizer.update(w, state, w)
      return (optax.apply_updates(w, updates), state), w

    _, path = jax.lax.scan(step, (w, optimizer.init(w)), length=400)
    assert (np.abs(path[-20:]).max() < 0.05) == converges


@pytest.mark.parametrize(
  ("steps", "words"),
  [
    (None, "`steps` must be an int >= 0, got None"),
    ({}, "`steps` must be an int >= 0, got None"),
    ({"early": 1, "late": -1}, "`steps` must be an int >= 0, got -1"),
    ({"early": 1, "late": 0.5}, "`steps` must be an int >= 0, got 0.5"),
  ],
)
def test_invalid_delays_raise(steps, words):
  with pytest.raises(ValueError, match=words):
    transforms.delay_gradients(MOMENTUM, steps)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", ["other", "early"])
def test_delays_of_other_parameters_are_refused(name, delay):
  optimizer = transforms.delay_gradients(MOMENTUM, {name: delay})
  with pytest.raises(ValueError, match="`steps` must be a number, or a tree"):
    optimizer.init(PARAMS)
