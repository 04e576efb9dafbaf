"""Parameters that several stages of one program have stay one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import codecs, collectives, pipeline, reducers, training, transforms
from tests.pipeline.runtime import _small_models as small

_MICRO = 3
_SGD = optax.sgd(0.1, momentum=0.9)


def _layers(table):
  return small.tied_layers(before=table.num_stages > 3)


def _pipe(table):
  batch = {"x": jnp.ones((_MICRO, 8)), "y": jnp.ones((_MICRO, 8))}
  stages = pipeline.cut_layers(_layers(table), table.num_stages)
  return pipeline.OneProgram(stages, small.loss, table, batch, inputs="x")


def _train(pipe, chain, batches, workers=1):
  kinds = (jax.sharding.AxisType.Auto,) * 2
  shape = (workers, pipe.grid.num_devices)
  mesh = jax.make_mesh(shape, ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(workers, mesh=mesh)
  optimizer = chain(team.axis)
  state = pipe.init_state(team, optimizer)
  step = team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  losses = []
  for batch in batches:
    state, metrics = step(state, team.place(batch))
    losses.append(float(metrics["loss"][0]))
  return state, np.asarray(losses)


def _reference(chain, batches, table):
  team = collectives.workers(1, substrate="none")
  layers, microbatches = _layers(table), table.num_microbatches
  state = training.init_state(team, chain, *small.merged(layers))
  loss = small.chain_loss(layers)
  step = team.jit(
    training.make_step(loss, chain, axis=team.axis, accumulate=microbatches)
  )
  losses = []
  for batch in batches:
    state, metrics = step(state, team.place(batch))
    losses.append(float(metrics["loss"][0]))
  return state, np.asarray(losses)


def _copies(pipe, state, worker=0):
  """The tied table of both stages that have it."""
  arrays = jax.tree.map(lambda x: np.asarray(x[worker]), state.params)
  parts = pipe._ticks.params.split(arrays)
  first, last = (x["table"] for x in parts if "table" in x)
  return first, last


@pytest.mark.parametrize(
  ("table", "fix"),
  [
    # Both copies on the second device, in each of its chunks.
    (pipeline.make_table("interleaved", 2, 2, num_chunks=2), None),
    pytest.param(
      pipeline.make_table("1f1b", 3, 4), None, marks=pytest.mark.slow
    ),
    pytest.param(
      pipeline.make_table("interleaved", 1, 2, num_chunks=3),
      None,
      marks=pytest.mark.slow,
    ),
    pytest.param(pipeline.ours(3, 6, window=2), None, marks=pytest.mark.slow),
    (pipeline.ours(3, 6, window=2), transforms.predict_weights),
  ],
  ids=["two devices", "1f1b", "one device", "ours", "ours, predicted"],
)
def test_copies_get_the_sum_of_their_gradients(table, fix):
  pipe = _pipe(table)
  assert not pipe.stacked
  count = table.num_microbatches
  batches = small.batches(6, 1, _MICRO * count)
  inner = _SGD if fix is None else fix(_SGD, pipe.grid.delay)
  state, losses = _train(
    pipe,
    lambda axis: optax.chain(transforms.average_gradients(axis), inner),
    batches,
  )
  first, last = _copies(pipe, state)
  np.testing.assert_array_equal(first, last)
  behind = pipe.grid.behind
  late = transforms.delay_gradients(inner, pipe.grid.delay)
  _, wanted = _reference(late, batches[: len(batches) - behind], table)
  np.testing.assert_allclose(losses[behind:], wanted, rtol=1e-5)


def test_copies_whose_codes_differ_get_the_first_ones_update():
  # The layer between comes first in its stage: blocks are cut elsewhere.
  pipe = _pipe(pipeline.make_table("1f1b", 2, 2))
  batches = small.batches(3, 2, _MICRO * 2)
  compression = reducers.Compression(
    reducers.compressed(codecs.Quantize(4, 16)),
    reducers.ErrorFeedback(),
  )

  def chain(axis):
    return jdist.ssgd(_SGD, axis=axis, compression=compression)

  state, _ = _train(pipe, chain, batches, workers=2)
  first, last = _copies(pipe, state)
  np.testing.assert_array_equal(first, last)
