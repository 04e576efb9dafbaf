"""Every kind of model in a small size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import models

_LM = {"num_layers": 2, "width": 16, "num_heads": 2}

VARIANTS = [
  ("mlp", {}),
  ("mlp", {"hidden_sizes": (20, 30)}),
  ("lenet", {}),
  ("cnn", {}),
  ("cnn", {"hidden_sizes": (20,)}),
  ("alexnet", {"hidden_sizes": (20,)}),
  ("vgg11", {"width": 8}),
  ("vgg11", {"width": 8, "norm": "batch"}),
  ("vgg15", {"width": 8, "norm": "group"}),
  ("resnet8", {}),
  ("resnet8", {"norm": "group"}),
  ("resnet8", {"norm": "none"}),
  ("resnet18", {"width": 8}),
  ("resnet18", {"width": 8, "norm": "none", "shortcut_size": 3}),
  ("resnet50", {"width": 8, "norm": "group"}),
  ("transformer", _LM),
  ("transformer", _LM | {"positions": "rotary"}),
  ("transformer", _LM | {"tied": True, "num_layers": 1}),
]
# The table above tests another member of their families.
ALSO = ["vgg13", "vgg16", "vgg19", "resnet20", "resnet34"]

variants = pytest.mark.parametrize("name, options", VARIANTS)


def build(name, options=None, input_shape=None, seed=0, **kwargs):
  if input_shape is None:
    input_shape = (8,) if name == "transformer" else (8, 8, 1)
  return models.build(
    name,
    input_shape=input_shape,
    num_classes=10,
    seed=seed,
    **(options or {}),
    **kwargs,
  )


def like(name, batch_size=2, input_shape=None, dtype=jnp.float32):
  """What a model takes, without values."""
  if name == "transformer":
    return jax.ShapeDtypeStruct((batch_size, 8), jnp.int32)
  shape = (8, 8, 1) if input_shape is None else input_shape
  return jax.ShapeDtypeStruct((batch_size, *shape), dtype)


def inputs(name, batch_size=2):
  """What a model takes, at random; from NumPy, as JAX would compile."""
  x = like(name, batch_size)
  rng = np.random.default_rng(0)
  if jnp.issubdtype(x.dtype, jnp.integer):
    return jnp.asarray(rng.integers(0, 10, x.shape), jnp.int32)
  return jnp.asarray(rng.standard_normal(x.shape, np.float32))


def shapes_of(model, x, **kwargs):
  """Logits and state of a call, without values."""
  apply = functools.partial(model.apply, **kwargs)
  return jax.eval_shape(apply, model.params, model.state, x)


def leaves_of(model):
  pairs, _ = jax.tree_util.tree_flatten_with_path(model.params)
  return {
    jax.tree_util.keystr(path): (
      np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
    )
    for path, leaf in pairs
  }


def products(jaxpr):
  """All convolutions and matrix products of a program, in their order."""
  for equation in jaxpr.eqns:
    yield from _products_of(equation)


def has_products(equation):
  """Whether an equation is a product or contains one."""
  return next(_products_of(equation), None) is not None


def _products_of(equation):
  if equation.primitive.name in ("conv_general_dilated", "dot_general"):
    yield equation
  for value in jax.tree.leaves(list(equation.params.values())):
    inner = getattr(value, "jaxpr", value)
    if hasattr(inner, "eqns"):
      yield from products(inner)
