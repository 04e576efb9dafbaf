"""A run that begins with a flush and ends without one."""

import chex
import jax
import optax
import pytest

import jdist
from jdist import collectives, pipeline, training, transforms
from tests.pipeline.runtime import _small_models as small
from tests.pipeline.runtime import _training

_STAGES, _COUNT, _MICRO = 2, 2, _training.MICRO


def _program(table, sizes=small.SIZES, inputs="x", **options):
  made = pipeline.make_table(table, _STAGES, _COUNT, **options)
  return _training.one_program(
    small.layers(sizes), made, (8, 8), inputs=inputs, late_sends=False
  )


def _chain(axis, delay, momentum=0.9):
  inner = optax.sgd(0.1, momentum=momentum)
  return jdist.ssgd(transforms.predict_weights(inner, delay), axis=axis)


def _team():
  mesh = collectives.make_mesh((1, _STAGES), ("worker", "stage"))
  return collectives.workers(1, mesh=mesh)


def _run(pipe, team, chain, state, batches):
  step = _training.compiled_step(pipe, team, chain, state)
  for batch in batches:
    state, _ = step(state, team.place(batch))
  return state


@pytest.mark.parametrize(
  "sizes", [small.SIZES, pytest.param((8, 12, 8), marks=pytest.mark.slow)]
)
def test_window_continues_from_1f1b(sizes):
  batches, team = small.batches(9, 1, _MICRO * _COUNT), _team()
  flushed, late = _program("1f1b", sizes), _program("ours", sizes, window=2)
  assert (flushed.grid.delay, late.grid.delay) == (0, 1)
  chain = _chain(team.axis, 0)
  state = flushed.init_state(team, chain)
  state = _run(flushed, team, chain, state, batches[:4])
  chain = _chain(team.axis, 1)
  state = late.continue_from(state, team, chain)
  state = _run(late, team, chain, state, batches[4:])
  state = team.jit(late.make_drain(chain, axis=team.axis))(state)
  found = _training.split(late, state)[0]

  # The reference on one device is first in time, and then a step late,
  # starting with an empty ring.
  one = collectives.workers(1, substrate="none")
  layers = small.layers(sizes)
  plain = _chain(None, 0)
  wanted = training.init_state(one, plain, *small.merged(layers))
  late_chain = transforms.delay_gradients(_chain(None, 1), 1)
  empty = training.init_state(one, late_chain, *small.merged(layers))
  for optimizer, some in ((plain, batches[:4]), (late_chain, batches[4:])):
    if optimizer is late_chain:
      ring = empty.opt_state._replace(inner=wanted.opt_state)
      wanted = wanted._replace(opt_state=ring)
    step = one.jit(
      training.make_step(
        small.whole_loss(layers), optimizer, axis=None, accumulate=_COUNT
      )
    )
    for batch in some:
      wanted, _ = step(wanted, one.place(batch))
  kept = jax.tree.map(lambda x: x[0], wanted)
  params, _ = transforms.drain(late_chain, kept.opt_state, kept.params)
  assert small.error(found, params) < 1e-5

  # Another window that continues from there first reads the prediction.
  read = transforms.predicted_weights(state.opt_state.inner, state.params)
  assert small.error(read, state.params) > 1e-3
  again = late.continue_from(state, team, chain)
  chex.assert_trees_all_equal(again.opt_state.older, (read,))


def test_random_keys_continue():
  def noisy(batch, key):
    return batch["x"] + jax.random.normal(key, batch["x"].shape)

  team, pipe = _team(), _program("1f1b", inputs=noisy)
  chain = jdist.ssgd(optax.sgd(0.1), axis=team.axis)
  step = team.jit(pipe.make_step(chain, axis=team.axis))
  first, second = map(team.place, small.batches(2, 1, _MICRO * _COUNT))
  state, _ = step(pipe.init_state(team, chain), first)
  wanted, _ = step(state, second)
  found, _ = step(pipe.continue_from(state, team, chain), second)
  chex.assert_trees_all_equal(found.params, wanted.params)


def test_different_optimizer_or_stages_raise():
  team, late = _team(), _program("ours", window=2)
  chain = _chain(team.axis, 1)
  flushed = _program("1f1b").init_state(team, _chain(team.axis, 0, None))
  with pytest.raises(ValueError, match="got optimizer states of other shapes"):
    late.continue_from(flushed, team, chain)
  wide = _program("1f1b", (8, 12, 8)).init_state(team, chain)
  with pytest.raises(ValueError, match="got parameters of other shapes"):
    late.continue_from(wide, team, chain)


@pytest.mark.parametrize("window", [2, 3])
def test_versions_have_separate_buffers(window):
  # Without prediction all versions are the parameters themselves.
  team, late = _team(), _program("ours", window=window)
  chain = jdist.ssgd(optax.sgd(0.1), axis=team.axis)
  state = _program("1f1b").init_state(team, chain)
  state = late.continue_from(state, team, chain)
  buffers = [
    shard.data.unsafe_buffer_pointer()
    for x in jax.tree.leaves((state.params, state.opt_state.older))
    for shard in x.addressable_shards
  ]
  assert len(set(buffers)) == len(buffers)
