"""A front that is trained, and a rest that is predicted."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  codecs,
  collectives,
  methods,
  profiling,
  reducers,
  training,
  transforms,
)
from tests.transforms._fronts import Cut, PARAMS, predict, THETA, whole

# Large enough that codecs do not send them as they are.
_DRAW = np.random.default_rng(7)
LARGE = {
  "a": jnp.asarray(_DRAW.normal(size=1024), jnp.float32),
  "b": jnp.asarray(_DRAW.normal(size=64), jnp.float32),
  "c": jnp.zeros(1024),
  "d": jnp.zeros((1024, 64)),
}


def targets(num_steps, num_workers, seed=0, like=PARAMS):
  draw = np.random.default_rng(seed)
  return [
    {
      k: draw.normal(size=(num_workers, *x.shape)).astype(np.float32)
      for k, x in like.items()
    }
    for _ in range(num_steps)
  ]


def train(make, num_workers, xs, substrate="vmap", first=PARAMS):
  """Params and states [workers, ...] after every step, and the program."""
  team = collectives.workers(num_workers, substrate=substrate)
  optimizer = make(team.axis)

  def step(params, state, x):
    gradients = jax.tree.map(jnp.subtract, params, x)
    updates, state = optimizer.update(gradients, state, params)
    return transforms.apply_updates(params, updates, state), state

  params = team.replicate(first)
  state = team.jit(optimizer.init)(params)
  program = team.jit(step).lower(params, state, team.place(xs[0])).compile()
  seen = []
  for x in xs:
    params, state = program(params, state, team.place(x))
    seen.append(jax.tree.map(np.asarray, (params, state)))
  return seen, program


def rows_equal(tree):
  return all(
    row.tobytes() == x[0].tobytes() for x in jax.tree.leaves(tree) for row in x
  )


def by_hand(xs, rate, interval):
  """The front by local SGD, the rest predicted at every meeting."""
  num_workers = len(xs[0]["a"])
  w = [
    {k: np.float64(v) for k, v in PARAMS.items()} for _ in range(num_workers)
  ]
  for t, x in enumerate(xs):
    for i in range(num_workers):
      for k in "ab":
        w[i][k] = w[i][k] - rate * (w[i][k] - x[k][i])
    if t % interval == interval - 1:
      a, b = (np.mean([v[k] for v in w], 0) for k in "ab")
      rest = {"c": THETA * np.tanh(a), "d": np.outer(a, b)}
      w = [{"a": a, "b": b, **rest} for _ in w]
    yield w


@pytest.mark.smoke
@pytest.mark.parametrize("interval", [1, 3])
def test_mp2_by_hand(interval):
  xs = targets(7, 2)
  seen, _ = train(
    lambda axis: methods.mp2(
      optax.sgd(0.1), Cut(), predict, THETA, interval, axis=axis
    ),
    2,
    xs,
  )
  for (params, state), wanted in zip(
    seen, by_hand(xs, 0.1, interval), strict=True
  ):
    for i, own in enumerate(wanted):
      for k, x in own.items():
        np.testing.assert_allclose(params[k][i], x, rtol=2e-6, atol=1e-6)
    # On the rest all workers agree at all times, and on the anchor.
    assert rows_equal((params["c"], params["d"], state.anchor))
    assert (state.clock.interval == interval).all()


def synchronous(axis):
  return whole(methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=axis), axis)


def outer(axis):
  return whole(
    methods.diloco(
      optax.sgd(0.1),
      3,
      axis=axis,
      compression=reducers.Compression(
        codecs.Quantize(4), reducers.ErrorFeedback()
      ),
    ),
    axis,
  )


def late(axis):
  return whole(methods.cocod(optax.sgd(0.1), 3, axis=axis), axis)


def compared(axis):
  """A front in 8 bits, and a residual of low rank in 4: experiments/mp2."""
  front = transforms.average_gradients(
    axis,
    reducers.Compression(codecs.Quantize(8, 64), reducers.ErrorFeedback()),
  )
  rest = methods.powersgd(
    optax.sgd(0.1),
    1,
    axis=axis,
    factors=reducers.compressed(codecs.Quantize(4), owner_feedback="own_share"),
  )
  return whole(optax.chain(front, optax.sgd(0.1)), axis, rest, 0.5)


@pytest.mark.parametrize("make", [synchronous, outer, late])
@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_replicas_are_equal_to_the_bit(make, substrate):
  seen, _ = train(make, 4, targets(50, 4), substrate)
  meetings = 0
  for params, state in seen:
    assert rows_equal((params["c"], params["d"], state.anchor))
    if not state.clock.synchronized[0]:
      continue
    meetings += 1
    anchor = {k: x[0] for k, x in state.anchor.items()}
    if make is not late:  # There a worker differs from the anchor.
      chex.assert_trees_all_equal(anchor, jax.tree.map(lambda x: x[0], params))
    wanted = jax.jit(predict)(THETA, anchor)
    for k, x in wanted.items():
      np.testing.assert_allclose(anchor[k], x, rtol=1e-6, atol=1e-7)
  assert meetings >= 10
  labels = transforms.sharing(seen[-1][1])
  assert labels.params == (make is synchronous)
  assert all(labels.state.anchor.values())
  if make is synchronous:  # Adam's moments would be stored once.
    assert all(jax.tree.leaves(labels.state))


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_residual_in_few_bits_is_equal_on_all_workers(substrate):
  xs = targets(12, 4, like=LARGE)
  seen, program = train(compared, 4, xs, substrate, LARGE)
  for params, state in seen:
    assert rows_equal((params, state.anchor, state.predicted))
  residual = np.asarray(params["d"][0]) - state.predicted["d"][0]
  assert np.abs(residual).max() > 0.01
  if substrate == "shard_map":
    assert sent_in(program) < 4 * 1088  # Less than the front in float32.


def test_front_of_mp2_in_few_bits():
  """Is the front of local steps with the same compression."""
  compression = reducers.Compression(
    codecs.Quantize(2, 64, rounding="stochastic"),
    reducers.ErrorFeedback(),
    seed=5,
  )

  def in_bits(axis):
    return methods.mp2(
      optax.sgd(0.1), Cut(), predict, 0.5, 3, axis=axis, compression=compression
    )

  def front_alone(axis):
    return transforms.local_steps(
      optax.sgd(0.1), 3, axis=axis, compression=compression
    )

  front = {k: LARGE[k] for k in "ab"}
  xs = targets(6, 4, like=LARGE)
  seen, _ = train(in_bits, 4, xs, "vmap", LARGE)
  fronts = [{k: x[k] for k in "ab"} for x in xs]
  alone, _ = train(front_alone, 4, fronts, "vmap", front)
  for (params, _), (wanted, _) in zip(seen, alone, strict=True):
    for k in "ab":
      np.testing.assert_array_equal(params[k], wanted[k])
  assert rows_equal((params, seen[-1][1].anchor))
  left = seen[-1][1].front.sync.compression.feedback.residual
  assert all(np.asarray(x).any() for x in jax.tree.leaves(left))


def sent_in(program):
  """Payload bytes of every collective of a compiled program."""
  found = profiling.read_collectives(program)
  return sum(c.payload_bytes * c.count for c in found)


def published(axis):
  return methods.mp2(optax.sgd(0.1), Cut(), predict, THETA, axis=axis)


def everything(axis):
  return methods.ssgd(optax.sgd(0.1), axis=axis)


def test_bytes_are_those_of_the_front():
  for make, entries in ((synchronous, 5), (published, 5), (everything, 14)):
    _, program = train(make, 4, targets(1, 4), "shard_map")
    assert sent_in(program) == 4 * entries


def test_gradients_of_the_rest_have_no_effect():
  """By design: what is not sent is not remembered either."""
  optimizer = synchronous(None)
  state = optimizer.init(PARAMS)
  gradients = jax.tree.map(jnp.ones_like, PARAMS)
  wild = gradients | {"c": jnp.full(3, jnp.nan), "d": jnp.full((3, 2), 1e30)}
  for given in (gradients, wild):
    updates, new = optimizer.update(given, state, PARAMS)
    moved = optax.apply_updates(PARAMS, updates)
    front = {k: moved[k] for k in "ab"}
    for k, x in predict(THETA, front).items():
      np.testing.assert_allclose(moved[k], x, rtol=1e-6, atol=1e-6)
  # Nor is there any state for them.
  sizes = [x.size for x in jax.tree.leaves(new.front)]
  assert sum(sizes) == 5 and new.predicted == () and new.rest == ()


# The rest's own training.


def refreshed(axis, rate=0.1):
  """All of the residual is averaged in every step."""
  return whole(
    methods.ssgd(optax.sgd(0.1), axis=axis),
    axis,
    rest=methods.ssgd(optax.sgd(rate), axis=axis),
  )


def test_residual_by_hand():
  xs = targets(6, 2)
  seen, _ = train(refreshed, 2, xs)
  w = {k: np.float64(v) for k, v in PARAMS.items()}
  predicted = {k: w[k] for k in "cd"}
  for t, (x, (params, state)) in enumerate(zip(xs, seen, strict=True)):
    # Until there is a prediction, nothing is added to it.
    rate = {k: 0.1 if k in "ab" or t else 0.0 for k in w}
    w = {k: w[k] - rate[k] * (w[k] - x[k].mean(0)) for k in w}
    now = {"c": THETA * np.tanh(w["a"]), "d": np.outer(w["a"], w["b"])}
    # The refreshed value, moved as the prediction moves.
    w |= {k: w[k] + now[k] - predicted[k] for k in now}
    predicted = now
    for k in w:
      np.testing.assert_allclose(params[k][0], w[k], rtol=5e-6, atol=1e-6)
      np.testing.assert_allclose(state.anchor[k][0], w[k], rtol=5e-6, atol=1e-6)
    assert rows_equal((params, state))


def rotating(axis):
  """Front every round; of the rest a leaf in turn."""
  return whole(
    methods.local_sgd(optax.sgd(0.1), 2, axis=axis),
    axis,
    rest=transforms.fragment_steps(optax.sgd(0.1), 4, 2, axis=axis),
  )


def test_rotating_refresh():
  xs = targets(12, 2)
  seen, _ = train(rotating, 2, xs)
  for t, (params, state) in enumerate(seen):
    assert rows_equal(state.anchor)
    # A leaf is together when it has just been its turn, at t = 1, 5, ...
    apart = {k: np.abs(x[0] - x[1]).max() for k, x in params.items()}
    assert (apart["c"] < 1e-6) == (t % 4 == 1 or t < 2)
    assert (apart["d"] < 1e-6) == (t % 4 == 3 or t < 2)
    if t % 4 == 1:
      np.testing.assert_allclose(
        params["c"][0],
        state.predicted["c"][0] + state.rest.anchor["c"][0],
        rtol=1e-5,
        atol=1e-6,
      )


def test_refreshed_rest_learns_beyond_the_prediction():
  # Gradients lead to about 5, where no prediction from this front goes.
  xs = [{k: v + 5 * (k in "cd") for k, v in x.items()} for x in targets(60, 2)]
  seen, _ = train(rotating, 2, xs)
  for k in "cd":
    assert np.abs(seen[-1][1].anchor[k].mean() - 5) < 0.5
    assert np.abs(seen[-1][1].predicted[k]).max() < 1


def test_bytes_of_a_rotating_refresh():
  team = collectives.workers(4, substrate="vmap")
  optimizer = rotating(team.axis)

  def step(params):
    return optimizer.update(params, optimizer.init(params), params)

  traffic = collectives.traffic(step, PARAMS, axis=team.axis, num_workers=4)
  ring = 2 * 3 / 4
  # Of a round of the front (5 entries), and of the rest's leaves (3 and 6),
  # each of which is sent once in two rounds.
  assert traffic.bytes_per_step == 0
  assert traffic.bytes_per_round == ring * 4 * (5 + 3 + 6)


RESTS = {
  "longer rounds": lambda sgd, axis: methods.local_sgd(sgd, 4, axis=axis),
  "late": lambda sgd, axis: methods.local_sgd(
    sgd, 4, axis=axis, overlap=transforms.Delayed(steps=2)
  ),
  "fragments": lambda sgd, axis: transforms.fragment_steps(
    sgd, 4, 2, axis=axis
  ),
}


@pytest.mark.parametrize("name", RESTS)
def test_host_control_leaves_rounds_of_the_rest_to_the_device(name):
  team = collectives.workers(2, substrate="vmap")
  sgd = optax.sgd(0.1)
  front = methods.local_sgd(sgd, 2, axis=team.axis)
  chain = whole(front, team.axis, RESTS[name](sgd, team.axis))
  xs = targets(8, 2)

  def loss(params, model_state, x, key):
    del key
    squares = jax.tree.map(lambda w, x: jnp.sum((w - x) ** 2), params, x)
    return sum(squares.values()), (model_state, {})

  step = training.make_step(loss, chain, axis=team.axis)
  ends = []
  for host_rounds in (False, None):
    trainer = training.Trainer(team, step, host_rounds=host_rounds)
    state = training.init_state(team, chain, PARAMS)
    state, _ = trainer.fit(state, lambda start: iter(xs[start:]), 8)
    assert state.opt_state.front.clock.round.tolist() == [4, 4]
    assert state.opt_state.rest.clock.round.tolist() == [2, 2]
    ends.append(state.params)
  chex.assert_trees_all_close(*ends, rtol=1e-6, atol=1e-6)


def test_front_beside_its_anchor_is_not_moved_by_a_rest_on_its_own():
  def late_alone(axis):
    return methods.cocod(optax.sgd(0.1), 3, axis=axis)

  def both(axis):
    rest = methods.local_sgd(optax.sgd(0.1), 3, axis=axis)
    return whole(late_alone(axis), axis, rest)

  xs = targets(6, 2)
  alone, _ = train(
    late_alone, 2, [{k: x[k] for k in "ab"} for x in xs], "vmap",
    {k: PARAMS[k] for k in "ab"},
  )  # fmt: skip
  seen, _ = train(both, 2, xs)
  for (params, _), (wanted, _) in zip(seen, alone, strict=True):
    for k in "ab":
      np.testing.assert_allclose(params[k], wanted[k], rtol=1e-6, atol=1e-6)
  assert not rows_equal(params["a"])


# Draining.


def run(optimizer, params, num_steps):
  update = jax.jit(optimizer.update)
  state = optimizer.init(params)
  for t in range(num_steps):
    gradients = jax.tree.map(lambda x, t=t: (t + 1) * x, params)
    updates, state = update(gradients, state, params)
    params = transforms.apply_updates(params, updates, state)
  return params, state


def test_drain_applies_the_front_and_predicts():
  optimizer = late(None)
  drain = jax.jit(lambda s, p: transforms.drain(optimizer, s, p))
  params, state = run(optimizer, PARAMS, 4)
  params, state = drain(state, params)
  assert state.clock.step == 4
  front = methods.cocod(optax.sgd(0.1), 3, axis=None)
  alone, own = run(front, {k: PARAMS[k] for k in "ab"}, 4)
  alone, _ = transforms.drain(front, own, alone)
  for k, x in (alone | predict(THETA, alone)).items():
    np.testing.assert_allclose(params[k], x, rtol=1e-5, atol=1e-6)
  again, _ = drain(state, params)
  chex.assert_trees_all_equal(again, params)


def test_draining_does_not_step_a_front_that_holds_nothing():
  optimizer = whole(
    methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=None),
    None,
    rest=methods.local_sgd(optax.sgd(0.1), 3, axis=None),
  )
  state = optimizer.init(PARAMS)
  updates, state = optimizer.update(PARAMS, state, PARAMS)
  params = transforms.apply_updates(PARAMS, updates, state)
  drained, after = transforms.drain(optimizer, state, params)
  for k in PARAMS:
    np.testing.assert_allclose(drained[k], params[k], rtol=1e-6)
  assert (after.clock.step, after.clock.round) == (1, 1)
  assert after.clock.synchronized


def test_drain_moves_no_rest_that_has_nothing_begun():
  """A momentum would move the residual without a gradient."""
  optimizer = whole(
    methods.local_sgd(optax.sgd(0.1), 3, axis=None), None,
    rest=methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=None),
  )  # fmt: skip
  params, state = PARAMS, optimizer.init(PARAMS)
  gradients = jax.tree.map(jnp.ones_like, PARAMS)
  for _ in range(4):
    updates, state = optimizer.update(gradients, state, params)
    params = transforms.apply_updates(params, updates, state)
  drained, new = transforms.drain(optimizer, state, params)
  chex.assert_trees_all_equal(new.rest, state.rest)
  moved = {k: drained[k] - predict(THETA, drained)[k] for k in "cd"}
  before = {k: params[k] - state.predicted[k] for k in "cd"}
  chex.assert_trees_all_close(moved, before, atol=1e-6)
