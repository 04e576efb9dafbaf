"""Models cut into stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import models, pipeline
from jdist.pipeline.runtime import _stage_arrays, _stages, _traced_model
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


@pytest.mark.parametrize("alone", [True, False])
def test_layers_that_run_again_have_their_masks_and_keys(alone):
  def apply(params, state, x, *, train, mask=None, key=None):
    assert train is True
    kept = jax.random.uniform(key, x.shape) * mask[:, None]
    return jnp.sin(params["a"] * x * kept), state

  layer = models.Layer("a", {"a": jnp.float32(2.0)}, {}, apply)
  stage = layer if alone else pipeline.cut_layers([layer], 1)[0]
  batch = {"mask": jnp.array([1.0, 0.0, 1.0])}

  def loss(stage, params):
    x, key = jnp.ones((3, 8)), jax.random.key(0)
    y, _ = _stages.apply_layer(stage, params, {}, x, batch, key)
    return y.sum()

  again = _stages.recompute_layers(stage)
  text = str(jax.make_jaxpr(jax.grad(lambda p: loss(again, p)))(layer.params))
  assert "remat" in text or "checkpoint" in text
  wanted, found = (
    jax.value_and_grad(lambda p, x=x: loss(x, p))(layer.params)
    for x in (stage, again)
  )
  np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
  np.testing.assert_allclose(found[1]["a"], wanted[1]["a"], rtol=1e-6)
