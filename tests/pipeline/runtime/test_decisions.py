"""What decides by all leaves decides for all stages of a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import collectives, models, pipeline, training, transforms
from tests.pipeline.runtime import _small_models as small

_STAGES, _COUNT, _MICRO = 4, 2, 3


def _layers(last):
  """Layers `tanh(x + sqrt(a))`, all a = 1 but the last one's."""

  def layer(name, start):
    def apply(params, state, x, *, train, mask=None):
      del train, mask
      return jnp.tanh(x + jnp.sqrt(params[name]["a"])), state

    return models.Layer(name, {name: {"a": jnp.full(8, start)}}, {}, apply)

  return [
    layer(n, x) for n, x in zip("abcd", (1.0, 1.0, 1.0, last), strict=True)
  ]


def _train(layers, chain, batches, workers):
  batch = {"x": jnp.ones((_MICRO, 8)), "y": jnp.ones((_MICRO, 8))}
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(layers, _STAGES),
    small.loss,
    pipeline.make_table("1f1b", _STAGES, _COUNT),
    batch,
    inputs="x",
  )
  mesh = collectives.make_mesh((workers, _STAGES), ("worker", "stage"))
  team = collectives.workers(workers, mesh=mesh)
  optimizer = chain(team.axis)
  state = pipe.init_state(team, optimizer)
  step = team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  for batch in batches:
    state, _ = step(state, team.place(batch))
  parts = jax.tree.map(
    lambda x: np.asarray(x[0]), (state.params, state.model_state)
  )
  return pipe.split(*parts)[0], state


def _guarded(axis):
  return optax.chain(
    transforms.skip_nonfinite(axis),
    transforms.average_gradients(axis),
    optax.sgd(0.1),
  )


def test_one_stages_infinite_gradient_is_skipped_by_all_of_them():
  # The root's slope at zero, in the last stage alone.
  layers = _layers(0.0)
  batches = small.batches(2, 1, _MICRO * _COUNT)
  found, state = _train(layers, _guarded, batches, 1)
  assert small.error(found, small.merged(layers)[0]) == 0.0
  assert transforms.skipped(state.opt_state).tolist() == [2]
  moved, state = _train(_layers(0.5), _guarded, batches, 1)
  assert transforms.skipped(state.opt_state).tolist() == [0]
  assert small.error(moved, found) > 1e-3


@pytest.mark.slow
def test_a_workers_own_clipping_is_by_the_norm_of_all_its_stages():
  layers = small.layers()
  batches = small.batches(3, 2, _MICRO * _COUNT)

  def chain(axis):
    return optax.chain(
      transforms.clip_local(0.02, axis),
      transforms.average_gradients(axis),
      optax.sgd(0.5),
    )

  found, _ = _train(layers, chain, batches, 2)
  team = collectives.workers(2, substrate="vmap")
  state = training.init_state(team, chain(team.axis), *small.merged(layers))
  step = team.jit(
    training.make_step(
      small.whole_loss(layers), chain(team.axis), axis=team.axis,
      accumulate=_COUNT,
    )
  )  # fmt: skip
  for batch in batches:
    state, _ = step(state, team.place(batch))
  wanted = jax.tree.map(lambda x: x[0], state.params)
  # What each stage clips by its own norm is another training.
  assert small.error(found, wanted) < 1e-5
