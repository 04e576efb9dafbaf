"""Cuts: the published counts, and trees that come apart and together."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import models, prediction
from jdist.prediction import _cut
from tests import _refusals
from tests.prediction import _tiny

# Parameters pushed, and layers predicted: of convolutions, dense.
TABLE = {
  "lenet": (2_572, 0, 3),
  "alexnet": (617_344, 3, 3),
  "vgg15": (260_160, 8, 3),
  "resnet18": (185_664, 10, 1),
  "resnet34": (351_872, 20, 1),
  "resnet50": (343_104, 30, 1),
}
TOTALS = {"lenet": 61_706, "vgg15": 4_722_698, "resnet18": 3_139_274}


def small():
  """Two layers of a network, the first with a normalization, by hand."""
  return {
    "a": {
      "bias": jnp.array([5.0, 6.0]),
      "kernel": jnp.array([[1.0, 2.0], [3.0, 4.0]]),
    },
    "a_norm": {"bias": jnp.array([9.0, 10.0]), "scale": jnp.array([7.0, 8.0])},
    "b": {"kernel": jnp.array([[11.0], [12.0]])},
  }


def test_table_has_every_published_cut():
  assert set(TABLE) == set(prediction.PUBLISHED)


@pytest.mark.parametrize("name", TABLE)
def test_published_counts_match(name):
  cut = prediction.published_cut(name)
  num_front, convs, dense = TABLE[name]
  assert cut.num_front == num_front
  assert sum(not layer.is_dense for layer in cut.rear) == convs
  assert sum(layer.is_dense for layer in cut.rear) == dense
  model = prediction.published_model(name, abstract=True)
  total = models.num_params(model)
  assert cut.num_front + cut.num_rear == total == TOTALS.get(name, total)


def test_front_is_flattened_layer_by_layer():
  cut = prediction.cut(small(), 1)
  assert [leaf.name for leaf in cut.front[0].leaves] == [
    "a.kernel",
    "a.bias",
    "a_norm.bias",
    "a_norm.scale",
  ]
  assert cut.flatten_front(small()).tolist() == [*range(1, 7), 9, 10, 7, 8]
  assert _tiny.flatten_rear(cut, small()).tolist() == [11, 12]


def test_join_undoes_split_and_unflatten_undoes_flatten():
  model = models.build("resnet8", input_shape=(8, 8, 1), num_classes=10)
  cut = prediction.cut(model, 5)
  front, rear = cut.split(model.params)
  same = cut.join(
    cut.unflatten_front(cut.flatten_front(front)),
    cut.unflatten_rear(_tiny.flatten_rear(cut, model.params)),
  )
  for joined in (cut.join(front, rear), same):
    chex.assert_trees_all_equal(joined, model.params)


def test_half_precision_is_restored_exactly():
  tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small())
  cut = prediction.cut(tree, 1)
  vector = cut.flatten_front(tree)
  assert vector.dtype == jnp.float32
  front = cut.unflatten_front(vector)
  assert front["a"]["kernel"].dtype == jnp.bfloat16


def test_cut_is_plain_data():
  cut = prediction.published_cut("resnet18")
  again = prediction.Cut.from_description(
    json.loads(json.dumps(cut.describe()))
  )
  assert again == cut
  assert {cut: 1}[again] == 1
  # As saved predictors and data sets have it.
  assert again.fingerprint == cut.fingerprint == "342a2a0d0bc82abc"
  renamed = dataclasses.replace(cut, model="other")
  assert renamed.fingerprint == cut.fingerprint
  deeper = prediction.cut(
    prediction.published_model("resnet18", abstract=True), 11
  )
  assert deeper.fingerprint != cut.fingerprint


def test_cut_works_inside_compiled_and_mapped_functions():
  cut = prediction.cut(small(), 1)
  many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), small())
  rows = jax.jit(jax.vmap(cut.flatten_front))(many)
  np.testing.assert_array_equal(rows[1], 2 * cut.flatten_front(small()))


def test_another_tree_is_refused_by_the_first_leaf_that_differs():
  cut = prediction.cut(small(), 1, name="small")
  wide = small()
  wide["b"]["kernel"] = jnp.zeros((2, 3))
  with _refusals.refused("tree", "its leaf b.kernel is float[2, 3] and not"):
    cut.split(wide)
  short = small()
  del short["a_norm"]
  with pytest.raises(ValueError, match=r"leaf a_norm\.bias is missing"):
    cut.split(short)
  with pytest.raises(
    ValueError, match=r"c\.kernel is float\[2\] and not missing"
  ):
    cut.split(small() | {"c": {"kernel": jnp.zeros(2)}})
  front, rear = cut.split(small())
  with _refusals.refused("rear", "the rear of Cut"):
    cut.join(front, front)
  with _refusals.refused("front", "the front of Cut"):
    cut.join(rear, rear)
  with _refusals.refused("tree", "leaf a.bias is missing"):
    cut.flatten_front(rear)
  stacked = jax.tree.map(lambda x: x[None], small())
  with pytest.raises(ValueError, match="take one worker's"):
    cut.flatten_front(stacked)
  with _refusals.refused("vector", "shape [10]"):
    cut.unflatten_front(jnp.zeros(9))


def test_another_cut_is_refused_by_the_first_leaf_that_differs():
  ours = prediction.published_cut("vgg15")
  model = prediction.published_model("vgg15", abstract=True)
  refuse = _cut.refuse_other_cut
  refuse("predictor", prediction.cut(model, 4), ours)
  with pytest.raises(
    ValueError, match=r"conv05\.kernel.*, behind the cut, there is"
  ):
    refuse("predictor", prediction.cut(model, 5), ours)
  wide = prediction.published_model("vgg15", num_classes=100, abstract=True)
  other = prediction.cut(wide, 4)
  with _refusals.refused("predictor", "dense15.kernel"):
    refuse("predictor", other, ours)
  one = prediction.cut(small(), 1)
  three = prediction.cut(small() | {"c": {"kernel": jnp.zeros((1, 1))}}, 1)
  with pytest.raises(ValueError, match=r"there is c\.kernel"):
    refuse("predictor", three, one)


def named(*names):
  return {name: {"kernel": jnp.zeros((2, 2))} for name in names}


def test_numbers_in_names_are_sorted_as_numbers():
  """As flax names them, without zeros in front."""
  cut = prediction.cut(named(*(f"Dense_{i}" for i in range(12))), 3)
  names = [layer.name for layer in (*cut.front, *cut.rear)]
  assert names == [f"Dense_{i}" for i in range(12)]
  assert "(Dense_0, Dense_1, Dense_2)" in repr(cut)
  deep = prediction.cut({"block_10": named("a"), "block_9": named("b2")}, 1)
  assert deep.front[0].name == "block_9.b2"
  odd = prediction.cut(named("1a", "a", "x01", "x1", "x"), 4)
  assert [layer.name for layer in odd.front] == ["1a", "a", "x", "x01"]


@pytest.mark.parametrize("name", models.MODELS)
def test_models_of_jdist_are_cut_in_order_of_execution(name):
  """So the fingerprints of saved predictors and data sets stay theirs."""
  images = {"input_shape": (32, 32, 3)}
  many = {
    "mlp": {**images, "hidden_sizes": (5,) * 12},
    "transformer": {"input_shape": (16,), "num_layers": 12},
  }
  model = models.build(
    name, num_classes=10, abstract=True, **many.get(name, images)
  )
  whole = prediction.cut(model, 1)
  found = dict.fromkeys(
    leaf.path[:-1]
    for layer in (*whole.front, *whole.rear)
    for leaf in layer.leaves
  )
  leaves = jax.tree_util.tree_leaves_with_path(model.params)
  sorted_keys = dict.fromkeys(
    tuple(key.key for key in path[:-1]) for path, _ in leaves
  )
  assert list(found) == list(sorted_keys)


def test_order_can_be_given():
  tree = small() | named("first", "Dense_0")
  order = ("first", "b", "a", "a_norm", "Dense_0")
  cut = prediction.cut(tree, 3, order=order)
  assert [layer.name for layer in cut.front] == ["first", "b", "a"]
  # With its normalization, and as a cut comes back from a file.
  assert [leaf.name for leaf in cut.front[2].leaves][2:] == [
    "a_norm.bias",
    "a_norm.scale",
  ]
  assert prediction.Cut.from_description(cut.describe()) == cut
  front, rear = cut.split(tree)
  assert jax.tree.structure(cut.join(front, rear)) == jax.tree.structure(tree)
  for wrong, rule in (
    (order[1:], "'first' is missing"),
    ((*order, "c"), "'c' is none of them"),
    ((*order, 3), "3 is none of them"),
    ((*order, "b"), "'b' is named twice"),
    ("b", "is missing"),
    (3, "3 is none of them"),
  ):
    with pytest.raises(ValueError, match=rf"`order` must.*{rule}.*They are D"):
      prediction.cut(tree, 3, order=wrong)


def test_long_cut_shows_first_and_last_layers():
  shown = repr(prediction.published_cut("resnet18"))
  assert shown.startswith("Cut(resnet18: 10 layers of 185,664 parameters (")
  assert shown.count(", ...,") == 1 and shown.count("conv") <= 4
