"""Convolutions of few channels and max pooling that are fast on CPUs.

The time of XLA's convolutions on CPUs does not fall with the channels, and the
gradient of its windowed maximum is a scalar loop: both together double the
time of a LeNet's step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# With 16 channels and more, XLA's own convolutions were as fast or faster for
# 3x3 windows (ResNets' layers, batches of 8 and 16, one thread).
MOST_CHANNELS = 8


def convolve(
  images: jax.Array,
  kernel: jax.Array,
  strides: Sequence[int],
  padding: str | Sequence[tuple[int, int]],
  *,
  precision: Any = None,
  **rest: Any,
) -> jax.Array:
  """Runs `jax.lax.conv_general_dilated`, on CPUs as one matrix product.

  It is for `nnx.Conv(conv_general_dilated=convolve)` without dilations or
  groups.
  """
  # The platform of the compilation decides, and not that of the trace: programs
  # for GPUs are also compiled on machines without one.

  def by_xla(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
      images, kernel, strides, padding, precision=precision, **rest
    )

  def by_patches(images: jax.Array, kernel: jax.Array) -> jax.Array:
    return _multiply_patches(images, kernel, strides, padding, precision)

  return jax.lax.platform_dependent(
    images, kernel, cpu=by_patches, default=by_xla
  )


def _multiply_patches(
  images: jax.Array,
  kernel: jax.Array,
  strides: Sequence[int],
  padding: str | Sequence[tuple[int, int]],
  precision: Any,
) -> jax.Array:
  *window, _, num_features = kernel.shape
  if isinstance(padding, str):
    padding = jax.lax.padtype_to_pads(
      images.shape[1:3], window, strides, padding
    )
  x = jnp.pad(images, ((0, 0), *padding, (0, 0)))
  # With rows of pixels last, all copies below are contiguous, and the few
  # channels are an outer axis.
  x = x.transpose(3, 0, 1, 2)
  sizes = [
    (size - taps) // stride + 1
    for size, taps, stride in zip(x.shape[2:], window, strides, strict=True)
  ]
  # One direction after the other needs h + w copies instead of h * w.
  for axis in (1, 0):
    x = jnp.stack(
      [
        jax.lax.slice_in_dim(
          x,
          tap,
          tap + (sizes[axis] - 1) * strides[axis] + 1,
          strides[axis],
          axis=axis - 2,
        )
        for tap in range(window[axis])
      ]
    )
  patches = x.reshape(kernel.size // num_features, -1)
  y = jnp.matmul(
    kernel.reshape(-1, num_features).T, patches, precision=precision
  )
  return y.reshape(num_features, len(images), *sizes).transpose(1, 2, 3, 0)


def halve(images: jax.Array, padding: str = "VALID") -> jax.Array:
  """Returns the maxima of 2x2 pixels of images [batch, height, width, c].

  It computes `nnx.max_pool(images, (2, 2), strides=(2, 2))`, but equal maxima
  of a window share the gradient.
  """
  # After a rectifier nearly all equal maxima are zeros, which have no gradient.
  batch, height, width, channels = images.shape
  if height % 2 or width % 2:
    return nnx.max_pool(images, (2, 2), strides=(2, 2), padding=padding)
  pairs = images.reshape(batch, height // 2, 2, width // 2, 2, channels)
  return pairs.max((2, 4))
