"""Chains that decide by all leaves match the unsplit model in a pipeline.

This holds in one program and in processes, in float64.
"""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jdist
from jdist import collectives, models, pipeline, transforms
from jdist.pipeline.runtime import _device_program, _stage_arrays
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_MICRO, _COUNT, _STEPS = _training.MICRO, 2, 4
_SGD = optax.sgd(0.5, momentum=0.9)


def _one(params):
  """Marks the second layer alone, which belongs to another stage."""
  return {
    name: jax.tree.map(lambda _, name=name: name == "dense1", tree)
    for name, tree in params.items()
  }


_CHAINS = {
  "clip": optax.chain(optax.clip_by_global_norm(0.05), _SGD),
  "finite": optax.apply_if_finite(optax.adam(0.05), 3),
  "mask by name": optax.adamw(0.01, weight_decay=0.5, mask=_one),
  "normalize": optax.chain(optax.normalize_by_update_norm(), _SGD),
  "prodigy": contrib.prodigy(1.0),
  "polyak": optax.polyak_sgd(1.0),
  "dog": contrib.dog(1.0),
  "clip and LAMB": optax.chain(
    optax.clip_by_global_norm(0.05), optax.lamb(0.1)
  ),
  "steps": optax.MultiSteps(
    optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
  ).gradient_transformation(),
  "freeze by name": optax.partition(
    {"a": _SGD, "b": optax.set_to_zero()},
    lambda p: {k: "b" if k == "dense1" else "a" for k in p},
  ),
}  # fmt: skip
_CHEAP = ("clip",)


def _layers(sizes):
  return small.layers(sizes, dtype=jnp.float64)


def _batches(sizes, workers=1, number=_STEPS):
  return small.batches(
    number, workers, _MICRO * _COUNT, sizes, dtype=np.float64
  )


def _unsplit(*args, loss=None):
  state, _ = _training.unsplit(*args, loss=loss)
  return _training.of_worker(state)[0]


def _one_program(layers, table, chain, batches, sizes, workers=1, **options):
  dtype = batches[0]["x"].dtype
  pipe = _training.one_program(
    layers,
    table,
    microbatch=_training.microbatch(sizes, dtype=dtype),
    **options,
  )
  state, _ = _training.train(
    pipe, chain, batches, workers, drained=pipe.grid.behind > 0
  )
  return _training.split(pipe, state)[0], state


def _averaged(name):
  return lambda axis: optax.chain(
    transforms.average_gradients(axis), _CHAINS[name]
  )


def _slow(names, cheap=_CHEAP):
  return [
    x if x in cheap else pytest.param(x, marks=pytest.mark.slow) for x in names
  ]


@pytest.mark.parametrize("name", _slow(_CHAINS))
@pytest.mark.parametrize(
  ("table", "sizes"),
  [
    (("1f1b", 2, _COUNT), small.SIZES[:3]),
    *(
      pytest.param(table, sizes, marks=pytest.mark.slow)
      for table, sizes in (
        (("interleaved", 2, _COUNT), small.SIZES),
        (("1f1b", 2, _COUNT), small.UNLIKE[:3]),
      )
    ),
  ],
  ids=["equal", "interleaved", "unlike"],
)
def test_one_program_matches_unsplit_model(name, table, sizes):
  if sizes == small.UNLIKE[:3] and ("LAMB" in name or "by name" in name):
    pytest.skip("refused by name: tests/pipeline/runtime/test_chains.py")
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    layers, batches = _layers(sizes), _batches(sizes)
    table = pipeline.make_table(*table)
    found, _ = _one_program(layers, table, _averaged(name), batches, sizes)
    wanted = _unsplit(layers, _averaged(name), batches, _COUNT)
    assert small.error(found, wanted) < 1e-12


# Polyak's rule needs the loss, which a process does not pass to its optimizer.
@pytest.mark.parametrize("name", _slow(x for x in _CHAINS if x != "polyak"))
def test_processes_match_unsplit_model(name):
  sizes = small.UNLIKE
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    layers, batches = _layers(sizes), _batches(sizes)
    wanted = _unsplit(layers, lambda axis: _CHAINS[name], batches, _COUNT)
  found = _processes(layers, ("1f1b", 3, _COUNT), _CHAINS[name], batches, sizes)
  assert small.error(found, wanted) < 1e-12


def _processes(layers, table, optimizer, batches, sizes, cuts=3):
  def work(process, _):
    state = process.init_state(optimizer)
    state, _ = process.run(state, _training.of_first(batches))
    return process.gather(state)[0]

  with jax.enable_x64(True):
    shapes = _training.microbatch(sizes, dtype=np.float64)
  return _training.processes(
    layers, pipeline.make_table(*table), work, cuts=cuts, microbatch=shapes,
    x64=True, promotion="standard",
  )[0]  # fmt: skip


