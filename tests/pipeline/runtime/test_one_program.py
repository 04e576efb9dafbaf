"""A pipeline in one program matches the unsplit model, late or not."""

import collections as counting
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import models, pipeline, training, transforms
from jdist.pipeline.runtime import _device_state, _grid, _stages
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_MICRO = _training.MICRO
_momentum, _split, _of = (
  _training.momentum, _training.split, _training.of_worker,
)  # fmt: skip


def _pipe(table, sizes=small.SIZES, *, statistics=False, **options):
  layers = small.layers(sizes, statistics=statistics)
  return _training.one_program(layers, table, sizes, **options), layers


@pytest.mark.parametrize("late", [False, True])
def test_ticks_update_rings_in_place(late):
  pipe, _ = _pipe(pipeline.make_table("zb_h1", 2, 4), late_sends=late)
  team, optimizer = _training.team_of(pipe), _momentum("worker")
  state = pipe.abstract_state(team, optimizer)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((1, 4 * x.shape[0], *x.shape[1:]), x.dtype),
    _training.microbatch(),
  )
  step = _training.compiled_step(pipe, team, optimizer, state)
  text = step.lower(state, batch).compile().as_text()
  flight = jax.eval_shape(pipe._ticks.start)
  copied = set(re.findall(r"= (\w+)\[([\d,]*)\]\S* copy\(", text))
  for ring in (flight.inputs, flight.gradients, *flight.stash.values()):
    assert ("f32", ",".join(map(str, ring.shape))) not in copied


@pytest.mark.parametrize(("name", "versions"), [("1f1b", 0), ("2bw", 1)])
def test_state_keeps_as_many_older_versions_as_gradients_are_late(
  name, versions
):
  pipe, _ = _pipe(pipeline.make_table(name, 2, 2))
  state = pipe.abstract_state(_training.team_of(pipe), _momentum("worker"))
  assert len(state.opt_state.older) == versions == pipe.grid.delay


def test_whole_backward_passes_leave_nothing_between_two_parts():
  pipe, _ = _pipe(pipeline.make_table("1f1b", 2, 4))
  assert not jax.tree.leaves(jax.eval_shape(pipe._ticks.start).stash)


@pytest.mark.parametrize(
  ("table", "sizes", "late"),
  [
    (("1f1b", 4, 8), small.SIZES, True),
    (("zb_h1", 2, 4), small.UNLIKE, False),
    (("interleaved", 2, 4), small.SIZES, True),
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in [
        (("gpipe", 2, 4), small.SIZES, False),
        (("1f1b", 4, 4), small.UNLIKE, False),
        (("zb_h1", 4, 4), small.SIZES, True),
        (("naive", 2, 1), small.UNLIKE, True),
        (("1f1b", 1, 4), small.SIZES, True),
        (("interleaved", 1, 2), small.SIZES, True),
      ]
    ),
  ],
  ids=str,
)
def test_synchronous_table_matches_unsplit_model(table, sizes, late):
  made = pipeline.make_table(*table)
  pipe, layers = _pipe(made, sizes, statistics=True, late_sends=late)
  batches = small.batches(3, 1, _MICRO * made.num_microbatches, sizes)
  state, losses = _training.train(pipe, _momentum, batches)
  wanted, wanted_losses = _training.unsplit(
    layers, _momentum, batches, made.num_microbatches
  )
  assert small.error(_split(pipe, state), _of(wanted)) < 1e-5
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)


def test_weight_part_of_the_last_stage_reads_its_own_state():
  # The gradient of `b` is a product with the scale, and later micro-batches
  # change the scale before the weight part runs.
  def apply(params, state, x, *, train, mask=None):
    del train, mask
    w, scale = params["last"], state["last"]["scale"]
    y = jnp.tanh(x @ w["w"] + w["b"] * scale)
    return y, {"last": {"scale": scale + 0.5}}

  params = {"last": {"w": jnp.eye(8) / 2, "b": jnp.zeros(8)}}
  last = models.Layer("last", params, {"last": {"scale": jnp.ones(8)}}, apply)
  layers = [*small.layers((8, 8)), last]
  made = pipeline.make_table("zb_h1", 2, 4)
  pipe = _training.one_program(layers, made, (8, 8))
  batches = small.batches(2, 1, _MICRO * 4, (8, 8))
  state, _ = _training.train(pipe, _momentum, batches)
  wanted, _ = _training.unsplit(layers, _momentum, batches, 4)
  assert small.error(_split(pipe, state), _of(wanted)) < 1e-5


