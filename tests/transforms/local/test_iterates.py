"""Iterates inside an inner optimizer's state, moved by rounds."""

import typing

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import codecs, methods, reducers, states, transforms
from jdist.transforms.local import _iterates
from tests.transforms import _rounds

INTERVAL, RATE = 4, 0.1
# Two workers with unlike data, whose targets' mean is 1.
TARGETS = np.array([-3.0, 5.0], np.float32)
FREE = optax.contrib.schedule_free_sgd(RATE)


def train(optimizer, targets=TARGETS, steps=40):
  targets = np.broadcast_to(targets, (steps, *np.shape(targets)))
  params, state = _rounds.train(optimizer, targets)
  return params, state


def reference(optimizer, end, steps, targets=TARGETS):
  """Plain JAX: `end(round, params, state)` moves all workers at once."""
  params = jnp.zeros_like(jnp.asarray(targets))
  state = jax.vmap(optimizer.init)(params)
  for step in range(steps):
    updates, state = jax.vmap(optimizer.update)(params - targets, state, params)
    params = params + updates
    if (step + 1) % INTERVAL == 0:
      params, state = end(step // INTERVAL, params, state)
  return params, state


def mean(x):
  return jnp.broadcast_to(x.mean(0), x.shape)


def test_round_averages_both_sequences_of_schedule_free():
  params, state = train(jdist.local_sgd(FREE, INTERVAL, axis="worker"))
  wanted, inner = reference(
    FREE, lambda _, y, s: (mean(y), s._replace(z=mean(s.z))), 40
  )
  np.testing.assert_allclose(params[-1], wanted, rtol=1e-5)
  np.testing.assert_allclose(state.inner.z[-1], inner.z, rtol=1e-5)


def test_outer_step_shifts_iterates_with_the_parameters():
  outer = optax.sgd(0.7, 0.9, nesterov=True)
  memory = outer.init(jnp.zeros(()))
  anchor = jnp.zeros(())

  def end(number, y, inner):
    nonlocal anchor, memory
    del number
    update, memory = outer.update(anchor - y.mean(), memory, anchor)
    anchor = anchor + update
    # The mean distance of z from y is kept.
    z = jnp.full_like(y, anchor + (inner.z - y).mean())
    return jnp.full_like(y, anchor), inner._replace(z=z)

  params, state = train(jdist.diloco(FREE, INTERVAL, axis="worker"))
  wanted, inner = reference(FREE, end, 40)
  np.testing.assert_allclose(params[-1], wanted, rtol=1e-5)
  np.testing.assert_allclose(state.inner.z[-1], inner.z, rtol=1e-4)


@pytest.mark.parametrize("stream", [None, transforms.Stream()], ids=str)
def test_late_round_moves_distances_as_parameters(stream):
  keep = 1 / 2
  y_anchor = d_anchor = jnp.zeros(())
  y_sent = d_sent = None

  def end(number, y, inner):
    """Delayed averaging of y and of d = z - y, with half the progress kept."""
    nonlocal y_anchor, d_anchor, y_sent, d_sent
    start = (
      (y_anchor, d_anchor)
      if y_sent is None
      else (y_anchor - keep * y_sent, d_anchor - keep * d_sent)
    )
    progress = start[0] - y, start[1] - (inner.z - y)
    if y_sent is not None:
      y_anchor, d_anchor = y_anchor - y_sent.mean(), d_anchor - d_sent.mean()
    y_sent, d_sent = progress
    y = y_anchor - keep * y_sent
    return y, inner._replace(z=y + d_anchor - keep * d_sent)

  late = transforms.Delayed(stream=stream, carry=None)
  optimizer = transforms.local_steps(
    FREE, INTERVAL, axis="worker", overlap=late
  )
  params, state = train(optimizer)
  wanted, inner = reference(FREE, end, 40)
  np.testing.assert_allclose(params[-1], wanted, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(state.inner.z[-1], inner.z, rtol=1e-5, atol=1e-5)


ROUNDS = {
  "at once": {},
  "late": {"overlap": transforms.Delayed()},
  "within a round": {"overlap": transforms.Delayed(steps=2)},
  "compressed": {
    "compression": jdist.Compression(
      codecs.Quantize(8), reducers.ErrorFeedback()
    )
  },
  "elastic": {"rule": transforms.Elastic()},
  "slow momentum": {"rule": transforms.SlowMomentum(RATE, buffers="reset")},
}


@pytest.mark.parametrize("options", ROUNDS)
def test_schedule_free_is_evaluated_at_the_mean_of_the_targets(options):
  optimizer = transforms.local_steps(
    FREE, INTERVAL, axis="worker", **ROUNDS[options]
  )
  params, state = train(optimizer, steps=400)
  state, params = jax.tree.map(lambda x: x[-1], (state, params))
  found = jdist.evaluation_params(state, params)
  np.testing.assert_allclose(found, 1.0, atol=0.05)
  # Between two rounds, too, x belongs to the anchor.
  by_optax = optax.contrib.schedule_free_eval_params(
    FREE.init(jnp.zeros(()))._replace(z=state.anchor + state.sync.iterates[0]),
    state.anchor,
  )
  np.testing.assert_allclose(found, by_optax, rtol=1e-5)


def test_one_worker_is_plain_schedule_free():
  targets = _rounds.random_targets(12, 1)
  params, state = _rounds.train(
    jdist.local_sgd(FREE, INTERVAL, axis="worker"), targets
  )
  w, inner = jnp.zeros(()), FREE.init(jnp.zeros(()))
  update = jax.jit(FREE.update)
  for target in targets[:, 0]:
    updates, inner = update(w - target, inner, w)
    w = w + updates
  np.testing.assert_allclose(params[-1, 0], w, rtol=1e-6)
  np.testing.assert_allclose(state.inner.z[-1, 0], inner.z, rtol=1e-6)


@pytest.fixture
def as_users_promote():
  """Optax's lookahead and SAM multiply bools by floats."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.usefixtures("as_users_promote")
@pytest.mark.parametrize("of_pair", [False, True])
def test_lookahead_takes_part_with_both_of_its_parameters(of_pair):
  """Gradients are by the fast parameters, or by the pair as `jax.grad`'s."""
  inner = optax.lookahead(optax.sgd(RATE), 2, 0.5)
  optimizer = jdist.local_sgd(inner, INTERVAL, axis="worker")
  pair = optax.LookaheadParams.init_synced(jnp.zeros(2))

  def one(target):
    params, state = pair, optimizer.init(pair)
    for _ in range(2 * INTERVAL):
      fast = params.fast - target
      zeros = jnp.zeros_like(fast)
      given = optax.LookaheadParams(fast, zeros) if of_pair else fast
      updates, state = optimizer.update(given, state, params)
      params = jdist.apply_updates(params, updates, state)
    return params, jdist.evaluation_params(state, params)

  params, found = jax.jit(jax.vmap(one, axis_name="worker"))(TARGETS)
  # Two fast steps move by 0.19 of the distance, of which half is kept.
  slow = 1 - (1 - 0.19 / 2) ** INTERVAL
  np.testing.assert_allclose(found, np.full((2, 2), slow), rtol=1e-5)
  np.testing.assert_allclose(params.fast, params.slow, rtol=1e-6)


def test_lookahead_without_a_pair_names_the_pair():
  inner = optax.lookahead(optax.sgd(RATE), 2, 0.5)
  with pytest.raises(ValueError, match="LookaheadParams"):
    jdist.local_sgd(inner, INTERVAL, axis=None).init(jnp.zeros(2))


@pytest.mark.usefixtures("as_users_promote")
def test_round_averages_the_true_parameters_of_sam():
  """A round that ends between two of SAM's updates moves its cache, too."""
  inner = optax.contrib.sam(optax.sgd(RATE), optax.sgd(0.3), sync_period=3)
  params, _ = train(jdist.local_sgd(inner, INTERVAL, axis="worker"))
  wanted, _ = reference(
    inner, lambda _, y, s: (mean(y), s._replace(cache=mean(s.cache))), 40
  )
  np.testing.assert_allclose(params[-1], wanted, rtol=1e-5)


@pytest.mark.parametrize("name", ["madgrad", "cocob"])
def test_dual_averages_do_not_undo_rounds(name):
  """Positions that are computed from sums of gradients stay together."""
  inner = {
    "madgrad": optax.contrib.madgrad(RATE),
    "cocob": optax.contrib.cocob(),
  }
  params, state = train(
    jdist.local_sgd(inner[name], INTERVAL, axis="worker"), steps=200
  )
  # Apart by 16.7 and 7.8 if each worker keeps its own sums.
  apart = abs(params[-40:, 0] - params[-40:, 1]).max()
  assert apart < 1.5
  np.testing.assert_allclose(state.anchor[-1], 1.0, atol=0.15)


class AverageState(typing.NamedTuple):
  average: typing.Any


def averaging(kind=AverageState):
  """A user's own SGD that averages its iterates."""

  def update(updates, state, params):
    updates = jax.tree.map(lambda g: -RATE * g, updates)
    average = jax.tree.map(
      lambda a, p, u: a + 0.1 * (p + u - a), state.average, params, updates
    )
    return updates, kind(average)

  return optax.GradientTransformation(kind, update)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_copy_of_the_parameters_without_a_law_raises(scale):
  def scaled(params):
    return AverageState(jax.tree.map(lambda p: scale * p, params))

  inner = averaging(AverageState if scale is None else scaled)
  optimizer = jdist.local_sgd(inner, INTERVAL, axis=None)
  with pytest.raises(ValueError, match=r"copy of the parameters.*\.average"):
    optimizer.init({"w": jnp.ones(2)})


def test_declared_law_answers_what_a_copy_is():
  kept = states.declare(laws={"average": "constant"})(
    type("Kept", (AverageState,), {})
  )
  moved = states.declare(laws={"average": "iterate"}, evaluates="average")(
    type("Moved", (AverageState,), {})
  )
  _, own = train(jdist.local_sgd(averaging(kept), INTERVAL, axis="worker"))
  params, state = train(
    jdist.local_sgd(averaging(moved), INTERVAL, axis="worker")
  )
  assert abs(own.inner.average[-1, 0] - own.inner.average[-1, 1]) > 0.1
  np.testing.assert_allclose(*state.inner.average[-1], rtol=1e-6)
  last = jax.tree.map(lambda x: x[-1], state)
  np.testing.assert_allclose(
    jdist.evaluation_params(last, params[-1]),
    last.inner.average,
    rtol=1e-6,
  )


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (
      lambda: jdist.local_sgd(optax.flatten(FREE), 4, axis=None),
      "form of the parameters",
    ),
    (
      lambda: jdist.diloco(
        optax.contrib.madgrad(0.1),
        4,
        axis=None,
        compression=jdist.Compression(codecs.Quantize(4)),
      ),
      "`compression` must be None",
    ),
    (lambda: transforms.fragment_steps(FREE, 4, 2, axis=None), "iterates"),
  ],
  ids=["another form", "rounded sums", "fragments"],
)
def test_iterates_that_cannot_be_moved_raise(make, said):
  with pytest.raises(ValueError, match=said):
    make().init({"a": jnp.ones((2, 3)), "b": jnp.ones(4)})


