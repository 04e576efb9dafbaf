"""AlexNet in its ImageNet form, and in a form for small images."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx

from jdist.models import _forms, _layered_network, _layers


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


_SIZES: dict[_forms.Form, _Sizes] = {
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
    form: _forms.Form | None = None,
    hidden_sizes: Sequence[int] | None = None,
    rngs: _layers.Keys,
  ):
    form = _forms.choose_form(form, input_shape)
    sizes = _SIZES[form]
    _forms.check_size("alexnet", form, input_shape, sizes.smallest_image)
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
