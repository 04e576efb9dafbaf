"""Layers move between processes without changing the training."""

import dataclasses
import unittest.mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, models, pipeline, reducers
from jdist.pipeline.processes import _peers
from tests.experiments import _loading
from tests.pipeline.processes._threads import in_threads
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

layer_moves = _loading.alone("layer_moves", "pipeline/layer_moves.py")

_MICRO = _training.MICRO
_SIZES = small.UNLIKE
_OURS = pipeline.ours(2, 2, window=2, num_iterations=2)


def _batches(dtype=np.float32):
  found = small.batches(6, 1, _MICRO * 2, _SIZES, dtype)
  return _training.of_first(found)


def _optimizer():
  rate = optax.constant_schedule(0.1)
  return optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(rate))


def _process(peers, cuts, table=_OURS, layers=None, dtype=jnp.float32):
  layers = layers or small.layers(_SIZES, statistics=True, dtype=dtype)
  batch = _training.microbatch(_SIZES, dtype=dtype)
  return _training.process(
    layers, table, cuts=cuts, microbatch=batch, peers=peers
  )


def _model(process, state):
  """Returns all layers' parameters and state, and the counts."""
  counts = [np.asarray(x[1].count) for x in state.opt_state.values()]
  return jax.device_get(process.gather(state)), counts


def test_training_continues_with_the_same_numbers():
  def train(peers):
    with jax.enable_x64(True):
      first = _process(peers, [1], dtype=jnp.float64)
      second = _process(peers, [3], dtype=jnp.float64)
      batches = _batches(np.float64)
      kept = first.init_state(_optimizer())
      kept, losses = first.run(kept, batches)
      state = first.init_state(_optimizer())
      state, found = first.run(state, batches[:2])
      # Layers go from the second process to the first, and back.
      state = layer_moves.move_layers(state, first, second, _optimizer())
      assert len(state.params[peers.device]) == (3, 1)[peers.device]
      state, more = second.run(state, batches[2:4])
      state = layer_moves.move_layers(state, second, first, _optimizer())
      state, rest = first.run(state, batches[4:])
      return (
        _model(first, kept),
        _model(first, state),
        losses,
        found + more + rest,
      )

  for wanted, moved, losses, found in in_threads(2, train):
    assert small.error(moved[0], wanted[0]) < 1e-12
    assert moved[1] == wanted[1] == [6]
    for a, b in zip(found, losses, strict=True):
      assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)


def test_moved_layers_keep_their_bits():
  chunks = pipeline.make_table("interleaved", 2, 2, num_chunks=2)
  swapped = pipeline.make_table("1f1b", 2, 2)
  swapped = dataclasses.replace(swapped, devices=swapped.devices[::-1])

  def work(peers):
    first = _process(peers, 4, chunks)
    second = _process(peers, [2], swapped)
    state = first.init_state(_optimizer())
    state, _ = first.run(state, _batches()[:1])
    before = jax.device_get((state.params, state.opt_state, state.model_state))
    state = layer_moves.move_layers(state, first, second, _optimizer())
    assert list(state.params) == [1 - peers.device]
    state = layer_moves.move_layers(state, second, first, _optimizer())
    after = jax.device_get((state.params, state.opt_state, state.model_state))
    # Stages of one device share no array that an update donates.
    state, _ = first.run(state, _batches()[:1])
    return before, after

  for before, after in in_threads(2, work):
    assert jax.tree.structure(before) == jax.tree.structure(after)
    chex.assert_trees_all_equal(before, after)


def test_tied_parameters_move_to_each_stage_that_has_them():
  def work(peers):
    layers = small.tied_layers()
    table = pipeline.make_table("1f1b", 2, 2)
    batch = small.batches(1, 1, _MICRO * 2)[0]
    batch = {"x": batch["x"][0], "y": batch["x"][0]}
    found = []
    for cuts in ([1], [2]):
      found.append(
        _training.process(layers, table, (8, 8), cuts=cuts, peers=peers)
      )
    first, second = found
    state, _ = first.run(first.init_state(_optimizer()), [batch])
    with unittest.mock.patch.object(peers, "send", wraps=peers.send) as send:
      moved = layer_moves.move_layers(state, first, second, _optimizer())
      sent = [call.args[1:] for call in send.mock_calls]
    moved, _ = second.run(moved, [batch])
    trained, _ = first.run(first.init_state(_optimizer()), [batch] * 2)
    return (
      second.gather(moved),
      first.gather(trained),
      [arrays for tag, arrays in sent if tag.kind == _peers.Kind.LAYERS],
    )

  for device, (moved, wanted, sent) in enumerate(in_threads(2, work)):
    assert small.error(moved, wanted) < 1e-5
    # Only the layer between and its momentum are sent, because both devices
    # have the tied matrix already.
    shapes = [[x.shape for x in arrays] for arrays in sent]
    assert shapes == ([] if device == 0 else [[(6, 6), (6, 6)]])


