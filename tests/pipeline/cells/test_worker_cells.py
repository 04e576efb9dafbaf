"""Workers of several stages: codecs see a stage's own leaves, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import codecs, collectives, pipeline, reducers, training
from tests.pipeline.runtime import _small_models as small
from tests.profiling import _reading

_WORKERS, _STAGES, _MICRO, _COUNT = 2, 2, 3, 2


def _int4(axis):
  # A block is a leaf of 8 x 8: cut alike with the stages together or apart.
  compression = reducers.Compression(
    reducers.compressed(codecs.Quantize(4, 64)), reducers.ErrorFeedback()
  )
  return jdist.ssgd(
    optax.sgd(0.1, momentum=0.9), axis=axis, compression=compression
  )


def _batches():
  return small.batches(3, _WORKERS, _MICRO * _COUNT)


def _pipeline():
  batch = {"x": jnp.ones((_MICRO, 8)), "y": jnp.ones((_MICRO, 8))}
  layers = small.layers()
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(layers, _STAGES),
    small.loss,
    pipeline.make_table("1f1b", _STAGES, _COUNT),
    batch,
    inputs="x",
  )
  kinds = (jax.sharding.AxisType.Auto,) * 2
  shape = (_WORKERS, _STAGES)
  mesh = jax.make_mesh(shape, ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(_WORKERS, mesh=mesh)
  optimizer = _int4(team.axis)
  state = pipe.init_state(team, optimizer)
  step = team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  return pipe, team, state, step


def test_no_collective_of_a_codec_is_over_stages():
  _, team, state, step = _pipeline()
  batch = team.place(_batches()[0])
  text = step.lower(state, batch).compile().as_text()
  over_stages = [
    kind
    for kind, members in _reading.groups(text)
    if kind != "collective-permute"
    # Device 2 w + s: those of one worker.
    and any({0, 1} <= set(x) or {2, 3} <= set(x) for x in members)
  ]
  # The last stage's loss and metrics, to all stages.
  assert over_stages == ["all-reduce"]


@pytest.mark.slow
def test_four_bits_over_workers_train_as_unsplit_ones():
  pipe, team, state, step = _pipeline()
  for batch in _batches():
    state, _ = step(state, team.place(batch))
  layers = small.layers()
  whole = collectives.workers(_WORKERS, substrate="vmap")
  wanted = training.init_state(whole, _int4(whole.axis), *small.merged(layers))
  reference = whole.jit(
    training.make_step(
      small.whole_loss(layers),
      _int4(whole.axis),
      axis=whole.axis,
      accumulate=_COUNT,
    )
  )
  for batch in _batches():
    wanted, _ = reference(wanted, whole.place(batch))
  for worker in range(_WORKERS):
    parts = jax.tree.map(
      lambda x, w=worker: np.asarray(x[w]), (state.params, state.model_state)
    )
    one = jax.tree.map(lambda x, w=worker: x[w], wanted.params)
    # A rounding of float32 may turn one code: a step of 1/7 of 0.1 of a block.
    assert small.error(pipe.split(*parts)[0], one) < 1e-2
