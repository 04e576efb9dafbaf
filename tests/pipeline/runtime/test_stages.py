"""Models cut into stages."""

import jax
import jax.numpy as jnp

from jdist import models, pipeline
from jdist.pipeline.runtime import _stage_arrays, _traced_model
from tests.pipeline.runtime import _small_models as small


def test_stages_run_their_layers_in_order():
  layers = small.layers(small.UNLIKE, statistics=True)
  stages = pipeline.cut_layers(layers, [1, 3])
  assert [x.name for x in stages] == ["dense0", "dense1 to dense2", "dense3"]
  params, state = small.merged(stages)
  x = whole = jnp.ones((3, 6))
  found = {}
  for stage in stages:
    x, new = stage.apply(stage.params, stage.state, x, train=True)
    found |= new
  wanted = {}
  for layer in layers:
    whole, new = layer.apply(
      {layer.name: params[layer.name]},
      {layer.name: state[layer.name]},
      whole,
      train=True,
    )
    wanted |= new
  assert (x == whole).all() and small.error(found, wanted) == 0.0


def test_number_of_stages_cuts_evenly():
  layers = [models.Layer(n, {n: 1}, {}, None) for n in "abcdefg"]
  stages = pipeline.cut_layers(layers, 3)
  assert [len(x.layers) for x in stages] == [2, 3, 2]


def test_scalars_of_stages_keep_an_axis_and_join_undoes_split():
  trees = [{"scale": jnp.array(1.0 * i), "w": jnp.full(3, i)} for i in range(4)]
  arrays = _stage_arrays.StageArrays(trees, 2, apart=True)
  joined = arrays.join(trees)
  shapes = {"scale": (2, 1), "w": (2, 3)}
  assert jax.tree.map(jnp.shape, joined) == (shapes, shapes)
  assert small.error(arrays.split(joined), trees) == 0.0


def test_weights_of_micro_batches_without_samples_are_zero():
  batches = {"mask": jnp.zeros((3, 2))}
  assert _traced_model.sample_weights(batches).tolist() == [0.0] * 3
