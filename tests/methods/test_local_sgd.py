"""Averaging of parameters and its family: by hand and against NumPy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, transforms
from jdist.transforms.local import _round
from tests.methods._rounds import (
  check_rounds,
  check_same,
  gradient,
  MOMENTUM,
  RATE,
  rounds_of,
  SGD,
)
from tests.transforms._rounds import random_targets, train


def easgd(x, interval, beta):
  w, a, n = np.zeros(x.shape[1]), 0.0, x.shape[1]
  for t, xs in rounds_of(x, interval):
    for row in xs:
      w = w - RATE * gradient(w, row)
    w, a = w - beta / n * (w - a), a + beta * (w.mean() - a)
    yield t, w, a


def scaffold(x, interval, rate, eta_g):
  n = x.shape[1]
  w, a, own, shared = np.zeros(n), 0.0, np.zeros(n), 0.0
  for t, xs in rounds_of(x, interval):
    distance = 0.0
    for s, row in enumerate(xs):
      eta = rate(t - interval + s)
      w = w - eta * (gradient(w, row) - own + shared)
      distance += eta
    own = own - shared + (a - w) / distance
    shared = own.mean()
    a = a + eta_g * (w.mean() - a)
    w = np.full(n, a)
    yield t, w, a


def late_scaffold(x, interval, delay):
  """What a round has sent arrives after `delay` steps of the next one."""
  n = x.shape[1]
  w, a, own, shared = np.zeros(n), 0.0, np.zeros(n), 0.0
  start, sent = w, None
  for t, xs in rounds_of(x, interval):
    corrections = np.zeros(n)
    for s, row in enumerate(xs, 1):
      w = w - RATE * (gradient(w, row) - own + shared)
      corrections = corrections + RATE * shared
      if sent is not None and s == delay:
        a, shared = a - sent[0].mean(), shared + sent[1].mean()
        w, start = a - (start - w), a
    # The mean of the round's gradients, whatever they were corrected by.
    new = own + (start - w - corrections) / (interval * RATE)
    sent, own, start = (start - w, new - own), new, w
    yield t, w, a


def slow_mo(x, interval, rate, alpha, beta):
  n = x.shape[1]
  w, a, u = np.zeros(n), 0.0, 0.0
  for t, xs in rounds_of(x, interval):
    for s, row in enumerate(xs):
      eta = rate(t - interval + s)
      w = w - eta * gradient(w, row)
    u = beta * u + (a - w.mean()) / eta
    a = a - alpha * eta * u
    w = np.full(n, a)
    yield t, w, a


def fed_prox(x, interval, mu):
  w, a = np.zeros(x.shape[1]), 0.0
  for t, xs in rounds_of(x, interval):
    for row in xs:
      w = w - RATE * (gradient(w, row) + mu * (w - a))
    a = w.mean()
    w = np.full_like(w, a)
    yield t, w, a


def falling(t):
  return 0.2 / (1 + 0.05 * t)


def falling_rate(t):
  return 0.2 / (1 + 0.05 * jnp.float32(t))


REFERENCES = {
  "easgd": (
    lambda: methods.easgd(SGD, 3, 0.8, axis="worker"),
    lambda x: easgd(x, 3, 0.8),
  ),
  "scaffold": (
    lambda: methods.scaffold(
      optax.sgd(falling_rate), 4, falling_rate, 0.7, axis="worker"
    ),
    lambda x: scaffold(x, 4, falling, 0.7),
  ),
  "slow_mo": (
    lambda: methods.slow_mo(
      optax.sgd(falling_rate), 4, falling_rate, 0.9, 0.5, axis="worker"
    ),
    lambda x: slow_mo(x, 4, falling, 0.9, 0.5),
  ),
  "fed_prox": (
    lambda: methods.fed_prox(SGD, 3, 0.5, axis="worker"),
    lambda x: fed_prox(x, 3, 0.5),
  ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_rounds_match_the_paper(name):
  build, reference = REFERENCES[name]
  check_rounds(build(), reference)


def test_springs_pull_workers_and_anchor():
  # Two workers at 2 and 6 after a step, the centre at 0: alpha = 0.25.
  optimizer = methods.easgd(optax.sgd(0.5), 1, 0.5, axis="worker")
  params, states = train(optimizer, np.array([[4.0, 12.0]], np.float32))
  assert params.tolist() == [[1.5, 4.5]]
  assert states.anchor.tolist() == [[2.0, 2.0]]


def test_elastic_averaging_conserves_the_sum():
  # Centre and workers together move by what the gradients moved.
  optimizer = methods.easgd(SGD, 2, 0.9, axis="worker")
  targets = random_targets(12)
  params, states = train(optimizer, targets)
  before = np.concatenate([np.zeros((1, 4)), params[:-1]])
  went_in = -RATE * (before - targets).sum()
  held = params[-1].sum() + states.anchor[-1, 0]
  np.testing.assert_allclose(held, went_in, rtol=1e-5)


IDENTITIES = {
  "fed_prox": (
    lambda: methods.fed_prox(MOMENTUM, 3, 0.0, axis="worker"),
    lambda: methods.local_sgd(MOMENTUM, 3, axis="worker"),
  ),
  "slow_mo": (
    lambda: methods.slow_mo(
      MOMENTUM, 3, RATE, slow_momentum=0.0, axis="worker"
    ),
    lambda: methods.local_sgd(MOMENTUM, 3, axis="worker"),
  ),
  "slow_mo of a constant rate": (
    lambda: methods.slow_mo(MOMENTUM, 3, RATE, 0.8, 0.6, axis="worker"),
    lambda: transforms.local_steps(
      MOMENTUM, 3, axis="worker", rule=optax.sgd(0.8, momentum=0.6)
    ),
  ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_method_with_neutral_arguments_equals_simpler_one(name):
  one, other = IDENTITIES[name]
  check_same(one(), other())


def test_control_variates_vanish_among_equal_workers():
  targets = np.repeat(random_targets(16, 1), 4, axis=1)
  found, _ = train(methods.scaffold(SGD, 4, RATE, axis="worker"), targets)
  wanted, _ = train(methods.local_sgd(SGD, 4, axis="worker"), targets)
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


def test_control_variates_remove_drift():
  # Each worker has one target all the time: without them the workers leave
  # for their own; with them all walk together.
  targets = np.tile(np.array([-3.0, 0.0, 1.0, 6.0], np.float32), (40, 1))
  plain, _ = train(methods.local_sgd(SGD, 4, axis="worker"), targets)
  steady, _ = train(methods.scaffold(SGD, 4, RATE, axis="worker"), targets)
  assert plain[34].std() > 0.5  # In the middle of a round.
  assert steady[34].std() < 1e-3


def test_control_variate_is_a_mean_weighted_by_the_rates():
  rates = jnp.array([0.5, 0.25, 0.125, 1.0, 0.0])
  optimizer = methods.scaffold(
    optax.sgd(lambda step: rates[step]), 2, lambda step: rates[step],
    axis="worker",
  )  # fmt: skip
  targets = np.array([[1.0, 3.0]] * 4, np.float32)
  params, states = train(optimizer, targets)
  memory = states.sync.memory
  # The gradients of each step, which are corrected afterwards.
  before = np.concatenate([np.zeros((1, 2)), params[:-1]])
  slopes = before - targets
  for end, (first, last) in {1: (0.5, 0.25), 3: (0.125, 1.0)}.items():
    mean = (first * slopes[end - 1] + last * slopes[end]) / (first + last)
    np.testing.assert_allclose(memory.own[end], mean, 1e-6)
    np.testing.assert_allclose(memory.mean[end], [mean.mean()] * 2, 1e-6)


@pytest.mark.parametrize("delay", [1, 2, 3, None])
def test_late_control_variates_are_means_of_gradients_too(delay):
  overlap = transforms.Delayed(delay)
  check_rounds(
    methods.scaffold(SGD, 3, RATE, axis="worker", overlap=overlap),
    lambda x: late_scaffold(x, 3, 3 if delay is None else delay),
  )


@pytest.mark.parametrize(("interval", "delay"), [(2, 1), (4, 3), (4, 4)])
def test_late_control_variates_settle_at_the_optimum(interval, delay):
  targets = np.tile(np.array([1.0, 2.0, 6.0], np.float32), (400, 1))
  optimizer = methods.scaffold(
    SGD, interval, RATE, axis="worker", overlap=transforms.Delayed(delay)
  )
  _, states = train(optimizer, targets)
  np.testing.assert_allclose(states.anchor[-1], [3.0] * 3, rtol=1e-5)


def test_slow_momentum_follows_a_rate_that_falls():
  """By hand: u = 2 / 0.5, then 0.5 * 4 + 1 / 0.25, times the round's rate."""
  rates = jnp.array([0.5, 0.25])
  rule = transforms.SlowMomentum(lambda step: rates[step], 1.0, 0.5)
  end = _round.Round(
    anchor=jnp.array(8.0), local=(), progress=(), params=(), inner=(),
    memory=rule.init(jnp.array(8.0)), step=0, optimizer=SGD, axis=None,
  )  # fmt: skip
  for step, mean, anchor in ((0, 6.0, 6.0), (1, 5.0, 4.5)):
    end = rule.move(end._replace(step=step), jnp.array(mean), [], False)
    assert end.anchor == anchor


@pytest.mark.parametrize("buffers", ["average", "maintain", "reset"])
def test_slow_mo_treats_momenta_as_configured(buffers):
  def traces(buffers):
    optimizer = methods.slow_mo(
      MOMENTUM, 3, RATE, axis="worker", buffers=buffers
    )
    return train(optimizer, random_targets(3))[1].inner[0].trace

  before, after = traces(buffers)[1:]
  assert len(set(before.tolist())) == 4
  if buffers == "reset":
    assert not after.any()
  elif buffers == "average":
    assert len(set(after.tolist())) == 1
    mean = traces("maintain")[2].mean()
    np.testing.assert_allclose(after, mean, rtol=1e-5)
  else:
    assert len(set(after.tolist())) == 4
