"""Residual networks for ImageNet, and those of 6n + 2 layers for CIFAR."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdist import checks
from jdist.models import _layered_network, _layers, _normalization


class ResNet(_layered_network.LayeredNetwork):
  """ResNet-18, 34 and 50, with first layers for ImageNet or small images.

  The ImageNet form begins with a convolution over 7x7 pixels of stride 2 and
  pooling by 2, and the form for small images with one over 3x3 pixels. Four
  stages of blocks with 64, 128, 256 and 512 features follow, each after the
  first at half the resolution; then a mean over the image, and one dense layer.
  Where the shape changes, the shortcut is a convolution (option B).

  | parameters | ImageNet, 1,000 classes | CIFAR form, 10 classes |
  |------------|-------------------------|------------------------|
  | ResNet-18  | 11,689,512              | 11,173,962             |
  | ResNet-34  | 21,797,672              | 21,282,122             |
  | ResNet-50  | 25,557,032              | 23,520,842             |

  Args:
    blocks_per_stage: The number of blocks of each stage.
    bottleneck: Whether a block has 1x1, 3x3 and 1x1 convolutions, the last with
      four times the features, or two 3x3 convolutions.
    width: Features of the first stage, a multiple of `num_groups`.
    shortcut_size: The odd window size of the shortcuts' convolutions.

  References:
    He, Zhang, Ren and Sun, "Deep residual learning for image recognition",
    2015, arXiv:1512.03385, table 1. Departure, usual now: in a bottleneck
    that halves the resolution the 3x3 convolution has the stride.
    Without normalization all L blocks start as the identity, as in Fixup
    (Zhang, Dauphin and Ma, 2019, arXiv:1901.09321): the last of a block's m
    convolutions starts at zero, and the others are scaled by
    L**(-1 / (2m - 2)). Departures: the convolutions' ordinary biases in place
    of its scalar ones, no scalar multipliers, and a last layer that does not
    start at zero.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    blocks_per_stage: tuple[int, ...],
    bottleneck: bool,
    form: _layered_network.Form | None = None,
    norm: _normalization.Norm = "batch",
    num_groups: int = 8,
    width: int = 64,
    shortcut_size: int = 1,
    rngs: _layers.Keys,
  ):
    form = _layered_network.choose_form(
      "a resnet", form, input_shape, {"cifar": 8, "imagenet": 32}
    )
    checks.check_int("width", width, 1)
    if shortcut_size < 1 or shortcut_size % 2 == 0:
      raise ValueError(
        f"`shortcut_size` must be odd and >= 1, got {shortcut_size}."
      )
    self._add_layers(
      input_shape[-1], num_classes, width, blocks_per_stage,
      large=form == "imagenet", norm=norm, num_groups=num_groups, rngs=rngs,
      bottleneck=bottleneck, shortcut_size=shortcut_size,
    )  # fmt: skip

  def _add_layers(
    self,
    num_channels: int,
    num_classes: int,
    width: int,
    blocks_per_stage: tuple[int, ...],
    *,
    large: bool,
    norm: _normalization.Norm,
    num_groups: int,
    rngs: _layers.Keys,
    **block_options: Any,
  ) -> None:
    _normalization.check_norm(norm)
    window = 7 if large else 3
    # A bias before a normalization would be subtracted again.
    conv = _layers.conv(
      num_channels, width, window, strides=2 if large else 1,
      padding=window // 2, use_bias=norm == "none", rngs=rngs,
    )  # fmt: skip
    first: dict[str, nnx.Module] = {"stage0_conv": conv}
    if norm != "none":
      first["stage0_norm"] = _normalization.make_norm(norm, width, num_groups)
    # Symmetric padding by one pixel, as torchvision does.
    pool = functools.partial(
      nnx.max_pool, window_shape=(3, 3), strides=(2, 2),
      padding=((1, 1), (1, 1)),
    )  # fmt: skip
    _layers.add_conv(self, first, after=pool if large else None)
    num_features = width
    for stage, num_blocks in enumerate(blocks_per_stage):
      for block in range(num_blocks):
        # Names sort in the order of the layers, as flattened trees sort keys.
        name = f"stage{stage + 1}_block{block + 1}"
        module = _Block(
          num_features, width * 2**stage,
          strides=2 if stage > 0 and block == 0 else 1, norm=norm,
          num_groups=num_groups, num_blocks=sum(blocks_per_stage), rngs=rngs,
          **block_options,
        )  # fmt: skip
        self.add_part({name: module}, lambda x, mask, block: block(x, mask))
        num_features = module.out_features
    name = f"stage{len(blocks_per_stage) + 1}_dense"
    layer = _layers.dense(num_features, num_classes, last=True, rngs=rngs)
    self.add_part(
      {name: layer}, lambda x, mask, dense: dense(jnp.mean(x, axis=(1, 2)))
    )