def test_ring_has_a_slot_for_each_number_between_those_alive():
  assert _grid._span([0, 1, 5], [9, 2, 9], None) == 3


def test_equal_stages_are_stacked_and_unlike_ones_packed():
  table = pipeline.make_table("1f1b", 4, 4)
  alike, _ = _pipe(table)
  unlike, layers = _pipe(table, small.UNLIKE)
  stacked = [x._ticks.params.stacked for x in (alike, unlike)]
  assert stacked == [True, False]
  params, state = unlike.join()
  assert jax.tree.map(jnp.shape, params) == {"float32": (4, 1, 12 * 7)}
  found, _ = unlike.split(params, state)
  assert small.error(found, small.merged(layers)[0]) == 0.0


@pytest.mark.parametrize(
  ("stages", "microbatches", "window", "late", "sizes"),
  [
    # Its versions wait for longer than an iteration is under way.
    (2, 4, 3, True, small.SIZES),
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in [
        (4, 8, 2, True, small.UNLIKE),
        (4, 4, 2, False, small.SIZES),
        (4, 2, 3, False, small.SIZES),
        (2, 2, 2, False, small.SIZES),
      ]
    ),
  ],
  ids=str,
)
def test_window_matches_delayed_gradients_on_one_device(
  stages, microbatches, window, late, sizes
):
  table = pipeline.ours(stages, microbatches, window=window)
  pipe, layers = _pipe(table, sizes, late_sends=late)
  busy = pipe.grid.rows[..., [_grid.FORWARD, _grid.BACKWARD]] > 0
  assert busy.any(-1).all()
  batches = small.batches(12, 1, _MICRO * microbatches, sizes)
  _, losses = _training.train(pipe, _momentum, batches)
  behind = pipe.grid.behind
  _, wanted_losses = _training.unsplit(
    layers,
    lambda axis: transforms.delay_gradients(_momentum(axis), pipe.grid.delay),
    batches[: len(batches) - behind],
    microbatches,
  )
  # A loss depends on the parameters at which its gradient was taken.
  np.testing.assert_allclose(losses[behind:], wanted_losses, rtol=1e-5)
  # Until the first iteration is complete, its micro-batches so far stand for
  # it: their mean differs from that of all by their samples.
  np.testing.assert_allclose(losses[behind - 1], wanted_losses[0], rtol=0.15)


def test_bfloat16_gradients_are_summed_in_float32():
  table = pipeline.make_table("1f1b", 2, 4)
  pipe = _training.one_program(
    small.layers((8, 8, 8), dtype=jnp.bfloat16), table,
    microbatch=_training.microbatch((8, 8), dtype=jnp.bfloat16),
  )  # fmt: skip
  sums = jax.eval_shape(pipe._ticks.start).grads
  assert {x.dtype.name for x in jax.tree.leaves(sums)} == {"float32"}


_SGD = optax.sgd(0.1, momentum=0.9)


def test_update_keeps_the_prediction_that_its_iteration_has_read():
  pipe, layers = _pipe(pipeline.ours(1, 2, window=2), (8, 8))
  inner = transforms.predict_weights(_SGD, 1)
  params = layers[0].params
  grads = jax.tree.map(jnp.ones_like, params)
  _, moving = inner.update(grads, inner.init(params), params)
  read = transforms.predicted_weights(moving, params)
  assert small.error(read, params) > 0.01
  state = _device_state.InFlightState(moving, jnp.int32(1), (params,), ())
  _, state = pipe._program.optimizer(inner).update(grads, state, params)
  chex.assert_trees_all_equal(state.older, (read,))


_FIXES = {
  "prediction": lambda delay: transforms.predict_weights(_SGD, delay),
  # Weight decay reads the parameters to which a late gradient is applied.
  "decay": lambda delay: optax.chain(optax.add_decayed_weights(0.1), _SGD),
}