def test_keys_that_are_shared_stay_equal():
  def folded(number):
    del number
    noise = optax.add_noise(1.0, 0.0, jax.random.key(0))
    mean = transforms.average_gradients("worker")
    state = optax.chain(noise, mean, noise).init(jnp.zeros(2))
    own, _, shared = _iterates.own_keys(state, "worker")
    found = {"own": own.rng_key, "shared": shared.rng_key}
    return jax.tree.map(jax.random.key_data, found)

  found = jax.vmap(folded, axis_name="worker")(jnp.arange(2))
  assert (found["shared"][0] == found["shared"][1]).all()
  assert (found["own"][0] != found["own"][1]).any()


@pytest.mark.parametrize("of_pair", [False, True])
@pytest.mark.parametrize("bits", [None, 16])
def test_gradients_of_lookahead_are_those_of_its_fast_parameters(bits, of_pair):
  """Workers with their mean gradient are one worker with it."""
  compression = None
  if bits is not None:
    compression = reducers.Compression(
      reducers.compressed(codecs.Quantize(bits, None)), reducers.ErrorFeedback()
    )
  look = optax.lookahead(optax.sgd(RATE), 2, 0.5)
  targets = jnp.array([[1.0, 4.0], [3.0, -2.0]])

  def run(optimizer, x):
    pair = optax.LookaheadParams.init_synced(jnp.zeros(2))
    state = optimizer.init(pair)
    for _ in range(4):
      gradient = pair.fast - x
      if of_pair:
        zeros = jnp.zeros_like(gradient)
        gradient = optax.LookaheadParams(gradient, zeros)
      updates, state = optimizer.update(gradient, state, pair)
      pair = optax.apply_updates(pair, updates)
    return pair

  axis = "worker"
  chain = methods.ssgd(look, axis=axis, compression=compression)
  with jax.numpy_dtype_promotion("standard"):  # Lookahead multiplies by bools.
    found = jax.vmap(lambda x: run(chain, x), axis_name=axis)(targets)
    wanted = run(methods.ssgd(look, axis=None), targets.mean(0))
  for worker in range(2):
    np.testing.assert_allclose(found.fast[worker], wanted.fast, atol=1e-3)
    np.testing.assert_allclose(found.slow[worker], wanted.slow, atol=1e-3)


