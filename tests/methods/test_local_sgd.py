"""The family of methods: by hand, against NumPy, and where they agree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import methods, transforms
from jdist.transforms import intervals
from tests.transforms._rounds import (
  plain_apply,
  random_targets,
  train,
)

RATE = 0.1
SGD = optax.sgd(RATE)
MOMENTUM = optax.sgd(RATE, momentum=0.9)


def gradient(w, x):
  return w - x


def rounds_of(x, interval):
  """The targets [steps, workers] of each whole round."""
  for start in range(0, len(x) - interval + 1, interval):
    yield start + interval, x[start : start + interval]


def easgd(x, interval, beta):
  w, a, n = np.zeros(x.shape[1]), 0.0, x.shape[1]
  for t, xs in rounds_of(x, interval):
    for row in xs:
      w = w - RATE * gradient(w, row)
    w, a = w - beta / n * (w - a), a + beta * (w.mean() - a)
    yield t, w, a


def overlap(x, interval, alpha, mu):
  w, z, v, sent = np.zeros(x.shape[1]), 0.0, 0.0, 0.0
  for t, xs in rounds_of(x, interval):
    for row in xs:
      w = w - RATE * gradient(w, row)
    v = mu * v + np.mean(sent) - z
    z = z + v
    w = (1 - alpha) * w + alpha * z
    sent = w
    yield t, w, z


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


def cocod(x, interval):
  """As in the paper: the mean of what the round began with."""
  w = np.zeros(x.shape[1])
  for t, xs in rounds_of(x, interval):
    begun = w
    for row in xs:
      w = w - RATE * gradient(w, row)
    w = begun.mean() + (w - begun)
    yield t, w, begun.mean()


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
  "overlap_local_sgd": (
    lambda: methods.overlap_local_sgd(SGD, 3, 0.6, 0.5, axis="worker"),
    lambda x: overlap(x, 3, 0.6, 0.5),
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
  "cocod": (
    lambda: methods.cocod(SGD, 3, axis="worker"),
    lambda x: cocod(x, 3),
  ),
  "fed_prox": (
    lambda: methods.fed_prox(SGD, 3, 0.5, axis="worker"),
    lambda x: fed_prox(x, 3, 0.5),
  ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_rounds_are_those_of_the_paper(name):
  build, reference = REFERENCES[name]
  targets = random_targets(24)
  params, states = train(build(), targets)
  found = list(reference(targets.astype(np.float64)))
  assert len(found) >= 6
  for t, w, a in found:
    np.testing.assert_allclose(params[t - 1], w, 1e-5, 1e-6)
    np.testing.assert_allclose(states.anchor[t - 1], [a] * 4, 1e-5, 1e-6)
  # All methods tell their rounds in the same words.
  last = jax.tree.map(lambda x: x[-1], states)
  np.testing.assert_array_equal(jdist.anchor(last, params[-1]), last.anchor)
  assert transforms.rounds(last, 0).tolist() == [len(found)] * 4


@pytest.mark.smoke
def test_cocod_in_sub_tensors_is_cocod_to_the_bit():
  def run(optimizer):
    def one(x):
      w = {"a": jnp.zeros(5), "b": jnp.ones(3)}
      state = optimizer.init(w)
      for t in range(10):
        grads = jax.tree.map(lambda y, t=t: (y - x) * jnp.sin(t + x), w)
        updates, state = optimizer.update(grads, state, w)
        w = transforms.apply_updates(w, updates, state)
      return w, state.anchor

    return jax.vmap(one, axis_name="worker")(jnp.array([0.3, 1.7, -2.1]))

  sgd = optax.sgd(0.1, momentum=0.9)
  published = methods.cocod(sgd, 4, axis="worker")
  overlapping = transforms.local_steps(
    sgd,
    4,
    axis="worker",
    overlap=transforms.Delayed(
      carry=1.0, stream=transforms.Stream(max_bytes=8)
    ),
  )
  jax.tree.map(np.testing.assert_array_equal, run(published), run(overlapping))


def test_springs_pull_both_ends():
  # Two workers at 2 and 6 after a step, the centre at 0: alpha = 0.25.
  optimizer = methods.easgd(optax.sgd(0.5), 1, 0.5, axis="worker")
  params, states = train(optimizer, np.array([[4.0, 12.0]], np.float32))
  assert params.tolist() == [[1.5, 4.5]]
  assert states.anchor.tolist() == [[2.0, 2.0]]


def test_elastic_averaging_loses_nothing():
  # Centre and workers together move by what the gradients moved.
  optimizer = methods.easgd(SGD, 2, 0.9, axis="worker")
  targets = random_targets(12)
  params, states = train(optimizer, targets)
  before = np.concatenate([np.zeros((1, 4)), params[:-1]])
  went_in = -RATE * (before - targets).sum()
  held = params[-1].sum() + states.anchor[-1, 0]
  np.testing.assert_allclose(held, went_in, rtol=1e-5)


def test_od_sgd_leads_the_anchor_by_a_step():
  optimizer = methods.od_sgd(
    optax.sgd(0.5), 0.25, axis="worker", warmup_steps=1
  )
  params, states = train(optimizer, np.array([[2.0, 6.0]] * 3, np.float32))
  # Synchronous first: the mean gradient -4. Then one's own step in front.
  assert params[0].tolist() == [2.0, 2.0]
  assert params[1].tolist() == [2.0, 3.0]
  # The gradients 0 and -4 of step 1, whose mean is -2, move the anchor by 1;
  # those of step 2 were taken at 2 and 3.
  assert states.anchor[2].tolist() == [3.0, 3.0]
  assert params[2].tolist() == [3.0, 3.75]


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

  params, anchors = jax.vmap(one, 1, 1, axis_name="worker")(targets)
  wanted = list(
    fragments_reference(targets.astype(np.float64), 6, 3, tau, mix, 0.7, 0.9)
  )
  for t, (w, a) in enumerate(wanted):
    for p, name in enumerate("abc"):
      np.testing.assert_allclose(params[name][t], w[:, p], 1e-5, 1e-6)
      np.testing.assert_allclose(anchors[name][t], [a[p]] * 4, 1e-5, 1e-6)


IDENTITIES = {
  # A method whose parameter is switched off, and what it then is.
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
  "cocod": (
    lambda: methods.cocod(MOMENTUM, 3, axis="worker"),
    lambda: transforms.local_steps(
      MOMENTUM, 3, axis="worker", overlap=transforms.Delayed()
    ),
  ),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_switched_off_a_method_is_a_simpler_one(name):
  one, other = IDENTITIES[name]
  targets = random_targets(18, 4, 5)
  found, wanted = train(one(), targets)[0], train(other(), targets)[0]
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


def test_control_variates_are_nothing_among_equal_workers():
  targets = np.repeat(random_targets(16, 1), 4, axis=1)
  found, _ = train(methods.scaffold(SGD, 4, RATE, axis="worker"), targets)
  wanted, _ = train(methods.local_sgd(SGD, 4, axis="worker"), targets)
  np.testing.assert_allclose(found, wanted, 1e-5, 1e-6)


def test_control_variates_take_the_drift_away():
  # Each worker has one target all the time: without them the workers leave
  # for their own; with them all walk together.
  targets = np.tile(np.array([-3.0, 0.0, 1.0, 6.0], np.float32), (40, 1))
  plain, _ = train(methods.local_sgd(SGD, 4, axis="worker"), targets)
  steady, _ = train(methods.scaffold(SGD, 4, RATE, axis="worker"), targets)
  assert plain[34].std() > 0.5  # In the middle of a round.
  assert steady[34].std() < 1e-3


@pytest.mark.parametrize("buffers", ["maintain", "reset", "average"])
def test_slow_mo_treats_momenta_as_told(buffers):
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


REJECTED = {
  "moving_rate": (
    lambda: methods.easgd(SGD, 3, 1.5, axis=None),
    r"`moving_rate` must be in \[0, 1\], got 1.5",
  ),
  "pull": (
    lambda: methods.overlap_local_sgd(SGD, 3, -0.1, axis=None),
    r"`pull` must be in \[0, 1\], got -0.1",
  ),
  "learning_rate": (
    lambda: methods.scaffold(SGD, 3, 0.0, axis=None),
    r"`learning_rate` must be in \(0, inf\], got 0.0",
  ),
  "buffers": (
    lambda: methods.slow_mo(SGD, 3, 0.1, axis=None, buffers="keep"),
    "`buffers` must be one of 'maintain', 'reset', 'average', got 'keep'",
  ),
  "strength": (
    lambda: methods.fed_prox(SGD, 3, -1.0, axis=None),
    r"`strength` must be in \[0, inf\], got -1.0",
  ),
  "a policy for fragments": (
    lambda: methods.streaming_diloco(SGD, intervals.fixed(4), 2, axis=None),
    "`interval` must be an int for .*`streaming_diloco`.* got an interval "
    "policy. Give the number of steps",
  ),
  "outer_learning_rate of fragments": (
    lambda: methods.streaming_diloco(SGD, 4, 2, -0.7, axis=None),
    r"`outer_learning_rate` must be in \(0, inf\], got -0.7",
  ),
  "params of fragments": (
    lambda: transforms.fragment_steps(SGD, 4, 1, axis=None).update(
      jnp.zeros(3), ()
    ),
    "`params` .* of `fragment_steps` .also as `streaming_diloco`.: call",
  ),
  "params of a lead": (
    lambda: transforms.lead_step(SGD, SGD, axis=None).update(jnp.zeros(3), ()),
    "`params` .* of `lead_step` .also as `od_sgd`.: call",
  ),
  "delay_steps": (
    lambda: methods.streaming_diloco(SGD, 3, 2, axis=None, delay_steps=3),
    "`steps` must be below `interval`, 3, got 3",
  ),
  "fragments": (
    lambda: methods.streaming_diloco(SGD, 3, 4, axis=None),
    "`fragments` must be at most `interval`, 3, got 4",
  ),
  "leaves": (
    lambda: transforms.fragment_steps(SGD, 3, 2, axis=None).init(jnp.zeros(3)),
    "`fragments` must be at most the number of leaves, 1, got 2",
  ),
  "optimizer": (
    lambda: methods.easgd(0.1, 3, axis=None),
    "`optimizer` must be an Optax transformation",
  ),
  "params": (
    lambda: methods.easgd(SGD, 3, axis=None).update(
      jnp.zeros(3), methods.easgd(SGD, 3, axis=None).init(jnp.zeros(3))
    ),
    "`params` must be given to `update` of `local_steps`",
  ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_cannot_be_is_refused(name):
  call, message = REJECTED[name]
  with pytest.raises(ValueError, match=message):
    call()
