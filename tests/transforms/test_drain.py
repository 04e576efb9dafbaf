"""Draining: all stand on the anchor, and nothing that was begun is missing."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jdist
from jdist import codecs, collectives, methods, reducers, training, transforms
from jdist.transforms import _drain, intervals
from tests import _refusals, _thinned
from tests.transforms._rounds import random_targets, train

RATE = 0.1
SGD = optax.sgd(RATE)
MOMENTUM = optax.sgd(RATE, momentum=0.9)
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def run(optimizer, *targets, drained=True, dtype=jnp.float32):
  """Trains on each of the targets [steps, workers, leaves], drains after each.

  Returns:
    Of each: the parameters [steps, workers, leaves], and what the end of it
    is, parameters and state; and what it is after another drain.
  """

  def gradient(w, x):
    return {name: w[name] - x[p].astype(dtype) for p, name in enumerate(w)}

  def body(carry, x):
    w, state = carry
    updates, state = optimizer.update(gradient(w, x), state, w)
    w = jdist.apply_updates(w, updates, state)
    return (w, state), w

  def one(parts):
    names = "abcd"[: targets[0].shape[2]]
    w = {name: jnp.zeros((), dtype) for name in names}
    state, found = optimizer.init(w), []
    for xs in parts:
      (w, state), every = jax.lax.scan(body, (w, state), xs)
      if drained:
        w, state = transforms.drain(optimizer, state, w)
      again = transforms.drain(optimizer, state, w)
      found.append((jnp.stack(list(every.values()), -1), (w, state), again))
    return found

  parts = [x.swapaxes(0, 1) for x in targets]
  return jax.jit(jax.vmap(one, axis_name="worker"))(parts)


def values(w):
  """The leaves of all workers, [workers, leaves]."""
  return np.stack([np.asarray(x, np.float64) for x in w.values()], -1)


METHODS = {
  "local": functools.partial(
    transforms.local_steps, MOMENTUM, 5, rule=NESTEROV
  ),
  "late": functools.partial(
    transforms.local_steps,
    MOMENTUM,
    5,
    rule=NESTEROV,
    overlap=transforms.Delayed(carry=0.5),
  ),
  "late by steps": functools.partial(
    transforms.local_steps, MOMENTUM, 5, overlap=transforms.Delayed(2)
  ),
  "easgd": functools.partial(methods.easgd, MOMENTUM, 5, 0.8),
  "overlap": functools.partial(
    methods.overlap_local_sgd, MOMENTUM, 5, 0.6, 0.5
  ),
  "scaffold": functools.partial(methods.scaffold, SGD, 5, RATE),
  "slow_mo": functools.partial(
    methods.slow_mo, MOMENTUM, 5, RATE, buffers="average"
  ),
  "cocod": functools.partial(methods.cocod, MOMENTUM, 5),
  "fed_prox": functools.partial(methods.fed_prox, MOMENTUM, 5, 0.5),
  "streaming": functools.partial(
    methods.streaming_diloco, MOMENTUM, 5, 2, delay_steps=2
  ),
  "stale": lambda axis: transforms.delay_gradients(
    methods.ssgd(MOMENTUM, axis=axis), 3
  ),
}


# Parameters that differ from the anchor have a rounding of their own.
ROUNDED = ("easgd", "overlap", "streaming")


# A program each: what is alone in how it is brought in.
OFTEN = [
  *((x, jnp.float32) for x in ("late", "late by steps", "scaffold", "slow_mo")),
  *((x, jnp.float32) for x in ("cocod", "stale")),
  *((x, jnp.bfloat16) for x in ROUNDED),
]


@pytest.mark.parametrize(
  ("name", "dtype"),
  _thinned.some(
    [(name, jnp.float32) for name in METHODS]
    + [(name, jnp.bfloat16) for name in ROUNDED],
    OFTEN,
  ),
)
def test_drained_workers_are_on_the_anchor_and_continue(name, dtype):
  targets = random_targets(24, 4, 2)
  # In the middle of a round, at the end of one, and after a single step.
  parts = targets[:8], targets[8:18], targets[18:19], targets[19:]
  optimizer = METHODS[name](axis="worker")
  found = run(optimizer, *parts, dtype=dtype)
  if name != "stale":
    assert len(set(found[0][0][:, -1, 0].tolist())) == 4
  for every, (w, state), (again, same) in found:
    assert np.isfinite(every.astype(jnp.float32)).all()
    anchor = transforms.anchor(state, w)
    for leaf, there in zip(w.values(), anchor.values(), strict=True):
      assert len(set(leaf.tolist())) == 1
      np.testing.assert_array_equal(leaf, there)
    # To drain twice is to drain once.
    chex.assert_trees_all_equal((w, state), (again, same))
    assert np.all(transforms.synchronized(state))


ENDED = {
  "local": (MOMENTUM, transforms.local_steps, {"rule": NESTEROV}),
  "fed_prox": (MOMENTUM, methods.fed_prox, {"strength": 0.5}),
  "scaffold": (SGD, methods.scaffold, {"learning_rate": RATE}),
  "slow_mo": (
    MOMENTUM,
    methods.slow_mo,
    {"learning_rate": RATE, "buffers": "reset"},
  ),
}


@pytest.mark.parametrize("name", ENDED)
def test_drained_round_equals_a_shorter_one(name):
  inner, build, options = ENDED[name]
  targets = random_targets(8, 4, 2)

  def end(interval, drained):
    optimizer = build(inner, interval, axis="worker", **options)
    return run(optimizer, targets, drained=drained)[0][1]

  found, state = end(5, True)
  wanted, reference = end(intervals.ending_at(8, 5), False)
  np.testing.assert_allclose(values(found), values(wanted), 1e-5, 1e-6)
  for mine, theirs in (
    (state.inner, reference.inner),
    (state.sync.memory, reference.sync.memory),
    (state.clock.round, reference.clock.round),
    (state.clock.round_step, reference.clock.round_step),
  ):
    chex.assert_trees_all_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [3, 7])
def test_drained_springs_relax_to_the_common_mean(steps):
  targets = random_targets(steps, 4, 1)
  optimizer = methods.easgd(SGD, 3, 0.8, axis="worker")
  [(every, (w, _), _)] = run(optimizer, targets)
  before = np.concatenate([np.zeros((4, 1, 1)), every[:, :-1]], 1)
  went_in = -RATE * (before - targets.swapaxes(0, 1)).sum()
  np.testing.assert_allclose(values(w), went_in / 5, 1e-5, 1e-6)


def test_springs_with_a_late_mean_relax_at_the_end_of_a_round():
  optimizer = transforms.local_steps(
    SGD, 7, axis="worker", rule=transforms.Elastic(0.8),
    overlap=transforms.Delayed(steps=3),
  )  # fmt: skip

  def one(targets):
    w, state = jnp.zeros(()), optimizer.init(jnp.zeros(()))
    for target in targets:
      updates, state = optimizer.update(w - target, state, w)
      w = w + updates
    return w, state.anchor, transforms.drain(optimizer, state, w)[0]

  w, anchor, drained = jax.jit(jax.vmap(one, axis_name="worker"))(
    random_targets(14, 4).T
  )
  # The mean of the last round, which is on its way, moves the anchor first.
  anchor = anchor[0] + 0.8 * (w.mean() - anchor[0])
  np.testing.assert_allclose(drained, [(anchor + w.sum()) / 5] * 4, rtol=1e-5)


def test_springs_pull_after_a_drain():
  # Drained before, workers go to 2 and 6 from 0, and end a round at 1.5 and
  # 4.5, away from the center at 2; a drain moves all there.
  optimizer = methods.easgd(optax.sgd(0.5), 1, 0.5, axis="worker")
  nothing = np.zeros((1, 2, 1), np.float32)
  targets = np.array([[[4.0], [12.0]]], np.float32)
  _, (every, (w, _), _) = run(optimizer, nothing, targets)
  assert every[:, 0].tolist() == [[1.5], [4.5]]
  np.testing.assert_allclose(values(w), [[8 / 3]] * 2, rtol=1e-6)


def overlap(x, interval, alpha, mu):
  """Overlap-Local-SGD in NumPy, drained at the end."""
  w, z, v, sent = np.zeros(x.shape[1]), 0.0, 0.0, np.zeros(x.shape[1])

  def arrive(z, v, mean):
    v = mu * v + mean - z
    return z + v, v

  for t, row in enumerate(x, 1):
    w = w - RATE * (w - row)
    if t % interval == 0:
      z, v = arrive(z, v, sent.mean())
      w = (1 - alpha) * w + alpha * z
      sent = w
  z, v = arrive(z, v, sent.mean())
  return arrive(z, v, w.mean())[0] if len(x) % interval else z


@pytest.mark.parametrize(("steps", "mu"), [(8, 0.0), (8, 0.5), (6, 0.5)])
def test_anchor_that_is_late_takes_both_means(steps, mu):
  targets = random_targets(steps, 4, 1)
  optimizer = methods.overlap_local_sgd(SGD, 3, 0.6, mu, axis="worker")
  [(every, (w, _), _)] = run(optimizer, targets)
  wanted = overlap(targets[..., 0].astype(np.float64), 3, 0.6, mu)
  np.testing.assert_allclose(values(w), np.full((4, 1), wanted), 1e-5, 1e-6)
  if not mu:
    np.testing.assert_allclose(wanted, every[:, -1].mean(), 1e-5)


def fragments(x, drains, interval, number, tau, mix, rate, mu):
  """Streaming DiLoCo in NumPy; yields (w, a) after each drain."""
  n = x.shape[1]
  w, a, m = np.zeros((n, number)), np.zeros(number), np.zeros(number)
  under_way = {}

  def arrive(p, progress):
    m[p] = mu * m[p] + progress.mean()
    a[p] -= rate * (mu * m[p] + progress.mean())

  for t, row in enumerate(x, 1):
    phases = [(t - interval * (p + 1) // number) for p in range(number)]
    late = [p for p, (sent_at, _) in under_way.items() if sent_at + tau == t]
    for p in late:
      arrive(p, under_way.pop(p)[1])
    w = w - RATE * (w - row)
    for p in late:
      w[:, p] = mix * w[:, p] + (1 - mix) * a[p]
    for p, phase in enumerate(phases):
      if phase >= 0 and phase % interval == 0:
        under_way[p] = (t, a[p] - w[:, p])
    if t in drains:
      for p in range(number):
        begun = a[p]
        if p in under_way:
          _, progress = under_way.pop(p)
          arrive(p, progress)
          begun = begun - progress
        if phases[p] < 0 or phases[p] % interval:
          # Else it was sent in this step, and has done nothing since.
          arrive(p, begun - w[:, p])
        w[:, p] = a[p]
      yield w.copy(), a.copy()


def test_drain_applies_late_and_unsent_fragments():
  # Drained with fragments under way, and again with none: fragments of 3 are
  # sent in steps 2, 4, 6, 8, ... and arrive three steps later.
  targets = random_targets(27, 4, 3)
  drains = (9, 11, 20, 27)
  optimizer = methods.streaming_diloco(
    SGD, 6, 3, 0.7, 0.9, axis="worker", delay_steps=3, mix=0.25
  )
  cuts = zip((0, *drains), drains, strict=False)
  found = run(optimizer, *[targets[a:b] for a, b in cuts])
  wanted = fragments(
    targets.astype(np.float64), drains, 6, 3, 3, 0.25, 0.7, 0.9
  )
  for (_, (w, state), _), (there, anchor) in zip(found, wanted, strict=True):
    np.testing.assert_allclose(values(w), there, 1e-5, 1e-6)
    np.testing.assert_allclose(values(state.anchor), [anchor] * 4, 1e-5, 1e-6)


def test_drain_applies_late_and_unsent_progress():
  # 1.75 and 5.25 are sent after step 3; they are at 1.875 and 5.625 when
  # drained: the anchor goes to the mean 3.5, and by 0.25 more.
  optimizer = transforms.fragment_steps(
    optax.sgd(0.5), 3, 1, axis="worker", overlap=transforms.Delayed(steps=2)
  )
  [(every, (w, _), _)] = run(
    optimizer, np.array([[[2.0], [6.0]]] * 4, np.float32)
  )
  assert every[:, -1].tolist() == [[1.875], [5.625]]
  assert values(w).tolist() == [[3.75], [3.75]]


def test_evaluation_may_drain():
  # Workers at 1 and 3, the centre at 0: the springs relax at 4/3.
  team = collectives.workers(2, substrate="vmap")
  chain = methods.easgd(SGD, 3, 0.8, axis=team.axis)
  state = training.init_state(team, chain, {"kernel": jnp.zeros((1, 2))})
  there = np.array([[[1.0, 0.0]], [[3.0, 0.0]]], np.float32)
  state = state._replace(params=team.place({"kernel": there}))

  def apply(params, model_state, images, *, train):
    del train
    return images @ params["kernel"], model_state

  batch = {
    "image": np.ones((2, 1, 1), np.float32),
    "label": np.zeros((2, 1), np.int32),
    "mask": np.ones((2, 1), np.float32),
  }
  for optimizer, centre in ((None, 0.0), (chain, 4 / 3)):
    evaluate = training.Evaluator(team, apply, [batch], optimizer=optimizer)
    wanted = np.log1p(np.exp(-centre))
    assert evaluate(state)["loss"] == pytest.approx(wanted, rel=1e-6)


INT4 = reducers.compressed(codecs.Quantize(4, 16))
CHAIN = optax.chain(
  transforms.average_gradients(
    None,
    reducers.Compression(INT4, reducers.ErrorFeedback()),
  ),
  # What must not move, and would under a gradient of zero.
  optax.trace(0.9),
  optax.add_decayed_weights(0.1),
  optax.scale_by_learning_rate(0.1),
)
MEAN = reducers.Compression(INT4, reducers.ErrorFeedback())


class HeldState(NamedTuple):
  mu: dict
  compression: reducers.CompressionState


def hold(updates, state, params=None, *, control, **extra):
  """Holds the mean of all workers, which is no average in front of a chain."""
  if control.drain == "residuals":
    memory = MEAN.absorb(state.mu, state.compression, None)
    return updates, state._replace(compression=memory)
  mu, memory = MEAN.mean(updates, state.compression, None)
  return mu, HeldState(mu, memory)


HOLDERS = {
  "average_gradients": (CHAIN, lambda state: state[0]),
  "one's own": (
    optax.chain(
      optax.GradientTransformationExtraArgs(
        lambda params: HeldState(params, MEAN.init(params, None)), hold
      ),
      optax.scale_by_learning_rate(0.1),
    ),
    lambda state: state[0].compression,
  ),
  # One that does not pass extra arguments on takes a mean.
  "behind a stranger": (
    optax.GradientTransformation(
      CHAIN.init, lambda g, state, params=None: CHAIN.update(g, state, params)
    ),
    lambda state: state[0],
  ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_owners_residuals_move_to_the_feedback(name):
  optimizer, reduction = HOLDERS[name]
  random = np.random.default_rng(0)
  params = {"w": jnp.asarray(random.normal(size=400), jnp.float32)}
  state = jax.tree.map(
    lambda x: jnp.asarray(random.normal(size=x.shape)).astype(x.dtype) + 1,
    optimizer.init(params),
  )
  found, new = transforms.drain(optimizer, state, params, residuals=True)
  before, after = reduction(state), reduction(new)
  if name != "behind a stranger":
    (held,) = before.reducer.residual
    residual = before.feedback.residual["w"] + held[:400]
    np.testing.assert_allclose(after.feedback.residual["w"], residual, 1e-6)
    assert not after.reducer.residual[0].any()
    # All else is as it was.
    after.feedback.residual["w"] = before.feedback.residual["w"]
    new = jax.tree.map(
      lambda n, o: o if n.shape == held.shape and not n.any() else n, new, state
    )
  chex.assert_trees_all_equal((found, new), (params, state))
  # Without `residuals`, nothing is under way.
  assert transforms.drain(optimizer, state, params)[1] is state


def test_residuals_between_rounds_are_brought_in_by_a_mean_of_their_own():
  largest = reducers.compressed(codecs.TopK(k=1), wire="gather")
  optimizer = transforms.local_steps(
    optax.sgd(1.0), 1, axis=None,
    compression=reducers.Compression(largest, reducers.ErrorFeedback()),
  )  # fmt: skip
  w = jnp.zeros(2)
  updates, state = optimizer.update(jnp.array([2.0, 1.0]), optimizer.init(w), w)
  w = jdist.apply_updates(w, updates, state)
  np.testing.assert_array_equal(w, [-2.0, 0.0])
  found, _ = transforms.drain(optimizer, state, w)
  np.testing.assert_array_equal(found, w)
  # The smaller entry is what the message of the round has left out.
  found, state = transforms.drain(optimizer, state, w, residuals=True)
  np.testing.assert_array_equal(found, [-2.0, -1.0])
  found, _ = transforms.drain(optimizer, state, found, residuals=True)
  np.testing.assert_array_equal(found, [-2.0, -1.0])


BEGUN = {
  "round": functools.partial(transforms.local_steps, SGD, 5),
  "outer": functools.partial(
    transforms.local_steps, SGD, 5, rule=optax.sgd(1.0)
  ),
  "late": functools.partial(
    transforms.local_steps, SGD, 5, overlap=transforms.Delayed(carry=0.5)
  ),
  "late by steps": functools.partial(
    transforms.local_steps, SGD, 5, overlap=transforms.Delayed(2)
  ),
  "streamed": functools.partial(
    transforms.local_steps,
    SGD,
    5,
    overlap=transforms.Delayed(stream=transforms.Stream(8)),
  ),
  "stale": lambda axis: transforms.delay_gradients(
    methods.ssgd(SGD, axis=axis), 3
  ),
}


@pytest.mark.parametrize("name", BEGUN)
def test_drain_loses_nothing(name):
  # In the middle of a round: 13 of rounds of 5, or three gradients late.
  optimizer = BEGUN[name](axis="worker")
  targets = random_targets(13)
  params, states = train(optimizer, targets)
  last = jax.tree.map(lambda x: x[-1], (states, params))
  drain = jax.vmap(
    lambda state, w: transforms.drain(optimizer, state, w), axis_name="worker"
  )
  drained, state = jax.jit(drain)(*last)
  before = np.concatenate([np.zeros((1, 4)), params[:-1]])
  moved = -RATE * (before - targets).sum(0).mean()
  np.testing.assert_allclose(drained, [moved] * 4, rtol=1e-5, atol=1e-6)
  anchor = transforms.anchor(state, drained)
  np.testing.assert_array_equal(anchor, drained)
  # There is nothing more to bring in.
  again, _ = jax.jit(drain)(state, drained)
  np.testing.assert_array_equal(again, drained)


def test_residual_is_drained_once_without_a_message_in_flight():
  # Rounds of 2 that are not delayed yet send the largest of four entries; the
  # fifth step's progress comes out with all that was held back.
  optimizer = transforms.local_steps(
    SGD,
    2,
    axis="worker",
    overlap=transforms.Delayed(after_step=100),
    compression=reducers.Compression(
      reducers.compressed(codecs.TopK(k=1)), reducers.ErrorFeedback()
    ),
  )
  gradient = jnp.arange(1.0, 5.0)

  def one(_):
    def body(carry, _):
      w, state = carry
      updates, state = optimizer.update(gradient, state, w)
      return (jdist.apply_updates(w, updates, state), state), None

    first = jnp.zeros(4), optimizer.init(jnp.zeros(4))
    (w, state), _ = jax.lax.scan(body, first, length=5)
    return transforms.drain(optimizer, state, w)[0]

  w = jax.jit(jax.vmap(one, axis_name="worker"))(jnp.zeros(2))
  np.testing.assert_allclose(w, [-0.5 * gradient] * 2, rtol=1e-5)


@pytest.mark.parametrize("delay", [None, 1])
def test_control_variates_and_their_mean_agree_when_drained(delay):
  # In the middle of a round, where c moves before this round's c_i is sent.
  targets = np.tile(np.array([1.0, 2.0, 6.0], np.float32)[:, None], (406, 1, 1))
  optimizer = methods.scaffold(
    SGD, 3, RATE, axis="worker", overlap=transforms.Delayed(delay)
  )
  found = run(optimizer, targets[:4], targets[4:])
  for _, (_, state), _ in found:
    memory = state.sync.memory
    np.testing.assert_allclose(
      memory.mean["a"], [np.mean(memory.own["a"])] * 3, rtol=0, atol=1e-6
    )
  np.testing.assert_allclose(values(found[1][1][0]), [[3.0]] * 3, rtol=1e-5)


def stale(axis):
  return transforms.delay_gradients(methods.ssgd(SGD, axis=axis), 1)


# A momentum and a step, which move by a gradient of zero.
COUNTING = optax.sgd(optax.constant_schedule(RATE), momentum=0.9)
LOCAL = functools.partial(transforms.local_steps, SGD, 5)


def beside(late, axis):
  """The leaf "a" by what drains, "b" by what does not."""
  return optax.partition(
    {"late": late(axis=axis), "now": methods.ssgd(COUNTING, axis=axis)},
    {"a": "late", "b": "now"},
  )


def before(late, axis):
  return optax.chain(
    optax.masked(methods.ssgd(COUNTING, axis=axis), {"a": False, "b": True}),
    optax.masked(late(axis=axis), {"a": True, "b": False}),
  )


@pytest.mark.parametrize(
  ("build", "late"), [(beside, stale), (beside, LOCAL), (before, LOCAL)]
)
def test_drain_keeps_states_of_other_leaves(build, late):
  optimizer, targets = build(late, "worker"), random_targets(3, 2, 2)
  [(_, (w, state), _)] = run(optimizer, targets, drained=False)
  [(_, (drained, after), again)] = run(optimizer, targets)
  assert (drained["a"] != w["a"]).any()
  np.testing.assert_array_equal(drained["b"], w["b"])
  chex.assert_trees_all_equal((drained, after), again)

  def momenta(state):
    return state[0] if build is before else state.inner_states["now"]

  chex.assert_trees_all_equal(momenta(after), momenta(state))


def test_transformation_behind_a_delay_takes_drained_gradients():
  optimizer = optax.chain(
    transforms.delay_gradients(optax.identity(), 1),
    optax.trace(0.5),
    optax.scale(-1.0),
  )
  w = jnp.array(0.0)
  _, state = optimizer.update(jnp.array(4.0), optimizer.init(w), w)
  w, state = transforms.drain(optimizer, state, w)
  assert w.item() == -4.0 and state[1].trace.item() == 4.0


def as_built(steps):
  return steps


def passing_extra_arguments(steps):
  return optax.GradientTransformationExtraArgs(steps.init, steps.update)


@pytest.mark.parametrize("number", [5, 4])
@pytest.mark.parametrize(
  "form",
  [
    as_built,
    optax.MultiSteps.gradient_transformation,
    passing_extra_arguments,
  ],
)
def test_drain_keeps_accumulated_gradients(form, number):
  # Two updates of two gradients each, and half of a third.
  optimizer = form(
    optax.MultiSteps(transforms.local_steps(SGD, 4, axis=None), 2)
  )
  w = jnp.array(1.0)
  state = optimizer.init(w)
  with jax.numpy_dtype_promotion("standard"):  # MultiSteps scales by bools.
    for _ in range(number):
      updates, state = optimizer.update(jnp.array(1.0), state, w)
      w = optax.apply_updates(w, updates)
  w, drained = transforms.drain(optimizer, state, w)
  assert w.item() == pytest.approx(0.8)
  assert drained.inner_opt_state.anchor.item() == w.item()
  wanted = state._replace(inner_opt_state=drained.inner_opt_state)
  chex.assert_trees_all_equal(drained, wanted)
  chex.assert_trees_all_equal(
    (w, drained), transforms.drain(optimizer, drained, w)
  )


def test_accumulation_within_a_chain_raises():
  steps = optax.MultiSteps(stale(None), 2).gradient_transformation()
  optimizer, w = optax.chain(optax.identity(), steps), jnp.ones(2)
  with _refusals.refused("optimizer", "must be `optax.MultiSteps` itself"):
    transforms.drain(optimizer, optimizer.init(w), w)


@pytest.fixture
def plateau():
  """Halves the rate in every step in which the loss has not fallen."""
  with jax.numpy_dtype_promotion("standard"):  # It mixes counters and floats.
    yield optax.chain(
      optax.sgd(1.0), optax.contrib.reduce_on_plateau(0.5, patience=1)
    )


def test_pending_gradient_is_applied_with_the_given_loss(plateau):
  optimizer = transforms.delay_gradients(methods.ssgd(plateau, axis=None), 1)
  w, value = jnp.array(0.0), jnp.array(1.0)
  state = optimizer.init(w)
  for gradient in (2.0, 4.0):
    updates, state = optimizer.update(
      jnp.array(gradient), state, w, value=value
    )
    w = optax.apply_updates(w, updates)
  assert w.item() == -2.0
  # The loss has not fallen, so that the rate is half of what it was.
  assert transforms.drain(optimizer, state, w, value=value)[0].item() == -4.0
  again = transforms.drain(optimizer, state, w, value=value / 2)
  assert again[0].item() == -6.0


def test_residuals_drain_behind_a_plateau_without_a_loss(plateau):
  compression = reducers.Compression(INT4, reducers.ErrorFeedback())
  optimizer = methods.ssgd(plateau, axis=None, compression=compression)
  w = {"w": jnp.linspace(-1.0, 1.0, 400)}
  state = jax.tree.map(jnp.ones_like, optimizer.init(w))
  found, drained = transforms.drain(optimizer, state, w, residuals=True)
  chex.assert_trees_all_equal(found, w)
  assert not drained[0].reducer.residual[0].any()
  chex.assert_trees_all_equal(state[1:], drained[1:])


def test_drain_keeps_a_method_that_holds_nothing():
  optimizer = optax.adam(0.1)
  w = jnp.ones(3)
  state = optimizer.init(w)
  assert transforms.drain(optimizer, state, w) == (w, state)


@pytest.mark.parametrize(("step", "taken"), [(3, True), (4, False)])
def test_compression_that_took_a_mean_keeps_its_residuals(step, taken):
  """A wrapper that drops `control` makes it count another mean."""
  old = reducers.CompressionState(jnp.int32(3), (), jnp.ones(2))
  new = reducers.CompressionState(jnp.int32(step), (), jnp.zeros(2))
  (found,) = _drain._absorbed((old,), (new,))
  assert found.feedback.tolist() == ([0.0, 0.0] if taken else [1.0, 1.0])
  assert found.step == 3


def test_accumulation_is_found_behind_its_bound_methods():
  steps = optax.MultiSteps(optax.sgd(0.1), 2)
  assert _drain._multi_steps(steps) is steps
  assert _drain._multi_steps(steps.gradient_transformation()) is steps
  assert _drain._multi_steps(optax.sgd(0.1)) is None
  assert _drain._multi_steps(object()) is None


def test_accumulation_within_a_chain_drains_where_nothing_is_late():
  accumulated = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
  optimizer = optax.chain(transforms.average_gradients(None), accumulated)
  params = {"w": jnp.ones(2)}
  found, _ = transforms.drain(optimizer, optimizer.init(params), params)
  chex.assert_trees_all_equal(found, params)
