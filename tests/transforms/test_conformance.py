"""Every transformation of the table has every property."""

import hashlib
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, methods, transforms
from jdist.transforms import intervals
from tests import _thinned
from tests.profiling import _reading
from tests.transforms import _running, _table

TABLE = _table.TABLE
every_line = _table.every_line
smooth = [n for n in TABLE if not TABLE[n].rough]
on_all = _table.on("vmap", "shard_map", "mixed")


def rows_equal(x):
  return all(row.tobytes() == x[0].tobytes() for row in x)


def local_state(state):
  return transforms.local._anchor.find_rounds(state)


def close(found, wanted, rtol):
  """Within `rtol`; bfloat16 leaves within a few of their own roundings."""

  def one(path, f, w):
    assert f.dtype == w.dtype
    tolerance = 0.1 if f.dtype == jnp.bfloat16 else rtol
    np.testing.assert_allclose(
      f.astype(np.float32), w.astype(np.float32), tolerance, tolerance,
      err_msg=jax.tree_util.keystr(path),
    )  # fmt: skip

  jax.tree_util.tree_map_with_path(one, found, wanted)


def test_every_public_transformation_is_in_the_table():
  # Also what is made of a class of its own, as of `update_first`.
  made = (optax.GradientTransformation, intervals.IntervalPolicy)
  public = {
    name
    for module in (methods, transforms, intervals)
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and not name.startswith("_")
    and inspect.isclass(given := inspect.signature(value).return_annotation)
    and issubclass(given, made)
  }
  covered = {name for line in TABLE.values() for name in line.covers}
  # `only_floats` and `lenient` wrap any optimizer, see `tests/optimizers`, and
  # `outer_sgd` is an optimizer of Optax, for the outer step of a rule.
  others = {"with_mean_loss", "only_floats", "lenient", "outer_sgd"}
  assert public - others == covered


@on_all
def test_shared_leaves_are_equal_at_every_step(name, substrate):
  run = _table.record(name, substrate)
  labels = transforms.sharing(run.states[0])
  for params, state in zip(run.params, run.states, strict=True):
    if labels.params:
      assert all(map(rows_equal, jax.tree.leaves(params)))
    told = jax.tree.map(
      lambda x, shared: rows_equal(x) or not shared, state, labels.state
    )
    assert all(jax.tree.leaves(told)), told


@on_all
def test_anchors_are_equal_to_the_bit(name, substrate):
  run = _table.record(name, substrate)
  state, params = run.states[-1], run.params[-1]
  anchors = transforms.anchor(state, params)
  hashes = {
    hashlib.sha256(
      b"".join(x[worker].tobytes() for x in jax.tree.leaves(anchors))
    ).digest()
    for worker in range(_running.NUM_WORKERS)
  }
  assert len(hashes) == 1
  if local_state(state) is not None:
    # Rounds happened, and between them the workers differed.
    assert 3 <= local_state(state).clock.round[0] < _running.NUM_STEPS
    assert not all(rows_equal(params["a"]) for params in run.params)


@_table.on("shard_map", "mixed", lines=[n for n in TABLE if not TABLE[n].rough])
def test_substrates_agree(name, substrate):
  run, reference = _table.record(name, substrate), _table.record(name, "vmap")
  for t in (0, 5, 19):
    close(run.params[t], reference.params[t], 1e-5)
    close(run.states[t], reference.states[t], 1e-5)


# Elastic averaging's spring is weaker the more workers there are, and a
# worker's part of a norm is smaller.
alike = [n for n in smooth if n not in ("easgd", "clipped")]


@pytest.mark.parametrize("name", _thinned.some(alike, alike[::2]))
def test_equal_workers_are_one_worker(name):
  alone, together = _table.record_equal(name)
  for t in range(_running.NUM_STEPS):
    first = jax.tree.map(lambda x: x[:1], together.params[t])
    close(first, alone.params[t], 1e-5)


@_table.on("vmap")
def test_unknown_values_are_not_nan(name, substrate):
  # For which `jax.debug_nans` would stop a run that has none.
  run = _table.record(name, substrate)
  first = TABLE[name].make(None).init(_running.PARAMS)
  for x in jax.tree.leaves((first, run.states, run.params)):
    assert not np.isnan(np.asarray(x, np.float32)).any()


