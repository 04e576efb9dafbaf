"""Small networks: perceptrons, LeNet-5 and a net of three convolutions."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdist.models import _layered_network, _layers, _patches


class MLP(_layered_network.LayeredNetwork):
  """Fully connected layers with rectifiers between them.

  Args:
    hidden_sizes: Units of each hidden layer; default one layer of 128. Without
      hidden layers the model is linear.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden_sizes: Sequence[int] = (128,),
    rngs: _layers.Keys,
  ):
    # The first dense layer flattens the images.
    size = math.prod(input_shape)
    _layers.add_head(self, size, hidden_sizes, num_classes, first=1, rngs=rngs)


class LeNet(_layered_network.LayeredNetwork):
  """LeNet-5: two convolutions, three fully connected layers.

  It has 61,706 parameters for grayscale images and ten classes. Smaller images
  are padded to 32x32, as LeCun et al. did with MNIST.

  References:
    LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to
    document recognition", 1998, section II.B. Departures, which are usual
    now: rectifiers, max pooling without weights, a second convolution over all
    maps of the first, a linear last layer.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    rngs: _layers.Keys,
  ):
    height, width, num_channels = input_shape
    if max(height, width) > 32:
      raise ValueError(
        f"`input_shape` of lenet must be at most 32x32, got {input_shape}. "
        "Crop or shrink the images, or use cnn or resnet20."
      )
    conv1 = _layers.conv(num_channels, 6, 5, padding="VALID", rngs=rngs)
    _layers.add_conv(
      self, {"conv1": conv1}, before=_pad_to_32, after=_patches.halve
    )
    conv2 = _layers.conv(6, 16, 5, padding="VALID", rngs=rngs)
    _layers.add_conv(self, {"conv2": conv2}, after=_patches.halve)
    _layers.add_head(
      self, 5 * 5 * 16, (120, 84), num_classes, first=3, rngs=rngs
    )


class CNN(_layered_network.LayeredNetwork):
  """Three 3x3 convolutions, each followed by pooling, and dense layers.

  Widths are 32, 64 and 128, without normalization; there are 113,738 parameters
  for CIFAR-10. The network is for runs of minutes on a CPU, and not a published
  one.

  Args:
    hidden_sizes: Units of the hidden dense layers; default none. With (512,)
      there are 1,147,466 parameters at hardly more computation.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden_sizes: Sequence[int] = (),
    rngs: _layers.Keys,
  ):
    height, width, num_channels = input_shape
    if min(height, width) < 8:
      raise ValueError(
        "`input_shape` of cnn must be at least 8x8, as it is halved three "
        f"times, got {input_shape}. Pad the images, or use mlp."
      )
    for i, features in enumerate((32, 64, 128), 1):
      layer = _layers.conv(num_channels, features, 3, rngs=rngs)
      _layers.add_conv(self, {f"conv{i}": layer}, after=_patches.halve)
      num_channels = features
    # Pooling drops an odd last row or column, three times.
    num_features = (height // 8) * (width // 8) * 128
    _layers.add_head(
      self, num_features, hidden_sizes, num_classes, first=4, rngs=rngs
    )


def _pad_to_32(x: jax.Array) -> jax.Array:
  # An odd border has its larger half below and to the right.
  missing = [32 - size for size in x.shape[1:3]]
  around = [(0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)]
  return jnp.pad(x, around)