@pytest.mark.slow
def test_device_with_several_stages_sends_all_of_them():
  sizes, name = small.SIZES, "clip"
  with jax.enable_x64(True):
    layers, batches = _layers(sizes), _batches(sizes)
    wanted = _unsplit(layers, lambda axis: _CHAINS[name], batches, _COUNT)
  found = _processes(
    layers, ("interleaved", 2, _COUNT), _CHAINS[name], batches, sizes, 4
  )
  assert small.error(found, wanted) < 1e-12


def _steep(slope):
  """Makes layers `tanh(x + sqrt(a))`, the last one of infinite slope at 0."""

  def layer(name, start):
    def apply(params, state, x, *, train, mask=None):
      del train, mask
      return jnp.tanh(x + jnp.sqrt(params[name]["a"])), state

    return models.Layer(name, {name: {"a": jnp.full(8, start)}}, {}, apply)

  return [layer("a", 1.0), layer("b", slope)]


def test_apply_if_finite_agrees_over_stages():
  sizes = (8, 8)
  chain = optax.apply_if_finite(optax.sgd(0.1), 3)
  with jax.enable_x64(True):
    batches = _batches(sizes, number=2)
    for slope, moves in ((0.0, False), (0.5, True)):
      layers = _steep(slope)
      before = small.merged(layers)[0]
      found, state = _one_program(
        layers,
        pipeline.make_table("1f1b", 2, _COUNT),
        lambda axis: optax.chain(transforms.average_gradients(axis), chain),
        batches,
        sizes,
      )
      for key in "ab":  # The first stage's gradient is finite in both.
        same = bool((found[key]["a"] == before[key]["a"]).all())
        assert same != moves
      count = optax.tree_utils.tree_get(state.opt_state, "total_notfinite")
      assert count.tolist() == [0 if moves else 2]


def _guarded(axis):
  return optax.chain(
    transforms.skip_nonfinite(axis),
    transforms.average_gradients(axis),
    optax.sgd(0.1),
  )


def test_skip_nonfinite_agrees_over_stages():
  layers, table = _steep(0.0), pipeline.make_table("1f1b", 2, _COUNT)
  batches = small.batches(2, 1, _MICRO * _COUNT, (8, 8))
  found, state = _one_program(layers, table, _guarded, batches, (8, 8))
  assert small.error(found, small.merged(layers)[0]) == 0.0
  assert transforms.skipped(state.opt_state).tolist() == [2]
  moved, state = _one_program(_steep(0.5), table, _guarded, batches, (8, 8))
  assert transforms.skipped(state.opt_state).tolist() == [0]
  assert small.error(moved, found) > 1e-3


@pytest.mark.slow
def test_clip_local_uses_the_norm_of_all_stages():
  layers = small.layers()
  batches = small.batches(3, 2, _MICRO * _COUNT)

  def chain(axis):
    return optax.chain(
      transforms.clip_local(0.02, axis),
      transforms.average_gradients(axis),
      optax.sgd(0.5),
    )

  table = pipeline.make_table("1f1b", 4, _COUNT)
  found, _ = _one_program(layers, table, chain, batches, small.SIZES, 2)
  wanted = _unsplit(layers, chain, batches, _COUNT, 2)
  # Clipping each stage by its own norm would give other numbers.
  assert small.error(found, wanted) < 1e-5


