"""Layers with the initial values that networks of rectifiers need.

With `NoKeys` as the source of random keys they hold shapes instead of values,
and nothing is drawn or allocated.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdist import checks
from jdist.models import _patches
from jdist.models._layered_network import LayeredNetwork


class NoKeys:
  """A source of random keys that returns None."""

  def params(self) -> None:
    """Returns no key; NNX layers call this once per parameter."""


# `nnx.Rngs` or `NoKeys`.
Keys = Any


def conv(
  in_features: int,
  out_features: int,
  kernel_size: int,
  *,
  strides: int = 1,
  padding: str | int = "SAME",
  use_bias: bool = True,
  gain: float = 1.0,
  rngs: Keys,
) -> nnx.Conv:
  """Makes a convolution over square windows, channels last.

  Weights are normal with variance `2 gain**2 / fan_in` (He et al., 2015,
  arXiv:1502.01852), biases zero.
  """
  # XLA's convolutions on CPUs are slow for images of few channels.
  few = in_features <= _patches.MOST_CHANNELS
  return nnx.Conv(
    in_features, out_features, (kernel_size, kernel_size),
    strides=(strides, strides), padding=padding, use_bias=use_bias,
    kernel_init=_normal(2.0 * gain**2), bias_init=_zeros, rngs=rngs,
    conv_general_dilated=(
      _patches.convolve if few else jax.lax.conv_general_dilated
    ),
  )  # fmt: skip


def dense(
  in_features: int,
  out_features: int,
  *,
  last: bool = False,
  use_bias: bool = True,
  gain: float = 1.0,
  rngs: Keys,
) -> nnx.Linear:
  """Makes a fully connected layer.

  Weights are normal with variance `2 gain**2 / fan_in`, or half of it for a
  layer that no rectifier follows (`last`); biases zero.
  """
  # A rectifier halves the variance of its input; the factor 2 makes up for it.
  kernel_init = _normal((1.0 if last else 2.0) * gain**2)
  return nnx.Linear(
    in_features, out_features, use_bias=use_bias, kernel_init=kernel_init,
    bias_init=_zeros, rngs=rngs,
  )  # fmt: skip


class Embedding(nnx.Module):
  """A table of `size` vectors, normal with standard deviation `std`."""

  def __init__(self, size: int, num_features: int, *, std: float, rngs: Keys):
    # `_normal` divides the variance by the first size.
    init = _normal(std**2 * size)
    self.table = nnx.Param(init(rngs.params(), (size, num_features)))


def _normal(scale: float) -> Callable[..., Any]:
  """Returns a normal initializer of variance `scale / fan_in`, by NumPy."""
  # JAX would compile one program per shape, and its normal numbers may differ
  # between devices in the last bit.

  def init(
    key: jax.Array | None, shape: tuple[int, ...], dtype: Any = jnp.float32
  ) -> jax.Array | jax.ShapeDtypeStruct:
    if key is None:
      return jax.ShapeDtypeStruct(shape, dtype)
    # A multiplication by zero would leave zeros of both signs.
    if not scale:
      return jnp.asarray(np.zeros(shape), dtype)
    entropy = np.asarray(jax.random.key_data(key)).tolist()
    draw = np.random.default_rng(entropy).standard_normal(shape, np.float32)
    std = np.float32(math.sqrt(scale / math.prod(shape[:-1])))
    return jnp.asarray(draw * std, dtype)

  return init


_zeros = _normal(0.0)


def add_head(
  network: LayeredNetwork,
  in_features: int,
  hidden_sizes: Sequence[int],
  num_classes: int,
  *,
  first: int,
  rngs: Keys,
) -> None:
  """Adds dense layers with rectifiers between them; the first one flattens.

  Their names are dense<number>, counted from `first`.
  """
  for size in checks.check_list("hidden_sizes", hidden_sizes, "ints"):
    checks.check_int("hidden_sizes", size, 1)
  sizes = [in_features, *hidden_sizes, num_classes]
  num_layers = len(sizes) - 1
  # With leading zeros, names sort in the order of the layers.
  digits = len(str(first + num_layers - 1))

  def run(i: int, x: jax.Array, mask: Any, layer: Any) -> jax.Array:
    del mask
    x = layer(x if i else x.reshape(len(x), -1))
    return x if i == num_layers - 1 else jax.nn.relu(x)

  for i in range(num_layers):
    name = f"dense{first + i:0{digits}}"
    last = i == num_layers - 1
    layer = dense(sizes[i], sizes[i + 1], last=last, rngs=rngs)
    network.add_part({name: layer}, functools.partial(run, i))


def add_conv(
  network: LayeredNetwork,
  modules: Mapping[str, nnx.Module],
  *,
  before: Callable[[jax.Array], jax.Array] | None = None,
  after: Callable[[jax.Array], jax.Array] | None = None,
) -> None:
  """Adds a convolution, an optional norm, and a rectifier.

  `before` changes the images, and `after` the result, for instance by pooling.
  """

  def run(x: jax.Array, mask: Any, conv: Any, *norms: Any) -> jax.Array:
    x = conv(x if before is None else before(x))
    for norm in norms:
      x = norm(x, mask=mask)
    x = jax.nn.relu(x)
    return x if after is None else after(x)

  network.add_part(modules, run)
