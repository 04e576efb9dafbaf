"""Layers with the initial values that networks of rectifiers need."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def conv(
  in_features: int,
  out_features: int,
  kernel_size: int,
  *,
  strides: int = 1,
  padding: str = "SAME",
  use_bias: bool = True,
  gain: float = 1.0,
  rngs: nnx.Rngs,
) -> nnx.Conv:
  """Convolution over square windows, channels last.

  Weights are normal with variance `2 gain**2 / fan_in` (He et al., 2015,
  arXiv:1502.01852), biases zero.
  """
  return nnx.Conv(
    in_features,
    out_features,
    (kernel_size, kernel_size),
    strides=(strides, strides),
    padding=padding,
    use_bias=use_bias,
    kernel_init=_normal(2.0 * gain**2),
    bias_init=_zeros,
    rngs=rngs,
  )


def dense(
  in_features: int, out_features: int, *, last: bool = False, rngs: nnx.Rngs
) -> nnx.Linear:
  """Fully connected layer.

  Weights are normal with variance 2 / fan_in, or 1 / fan_in for the last
  layer, which no rectifier follows; biases zero.
  """
  return nnx.Linear(
    in_features,
    out_features,
    kernel_init=_normal(1.0 if last else 2.0),
    bias_init=_zeros,
    rngs=rngs,
  )


def _normal(scale: float) -> Callable[..., jax.Array]:
  """Initializer: normal with variance `scale / fan_in`, drawn by NumPy.

  JAX would compile one program per shape, seconds for a small network, and
  its normal numbers may differ in the last bit from device to device.
  """

  def init(
    key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
  ) -> jax.Array:
    entropy = np.asarray(jax.random.key_data(key)).tolist()
    draw = np.random.default_rng(entropy).standard_normal(shape, np.float32)
    std = np.float32(math.sqrt(scale / math.prod(shape[:-1])))
    return jnp.asarray(draw * std, dtype)

  # Not by multiplication, which leaves zeros of both signs.
  return init if scale else _zeros


def _zeros(
  key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> jax.Array:
  del key
  return jnp.asarray(np.zeros(shape), dtype)
