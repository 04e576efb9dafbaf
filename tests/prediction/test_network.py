"""Which layers a tree has, whatever its leaves are called."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import prediction


def network(kernel, bias):
  """Two convolutions and a dense layer, with names of other libraries."""

  def layer(*shape):
    return {bias: jnp.zeros(shape[-1]), kernel: jnp.zeros(shape)}

  return {
    "c0": layer(3, 3, 2, 4),
    "c1": layer(3, 3, 4, 4),
    "d": layer(4, 2),
  }


@pytest.mark.parametrize("names", [("kernel", "bias"), ("weight", "bias")])
def test_largest_leaf_determines_the_kind_of_a_layer(names):
  cut = prediction.cut(network(*names), 1)
  layers = (*cut.front, *cut.rear)
  assert [layer.is_dense for layer in layers] == [False, False, True]
  for layer in layers:
    assert [leaf.path[-1] for leaf in layer.leaves] == list(names)
  assert prediction.predictor(cut).num_params == (
    prediction.predictor(
      prediction.cut(network("kernel", "bias"), 1)
    ).num_params
  )


@pytest.mark.parametrize(
  ("leaf", "given"),
  [
    (np.zeros(2, np.int32), r"int32\[2\]"),
    (np.zeros(2, bool), r"bool\[2\]"),
    (np.zeros(2, np.complex64), r"complex64\[2\]"),
    (1.0, "1.0"),
    ("text", "'text'"),
    (jax.random.key(0), r"key<fry>\[\]"),
  ],
)
@pytest.mark.parametrize("where", ["c0", "d"])
def test_leaves_without_floats_are_refused(leaf, given, where):
  tree = network("kernel", "bias")
  tree[where]["more"] = leaf
  with pytest.raises(ValueError, match=f"floats.*got {given} at {where}.more"):
    prediction.cut(tree, 1)


def test_leaf_without_a_shape_is_refused():
  tree = network("kernel", "bias")
  cut = prediction.cut(tree, 1)
  tree["d"]["bias"] = 1.0
  with pytest.raises(
    ValueError, match=r"d\.bias is float\[\] and not float\[2"
  ):
    cut.split(tree)


def test_other_mappings_are_refused():
  tree = network("kernel", "bias")
  for other in (
    collections.OrderedDict(tree),
    tree | {"d": collections.OrderedDict(tree["d"])},
  ):
    with pytest.raises(ValueError, match="plain dicts, got a OrderedDict"):
      prediction.cut(other, 1)


def test_layers_in_a_list_are_refused():
  tree = network("kernel", "bias")
  with pytest.raises(ValueError, match="nested dict of arrays with text as"):
    prediction.cut(tree | {"d": [jnp.zeros(2)]}, 1)


def test_names_without_an_order_require_one():
  conv = {"kernel": jnp.zeros((3, 3, 2, 2))}
  norm = {"scale": jnp.ones(2), "bias": jnp.zeros(2)}
  dense = {"kernel": jnp.zeros((2, 2))}
  first = {"BatchNorm_0": norm, "Conv_0": conv, "Dense_0": dense}
  with pytest.raises(
    ValueError, match=r"BatchNorm_0 holds.*no layer is before"
  ):
    prediction.cut(first, 1)
  several = {
    "Conv_0": conv, "Conv_1": conv, "GroupNorm_0": norm, "GroupNorm_1": norm,
  }  # fmt: skip
  with pytest.raises(ValueError, match=r"GroupNorm_1 h.*GroupNorm_0 is before"):
    prediction.cut(several, 1)
  order = ("Conv_0", "GroupNorm_0", "Conv_1", "GroupNorm_1")
  cut = prediction.cut(several, 1, order=order)
  assert [leaf.path[0] for leaf in cut.front[0].leaves] == [
    "Conv_0", "GroupNorm_0", "GroupNorm_0",
  ]  # fmt: skip
  # What is asked for is done: inputs may be normalized first.
  order = ("BatchNorm_0", "Conv_0", "Dense_0")
  assert len(prediction.cut(first, 1, order=order).rear) == 2


@pytest.mark.parametrize(
  "tree", [{}, None, {"d": {"kernel": np.zeros((2, 2))}}]
)
def test_network_of_one_layer_cannot_be_cut(tree):
  with pytest.raises(
    ValueError, match=r"`model` must have two layers.*got [01]"
  ):
    prediction.cut(tree, 1)
