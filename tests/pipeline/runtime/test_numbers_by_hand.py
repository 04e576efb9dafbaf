"""Numbers of both runtimes by hand: keys, norms, versions and bytes."""

import functools
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import models, pipeline, training, transforms
from jdist.pipeline.processes import _stage_updates
from jdist.pipeline.runtime import (
  _chain_check,
  _device_state,
  _stage_arrays,
  _traced_model,
)
from tests import _refusals
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training


@pytest.mark.parametrize("count", [1, 2])
def test_only_several_micro_batches_have_keys_of_their_own(count):
  key = jax.random.key(3)
  found = _traced_model.microbatch_key(key, 5, np.arange(2), 0, count)
  for worker in range(2):
    wanted = jax.random.fold_in(jax.random.fold_in(key, 5), worker)
    # One micro-batch draws what the unsplit model draws.
    wanted = jax.random.fold_in(wanted, 0) if count > 1 else wanted
    assert found[worker] == wanted


@pytest.mark.parametrize(
  ("squared", "scale"), [(16.0, 0.5), (4.0, 1.0), (1.0, 1.0), (0.0, 1.0)]
)
def test_only_norms_beyond_the_greatest_are_scaled(squared, scale):
  assert _traced_model.clip_scale(jnp.float32(squared), 2.0) == scale


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_message_has_the_dtype_of_outputs_and_the_size_of_the_largest(dtype):
  outputs = [jax.ShapeDtypeStruct(x, dtype) for x in ((2, 3), (5,))]
  message = _stage_arrays.Message(outputs)
  assert (message.dtype, message.size) == (dtype, 6)
  alone = _stage_arrays.Message([])
  assert (alone.dtype, alone.size) == ("float32", 1)


def test_a_tied_leaf_counts_once_in_a_workers_clipped_norm():
  def needs_all(chain, tied):
    return _chain_check.needs_all(
      chain, num_parts=1, num_stages=2, tied=tied, one_program=True
    )

  clipped = optax.chain(transforms.clip_local(1.0, None), optax.sgd(0.1))
  assert needs_all(clipped, True) and not needs_all(clipped, False)
  assert not needs_all(optax.sgd(0.1), True)


def _in_partial():
  clip = optax.clip_by_global_norm(1.0)
  return clip._replace(update=functools.partial(clip.update))


def _in_keyword():
  def update(updates, state, params=None, *, inner):
    return inner.update(updates, state, params)

  clip = optax.clip_by_global_norm(1.0)
  return clip._replace(update=functools.partial(update, inner=clip))


def _in_argument():
  clip = optax.clip_by_global_norm(1.0)
  return clip._replace(update=functools.partial(map, clip.update))


def _behind_an_empty_cell():
  def update(updates, state, params=None):
    return (clip if unset is None else absent).update(updates, state, params)

  clip, unset = optax.clip_by_global_norm(1.0), None
  if unset is not None:
    absent = clip
  return clip._replace(update=update)


def _in_an_object():
  return types.SimpleNamespace(parts={"a": optax.clip_by_global_norm(1.0)})


@pytest.mark.parametrize(
  "make",
  [
    _in_partial,
    _in_keyword,
    _in_argument,
    _behind_an_empty_cell,
    _in_an_object,
  ],
)
def test_norm_over_all_leaves_is_found_wherever_it_is_held(make):
  for parts, found in ((1, False), (2, True)):
    assert found == _chain_check.needs_all(
      make(), num_parts=parts, num_stages=2, tied=False, one_program=False
    )


def test_run_that_continues_reads_the_prediction():
  inner = transforms.predict_weights(optax.sgd(0.1, momentum=0.9), 2)
  params = {"a": jnp.ones(2)}
  _, moving = inner.update({"a": jnp.ones(2)}, inner.init(params), params)
  kept = _device_state.InFlightState(moving, jnp.int32(1), (), ())
  state = training.TrainState(jnp.int32(1), params, kept, {}, None)
  found = _device_state.carried_over(state, state, 2).opt_state.older
  wanted = transforms.predicted_weights(moving, params)
  assert small.error(wanted, params) > 0.01
  assert len(found) == 2
  for version in found:
    chex.assert_trees_all_equal(version, wanted)


def test_first_steps_change_neither_updates_nor_the_optimizer():
  layers = small.layers((8, 8, 8))
  pipe = _training.one_program(
    layers, pipeline.ours(2, 1, window=2), (8, 8), late_sends=False
  )
  assert pipe.grid.behind == pipe.grid.delay == 1
  params, ones = layers[0].params, jax.tree.map(jnp.ones_like, layers[0].params)
  decay, counts = optax.add_decayed_weights(0.5), lambda count: -0.1
  chain = optax.chain(decay, optax.scale_by_schedule(counts))
  first, older = chain.init(params), (ones,)
  for step in range(2):
    state = _device_state.InFlightState(first, jnp.int32(step), older, ())
    updates, state = pipe._program.optimizer(chain).update(ones, state, params)
    # The step that completes the first gradient is number `behind`.
    still = step < pipe.grid.behind
    assert state.step == step + 1
    assert int(state.inner[1].count) == int(not still)
    assert bool(optax.tree.norm(updates) == 0) == still
    chex.assert_trees_all_equal(state.older, older if still else (params,))


def test_bytes_of_a_tick_are_those_of_the_largest_output():
  layers = small.layers((8, 4, 6, 8))
  pipe = _training.one_program(
    layers, pipeline.make_table("1f1b", 3, 2), (8, 8)
  )
  assert pipe.sent_bytes == _training.MICRO * 6 * 4


