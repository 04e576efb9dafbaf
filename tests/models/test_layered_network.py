"""Layers of a network in sequence are the whole model."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import models, pipeline
from jdist.models import _layered_network
from jdist.pipeline.runtime import _stages
from tests import _refusals
from tests.models import _variants
from tests.models._variants import build, variants


def in_layers(model):
  """The model's `apply`, of all its layers in one stage."""
  (stage,) = pipeline.cut_layers(model.layers, 1)
  return stage.apply


def program_of(apply, model, x, train):
  def run(params, state, x):
    mask = jnp.ones(len(x))
    return apply(params, state, x, train=train, mask=mask)

  program = jax.make_jaxpr(run, return_shape=True)
  return str(program(model.params, model.state, x))


@variants
def test_layers_make_the_program_of_the_model(name, options):
  # Equal programs compute equal bits, gradients included.
  model = build(name, options, abstract=True)
  x = _variants.like(name)
  for train in (True, False):
    whole = program_of(model.apply, model, x, train)
    assert program_of(in_layers(model), model, x, train) == whole


@variants
def test_layers_partition_the_tree_of_the_model(name, options):
  model = build(name, options)
  assert len({layer.name for layer in model.layers}) == len(model.layers) > 1
  for kind in ("params", "state"):
    whole = getattr(model, kind)
    merged = _stages.merge([getattr(x, kind) for x in model.layers])
    assert jax.tree.structure(merged) == jax.tree.structure(whole)
    # They are the same arrays, which need no memory of their own.
    pairs = zip(jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True)
    assert all(a is b for a, b in pairs)
  tied = {"['layer0_tokens']['table']": (0, len(model.layers) - 1)}
  shared = tied if options.get("tied") else {}
  assert _stages.shared_paths(model.layers) == shared


def test_layers_are_cut_where_little_is_passed_on():
  names = [x.name for x in build("vgg11", {"norm": "batch"}).layers]
  assert names == [*(f"conv{i:02}" for i in range(1, 9)), "dense9"]
  names = [x.name for x in build("resnet8").layers]
  blocks = [f"stage{i}_block1" for i in (1, 2, 3)]
  assert names == ["stage0_conv", *blocks, "stage4_dense"]
  names = [x.name for x in build("transformer", {"num_layers": 2}).layers]
  assert names == ["layer0_tokens", "layer1", "layer2", "layer3_norm"]
  # They sort in this order, as the head is the tenth behind the first.
  deep = build("transformer", {"num_layers": 8, "width": 16}, abstract=True)
  layers = [f"layer{i:02}" for i in range(1, 9)]
  names = [x.name for x in deep.layers]
  assert names == ["layer00_tokens", *layers, "layer09_norm"]


def test_abstract_layers_hold_shapes():
  model = build("resnet8", abstract=True)
  leaves = jax.tree.leaves([(x.params, x.state) for x in model.layers])
  assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)


def test_first_layer_checks_the_inputs_as_the_model_does():
  first, *_ = build("lenet").layers
  with _refusals.refused("images", "be"):
    first.apply(first.params, {}, jnp.ones((8, 8, 1)), train=True)


class _Dropped(_layered_network.LayeredNetwork):
  """Two layers with dropout, whose keys are state."""

  def __init__(self):
    rngs = nnx.Rngs(0)

    def run(x, mask, dense, dropout):
      del mask
      return dropout(dense(x))

    for name in ("a", "b"):
      modules = {
        f"{name}_dense": nnx.Linear(4, 4, rngs=rngs),
        f"{name}_dropout": nnx.Dropout(0.5, rngs=rngs),
      }
      self.add_part(modules, run)


def test_dropout_keys_are_in_the_layers_that_use_them():
  model = models.functional(_Dropped())
  x = np.ones((3, 4), np.float32)
  state, found = model.state, model.state
  for _ in range(2):
    wanted, state = model.apply(model.params, state, x, train=True)
    y, found = in_layers(model)(model.params, found, x, train=True)
    np.testing.assert_array_equal(y, wanted)
  assert [len(jax.tree.leaves(layer.state)) for layer in model.layers] == [2, 2]


def test_custom_module_is_one_layer():
  model = models.functional(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
  (layer,) = model.layers
  assert layer.params is model.params and layer.apply is model.apply
