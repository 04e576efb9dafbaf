"""Residual networks of 6n + 2 layers, for small images."""

import jax
import jax.numpy as jnp
from flax import nnx

from jdist.models import _layers, _normalization


class CifarResNet(nnx.Module):
  """The CIFAR ResNet of 6n + 2 layers.

  A convolution of 16 channels; three stages of n blocks with 16, 32 and 64
  channels, the second and third at half the resolution of the one before; a
  mean over the image; one dense layer. Shortcuts have no parameters: where
  the shape changes they take every second pixel and add channels of zeros
  (option A of the paper). ResNet-20 (n = 3) has 269,722 parameters on CIFAR-10.

  Without normalization nothing keeps the signal from growing with every
  block, so the initial values must: the first convolution of each of the L
  blocks starts smaller by L**-0.5 and the second at zero, so that all blocks
  start as the identity. This is Fixup (Zhang, Dauphin and Ma, 2019,
  arXiv:1901.09321) with m = 2; departures: the convolutions' ordinary biases
  in place of its scalar ones, no scalar multipliers, and the last layer does
  not start at zero.

  Args:
    input_shape: (height, width, channels), at least 4x4.
    num_classes: number of logits.
    blocks_per_stage: n, >= 1.
    norm: "batch" (default), "group" (`num_groups` groups) or "none".
    num_groups: groups of "group"; default 8, and must divide 16.
    rngs: source of the initial values.

  Raises:
    ValueError: if an argument is out of range.

  References:
    He, Zhang, Ren and Sun, "Deep residual learning for image recognition",
    2015, arXiv:1512.03385, section 4.2.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    blocks_per_stage: int,
    norm: _normalization.Norm = "batch",
    num_groups: int = 8,
    rngs: _layers.Keys,
  ):
    height, width, num_channels = input_shape
    if min(height, width) < 4:
      raise ValueError(
        "`input_shape` of a resnet must be at least 4x4, as it is halved "
        f"twice, got {input_shape}. Pad the images, or use mlp."
      )
    _normalization.check_norm(norm)
    self.stage0_conv = _layers.conv(
      num_channels, 16, 3, use_bias=norm == "none", rngs=rngs
    )
    if norm != "none":
      self.stage0_norm = _normalization.make_norm(norm, 16, num_groups)
    names = []
    num_channels = 16
    for stage in range(3):
      for block in range(blocks_per_stage):
        # Names that sort in the order of the layers.
        names.append(f"stage{stage + 1}_block{block + 1}")
        module = _Block(
          num_channels,
          16 * 2**stage,
          strides=2 if stage > 0 and block == 0 else 1,
          norm=norm,
          num_groups=num_groups,
          num_blocks=3 * blocks_per_stage,
          rngs=rngs,
        )
        setattr(self, names[-1], module)
        num_channels = 16 * 2**stage
    self.stage4_dense = _layers.dense(64, num_classes, last=True, rngs=rngs)
    self.names = tuple(names)
    self.norm = norm

  def __call__(
    self, images: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Gives logits [batch, num_classes] of images [batch, h, w, c]."""
    x = self.stage0_conv(images)
    if self.norm != "none":
      x = self.stage0_norm(x, mask=mask)
    x = jax.nn.relu(x)
    for name in self.names:
      x = getattr(self, name)(x, mask)
    return self.stage4_dense(jnp.mean(x, axis=(1, 2)))


class _Block(nnx.Module):
  """Two convolutions and a way past them."""

  def __init__(
    self,
    in_features: int,
    out_features: int,
    *,
    strides: int,
    norm: _normalization.Norm,
    num_groups: int,
    num_blocks: int,
    rngs: _layers.Keys,
  ):
    plain = norm == "none"
    self.conv1 = _layers.conv(
      in_features,
      out_features,
      3,
      strides=strides,
      use_bias=plain,
      gain=num_blocks**-0.5 if plain else 1.0,
      rngs=rngs,
    )
    self.conv2 = _layers.conv(
      out_features,
      out_features,
      3,
      use_bias=plain,
      gain=0.0 if plain else 1.0,
      rngs=rngs,
    )
    if not plain:
      self.conv1_norm = _normalization.make_norm(norm, out_features, num_groups)
      self.conv2_norm = _normalization.make_norm(norm, out_features, num_groups)
    self.plain = plain
    self.strides = strides
    self.added_features = out_features - in_features

  def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    y = self.conv1(x)
    y = y if self.plain else self.conv1_norm(y, mask=mask)
    y = self.conv2(jax.nn.relu(y))
    y = y if self.plain else self.conv2_norm(y, mask=mask)
    x = x[:, :: self.strides, :: self.strides]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.added_features)))
    return jax.nn.relu(x + y)
