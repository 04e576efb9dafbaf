"""Workers that are themselves sharded: codecs see what a device holds."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jdist
from jdist import codecs, collectives, reducers, training, transforms
from jdist.reducers import _sharded
from tests.profiling import _reading

ROUNDS = 5
# Devices 0 and 1 are the first worker, split over `inner`.
SPECS = {
  "a": PartitionSpec("inner"),
  "b": PartitionSpec(None, "inner"),
  "c": PartitionSpec(),
}
SHAPES = {"a": (16, 6), "b": (8, 32), "c": (37,)}
REDUCERS = {
  "all-to-all int4": reducers.compressed(codecs.Quantize(4, 4)),
  "gather top-k": reducers.compressed(codecs.TopK(0.1)),
  "all-to-all stochastic": reducers.compressed(
    codecs.Quantize(2, 8, rounding="stochastic")
  ),
  "sum random-k": reducers.compressed(codecs.RandomK(0.2, scaled=False)),
  "by leaf": reducers.PerLeaf(
    (reducers.Rule(reducers.compressed(codecs.Sign()), "a"),)
  ),
}
FEEDBACK = reducers.ErrorFeedback()


close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


def team_of():
  mesh = collectives.make_mesh((2, 2), ("worker", "inner"))
  return collectives.workers(2, mesh=mesh)


def trees(number, lead=(2,)):
  random = np.random.default_rng(number)
  return {
    name: random.normal(size=(*lead, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def placed(team, tree):
  return {
    name: jax.device_put(x, team.sharding(SPECS[name]))
    for name, x in tree.items()
  }


def run(team, optimizer, steps=ROUNDS):
  """The states after each step, and the program."""
  params = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
  state = training.init_state(team, optimizer, params, specs=SPECS)

  def step(state, gradients):
    updates, opt_state = optimizer.update(
      gradients, state.opt_state, state.params
    )
    w = jdist.apply_updates(state.params, updates, opt_state)
    return state._replace(params=w, opt_state=opt_state)

  program = team.jit(step, out_specs=team.specs(state))
  first = placed(team, trees(0))
  text = program.lower(state, first).compile().as_text()
  states = []
  for number in range(steps):
    state = program(state, placed(team, trees(number)))
    states.append(state)
  assert program._cache_size() == 1
  return states, text


def check_groups(text):
  """Collectives there are, and none between the devices of a worker."""
  found = _reading.groups(text)
  assert found
  for kind, groups in found:
    for group in groups:
      assert sorted(group) in ([0, 2], [1, 3], [0], [1], [2], [3]), (
        kind,
        group,
      )


def shards_of(tree, device):
  """What a device along `inner` holds, [workers, ...]."""
  half = {"a": 8, "b": 16}
  a = slice(device * half["a"], (device + 1) * half["a"])
  b = slice(device * half["b"], (device + 1) * half["b"])
  return {"a": tree["a"][:, a], "b": tree["b"][:, :, b]}


def test_devices_of_a_worker_lose_nothing():
  # The law of a reducer, for one leaf that two devices of a worker share.
  team, specs = team_of(), {"a": SPECS["a"]}
  compression = reducers.Compression(codecs.TopK(0.1), FEEDBACK, specs=specs)
  optimizer = transforms.average_gradients(team.axis, compression)
  state = training.init_state(
    team, optimizer, {"a": np.zeros(SHAPES["a"], "float32")}, specs=specs
  )
  given = {"a": trees(0)["a"]}
  program = team.jit(
    lambda g, s: optimizer.update(g, s),
    out_specs=(specs, team.specs(state.opt_state)),
  )
  mean, after = program(placed(team, given), state.opt_state)
  residual = after.feedback.trees.residual
  assert np.abs(residual["a"]).max() > 0.1
  close(2 * mean["a"][0] + residual["a"].sum(0), given["a"].sum(0))


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(n, marks=() if n.startswith(("all-to-all int4", "gather"))
                 else pytest.mark.slow)
    for n in REDUCERS
  ],
)  # fmt: skip
def test_every_device_reduces_its_own_shards(name):
  reducer = REDUCERS[name]
  team = team_of()
  optimizer = optax.chain(
    transforms.average_gradients(
      team.axis,
      reducers.Compression(reducer, FEEDBACK, seed=5, specs=SPECS),
    ),
    optax.sgd(1.0),
  )
  states, text = run(team, optimizer)
  check_groups(text)
  gathered = [team.gather((s.params, s.opt_state[0])) for s in states]

  # The same, of each shard by itself and of what is not split.
  def alone(pick, fold):
    like = jax.tree.map(lambda x: x[0], pick(trees(0)))

    def init(_):
      return reducer.init(like, "worker"), FEEDBACK.init(like)

    state = jax.vmap(init, axis_name="worker")(jnp.arange(2))

    def one(x, state, key):
      remembered, held = state
      wanted, held = FEEDBACK.prepare(x, held)
      mean, share, remembered = reducer.reduce(
        wanted, remembered, key, "worker"
      )
      mean, held = FEEDBACK.finish(mean, share, wanted, held)
      return mean, (remembered, held)

    one = jax.jit(jax.vmap(one, (0, 0, None), axis_name="worker"))
    total = 0
    for number in range(ROUNDS):
      key = fold(jax.random.fold_in(jax.random.key(5), number))
      mean, state = one(pick(trees(number)), state, key)
      total = jax.tree.map(lambda m, t: t - m, mean, total or
                           jax.tree.map(jnp.zeros_like, mean))  # fmt: skip
      yield total, state

  picks = [
    (functools.partial(shards_of, device=d),
     lambda key, d=d: jax.random.fold_in(key, d))
    for d in range(2)
  ]  # fmt: skip
  whole = (lambda tree: {"c": tree["c"]}, lambda key: key)
  for d, (pick, fold) in enumerate([*picks, whole]):
    for (w, state), (params, got) in zip(
      alone(pick, fold), gathered, strict=True
    ):
      close(pick(params), w)
      residual = pick(got.feedback.trees.residual)
      close(residual, state[1].residual)
      own = got.reducer["shards:inner" if d < 2 else "shards:"]
      if d < 2:
        own = jax.tree.map(lambda x, d=d: x[:, d], own)
      close(own, state[0])
  for params, _ in gathered:  # Identical to the bit over workers.
    for x in params.values():
      assert x[0].tobytes() == x[1].tobytes()


def test_state_is_placed_with_its_shard():
  team = team_of()
  reducer = REDUCERS["all-to-all int4"]
  optimizer = transforms.average_gradients(
    team.axis,
    reducers.Compression(reducer, FEEDBACK, specs=SPECS),
  )
  params = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
  state = training.init_state(team, optimizer, params, specs=SPECS).opt_state
  for x in state.reducer["shards:inner"].residual:
    assert x.sharding.spec == PartitionSpec("worker", "inner")
    assert x.shape[:2] == (2, 2)
  assert state.feedback.trees.residual["b"].sharding.spec == PartitionSpec(
    "worker", None, "inner"
  )
  (count,) = state.feedback.nonfinite.values()
  assert count.sharding.spec == PartitionSpec("worker", "inner")
  told = transforms.sharing(state)
  assert told.params and told.state.feedback.trees.residual["a"] is False
  one = jax.tree.map(lambda x: x[0], team.gather(state))
  assert transforms.nonfinite_rounds(one) == 0


def test_nan_stays_in_its_shard_and_is_counted():
  team = team_of()
  optimizer = transforms.average_gradients(
    team.axis,
    reducers.Compression(REDUCERS["all-to-all int4"], FEEDBACK, specs=SPECS),
  )
  gradients = trees(0)
  gradients["a"][1, 0, 0] = np.nan
  params = {name: np.zeros(shape, "float32") for name, shape in SHAPES.items()}
  state = training.init_state(team, optimizer, params, specs=SPECS)
  step = team.jit(lambda g, s: optimizer.update(g, s))
  mean, after = step(placed(team, gradients), state.opt_state)
  shard = np.asarray(mean["a"])[:, :8]
  assert np.isnan(shard).any() and np.isfinite(mean["a"][:, 8:]).all()
  counts = np.asarray(after.feedback.nonfinite["shards:inner"])
  np.testing.assert_array_equal(counts, [[0, 0], [1, 0]])
  rows = team.gather(after)
  assert transforms.nonfinite_rounds(rows).tolist() == [0, 1]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_local_steps_send_shards(late):
  team = team_of()
  optimizer = transforms.local_steps(
    optax.sgd(0.1, momentum=0.9),
    2,
    axis=team.axis,
    compression=reducers.Compression(
      REDUCERS["gather top-k"], FEEDBACK, specs=SPECS
    ),
    overlap=transforms.Delayed() if late else None,
    rule=optax.sgd(0.7, momentum=0.9, nesterov=True),
  )
  states, text = run(team, optimizer, steps=6)
  check_groups(text)
  last = team.gather(states[-1].opt_state)
  assert last.clock.round.tolist() == [3, 3]
  assert last.sync.compression.step[0] == 3 - late
  for x in jax.tree.leaves(last.anchor):
    assert x.any() and x[0].tobytes() == x[1].tobytes()
  residual = states[-1].opt_state.sync.compression.feedback.trees.residual["a"]
  assert residual.sharding.spec == PartitionSpec("worker", "inner")
  # What went in has arrived, or is held.
  drained = team.jit(
    lambda w, s: transforms.drain(optimizer, s, w, residuals=True)
  )
  _, after = drained(states[-1].params, states[-1].opt_state)
  for x in jax.tree.leaves(after.sync.compression.feedback.trees):
    assert not np.asarray(x).any()


def test_bits_are_of_all_devices():
  reducer = _sharded.Sharded(REDUCERS["all-to-all int4"], SPECS)
  like = {
    name: jax.ShapeDtypeStruct(shape, "float32")
    for name, shape in SHAPES.items()
  }
  local = [
    {"a": jax.ShapeDtypeStruct((8, 6), "float32"),
     "b": jax.ShapeDtypeStruct((8, 16), "float32")},
    {"c": like["c"]},
  ]  # fmt: skip
  alone = [reducer.reducer.num_bits(part, 2) for part in local]
  found = []

  def count(x):
    found.append(reducer.num_bits(like, 2))
    return x

  team = team_of()
  team.jit(count).lower(team.place(np.zeros(2)))
  assert found[0].sent == 2 * sum(bits.sent for bits in alone)


@pytest.mark.parametrize(
  "feedback",
  [FEEDBACK, reducers.EF21(), reducers.MomentumCorrection(0.5)],
  ids=["error", "ef21", "momentum"],
)
def test_drain_includes_owner_residuals(feedback):
  team = team_of()
  compression = reducers.Compression(
    REDUCERS["all-to-all int4"], feedback, specs=SPECS
  )
  optimizer = transforms.average_gradients(team.axis, compression)
  (state,), _ = run(team, optimizer, steps=1)
  drain = team.jit(
    lambda w, s: transforms.drain(optimizer, s, w, residuals=True)
  )
  _, after = drain(state.params, state.opt_state)
  flush = team.jit(
    lambda w, s: compression.reducer.flush(s.reducer, w, team.axis)[0]
  )
  held = flush(state.params, state.opt_state)
  assert all(np.asarray(held[name]).any() for name in ("a", "b"))
  for x in jax.tree.leaves(after.reducer):
    assert not np.asarray(x).any()
  # What comes out later has got what owners held.
  before, after = state.opt_state.feedback.trees, after.feedback.trees
  name = "mean" if isinstance(feedback, reducers.EF21) else "residual"
  moved = jax.tree.map(
    jnp.subtract, getattr(after, name), getattr(before, name)
  )
  close(moved, held)


def test_owners_keep_residuals_without_feedback():
  team = team_of()
  optimizer = transforms.average_gradients(
    team.axis,
    reducers.Compression(
      REDUCERS["all-to-all int4"], reducers.ErrorFeedback(0.0), specs=SPECS
    ),
  )
  (state,), _ = run(team, optimizer, steps=1)
  drain = team.jit(
    lambda w, s: transforms.drain(optimizer, s, w, residuals=True)
  )
  _, after = drain(state.params, state.opt_state)
  chex.assert_trees_all_equal(team.gather(after), team.gather(state.opt_state))


def test_cast_error_of_a_mean_of_shards_is_kept():
  """The mean lies between two numbers of bfloat16."""
  team, specs = team_of(), {"a": SPECS["a"]}
  compression = reducers.Compression(reducers.Exact(), FEEDBACK, specs=specs)
  optimizer = transforms.average_gradients(team.axis, compression)
  given = np.ones((2, *SHAPES["a"]), np.float32)
  given[1] = 1.0078125
  state = training.init_state(
    team, optimizer, {"a": jnp.zeros(SHAPES["a"], jnp.bfloat16)}, specs=specs
  )
  program = team.jit(
    lambda g, s: optimizer.update(g, s),
    out_specs=(specs, team.specs(state.opt_state)),
  )
  mean, after = program(
    placed(team, {"a": given.astype(jnp.bfloat16)}), state.opt_state
  )
  assert mean["a"].dtype == jnp.bfloat16
  residual = np.asarray(after.feedback.trees.residual["a"])
  assert np.abs(residual).max() > 1e-3
  mean = np.asarray(mean["a"][0], np.float32)
  close(2 * mean + residual.sum(0), given.sum(0))


def test_devices_of_a_worker_draw_numbers_of_their_own():
  team, specs = team_of(), {"a": SPECS["a"], "c": SPECS["c"]}
  codec = codecs.Quantize(1, 64, rounding="stochastic")
  compression = reducers.Compression(codec, specs=specs)
  optimizer = transforms.average_gradients(team.axis, compression)
  params = {"a": np.zeros((16, 6), "float32"), "c": np.zeros(64, "float32")}
  state = training.init_state(team, optimizer, params, specs=specs)
  # Rounding is random where an entry is no step of its block.
  given = {x: np.full((2, *y.shape), 0.3, "float32") for x, y in params.items()}
  for tree in given.values():
    tree[:, ::8] = 1.0
  program = team.jit(lambda x, s: optimizer.update(x, s)[0])
  found = program(
    {x: jax.device_put(y, team.sharding(specs[x])) for x, y in given.items()},
    state.opt_state,
  )
  first, second = np.split(np.asarray(found["a"][0]), 2)
  assert (first != second).any()
  # Both have all of an unsplit leaf, and must round it alike.
  np.testing.assert_array_equal(*found["c"])


def test_compression_with_another_seed_is_sharded_once():
  first = reducers.Compression(codecs.TopK(0.1), FEEDBACK, specs=SPECS)
  again = dataclasses.replace(first, seed=3)
  assert (again.reducer, again.feedback) == (first.reducer, first.feedback)