class CifarResNet(ResNet):
  """The CIFAR ResNet of 6n + 2 layers.

  A convolution of 16 channels is followed by three stages of n blocks with 16,
  32 and 64 channels, the second and third at half the resolution, then by a
  mean over the image and one dense layer. Shortcuts have no parameters: where
  the shape changes they take every second pixel and add channels of zeros
  (option A of the paper). ResNet-20 (n = 3) has 269,722 parameters on
  CIFAR-10. Without normalization its blocks start as those of `ResNet`.

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
    if min(input_shape[:2]) < 4:
      raise ValueError(
        "`input_shape` of a resnet must be at least 4x4, as it is halved "
        f"twice, got {input_shape}. Pad the images, or use mlp."
      )
    self._add_layers(
      input_shape[-1], num_classes, 16, (blocks_per_stage,) * 3,
      large=False, norm=norm, num_groups=num_groups, rngs=rngs,
      bottleneck=False, shortcut_size=None,
    )  # fmt: skip


class _Block(nnx.Module):
  """Two or three convolutions, and a shortcut around them.

  Without `shortcut_size` the shortcut has no parameters.
  """

  def __init__(
    self,
    in_features: int,
    features: int,
    *,
    bottleneck: bool,
    strides: int,
    norm: _normalization.Norm,
    num_groups: int,
    shortcut_size: int | None,
    num_blocks: int,
    rngs: _layers.Keys,
  ):
    self.plain = norm == "none"
    # (window, features, strides) of each convolution.
    if bottleneck:
      layers = [(1, features, 1), (3, features, strides), (1, 4 * features, 1)]
    else:
      layers = [(3, features, strides), (3, features, 1)]
    self.out_features = layers[-1][1]

    def add(
      name: str, inputs: int, gain: float, layer: tuple[int, ...]
    ) -> None:
      window, outputs, strides = layer
      # With strides, "SAME" pads an image of even size below and right only, so
      # that its windows begin a pixel later than those of symmetric padding.
      padding = window // 2 if shortcut_size else "SAME"
      conv = _layers.conv(
        inputs, outputs, window, strides=strides, padding=padding,
        use_bias=self.plain, gain=gain, rngs=rngs,
      )  # fmt: skip
      setattr(self, name, conv)
      if not self.plain:
        norm_layer = _normalization.make_norm(norm, outputs, num_groups)
        setattr(self, f"{name}_norm", norm_layer)

    # Fixup's scale keeps the sum of L residuals of order one.
    smaller = num_blocks ** (-0.5 / (len(layers) - 1)) if self.plain else 1.0
    inputs = in_features
    for i, layer in enumerate(layers):
      last = i == len(layers) - 1
      gain = 0.0 if self.plain and last else smaller
      add(f"conv{i + 1}", inputs, gain, layer)
      inputs = layer[1]
    self.names = tuple(f"conv{i + 1}" for i in range(len(layers)))
    self.strides = strides
    self.added_features = self.out_features - in_features
    self.projects = bool(shortcut_size and (strides > 1 or self.added_features))
    if shortcut_size and self.projects:
      # "shortcut" sorts after "conv", and the shortcut runs after them.
      shape = (shortcut_size, self.out_features, strides)
      add("shortcut", in_features, 1.0, shape)

  def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
    def run(name: str, x: jax.Array) -> jax.Array:
      x = getattr(self, name)(x)
      return x if self.plain else getattr(self, f"{name}_norm")(x, mask=mask)

    y = x
    for name in self.names[:-1]:
      y = jax.nn.relu(run(name, y))
    y = run(self.names[-1], y)
    if self.projects:
      x = run("shortcut", x)
    elif self.added_features:
      # Option A: every second pixel, and zeros for the added features.
      x = x[:, :: self.strides, :: self.strides]
      x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.added_features)))
    return jax.nn.relu(y + x)