def test_feedback_of_edges_begins_anew_where_layers_have_moved():
  """The outputs between the new stages have other shapes."""

  def work(peers):
    edges = reducers.MessageCodec(codecs.Quantize(4), reducers.ErrorFeedback())
    first, second = (
      _training.process(
        small.layers(_SIZES), _OURS, _SIZES, cuts=cuts, peers=peers, edges=edges
      )
      for cuts in ([1], [3])
    )
    state = first.init_state(_optimizer())
    state = layer_moves.move_layers(state, first, second, _optimizer())
    chex.assert_trees_all_equal(
      state.edges, second.init_state(_optimizer()).edges
    )

  in_threads(2, work)


def _all_leaves():
  """Makes a chain that clips by the global norm and keeps a random key."""

  def update(grads, key, params=None):
    del params
    key, now = jax.random.split(key)
    return jax.tree.map(lambda g: g * jax.random.uniform(now), grads), key

  scaled = optax.GradientTransformation(lambda _: jax.random.key(5), update)
  return optax.chain(
    optax.clip_by_global_norm(0.05), scaled, optax.trace(0.9), optax.scale(-0.1)
  )


def test_state_of_an_optimizer_of_all_leaves_moves_to_the_first_stage():
  tables = [pipeline.make_table("1f1b", 2, 2)]
  tables += [dataclasses.replace(tables[0], devices=tables[0].devices[::-1])]

  def train(peers):
    with jax.enable_x64(True):
      first, second, third = (
        _process(peers, cuts, table, dtype=jnp.float64)
        for cuts, table in (
          ([1], tables[0]),
          ([3], tables[0]),
          ([2], tables[1]),
        )
      )
      batches = _batches(np.float64)
      kept, losses = first.run(first.init_state(_all_leaves()), batches)
      state, found = first.run(first.init_state(_all_leaves()), batches[:2])
      # The first move takes layers alone, the second one the first stage, too.
      state = layer_moves.move_layers(state, first, second, _all_leaves())
      state, more = second.run(state, batches[2:4])
      state = layer_moves.move_layers(state, second, third, _all_leaves())
      assert list(state.params) == [1 - peers.device]
      state, rest = third.run(state, batches[4:])
      return (
        first.gather(kept),
        third.gather(state),
        losses,
        found + more + rest,
      )

  for kept, moved, losses, found in in_threads(2, train):
    assert small.error(moved, kept) < 1e-12
    for a, b in zip(found, losses, strict=True):
      assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)


def _alone(layers=None, cuts=2):
  table = pipeline.make_table("interleaved", 1, 2, num_chunks=2)
  return _process(None, cuts, table, layers)


def _flat():
  def init(params):
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(params)])

  def update(grads, state, params=None):
    del params
    return grads, state

  return optax.GradientTransformation(init, update)


def test_indivisible_optimizer_state_raises():
  first, second = _alone(cuts=[1]), _alone(cuts=[3])
  state = first.init_state(_flat())
  with pytest.raises(ValueError, match="leaves besides those of parameters"):
    layer_moves.move_layers(state, first, second, _flat())
  state = first.init_state(_optimizer())
  other = state.opt_state[0][1]._replace(count=jnp.int32(7))
  wrong = dict(state.opt_state) | {0: (state.opt_state[0][0], other)}
  with pytest.raises(ValueError, match="others in stages 0 and 1"):
    layer_moves.move_layers(
      state._replace(opt_state=wrong), first, second, _optimizer()
    )
  with pytest.raises(ValueError, match="the same layers and peers"):
    renamed = small.layers(_SIZES, statistics=True)
    renamed[3] = dataclasses.replace(renamed[3], name="other")
    layer_moves.move_layers(state, first, _alone(renamed), _optimizer())


@pytest.mark.parametrize("name", ("before", "after"))
def test_processes_of_another_type_raise(name):
  process = _alone(small.layers(_SIZES, statistics=True))
  state = process.init_state(_optimizer())
  given = {"before": process, "after": process} | {name: "process"}
  with pytest.raises(ValueError, match=f"`{name}` must be a `pipeline.Stage"):
    layer_moves.move_layers(state, optimizer=_optimizer(), **given)


def test_layers_without_names_raise():
  def apply(params, state, x, **_):
    return x @ params, state

  layers = [
    models.Layer(f"{i}", jnp.eye(6, size), {}, apply)
    for i, size in enumerate((6, 5))
  ]
  process = _alone(layers)
  state = process.init_state(_optimizer())
  with pytest.raises(ValueError, match="must have dicts of parameters"):
    layer_moves.move_layers(state, process, process, _optimizer())
