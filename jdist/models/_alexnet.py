"""AlexNet, for ImageNet and for small images."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jdist.models import _forms, _layered_network, _layers


class _Conv(NamedTuple):
  num_features: int
  kernel_size: int
  strides: int
  pooled: bool


_CONVS: dict[_forms.Form, tuple[_Conv, ...]] = {
  "cifar": (
    _Conv(96, 3, 1, True),
    _Conv(256, 5, 1, True),
    _Conv(384, 3, 1, False),
    _Conv(384, 3, 1, False),
    _Conv(256, 3, 1, True),
  ),
  "imagenet": (
    _Conv(64, 11, 4, True),
    _Conv(192, 5, 1, True),
    _Conv(384, 3, 1, False),
    _Conv(256, 3, 1, False),
    _Conv(256, 3, 1, True),
  ),
}
_POOL_SIZE: dict[_forms.Form, int] = {"cifar": 2, "imagenet": 3}
_HIDDEN_SIZE: dict[_forms.Form, int] = {"cifar": 512, "imagenet": 4096}
_SMALLEST: dict[_forms.Form, int] = {"cifar": 8, "imagenet": 63}


class AlexNet(_layered_network.LayeredNetwork):
  """AlexNet: five convolutions, three fully connected layers.

  The ImageNet form is that of one tower (Krizhevsky, 2014), 61,100,840
  parameters for 224x224 images and 1,000 classes. The form for small images
  has strides of 1, windows of 3, 5, 3, 3, 3 with 96, 256, 384, 384, 256
  features and pooling by 2; 6,080,394 parameters for CIFAR-10. Hidden dense
  layers have 4,096 units by default, and 512 in the form for small images.

  References:
    Krizhevsky, "One weird trick for parallelizing convolutional neural
    networks", 2014, arXiv:1404.5997. Departures: no dropout, whose keys would
    have to differ between workers; initial values of He et al.; at another
    size than 224 the first dense layer has other inputs, where some average
    to 6x6. The form for small images is a reconstruction: there is no
    published one that all agree on.
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
    _forms.check_size("alexnet", form, input_shape, _SMALLEST[form])
    self.pool_size = _POOL_SIZE[form]
    *size, num_features = input_shape
    pooled = []
    for i, (features, kernel_size, strides, pool) in enumerate(_CONVS[form]):
      # 2 and not 5 in the first layer, a window of 11 with strides of 4.
      padding = 2 if kernel_size == 11 else kernel_size // 2
      layer = _layers.conv(
        num_features,
        features,
        kernel_size,
        strides=strides,
        padding=padding,
        rngs=rngs,
      )
      setattr(self, f"conv{i + 1}", layer)
      num_features = features
      size = [(n + 2 * padding - kernel_size) // strides + 1 for n in size]
      if pool:
        size = [(n - self.pool_size) // 2 + 1 for n in size]
      pooled.append(pool)
    self.pooled = tuple(pooled)
    self.head = _layers.add_head(
      self,
      size[0] * size[1] * num_features,
      (_HIDDEN_SIZE[form],) * 2 if hidden_sizes is None else hidden_sizes,
      num_classes,
      first=6,
      rngs=rngs,
    )

  def parts(self) -> tuple[_layered_network.NetworkPart, ...]:
    """Returns each convolution with its pooling, then the dense layers."""
    convs = []
    for i, pooled in enumerate(self.pooled):
      name = f"conv{i + 1}"
      size = self.pool_size if pooled else None
      run = functools.partial(_run_conv, name, size)
      convs.append(_layered_network.NetworkPart((name,), run))
    return (*convs, *_layers.head_parts(self.head))


def _run_conv(
  name: str, pool_size: int | None, net: Any, x: jax.Array, mask: Any
) -> jax.Array:
  del mask
  x = jax.nn.relu(getattr(net, name)(x))
  if pool_size is None:
    return x
  return nnx.max_pool(x, (pool_size, pool_size), strides=(2, 2))