@pytest.mark.parametrize(
  "fix",
  [
    # By default processes test the others, see `test_late_cells`.
    x if x == "prediction" else pytest.param(x, marks=pytest.mark.slow)
    for x in _FIXES
  ],
)
def test_window_with_a_correction_matches_delayed_gradients_with_it(fix):
  pipe, layers = _pipe(pipeline.ours(4, 2, window=3), late_sends=False)
  batches = small.batches(12, 1, _MICRO * 2)

  def chain(axis):
    return optax.chain(
      transforms.average_gradients(axis), _FIXES[fix](pipe.grid.delay)
    )

  def late(axis):
    return transforms.delay_gradients(chain(axis), pipe.grid.delay)

  found, losses = _training.train(pipe, chain, batches, drained=True)
  late_state, wanted_losses = _training.unsplit(layers, late, batches, 2)
  one = jax.tree.map(lambda x: x[0], late_state)
  wanted, _ = transforms.drain(late(None), one.opt_state, one.params)
  assert small.error(_split(pipe, found)[0], wanted) < 1e-6
  behind = pipe.grid.behind
  np.testing.assert_allclose(
    losses[behind:], wanted_losses[:-behind], rtol=1e-6
  )
  # The fix must change the training.
  assert small.error(one.params, _unfixed()) > 1e-3
  # The first of the next iterations reads the prediction.
  kept = found.opt_state
  read = transforms.predicted_weights(kept.inner, found.params)
  chex.assert_trees_all_equal(kept.older, (read,) * pipe.grid.delay)


@functools.cache
def _unfixed():
  state, _ = _training.unsplit(
    small.layers(),
    lambda axis: transforms.delay_gradients(_SGD, 2),
    small.batches(12, 1, _MICRO * 2),
    2,
  )
  return _of(state)[0]


def test_drain_applies_every_gradient():
  table = pipeline.ours(4, 4, window=2)
  pipe, layers = _pipe(table, statistics=True, late_sends=False)
  batches = small.batches(5, 1, _MICRO * 4)
  # Steps without a gradient must not count in its schedule.
  rate = optax.linear_schedule(0.1, 0.02, 5)
  optimizer = optax.sgd(rate, momentum=0.9)
  state, _ = _training.train(
    pipe, lambda axis: jdist.ssgd(optimizer, axis=axis), batches, drained=True
  )
  assert (int(state.step[0]), int(state.opt_state.step[0])) == (5, 0)
  # Reference: the gradients of five iterations, each taken at the parameters
  # one update ago.
  params, model_state = small.merged(layers)
  kept, versions = optimizer.init(params), [params]
  gradient = training.make_gradient(small.whole_loss(layers), accumulate=4)
  for k, batch in enumerate(batches):
    one = jax.tree.map(lambda x: x[0], batch)
    read = versions[max(0, k - 1)]
    found = gradient(read, model_state, one, jax.random.key(0))
    model_state = found.model_state
    updates, kept = optimizer.update(found.grads, kept)
    versions.append(optax.apply_updates(versions[-1], updates))
  assert small.error(_split(pipe, state), (versions[-1], model_state)) < 1e-5


@pytest.mark.parametrize(
  "chain",
  [
    _momentum,
    pytest.param(
      lambda axis: jdist.local_sgd(optax.sgd(0.1, momentum=0.9), 2, axis=axis),
      marks=pytest.mark.slow,
    ),
  ],
  ids=["ssgd", "local_sgd"],
)
def test_workers_with_pipelines_match_workers_with_whole_models(chain):
  table = pipeline.make_table("1f1b", 2, 2)
  pipe, layers = _pipe(table, statistics=True)
  batches = small.batches(4, 2, _MICRO * 2)
  state, losses = _training.train(pipe, chain, batches, 2)
  wanted, wanted_losses = _training.unsplit(layers, chain, batches, 2, 2)
  for worker in range(2):
    found = _split(pipe, state, worker)
    assert small.error(found, _of(wanted, worker)) < 2e-5
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)


def test_masked_micro_batches_count_by_their_samples():
  table = pipeline.make_table("1f1b", 2, 2)
  pipe, layers = _pipe(table, statistics=True, mask=True)
  batches = small.batches(2, 1, _MICRO * 2)
  for batch in batches:
    batch["mask"] = np.array([[1, 1, 0, 1, 0, 0]], np.float32)
  state, losses = _training.train(pipe, _momentum, batches)
  wanted, wanted_losses = _training.unsplit(layers, _momentum, batches, 2)
  assert small.error(_split(pipe, state), _of(wanted)) < 1e-5
  np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)


