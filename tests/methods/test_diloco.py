"""Outer optimizers: of few bytes, and fragment by fragment."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, transforms
from tests.methods._rounds import check_same, gradient, MOMENTUM, RATE, SGD
from tests.transforms._rounds import plain_apply, random_targets, train


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


def test_sparse_loco_matches_numpy():
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


def test_weight_decay_of_muloco_is_that_of_matrices_and_vectors():
  optimizer = methods.muloco(0.1, 4, axis=None, weight_decay=0.5)
  w = {"matrix": jnp.eye(2), "vector": jnp.array([2.0, -4.0])}
  rest = jax.tree.map(jnp.zeros_like, w)
  updates, _ = jax.jit(optimizer.update)(rest, optimizer.init(w), w)
  for name, x in w.items():
    np.testing.assert_allclose(updates[name], -0.1 * 0.5 * x, 1e-6)


def test_sparse_loco_converges_with_sparse_progress():
  sparse = methods.sparse_loco(SGD, 4, 0.25, axis="worker", chunk=64)
  found, start = distances(sparse)
  assert found < 0.1 * start


def test_empty_matrices_stand_beside_those_of_muloco():
  # Optax's Muon would divide by their height.
  optimizer = methods.muloco(0.1, 2, axis=None)
  params = {"matrix": jnp.eye(2), "empty": jnp.zeros((0, 2))}
  state = jax.eval_shape(optimizer.init, params)
  # Muon has the matrix, and Adam the rest.
  muon, adam = (
    state.inner.inner_states[x].inner_state[0] for x in ("muon", "adam")
  )
  assert jax.tree.leaves(muon.mu) == [jax.ShapeDtypeStruct((2, 2), jnp.float32)]
  assert [x.shape for x in jax.tree.leaves(adam.mu)] == [(0, 2)]
  found, _ = jax.eval_shape(optimizer.update, params, state, params)
  chex.assert_trees_all_equal_shapes(found, params)


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


def fragments_reference(x, interval, number, tau, mix, rate, mu):
  """Streaming DiLoCo by fragments; x is [steps, workers, fragments]."""
  steps, n, _ = x.shape
  w, a, m = np.zeros((n, number)), np.zeros(number), np.zeros(number)
  under_way = {}
  for t in range(1, steps + 1):
    # What was sent tau steps ago is from the state.
    arriving = {}
    for p in range(number):
      first = interval * (p + 1) // number
      if t >= first + tau and (t - first - tau) % interval == 0 and tau:
        arriving[p] = under_way.pop(p)
    w = w - RATE * gradient(w, x[t - 1])
    for p in range(number):
      first = interval * (p + 1) // number
      if not tau and t >= first and (t - first) % interval == 0:
        arriving[p] = (a[p] - w[:, p]).mean()
      if p in arriving:
        m[p] = mu * m[p] + arriving[p]
        a[p] -= rate * (mu * m[p] + arriving[p])
        w[:, p] = mix * w[:, p] + (1 - mix) * a[p]
      if tau and t >= first and (t - first) % interval == 0:
        under_way[p] = (a[p] - w[:, p]).mean()
    yield w.copy(), a.copy()


@pytest.mark.parametrize(("tau", "mix"), [(0, 0.0), (2, 0.5), (3, 0.25)])
def test_fragments_are_sent_and_applied_one_by_one(tau, mix):
  targets = random_targets(24, 4, 3)
  optimizer = methods.streaming_diloco(
    SGD, 6, 3, 0.7, 0.9, axis="worker", delay_steps=tau, mix=mix
  )

  def one(xs):
    w = {"a": jnp.zeros(()), "b": jnp.zeros(()), "c": jnp.zeros(())}

    def body(carry, x):
      w, state = carry
      grads = jax.tree.map(jnp.subtract, w, dict(zip("abc", x, strict=True)))
      updates, state = optimizer.update(grads, state, w)
      carry = plain_apply(w, updates, state), state
      return carry, (carry[0], state.anchor)

    return jax.lax.scan(body, (w, optimizer.init(w)), xs)[1]

  params, anchors = jax.jit(jax.vmap(one, 1, 1, axis_name="worker"))(targets)
  wanted = list(
    fragments_reference(targets.astype(np.float64), 6, 3, tau, mix, 0.7, 0.9)
  )
  for t, (w, a) in enumerate(wanted):
    for p, name in enumerate("abc"):
      np.testing.assert_allclose(params[name][t], w[:, p], 1e-5, 1e-6)
      np.testing.assert_allclose(anchors[name][t], [a[p]] * 4, 1e-5, 1e-6)


IDENTITIES = {
  "fragments": (
    lambda: transforms.fragment_steps(MOMENTUM, 3, 1, axis="worker"),
    lambda: methods.local_sgd(MOMENTUM, 3, axis="worker"),
  ),
  "streaming_diloco": (
    lambda: methods.streaming_diloco(
      MOMENTUM, 3, 1, axis="worker", delay_steps=0, mix=0.0
    ),
    lambda: methods.diloco(MOMENTUM, 3, axis="worker"),
  ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_method_with_neutral_arguments_equals_simpler_one(name):
  one, other = IDENTITIES[name]
  check_same(one(), other())
