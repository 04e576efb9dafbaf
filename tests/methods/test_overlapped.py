"""Methods whose mean is late: by hand and against NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, transforms
from jdist.transforms import intervals
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


def cocod(x, interval):
  """As in the paper: the mean of what the round began with."""
  w = np.zeros(x.shape[1])
  for t, xs in rounds_of(x, interval):
    begun = w
    for row in xs:
      w = w - RATE * gradient(w, row)
    w = begun.mean() + (w - begun)
    yield t, w, begun.mean()


REFERENCES = {
  "overlap_local_sgd": (
    lambda: methods.overlap_local_sgd(SGD, 3, 0.6, 0.5, axis="worker"),
    lambda x: overlap(x, 3, 0.6, 0.5),
  ),
  "cocod": (
    lambda: methods.cocod(SGD, 3, axis="worker"),
    lambda x: cocod(x, 3),
  ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_rounds_match_the_paper(name):
  build, reference = REFERENCES[name]
  check_rounds(build(), reference)


@pytest.mark.smoke
def test_streamed_cocod_equals_cocod_to_the_bit():
  def run(optimizer):
    def one(x):
      def step(carry, t):
        w, state = carry
        grads = jax.tree.map(lambda y: (y - x) * jnp.sin(t + x), w)
        updates, state = optimizer.update(grads, state, w)
        w = transforms.apply_updates(w, updates, state)
        return (w, state), None

      w = {"a": jnp.zeros(5), "b": jnp.ones(3)}
      carry, _ = jax.lax.scan(step, (w, optimizer.init(w)), jnp.arange(10.0))
      return carry[0], carry[1].anchor

    return jax.jit(jax.vmap(one, axis_name="worker"))(
      jnp.array([0.3, 1.7, -2.1])
    )

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
  chex.assert_trees_all_equal(run(published), run(overlapping))


def test_cocod_is_local_steps_one_round_late():
  check_same(
    methods.cocod(MOMENTUM, 3, axis="worker"),
    transforms.local_steps(
      MOMENTUM, 3, axis="worker", overlap=transforms.Delayed()
    ),
  )


def test_means_of_msdpu_are_late_after_its_warm_up_only():
  optimizer = methods.msdpu(
    SGD, intervals.fixed(2), RATE, axis="worker", warmup_steps=3,
    overlap=transforms.Delayed(),
  )  # fmt: skip
  params, _ = train(optimizer, random_targets(6, 2))
  assert (params[:, 0] == params[:, 1]).tolist() == [True] * 3 + [False] * 3


def test_rounds_of_msdpu_grow_to_its_interval(monkeypatch):
  given = []

  def growth(*rates, **more):
    given.append((rates, more))
    return intervals.fixed(2)

  monkeypatch.setattr(intervals, "growth", growth)
  rate = optax.constant_schedule(RATE)
  methods.msdpu(SGD, 7, rate, axis=None)
  methods.msdpu(SGD, intervals.fixed(3), rate, axis=None)
  assert given == [((rate,), {"max_interval": 7})]


def test_rounds_grow_by_a_schedule_that_optax_injects():
  def rate(step):
    return RATE * 0.8 ** jnp.asarray(step, jnp.float32)

  def make(learning_rate, interval=8):
    return methods.msdpu(SGD, interval, learning_rate, axis="worker")

  injected = optax.inject_hyperparams(make, static_args=("interval",))(rate)
  _, state = train(injected, random_targets(14, 2))
  clock = jax.tree.map(lambda x: x[:, 0], state.inner_state.sync.clock)
  ends = np.flatnonzero(clock.synchronized)
  # Optax knows the rate of this step, not that with which a round begins.
  wanted = np.clip((0.8**-ends / 3) ** 2 + 1e-6, 1, 8).astype(int)
  assert wanted[-1] > 2
  np.testing.assert_array_equal(clock.next_interval[ends], wanted)
  # Eagerly, too: the first state is often made so.
  injected.init(jnp.ones(()))


def test_msdpu_delays_from_its_first_long_round_on():
  rate = optax.constant_schedule(RATE)
  optimizer = methods.msdpu(
    SGD, intervals.fixed(2), rate, axis="worker", warmup_steps=3,
    overlap=transforms.Delayed(after_step=None),
  )  # fmt: skip
  params, _ = train(optimizer, random_targets(6, 2))
  assert (params[:, 0] == params[:, 1]).tolist() == [True] * 3 + [False] * 3
