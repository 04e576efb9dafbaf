"""Pipelines in the training loop: bytes, evaluation, kill and resume."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdist
from jdist import collectives, pipeline, training
from tests.pipeline.runtime import _small_models as small

_MICRO, _WORKERS, _STAGES = 2, 2, 2


def _loss(outputs, batch):
  losses = optax.softmax_cross_entropy_with_integer_labels(
    outputs, batch["label"]
  )
  return losses.mean(), {}


def _batches(start):
  for i in range(start, 100):
    generator = np.random.default_rng(i)
    shape = (_WORKERS, 4 * _MICRO)
    yield {
      "image": generator.normal(size=(*shape, 8)).astype(np.float32),
      "label": generator.integers(0, 8, shape).astype(np.int32),
    }


def _run(table, chain, steps, folder=None):
  kinds = (jax.sharding.AxisType.Auto,) * 2
  shape = (_WORKERS, _STAGES)
  mesh = jax.make_mesh(shape, ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(_WORKERS, mesh=mesh)
  batch = jax.tree.map(lambda x: jnp.asarray(x[0, :_MICRO]), next(_batches(0)))
  stages = pipeline.cut_layers(small.layers(statistics=True), _STAGES)
  pipe = pipeline.OneProgram(stages, _loss, table, batch)
  optimizer = chain(team.axis)
  state = pipe.init_state(team, optimizer)
  trainer = training.Trainer(team, pipe.make_step(optimizer, axis=team.axis))
  held_out = next(_batches(99)) | {"mask": np.ones((_WORKERS, 4 * _MICRO))}
  evaluate = training.Evaluator(team, pipe.apply, [held_out])
  saved = {}
  if folder is not None:
    checkpoints = training.Checkpoints(folder, team)
    saved = {"checkpoints": checkpoints, "checkpoint_every": 1}
  state, records = trainer.fit(
    state, _batches, steps, evaluate=evaluate, **saved
  )
  return pipe, state, records


def _momentum(axis):
  return jdist.ssgd(optax.sgd(0.1, momentum=0.9), axis=axis)


@pytest.mark.parametrize(
  "table",
  [
    pytest.param(
      pipeline.make_table("1f1b", _STAGES, 4), marks=pytest.mark.slow
    ),
    pipeline.ours(_STAGES, 4, window=2),
  ],
  ids=["1f1b", "ours"],
)
def test_resumed_run_has_the_same_bits(table, tmp_path):
  _, whole, records = _run(table, _momentum, 5)
  _run(table, _momentum, 3, tmp_path)
  _, resumed, again = _run(table, _momentum, 5, tmp_path)
  chex.assert_trees_all_equal(whole, resumed)
  assert records[-1].sent_bytes == again[-1].sent_bytes
  assert records[-1].metrics == again[-1].metrics
  assert np.isfinite(records[-1].train_loss)


def test_workers_exchange_each_stages_part_of_the_gradient():
  _, _, records = _run(pipeline.make_table("1f1b", _STAGES, 4), _momentum, 2)
  # An all-reduce over two workers sends as many bytes as it is given: four
  # layers of 8 x 8 weights, and the running means.
  assert records[-1].sent_bytes == 2 * 4 * (4 * 8 * 8 + 4 * 8)


@pytest.mark.slow
def test_host_ends_rounds():
  table = pipeline.make_table("1f1b", _STAGES, 4)
  _, state, records = _run(
    table, lambda axis: jdist.local_sgd(optax.sgd(0.1), 2, axis=axis), 4
  )
  assert records[-1].rounds == 2
  for leaf in jax.tree.leaves(state.params):
    np.testing.assert_allclose(leaf[0], leaf[1], rtol=1e-6)