def test_masks_keys_and_counts_of_a_window_match_delayed_gradients():
  # A pass that runs twice draws the same numbers; iterations that have not
  # begun, or never do, leave the counts alone.
  def apply(params, state, x, *, train, mask=None, key, name):
    del train, mask
    kept = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
    y = jnp.tanh((x * kept + 0.1 * state[name]) @ params[name]["w"])
    return y, {name: state[name] + 1}

  layers = [
    models.Layer(
      x.name, x.params, {x.name: jnp.zeros(())},
      functools.partial(apply, name=x.name),
    )
    for x in small.layers((8, 8, 8))
  ]  # fmt: skip
  table = pipeline.ours(2, 2, window=3)
  pipe = _training.one_program(layers, table, (8, 8), mask=True)
  # A slot's number must count through all iterations.
  assert pipe.grid.num_microbatches % pipe.grid.slots
  batches = small.batches(4, 1, _MICRO * 2, (8, 8))
  for batch in batches:
    batch["mask"] = np.array([[1, 1, 0, 1, 0, 0]], np.float32)
  state, losses = _training.train(pipe, _momentum, batches, drained=True)

  def whole(params, state, batch, key):
    x, new = batch["x"], {}
    for layer in layers:
      own = ({layer.name: tree[layer.name]} for tree in (params, state))
      x, part = _stages.apply_layer(layer, *own, x, batch, key)
      new |= part
    error, metrics = small.loss(x, batch)
    return error, (new, metrics)

  wanted, wanted_losses = _training.unsplit(
    layers,
    lambda axis: transforms.delay_gradients(_momentum(axis), 2),
    batches, 2, loss=whole,
  )  # fmt: skip
  behind = pipe.grid.behind
  np.testing.assert_allclose(
    losses[behind:], wanted_losses[:-behind], rtol=1e-5
  )
  assert (
    _split(pipe, state)[1] == _of(wanted)[1] == {x.name: 8.0 for x in layers}
  )
  # A drain leaves an empty pipeline whose next iteration reads the parameters,
  # and the run's count of steps.
  kept = state.opt_state
  assert (int(state.step[0]), int(kept.step[0])) == (4, 0)
  chex.assert_trees_all_equal(kept.older, (state.params,) * pipe.grid.delay)
  assert not any(map(np.any, jax.tree.leaves(kept.flight)))


@functools.cache
def _compiled(name, microbatches, **options):
  # Only parameters have the size 61 * 61, because no number of samples here is
  # a multiple of 61.
  sizes = (61,) * 5
  table = pipeline.make_table(name, 4, microbatches, **options)
  pipe, _ = _pipe(table, sizes)
  team = _training.team_of(pipe)
  optimizer = _momentum(team.axis)
  state = pipe.init_state(team, optimizer)
  batch = small.batches(1, 1, _MICRO * microbatches, sizes)[0]
  step = team.jit(pipe.make_step(optimizer, axis=team.axis))
  return pipe, batch, step.lower(state, team.place(batch)).compile()


def _temporary_bytes(name, microbatches):
  pipe, batch, program = _compiled(name, microbatches)
  found = program.memory_analysis().temp_size_in_bytes
  # The batch and the rows that each device receives do not count.
  rows = pipe.grid.rows
  return found - sum(x.nbytes for x in batch.values()) - rows.nbytes


def test_memory_of_1f1b_does_not_grow_with_micro_batches():
  flat = [_temporary_bytes("1f1b", m) for m in (8, 64)]
  grows = [_temporary_bytes("gpipe", m) for m in (8, 64)]
  assert flat[1] < 1.05 * flat[0]
  # It keeps an input of each of the 56 additional micro-batches, and one copy
  # alone of this ring. XLA need not copy the whole batch, of which both tables
  # have the same.
  ring = 56 * _MICRO * 61 * 4
  assert ring < (grows[1] - grows[0]) - (flat[1] - flat[0]) < 2 * ring


def _of_parameters(text):
  """Counts the shapes whose size is a multiple of a layer's parameters."""
  shapes = re.findall(r"f32\[([\d,]+)\]", text)
  sizes = [tuple(map(int, x.split(","))) for x in shapes]
  return counting.Counter(x for x in sizes if math.prod(x) % 61**2 == 0)


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("1f1b", {}),
    ("gpipe", {}),
    pytest.param("ours", {"window": 4}, marks=pytest.mark.slow),
    pytest.param("zb_h1", {}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_parameter_sized_buffers_do_not_grow_with_micro_batches(name, options):
  few, many = (
    _of_parameters(_compiled(name, m, **options)[2].as_text()) for m in (8, 64)
  )
  # They are one device's stage and, for a window, its sums and versions.
  assert (61, 61) in few and few.total() > 20
  assert few == many
  # Only activations grow.
  assert _largest(name, 8, options) < _largest(name, 64, options)


def _largest(name, microbatches, options):
  _, _, program = _compiled(name, microbatches, **options)
  shapes = re.findall(r"f32\[([\d,]+)\]", program.as_text())
  return max(math.prod(map(int, x.split(","))) for x in shapes)
