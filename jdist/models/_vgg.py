"""VGG and AlexNet: convolutions in blocks, each followed by pooling."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jdist import checks
from jdist.models import _layered_network, _layers, _normalization, _patches


class VGG(_layered_network.LayeredNetwork):
  """VGG-11, 13, 16 and 19 (configurations A, B, D, E), and VGG-15.

  Five blocks of 3x3 convolutions have 64, 128, 256, 512 and 512 features, and
  each is followed by pooling by 2, also of a last odd row or column. Dense
  layers follow: in the ImageNet form 4,096, 4,096 and the classes, so that
  VGG-16 has 138,357,544 parameters for 1,000 classes. In the form for small
  images the last map is averaged and one dense layer follows: VGG-16 has
  14,719,818 parameters for CIFAR-10.

  VGG-15 is the network of MP²: twelve convolutions with 64, 64, 128, 128 and
  eight times 256 features, then dense layers of 100, 100 and the classes,
  without normalization; it has 4,722,698 parameters for CIFAR-10. Its source
  does not say where the eight are pooled: blocks of 3, 3 and 2 are a
  reconstruction.

  Args:
    width: Features of the first block.
    max_growth: The largest ratio of a block's width to the first block's.

  References:
    Simonyan and Zisserman, "Very deep convolutional networks for large-scale
    image recognition", 2014, arXiv:1409.1556, table 1. Departures: no
    dropout, whose keys would have to differ between workers; initial values
    of He et al.; convolutions before a normalization have no biases.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    convs_per_block: tuple[int, ...],
    form: _layered_network.Form | None = None,
    hidden_sizes: Sequence[int] | None = None,
    norm: _normalization.Norm = "none",
    num_groups: int = 8,
    width: int = 64,
    max_growth: int = 8,
    rngs: _layers.Keys,
  ):
    *size, num_features = input_shape
    form = _layered_network.choose_form(
      "vgg", form, input_shape, {"cifar": 1, "imagenet": 32}
    )
    _normalization.check_norm(norm)
    checks.check_int("width", width, 1)
    averaged = form == "cifar"
    number = 0
    for block, num_convs in enumerate(convs_per_block, 1):
      features = width * min(2 ** (block - 1), max_growth)
      end = functools.partial(
        _end_block, averaged and block == len(convs_per_block)
      )
      for i in range(num_convs):
        number += 1
        # With two digits, names sort in the order of the layers.
        name = f"conv{number:02}"
        # A bias before a normalization would be subtracted again.
        layer = _layers.conv(
          num_features, features, 3, use_bias=norm == "none", rngs=rngs
        )
        modules: dict[str, nnx.Module] = {name: layer}
        if norm != "none":
          modules[f"{name}_norm"] = _normalization.make_norm(
            norm, features, num_groups
          )
        _layers.add_conv(
          self, modules, after=end if i == num_convs - 1 else None
        )
        num_features = features
      # Pooling keeps an odd last row or column.
      size = [(n + 1) // 2 for n in size]
    # Without the mean, the first dense layer sees every pixel of the last map.
    if not averaged:
      num_features *= size[0] * size[1]
    if hidden_sizes is None:
      hidden_sizes = () if averaged else (4096, 4096)
    _layers.add_head(
      self, num_features, hidden_sizes, num_classes, first=number + 1, rngs=rngs
    )


def _end_block(averaged: bool, x: jax.Array) -> jax.Array:
  x = _patches.halve(x, padding="SAME")
  return jnp.mean(x, axis=(1, 2)) if averaged else x


class _Conv(NamedTuple):
  num_features: int
  kernel_size: int
  strides: int
  pooled: bool


class _Sizes(NamedTuple):
  convs: tuple[_Conv, ...]
  pool_size: int
  hidden_size: int
  smallest_image: int


_SIZES: dict[_layered_network.Form, _Sizes] = {
  "cifar": _Sizes(
    (
      _Conv(96, 3, 1, True), _Conv(256, 5, 1, True), _Conv(384, 3, 1, False),
      _Conv(384, 3, 1, False), _Conv(256, 3, 1, True),
    ),
    pool_size=2, hidden_size=512, smallest_image=8,
  ),
  "imagenet": _Sizes(
    (
      _Conv(64, 11, 4, True), _Conv(192, 5, 1, True), _Conv(384, 3, 1, False),
      _Conv(256, 3, 1, False), _Conv(256, 3, 1, True),
    ),
    pool_size=3, hidden_size=4096, smallest_image=63,
  ),
}  # fmt: skip


class AlexNet(_layered_network.LayeredNetwork):
  """AlexNet: five convolutions, three fully connected layers.

  The ImageNet form has one tower (Krizhevsky, 2014) and 61,100,840 parameters
  for 224x224 images and 1,000 classes. The form for small images has strides of
  1, windows of 3, 5, 3, 3, 3 with 96, 256, 384, 384, 256 features and pooling
  by 2; it has 6,080,394 parameters for CIFAR-10. Hidden dense layers have 4,096
  units by default, and 512 in the form for small images.

  References:
    Krizhevsky, "One weird trick for parallelizing convolutional neural
    networks", 2014, arXiv:1404.5997. Departures: no dropout, whose keys would
    have to differ between workers; initial values of He et al.; the inputs of
    the first dense layer follow the image size, where other implementations
    average to 6x6. The form for small images is a reconstruction.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    form: _layered_network.Form | None = None,
    hidden_sizes: Sequence[int] | None = None,
    rngs: _layers.Keys,
  ):
    smallest = {name: sizes.smallest_image for name, sizes in _SIZES.items()}
    form = _layered_network.choose_form("alexnet", form, input_shape, smallest)
    sizes = _SIZES[form]
    window = (sizes.pool_size, sizes.pool_size)
    max_pool = functools.partial(
      nnx.max_pool, window_shape=window, strides=(2, 2)
    )
    *size, num_features = input_shape
    for i, (features, kernel_size, strides, pool) in enumerate(sizes.convs):
      # The paper pads the first layer's windows of 11 by 2, and not by 5.
      padding = 2 if kernel_size == 11 else kernel_size // 2
      layer = _layers.conv(
        num_features, features, kernel_size,
        strides=strides, padding=padding, rngs=rngs,
      )  # fmt: skip
      _layers.add_conv(
        self, {f"conv{i + 1}": layer}, after=max_pool if pool else None
      )
      num_features = features
      # Convolutions and pooling drop incomplete windows at the border.
      size = [(n + 2 * padding - kernel_size) // strides + 1 for n in size]
      if pool:
        size = [(n - sizes.pool_size) // 2 + 1 for n in size]
    if hidden_sizes is None:
      hidden_sizes = (sizes.hidden_size,) * 2
    num_features *= size[0] * size[1]
    _layers.add_head(
      self, num_features, hidden_sizes, num_classes, first=6, rngs=rngs
    )
