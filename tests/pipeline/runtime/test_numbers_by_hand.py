"""Numbers of both runtimes by hand: keys, norms, versions and bytes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import pipeline, training, transforms
from jdist.pipeline.runtime import _chain_check, _device_state, _traced_model
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


def test_a_tied_leaf_counts_once_in_a_workers_clipped_norm():
  def needs_all(chain, tied):
    return _chain_check.needs_all(
      chain, num_parts=1, num_stages=2, tied=tied, one_program=True
    )

  clipped = optax.chain(transforms.clip_local(1.0, None), optax.sgd(0.1))
  assert needs_all(clipped, True) and not needs_all(clipped, False)
  assert not needs_all(optax.sgd(0.1), True)


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