@on_all
def test_step_is_compiled_once(name, substrate):
  _table.record(name, substrate)  # 30 steps.
  assert len(_table.runner(name, substrate).traces) == 1


@on_all
def test_parameters_and_state_may_be_donated(name, substrate):
  assert _table.record(name, substrate).donated


@every_line
def test_fresh_state_may_be_donated(name):
  # Made outside of a program, where equal counters are easily one buffer.
  optimizer = TABLE[name].make(None)
  params = jax.tree.map(jnp.asarray, _running.PARAMS)
  leaves = jax.tree.leaves((params, optimizer.init(params)))
  pointers = [x.unsafe_buffer_pointer() for x in leaves]
  assert len(set(pointers)) == len(pointers)


# That arguments are arrays and that leaves are narrow have nothing to do with
# each other: one at a time, and both or none in the slow set.
@pytest.mark.parametrize(
  ("name", "dtype", "injected"),
  [
    pytest.param(
      name, dtype, injected,
      marks=pytest.mark.slow
      if injected == (dtype == "bfloat16")
      else [pytest.mark.smoke] * (name in _table.QUICK),
    )
    for name in TABLE
    for dtype in ("float32", "bfloat16")
    for injected in (False, True)
  ],
)  # fmt: skip
def test_state_keeps_its_form(name, dtype, injected):
  line = TABLE[name]
  optimizer = line.inject(None) if injected else line.make(None)
  params = jax.tree.map(lambda x: jnp.asarray(x, dtype), _running.PARAMS)
  state = optimizer.init(params)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
  assert all(x.size for x in jax.tree.leaves(state))  # Orbax refuses those.
  updates, new = jax.eval_shape(
    lambda g: optimizer.update(g, state, params, loss=jnp.float32(1.0)), params
  )
  chex.assert_trees_all_equal_structs(new, state)
  chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
  assert not any(x.weak_type for x in jax.tree.leaves((new, state)))
  assert all(x.dtype == dtype for x in jax.tree.leaves(updates))
  local = local_state(state)
  if local is not None:
    kept = [getattr(local, n, ()) for n in ("anchor", "outer", "pending")]
    wide = jax.tree.leaves(kept)
    assert all(x.dtype != jnp.bfloat16 for x in wide)


@pytest.mark.parametrize("name", ["ssgd", "stale", "outer", "late"])
def test_updates_have_the_dtype_of_the_gradients(name):
  optimizer = TABLE[name].make(None)
  params = jnp.ones(2, jnp.bfloat16)
  gradients = jnp.ones(2, jnp.float32)
  with jax.numpy_dtype_promotion("standard"):  # Momentum of the mixed dtypes.
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
  assert updates.dtype == jnp.float32


# A program each; which arguments those are, all lines say to
# `test_state_keeps_its_form`.
@pytest.mark.parametrize(
  "name", _thinned.some(list(TABLE), list(TABLE)[::3], smoke=_table.QUICK)
)
def test_continuous_arguments_may_be_injected_in_a_chain(name):
  team = _running.team("vmap")
  optimizer = optax.chain(optax.clip(1e6), TABLE[name].inject(team.axis))
  # Injected numbers are float32 arrays, which Optax multiplies with float32.
  runner = _running.Runner(optimizer, team, jnp.float32, TABLE[name].bound)
  run = runner.run(_running.placed("vmap"))
  reference = _table.record(name, "vmap")
  if name == "clipped":  # By a norm over the leaf that is bfloat16 there, too.
    plain = TABLE[name].make(team.axis)
    plain = _running.Runner(plain, team, jnp.float32)
    reference = plain.run(_running.placed("vmap"))
  if not TABLE[name].rough:
    close(run.params[-1]["a"], reference.params[-1]["a"], 1e-5)
  assert len(runner.traces) == 1
  injected = run.states[-1][1].hyperparams
  assert set(injected) == set(TABLE[name].continuous)
  labels = transforms.sharing(run.states[-1])
  assert labels.params == transforms.sharing(reference.states[-1]).params


