"""Methods that send fewer bytes, against NumPy, step by step."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, reducers, transforms
from tests.methods._by_hand import descended, Exchange, sign
from tests.transforms._rounds import random_targets, train

RATE = 0.1
SGD = optax.sgd(RATE)
WORKERS = 4
# Rows of 8 entries, one for each worker as an owner.
SHAPE = (8, 4)


def largest(x, k):
  kept = np.zeros_like(x)
  chosen = np.argsort(-np.abs(x), kind="stable")[:k]
  kept[chosen] = x[chosen]
  return kept


def mean_abs_signs(x):
  return np.abs(x).mean(-1, keepdims=True) * sign(x)


def signs_with_feedback(shape):
  e = np.zeros(shape)

  def step(g):
    nonlocal e
    p = g + e
    s = mean_abs_signs(p)
    e = p - s
    return -RATE * s.mean(0)

  return step


def signs_exchanged(shape):
  e, exchange = np.zeros(shape), Exchange(shape, mean_abs_signs)

  def step(g):
    nonlocal e
    p = g + e
    mean, share = exchange(p)
    e = p - share
    return -RATE * mean

  return step


def votes(shape):
  def step(g):
    return -RATE * sign(sign(g).sum(0))

  return step


def signum(shape):
  m = np.zeros(shape)

  def step(g):
    nonlocal m
    m = 0.9 * m + 0.1 * g
    return -RATE * sign(sign(m).sum(0))

  return step


def top_k(k, remember):
  def steps_of(shape):
    e = np.zeros(shape)

    def step(g):
      nonlocal e
      p = g + e
      s = np.stack([largest(x, k) for x in p])
      e = remember * (p - s)
      return -RATE * s.mean(0)

    return step

  return steps_of


def deep(ks, nesterov=False, threshold=None):
  """Deep Gradient Compression; ks are the numbers of entries by step."""

  def steps_of(shape):
    u, v, t = np.zeros(shape), np.zeros(shape), 0

    def step(g):
      nonlocal u, v, t
      if threshold is not None:
        limit = threshold / shape[0] ** 0.5
        norm = np.linalg.norm(g, axis=1, keepdims=True)
        g = g * np.minimum(1.0, limit / norm)
      if nesterov:
        u = 0.9 * (u + g)
        v = v + u + g
      else:
        u = 0.9 * u + g
        v = v + u
      s = np.stack([largest(x, ks[min(t, len(ks) - 1)]) for x in v])
      v = np.where(s != 0, 0.0, v)
      u = np.where(s != 0, 0.0, u)
      t += 1
      return -RATE * s.mean(0)

    return step

  return steps_of


METHODS = {
  "ef_signsgd gathered": (
    lambda axis: methods.ef_signsgd(SGD, axis=axis, wire="gather"),
    signs_with_feedback,
  ),
  "ef_signsgd": (
    lambda axis: methods.ef_signsgd(SGD, axis=axis),
    signs_exchanged,
  ),
  "signsgd": (lambda axis: methods.signsgd(SGD, axis=axis), votes),
  "signum": (lambda axis: methods.signsgd(SGD, 0.9, axis=axis), signum),
  "topk_sgd": (
    lambda axis: methods.topk_sgd(SGD, 0.25, axis=axis),
    top_k(8, 1.0),
  ),
  "topk_sgd without feedback": (
    lambda axis: methods.topk_sgd(SGD, 0.25, axis=axis, feedback=False),
    top_k(8, 0.0),
  ),
  "dgc": (lambda axis: methods.dgc(SGD, 0.25, axis=axis), deep([8])),
  "dgc nesterov": (
    lambda axis: methods.dgc(
      SGD, 0.125, axis=axis, nesterov=True, threshold=6.0
    ),
    deep([4], nesterov=True, threshold=6.0),
  ),
  "dgc warm": (
    lambda axis: methods.dgc(SGD, 1 / 32, axis=axis, steps_per_phase=3),
    deep([8] * 3 + [2] * 3 + [1]),
  ),
}


@pytest.mark.parametrize("name", METHODS)
def test_method_matches_numpy(name):
  make, steps_of = METHODS[name]
  targets = random_targets(12, WORKERS, *SHAPE)
  params, states = train(make("worker"), targets)
  wanted = descended(targets, steps_of)
  np.testing.assert_array_equal(params, np.repeat(params[:, :1], WORKERS, 1))
  np.testing.assert_allclose(params[:, 0], wanted, 1e-4, 1e-5)
  assert transforms.sharing(states).params is True


# Of a block of norm s, s q / 7 with the integers q: nothing to round.
LEVELS = [[6, 3, -2, 0], [7, 0, 0, 0], [-4, 4, 4, 1], [3, 6, 2, 0]]


def test_qsgd_keeps_values_on_a_level():
  scales = np.array([7.0, 14.0, 3.5, 28.0], np.float32)
  g = np.array(LEVELS, np.float32) * scales[:, None] / 7
  optimizer = methods.qsgd(optax.sgd(1.0), axis="worker")

  def one(g):
    return optimizer.update(g, optimizer.init(g))[0]

  found = jax.jit(jax.vmap(one, axis_name="worker"))(g)
  np.testing.assert_allclose(found, -np.tile(g.mean(0), (4, 1)), 1e-6)


def noisy_means(optimizer, g, times=600):
  """What comes out of the same gradient again and again, of one worker."""

  def body(state, _):
    updates, state = optimizer.update(g, state)
    return state, -updates

  run = jax.jit(lambda: jax.lax.scan(body, optimizer.init(g), length=times)[1])
  return np.asarray(run())


def test_qsgd_rounds_to_neighbours_without_bias():
  g = random_targets(1, 1, 20)[0, 0]
  norm = np.linalg.norm(g.reshape(2, 10), axis=1).repeat(10)
  optimizer = methods.qsgd(optax.sgd(1.0), block=10, axis=None)
  found = noisy_means(optimizer, jnp.asarray(g))
  levels = found * 7 / norm
  np.testing.assert_allclose(levels, np.round(levels), atol=1e-4)
  wanted = g * 7 / norm
  assert np.all(np.abs(levels - wanted) < 1 + 1e-4)
  # Five standard deviations of the mean of 600 coins.
  assert np.abs(levels.mean(0) - wanted).max() < 5 * 0.5 / 600**0.5


def test_terngrad_clips_and_is_unbiased():
  g = random_targets(1, 1, 40)[0, 0]
  g[7] = 30.0
  limit = 2.5 * np.sqrt((g**2).mean())
  clipped = np.clip(g, -limit, limit)
  optimizer = methods.terngrad(optax.sgd(1.0), axis=None)
  found = noisy_means(optimizer, jnp.asarray(g)) / np.abs(clipped).max()
  np.testing.assert_allclose(np.unique(found.round(4)), [-1.0, 0.0, 1.0])
  wanted = clipped / np.abs(clipped).max()
  assert np.abs(found.mean(0) - wanted).max() < 5 * 0.5 / 600**0.5


def test_signs_of_ties_and_zeros_are_votes_for_up():
  optimizer = methods.signsgd(optax.sgd(1.0), axis="worker")

  def one(g):
    return optimizer.update(g, optimizer.init(g))[0]

  g = np.array([[1.0, -2.0, 0.0, -3.0], [-1.0, -5.0, 0.0, 0.0]], np.float32)
  found = jax.jit(jax.vmap(one, axis_name="worker"))(g)
  assert found[0].tolist() == [-1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_leaves_of_one_dimension_keep_an_ordinary_momentum_in_dgc(nesterov):
  targets = random_targets(10, WORKERS, 6)
  optimizer = methods.dgc(SGD, 0.2, axis="worker", nesterov=nesterov)
  found, _ = train(optimizer, targets)
  momentum = optax.sgd(RATE, momentum=0.9, nesterov=nesterov)
  wanted, _ = train(methods.ssgd(momentum, axis="worker"), targets)
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


def test_dgc_with_all_entries_is_momentum():
  targets = random_targets(10, WORKERS, *SHAPE)
  found, _ = train(methods.dgc(SGD, 1.0, axis="worker"), targets)
  momentum = optax.sgd(RATE, momentum=0.9)
  wanted, _ = train(methods.ssgd(momentum, axis="worker"), targets)
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


@pytest.mark.parametrize(
  "optimizer",
  [
    methods.topk_sgd(optax.sgd(0.5), 1.0, axis=None),
    methods.powersgd(optax.sgd(0.5), axis=None),
    methods.qsgd(optax.sgd(0.5), axis=None),
  ],
  ids=["topk_sgd", "powersgd", "qsgd"],
)
def test_parameters_may_be_numbers_of_python(optimizer):
  state = optimizer.init({"w": 2.0, "v": 1.0})
  gradients = {"w": jnp.array(1.0), "v": jnp.array(-1.0)}
  updates, _ = optimizer.update(gradients, state, {"w": 2.0, "v": 1.0})
  assert updates == {"w": -0.5, "v": 0.5}


def test_top_k_with_all_entries_is_plain_averaging():
  targets = random_targets(10, WORKERS, *SHAPE)
  found, _ = train(methods.topk_sgd(SGD, 1.0, axis="worker"), targets)
  wanted, _ = train(methods.ssgd(SGD, axis="worker"), targets)
  np.testing.assert_allclose(found, wanted, 1e-6, 1e-6)


def test_demo_is_the_sign_of_the_fastest_components():
  targets = random_targets(10, WORKERS, *SHAPE)
  optimizer = methods.demo(SGD, 0.9, chunk=4, k=3, axis="worker")
  place, frequency = np.arange(4), np.arange(4)[:, None]
  d = np.cos(np.pi * (2 * place + 1) * frequency / 8)
  d *= np.sqrt(np.where(frequency == 0, 1, 2) / 4)

  def steps_of(shape):
    m = np.zeros(shape)

    def fastest(x):
      tiles = x.reshape(2, 4, 4)
      kept = [largest((d @ t @ d.T).reshape(-1), 3) for t in tiles]
      return np.concatenate(
        [(d.T @ c.reshape(4, 4) @ d).reshape(-1) for c in kept]
      )

    def step(g):
      nonlocal m
      p = 0.9 * m + g
      q = np.stack([fastest(x) for x in p])
      m = p - q
      return -RATE * np.sign(q.mean(0))

    return step

  params, _ = train(optimizer, targets)
  wanted = descended(targets, steps_of)
  np.testing.assert_allclose(params[:, 0], wanted, 1e-4, 1e-5)


def test_powersgd_keeps_higher_ranks_as_residual():
  """The mean is of the rank; with the residuals nothing is missing."""
  targets = random_targets(8, WORKERS, 16, 12)
  optimizer = methods.powersgd(SGD, 2, axis="worker")
  params, states = train(optimizer, targets)
  steps = np.diff(params[:, 0], axis=0, prepend=0 * params[:1, 0])
  assert {np.linalg.matrix_rank(x, 1e-4) for x in steps} == {2}
  before = np.concatenate([0 * params[:1, 0], params[:-1, 0]])
  went_in = (before - targets.mean(1)).cumsum(0)
  residual = states[0].feedback.residual.mean(1)
  np.testing.assert_allclose(
    went_in, residual - params[:, 0] / RATE, 1e-3, 1e-4
  )


@pytest.mark.parametrize(("seed", "used"), [(None, 0), (0, 0), (7, 7)])
def test_powersgd_begins_with_the_directions_of_its_seed(seed, used):
  w = jnp.zeros((6, 5))
  state = methods.powersgd(SGD, axis=None, seed=seed).init(w)
  wanted = reducers.PowerSGD(2, used).init(w, None)
  chex.assert_trees_all_equal(state[0].reducer, wanted)
