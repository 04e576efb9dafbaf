"""Small convolutional networks: LeNet-5 and a net of three convolutions."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdist.models import _layers, _patches


class LeNet(nnx.Module):
  """LeNet-5: two convolutions, three fully connected layers.

  61,706 parameters for gray images and ten classes. Images smaller than
  32x32 are put in the middle of one, as LeCun et al. did with MNIST.

  References:
    LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to
    document recognition", 1998, section II.B. Departures, which are usual
    now: rectifiers, max pooling without weights, every map of the second
    convolution sees all of the first, a linear last layer.
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
    self.conv1 = _layers.conv(num_channels, 6, 5, padding="VALID", rngs=rngs)
    self.conv2 = _layers.conv(6, 16, 5, padding="VALID", rngs=rngs)
    self.head = _layers.add_head(
      self, 5 * 5 * 16, (120, 84), num_classes, first=3, rngs=rngs
    )

  def __call__(self, images: jax.Array) -> jax.Array:
    """Gives logits [batch, num_classes] of images [batch, h, w, c]."""
    _, height, width, _ = images.shape
    missing = [(32 - size) for size in (height, width)]
    around = [(0, 0), *((m // 2, m - m // 2) for m in missing), (0, 0)]
    x = jnp.pad(images, around)
    for layer in (self.conv1, self.conv2):
      x = _patches.halve(jax.nn.relu(layer(x)))
    return _layers.apply_head(self, x.reshape(len(x), -1))


class CNN(nnx.Module):
  """Three 3x3 convolutions, each followed by pooling, and one dense layer.

  Widths 32, 64 and 128, without normalization; 113,738 parameters for
  CIFAR-10. Made for runs of minutes on a CPU; no published network.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    rngs: _layers.Keys,
  ):
    height, width, num_channels = input_shape
    if min(height, width) < 8:
      raise ValueError(
        "`input_shape` of cnn must be at least 8x8, as it is halved three "
        f"times, got {input_shape}. Pad the images, or use mlp."
      )
    self.conv1 = _layers.conv(num_channels, 32, 3, rngs=rngs)
    self.conv2 = _layers.conv(32, 64, 3, rngs=rngs)
    self.conv3 = _layers.conv(64, 128, 3, rngs=rngs)
    num_features = (height // 8) * (width // 8) * 128
    self.dense4 = _layers.dense(num_features, num_classes, last=True, rngs=rngs)

  def __call__(self, images: jax.Array) -> jax.Array:
    """Gives logits [batch, num_classes] of images [batch, h, w, c]."""
    x = images
    for layer in (self.conv1, self.conv2, self.conv3):
      x = _patches.halve(jax.nn.relu(layer(x)))
    return self.dense4(x.reshape(len(x), -1))