def test_norm_of_narrow_gradients_is_that_of_their_wide_squares():
  # In bfloat16 the square of 1.0078125 = 1 + 2**-7 would lose its 2**-14.
  x = jnp.full(2, 1 + 2.0**-7, jnp.bfloat16)
  found = _traced_model.squared_norm({"x": x})
  assert found == 2 * (1 + 2.0**-7) ** 2


@pytest.mark.parametrize("runtime", ["one program", "process"])
def test_run_begins_with_the_given_parameters_and_state(runtime):
  layers = small.layers((4, 4), statistics=True)
  params, state = (
    jax.tree.map(lambda x: x + 1.0, tree) for tree in small.merged(layers)
  )
  table = pipeline.make_table("1f1b", 1, 2)
  if runtime == "one program":
    pipe = _training.one_program(layers, table, (4, 4))
    team = _training.team_of(pipe)
    begun = pipe.init_state(team, optax.sgd(0.1), params, state)
    found = _training.split(pipe, begun)
  else:
    process = _training.process(layers, table, (4, 4))
    begun = process.init_state(optax.sgd(0.1), params, state)
    found = process.gather(begun)
  chex.assert_trees_all_equal(found, (params, state))


def test_layers_of_a_stage_see_their_own_parameters_only():
  """A layer may add up all that it is given, as weight decay does."""

  def total(params, state, x, **_):
    return x + sum(jax.tree.leaves(params)), state

  layers = [
    models.Layer(n, {n: jnp.float32(i)}, {}, total) for i, n in enumerate("abc")
  ]
  (stage,) = pipeline.cut_layers(layers, 1)
  found, _ = stage.apply(stage.params, {}, jnp.float32(10.0), train=True)
  assert found == 10.0 + 0.0 + 1.0 + 2.0


def test_optimizer_whose_state_changes_its_form_is_refused():
  """The next iteration would fail deep inside, or compile again."""
  growing = optax.GradientTransformation(
    lambda _: jnp.zeros(()), lambda updates, state, params=None: (updates, ())
  )
  (stage,) = pipeline.cut_layers(small.layers((4, 4)), 1)
  program = _stage_updates.UpdateProgram(growing, [stage], 1)
  grads = jax.tree.map(jnp.ones_like, stage.params)
  with _refusals.refused("optimizer.update", "must keep its state's form"):
    program.update(
      grads, program.init(stage.params), stage.params, {}, jnp.ones(())
    )


def _held_by(name):
  """Returns a chain with a function of this factory, as Optax's chains have."""

  def update():
    """Is found by its name alone."""

  update.__qualname__ = f"{name}.<locals>.update_fn"
  return types.SimpleNamespace(update=update)


def _needs_all(name, **options):
  usual = {
    "num_parts": 1, "num_stages": 2, "tied": False, "one_program": False
  }  # fmt: skip
  return _chain_check.needs_all(_held_by(name), **usual | options)


@pytest.mark.parametrize(
  "name",
  [
    "add_noise", "apply_if_finite", "clip_by_global_norm", "dadapt_adamw",
    "differentially_private_aggregate", "dog", "dowg", "flatten",
    "hutchinson_estimator_diag_hessian", "mechanize", "momo", "momo_adam",
    "normalize_by_update_norm", "polyak_sgd", "prodigy", "sam",
    "scale_by_backtracking_linesearch", "scale_by_dog", "scale_by_lbfgs",
    "scale_by_polyak", "scale_by_zoom_linesearch", "skip_large_updates",
    "skip_not_finite",
  ],
)  # fmt: skip
def test_factory_that_decides_by_all_leaves_has_to_see_them(name):
  assert _needs_all(name, num_parts=2) and _needs_all(name, tied=True)
  assert _needs_all(name, num_parts=2, one_program=True)
  assert not _needs_all(name) and not _needs_all("scale_by_adam", num_parts=2)


@pytest.mark.parametrize("name", ["skip_nonfinite", "clip_local"])
def test_factory_that_agrees_over_stages_does_so_in_one_program_alone(name):
  assert _needs_all(name, num_parts=2)
  assert not _needs_all(name, num_parts=2, one_program=True)
  assert _needs_all(name, tied=True) == (name == "clip_local")


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("muon", "Muon"), ("scale_by_muon", "Muon"), ("lars", "LARS or LAMB"),
    ("lamb", "LARS or LAMB"), ("fromage", "LARS or LAMB"),
    ("scale_by_trust_ratio", "LARS or LAMB"), ("adafactor", "Adafactor"),
    ("scale_by_factored_rms", "Adafactor"), ("novograd", "NovoGrad"),
    ("scale_by_novograd", "NovoGrad"), ("sm3", "SM3"), ("scale_by_sm3", "SM3"),
    ("PowerSGD", "PowerSGD"), ("PerLeaf", "a policy per leaf"),
    ("partition", "a partition of leaves"),
    ("multi_transform", "a partition of leaves"), ("masked", "a mask"),
    ("adaptive_grad_clip", "adaptive_grad_clip"),
    ("clip_by_block_rms", "clip_by_block_rms"), ("centralize", "centralize"),
  ],
)  # fmt: skip
def test_factory_that_needs_whole_leaves_has_a_word(name, kind):
  found = frozenset(_chain_check._names(_held_by(name), set()))
  assert _chain_check._kinds(found) == [kind]
  # In one program a stage's leaves have lost their names.
  by_name = kind in ("a partition of leaves", "a mask")
  assert _needs_all(name, one_program=True) == by_name
  assert not _needs_all(name, one_program=True, num_stages=1)
