"""VGG: 3x3 convolutions in five blocks, each followed by pooling."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jdist import checks
from jdist.models import (
  _forms,
  _layered_network,
  _layers,
  _normalization,
  _patches,
)


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
    form: _forms.Form | None = None,
    hidden_sizes: Sequence[int] | None = None,
    norm: _normalization.Norm = "none",
    num_groups: int = 8,
    width: int = 64,
    max_growth: int = 8,
    rngs: _layers.Keys,
  ):
    *size, num_features = input_shape
    form = _forms.choose_form(form, input_shape)
    if form == "imagenet":
      _forms.check_size("vgg", form, input_shape, 32)
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