def test_state_without_iterates_stays_as_it_is():
  w = {"w": jnp.ones(2)}
  plain = jdist.local_sgd(optax.sgd(RATE), 2, axis=None).init(w)
  assert _iterates.split(plain.sync) is plain.sync
  assert _iterates.at_anchor(plain) is plain
  assert _iterates.at_anchor({"a": (1, 2)}) == {"a": (1, 2)}
  free = jdist.local_sgd(FREE, 2, axis=None).init(w).sync
  joined = _iterates.join(free)
  assert joined.iterates == () and joined.anchor.params is free.anchor
  assert _iterates.split(joined) == free


def test_iterates_of_narrow_parameters_are_wide_at_the_anchor():
  w = {"w": jnp.ones(2, jnp.bfloat16)}
  state = jdist.local_sgd(FREE, 2, axis=None).init(w)
  assert state.inner.z["w"].dtype == jnp.bfloat16
  wide = jax.tree.leaves((state.sync.anchor, state.sync.iterates))
  assert len(wide) == 2 and {x.dtype for x in wide} == {jnp.dtype("float32")}


def test_iterates_are_streamed_beside_control_variates():
  """The message then has two trees, each with its iterates."""
  found = []
  for stream in (None, transforms.Stream()):
    optimizer = transforms.local_steps(
      FREE, 2, axis=None, rule=transforms.ControlVariates(0.1),
      overlap=transforms.Delayed(stream=stream),
    )  # fmt: skip
    w, update = {"a": jnp.ones(3), "b": jnp.ones(())}, jax.jit(optimizer.update)
    state = optimizer.init(w)
    for _ in range(5):
      updates, state = update(w, state, w)
      w = jdist.apply_updates(w, updates, state)
    found.append((w, state.anchor))
  chex.assert_trees_all_close(*found, rtol=1e-6)
  assert found[0][0]["b"] < 1.0


