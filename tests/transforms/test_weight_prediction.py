"""Late gradients, computed where the parameters will be."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, training, transforms

W = {"a": jnp.array([2.0, -1.0]), "b": jnp.array(3.0)}
GRADS = {"a": jnp.array([1.0, -3.0]), "b": jnp.array(0.5)}
RATE, DECAY = 0.1, 0.8


def momentum(**options):
  return optax.sgd(RATE, momentum=DECAY, **options)


@pytest.fixture(autouse=True)
def promotion():
  # Optax's Adam mixes dtypes.
  with jax.numpy_dtype_promotion("standard"):
    yield


def after(optimizer, steps, w=W):
  """Parameters and state after some steps of one gradient."""
  state = optimizer.init(w)
  for _ in range(steps):
    updates, state = optimizer.update(GRADS, state, w)
    w = optax.apply_updates(w, updates)
  return w, state


@pytest.mark.parametrize(
  "optimizer",
  [
    momentum(),
    momentum(nesterov=True),
    optax.adamw(optax.linear_schedule(0.1, 0.0, 6)),
    optax.chain(optax.clip(1.0), momentum(), optax.keep_params_nonnegative()),
  ],
  ids=["momentum", "nesterov", "adamw", "chain"],
)
def test_prediction_is_the_end_of_steps_with_zero_gradients(optimizer):
  w, state = after(transforms.predict_weights(optimizer, 3), 2)
  found = transforms.predicted_weights(state, w)
  zero, inner = jax.tree.map(jnp.zeros_like, W), state.inner
  for _ in range(3):
    updates, inner = optimizer.update(zero, inner, w)
    w = optax.apply_updates(w, updates)
  chex.assert_trees_all_close(found, w, rtol=1e-6)


def test_momentum_matches_closed_form():
  w, state = after(transforms.predict_weights(momentum(), 4), 2)
  far = (DECAY - DECAY**5) / (1 - DECAY)
  velocity = optax.tree.get(state, "trace")
  wanted = jax.tree.map(lambda w, v: w - RATE * v * far, w, velocity)
  found = transforms.predicted_weights(state, w)
  chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_adam_with_held_second_moment_matches_the_sum():
  adam = optax.adam(RATE, b1=0.9, b2=0.95)
  w, state = after(transforms.predict_weights(adam, 3, b2=0.95), 2)
  moments = state.inner[0]

  def wanted(w, m, v):
    for k in range(1, 4):
      scale = jnp.sqrt(v / (1 - 0.95 ** (2 + k))) + 1e-8
      w = w - RATE / (1 - 0.9 ** (2 + k)) * m * 0.9**k / scale
    return w

  chex.assert_trees_all_close(
    transforms.predicted_weights(state, w),
    jax.tree.map(wanted, w, moments.mu, moments.nu),
    rtol=1e-6,
  )


def test_updates_are_those_of_the_optimizer():
  plain, _ = after(momentum(), 3)
  w, state = after(transforms.predict_weights(momentum(), 2), 3)
  chex.assert_trees_all_equal(w, plain)
  # Zero steps predict the present parameters, as no prediction does.
  w, state = after(transforms.predict_weights(momentum(), 0), 3)
  chex.assert_trees_all_equal(transforms.predicted_weights(state, w), w)
  assert transforms.predicted_weights(optax.EmptyState(), w) is w


def test_each_leaf_is_predicted_by_its_own_delay():
  steps = {"a": 2, "b": 1}
  w, state = after(transforms.predict_weights(momentum(), steps), 1)
  found = transforms.predicted_weights(state, w)
  for name, number in steps.items():
    one = transforms.predict_weights(momentum(), number)
    w, state = after(one, 1)
    wanted = transforms.predicted_weights(state, w)[name]
    np.testing.assert_array_equal(found[name], wanted)


def late(delay, predicted):
  """Returns the path of momentum SGD on a quadratic with a delay."""
  optimizer = optax.sgd(0.05, momentum=0.9)
  if predicted:
    optimizer = transforms.predict_weights(optimizer, delay)
  optimizer = transforms.delay_gradients(optimizer, delay)

  def step(carry, _):
    w, state = carry
    read = transforms.predicted_weights(state, w)
    updates, state = optimizer.update(read, state, w)
    return (optax.apply_updates(w, updates), state), w

  w = jnp.array(1.0)
  return jax.lax.scan(step, (w, optimizer.init(w)), length=300)[1]


def test_delay_that_diverges_converges_at_predicted_weights():
  assert np.abs(late(3, False)[-1]) > 1.0
  assert np.abs(late(3, True)[-20:]).max() < 0.1


def test_training_step_takes_gradients_at_predicted_weights():
  optimizer = transforms.predict_weights(momentum(), 2)
  team = collectives.workers(1, substrate="none")

  def loss(w, model_state, batch, key):
    return jnp.sum(w**2) / 2, (model_state, {"read": w.sum()})

  step = team.jit(training.make_step(loss, optimizer, axis=team.axis))
  state = training.init_state(team, optimizer, jnp.array([2.0]))
  for wanted in (2.0, 1.8 - 0.2 * (0.8 + 0.64)):
    state, metrics = step(state, {"x": jnp.zeros((1, 1))})
    np.testing.assert_allclose(metrics["read"], wanted, rtol=1e-6)


SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
  ("make", "words"),
  [
    (
      lambda: transforms.predict_weights(None, 1),
      "`optimizer` must be an Optax transformation",
    ),
    (
      lambda: transforms.predict_weights(SGD, 1.5),
      "`steps` must be an int >= 0, got 1.5",
    ),
    (
      lambda: transforms.predict_weights(SGD, 1, b2=0.0),
      r"`b2` must be in \(0, 1\], got 0.0",
    ),
    (
      lambda: transforms.predict_weights(SGD, {"c": 1}).init(W),
      "`steps` must be a number, or a tree of numbers",
    ),
    (
      lambda: transforms.predict_weights(
        transforms.delay_gradients(SGD, 1), 1
      ).init(W),
      "`optimizer` must send nothing and hold nothing back",
    ),
    (
      lambda: transforms.predicted_weights(
        [transforms.predict_weights(SGD, 1).init(W)] * 2, W
      ),
      "`state` must hold one `predict_weights` at most",
    ),
  ],
)
def test_invalid_arguments_raise(make, words):
  with pytest.raises(ValueError, match=words):
    make()


def test_arguments_of_the_call_reach_the_optimizer():
  seen = []

  def update(updates, state, params=None, **extra):
    seen.append(extra)
    return updates, state

  optimizer = transforms.predict_weights(
    optax.GradientTransformationExtraArgs(lambda params: (), update), 2
  )
  w = jnp.array(1.0)
  optimizer.update(jnp.array(0.5), optimizer.init(w), w, value=3.0)
  # The step itself, and those that it foresees.
  assert len(seen) >= 2 and all(x == {"value": 3.0} for x in seen)
