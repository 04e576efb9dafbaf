"""Models cut into stages."""

import jax.numpy as jnp

from jdist import models, pipeline
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