def test_iterates_may_be_sent_in_few_bits():
  compression = jdist.Compression(codecs.Quantize(8))
  options = {"axis": "worker", "compression": compression}
  params, state = train(jdist.local_sgd(FREE, INTERVAL, **options))
  exact, _ = train(jdist.local_sgd(FREE, INTERVAL, axis="worker"))
  np.testing.assert_allclose(params[-1], exact[-1], atol=0.02)
  np.testing.assert_array_equal(*state.inner.z[-1])


@states.declare(laws={"total": "statistic"})
class SumState(typing.NamedTuple):
  total: optax.Updates


def test_rounds_average_what_is_declared_a_statistic():
  def update(updates, state, params=None):
    del params
    return updates, SumState(jax.tree.map(jnp.add, state.total, updates))

  sums = optax.GradientTransformation(
    lambda params: SumState(jax.tree.map(jnp.zeros_like, params)), update
  )
  _, state = train(jdist.local_sgd(sums, INTERVAL, axis="worker"), steps=4)
  np.testing.assert_allclose(*state.inner.total[-1], rtol=1e-6)
  assert abs(state.inner.total[-2, 0] - state.inner.total[-2, 1]) > 1
  with pytest.raises(ValueError, match="iterates"):
    transforms.fragment_steps(sums, 4, 1, axis=None).init({"a": jnp.ones(2)})


@pytest.mark.parametrize(
  "read",
  [lambda params: 1.5, lambda params: jnp.concatenate([*params.values()])],
  ids=["a number", "another form"],
)
def test_what_is_no_copy_of_the_parameters_needs_no_law(read):
  inner = averaging(lambda params: AverageState(read(params)))
  params = {"a": jnp.ones(2), "b": jnp.ones(3)}
  state = jdist.local_sgd(inner, INTERVAL, axis=None).init(params)
  chex.assert_trees_all_equal(state.inner.average, read(params))