@pytest.mark.parametrize(
  ("name", "argument", "others"),
  [
    ("stale", "steps", ()),
    ("local", "interval", ()),
    ("late outer", "after_step", ("interval",)),
    ("late by steps", "steps", ("interval",)),
    ("post_local_sgd", "switch_step", ("interval",)),
    ("diloco", "interval", ()),
    ("msdpu", "warmup_steps", ("interval",)),
  ],
)
def test_structural_argument_is_not_injected(name, argument, others):
  optimizer = TABLE[name].inject(None, static_args=others)
  message = (
    rf"`{argument}` shapes the program and must be a Python int, got an "
    rf"array.*`static_args=\('{argument}',\)`"
  )
  with pytest.raises(ValueError, match=message):
    optimizer.init(jnp.zeros(2))


@pytest.mark.parametrize("name", _thinned.some(smooth, smooth[::4]))
def test_scan_over_steps_is_the_same(name):
  team = _running.team("shard_map")
  optimizer = TABLE[name].make(team.axis)
  one = _running.make_step(optimizer)

  def train(params, targets, losses):
    def body(carry, data):
      return one(*carry, *data), None

    # What a worker begins with is its own, even if all begin alike.
    state = collectives.varying(optimizer.init(params), team.axis)
    return jax.lax.scan(body, (params, state), (targets, losses))[0]

  # [workers, steps, ...]
  targets, losses = jax.tree.map(
    lambda x: np.swapaxes(x, 0, 1), _running.targets(_running.NUM_WORKERS)
  )
  params, state = team.jit(train)(
    _table.runner(name, "shard_map").begin()[0],
    *team.place((targets, losses)),
  )
  reference = _table.record(name, "shard_map")
  close(_running.copied(params), reference.params[-1], 1e-5)
  close(_running.copied(state), reference.states[-1], 1e-5)


# A streamed worker needs the specs of its shards: see test_sending.
@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow if i % 3 else ())
    for i, name in enumerate(TABLE)
    if not name.startswith("streamed") and not TABLE[name].whole
  ],
)
def test_no_collective_crosses_the_inner_axis(name):
  runner = _table.runner(name, "mesh")
  assert runner.begin()[0]["a"].sharding.shard_shape((2, 4)) == (1, 2)
  # Devices 0 and 1 are one worker, 2 and 3 the other.
  compiled = runner.compile()
  found = _reading.groups(compiled.as_text())
  assert found
  for kind, groups in found:
    assert kind == "all-reduce" and sorted(groups) == [[0, 2], [1, 3]]
  run = runner.run(_running.placed("mesh"), compiled)
  close(run.params[-1], _table.record(name, "two").params[-1], 1e-5)


# In these a float32 of the library's own meets the leaves.
MEETING = ("msdpu", "compressed rounds", "dgc")
# `mp2` has a predictor of the test's own, in float32.
WIDE = [x for x in TABLE if x not in ("mp2", "predict_rest")]


@pytest.mark.parametrize(
  ("name", "dtype"),
  [
    pytest.param(
      name, dtype,
      marks=() if dtype == "float64" and name in MEETING else pytest.mark.slow,
    )
    for dtype in ("float64", "complex64")
    for name in WIDE
  ],
)  # fmt: skip
def test_wide_leaves_keep_their_dtypes_under_strict_promotion(name, dtype):
  team = _running.team("vmap")
  optimizer = TABLE[name].make(team.axis)
  step = _running.make_step(optimizer)

  def run(params, state, loss):
    moved, after = step(params, state, params, loss)
    drained = transforms.drain(optimizer, after, moved)
    return moved, after, *drained, transforms.anchor(*drained[::-1])

  def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

  with jax.enable_x64(dtype == "float64"):
    params = jax.tree.map(
      lambda x: jnp.ones((team.num_workers, *x.shape), dtype), _running.PARAMS
    )
    loss = jnp.ones(team.num_workers, jnp.float32)
    try:
      state = jax.eval_shape(team.spmd(optimizer.init), params)
    except ValueError as error:  # Some are for real numbers alone.
      assert dtype == "complex64" and "`" in str(error)
      return
    found = jax.eval_shape(team.spmd(run), params, state, loss)
  assert [kinds(x) for x in found] == [
    kinds(x) for x in (params, state, params, state, params)
  ]