@pytest.mark.slow
def test_tied_leaves_count_once():
  sizes = small.SIZES
  layers = [
    models.Layer(
      x.name, jax.tree.map(lambda v: v.astype(jnp.float32), x.params), {},
      x.apply,
    )
    for x in small.tied_layers()
  ]  # fmt: skip
  batches = small.batches(_STEPS, 1, _MICRO * _COUNT, sizes)
  found, _ = _one_program(
    layers,
    pipeline.make_table("1f1b", 3, _COUNT),
    _averaged("clip"),
    batches,
    sizes,
  )
  loss = small.chain_loss(layers)
  wanted = _unsplit(layers, _averaged("clip"), batches, _COUNT, loss=loss)
  assert small.error(found, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("form", ["workers", "inside local steps", "Muon"])
def test_explicit_whole_model_accepts_unlike_stages(form):
  sizes, inside = small.UNLIKE[:3], _CHAINS["clip"]

  def chain(whole, axis):
    if form == "inside local steps":
      return jdist.local_sgd(whole(inside), 2, axis=axis)
    optimizer = whole(contrib.muon(0.05) if form == "Muon" else inside)
    return optax.chain(transforms.average_gradients(axis), optimizer)

  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    layers, batches = _layers(sizes), _batches(sizes, 2)
    found, _ = _one_program(
      layers,
      pipeline.make_table("1f1b", 2, _COUNT),
      functools.partial(chain, pipeline.whole_model),
      batches,
      sizes,
      2,
    )
    wanted = _unsplit(
      layers, functools.partial(chain, lambda x: x), batches, _COUNT, 2
    )
    # The anchor of local steps is float32.
    rtol = 1e-6 if form == "inside local steps" else 1e-12
    assert small.error(found, wanted) < rtol


@pytest.mark.slow
def test_prediction_accepts_clipping_inside():
  sizes, table = small.SIZES[:3], pipeline.ours(2, _COUNT, window=2)
  layers = small.layers(sizes)
  batches = small.batches(6, 1, _MICRO * _COUNT, sizes)

  def chain(axis):
    inside = pipeline.whole_model(_CHAINS["clip"])
    return jdist.ssgd(transforms.predict_weights(inside, 1), axis=axis)

  found, _ = _one_program(
    layers, table, chain, batches, sizes, late_sends=False
  )
  delayed = transforms.delay_gradients(chain(None), 1)
  state, _ = _training.unsplit(layers, lambda axis: delayed, batches, _COUNT)
  one = jax.tree.map(lambda x: x[0], state)
  wanted, _ = transforms.drain(delayed, one.opt_state, one.params)
  assert small.error(found, wanted) < 1e-5


@jax.numpy_dtype_promotion("standard")  # Adam mixes dtypes.
def test_state_is_stored_in_equal_parts():
  sizes = small.SIZES[:3]
  layers = small.layers(sizes)
  _, state = _one_program(
    layers,
    pipeline.make_table("1f1b", 2, _COUNT),
    _averaged("finite"),
    small.batches(1, 1, _MICRO * _COUNT, sizes),
    sizes,
  )
  moments = [x for x in jax.tree.leaves(state.opt_state.inner) if x.ndim > 2]
  # Two matrices of 64 numbers have two moments each, half on each device.
  assert [x.shape for x in moments] == [(1, 2, 32)] * 4
  for x in moments:
    assert {s.data.shape for s in x.addressable_shards} == {(1, 1, 32)}


def test_norm_within_a_whole_model_counts_each_stage_once():
  layers = small.layers((4, 4, 4))
  params = _stage_arrays.StageArrays([x.params for x in layers], 2)
  layout = _device_program.Layout(layers, params, "stage")
  inside = transforms.clip_local(0.1, None)
  optimizer = pipeline.whole_model(inside)

  def update(own):
    with collectives.model_parts("stage"), _device_program.layout_of(layout):
      return optimizer.update(own, optimizer.init(own), own)[0]

  found = jax.jit(jax.vmap(update, axis_name="stage"))(
    params.join([x.params for x in layers])
  )
  wanted, _ = inside.update(small.merged(layers)[0], optax.EmptyState())
  assert small.error(small.merge(params.split(found)), wanted) < 1e-6


def _sent(optimizer):
  """Counts the collectives of a step."""
  sizes = small.SIZES[:3]
  pipe = _training.one_program(
    small.layers(sizes), pipeline.make_table("1f1b", 2, _COUNT), sizes
  )
  team = _training.team_of(pipe)
  optimizer = jdist.ssgd(optimizer, axis=team.axis)
  state = pipe.init_state(team, optimizer)
  (batch,) = small.batches(1, 1, _MICRO * _COUNT, sizes)
  step = team.spmd(pipe.make_step(optimizer, axis=team.axis))
  text = str(jax.make_jaxpr(step)(state, batch))
  kinds = ("all_gather[", "psum", "ppermute[", "all_to_all[", "reduce_scatter[")
  return {kind: text.count(kind) for kind in kinds}


@jax.numpy_dtype_promotion("standard")
def test_elementwise_chains_communicate_nothing_over_stages():
  nothing = _sent(optax.identity())
  assert not nothing["all_gather["] and nothing["ppermute["]
  assert _sent(_SGD) == _sent(optax.adam(0.1)) == nothing
  # The gradient, the parameters in update and init, and momentum are gathered.
  assert _sent(_CHAINS["clip"])["all_gather["] == 4


def test_rounds_and_predictions_inside_raise():
  pipe = _training.one_program(
    small.layers(), pipeline.make_table("1f1b", 2, _COUNT)
  )
  team = _training.team_of(pipe)
  for chain, words in (
    (
      jdist.local_sgd(_CHAINS["clip"], 2, axis=team.axis),
      "neither rounds nor predicted weights.* got one with LocalSteps.*whole_",
    ),
    (
      jdist.ssgd(
        transforms.predict_weights(_CHAINS["clip"], 1), axis=team.axis
      ),
      "got one with PredictWeightsState",
    ),
  ):
    with pytest.raises(ValueError, match=words):
      pipe.init_state(team, chain)


@pytest.mark.parametrize("devices", [1, 3])
def test_state_of_any_size_is_cut_and_joined(devices):
  arrays = types.SimpleNamespace(num_devices=devices)
  layout = _device_program.Layout((), arrays, "stage")
  state = {
    "seven": jnp.arange(7.0),
    "four": jnp.ones((2, 2)),
    "count": jnp.array(5),
  }

  def there_and_back(_):
    parts = layout.cut(state)
    return parts, layout.joined(parts, state)

  parts, found = jax.vmap(there_and_back, axis_name="stage")(
    jnp.arange(devices)
  )
  assert parts["seven"].shape == (devices, -(-7 // devices))
  for device in range(devices):
    one = jax.tree.map(lambda x, i=device: x[i], found)
    chex.assert_trees_all_equal(one, state)
