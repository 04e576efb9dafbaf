"""Fully connected networks."""

import math
from collections.abc import Sequence

import jax
from flax import nnx

from jdist.models import _layers


class MLP(nnx.Module):
  """Fully connected layers with rectifiers between them.

  Args:
    hidden_sizes: units of each hidden layer; default one layer of 128. Empty
      makes the model linear.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden_sizes: Sequence[int] = (128,),
    rngs: _layers.Keys,
  ):
    self.head = _layers.add_head(
      self,
      math.prod(input_shape),
      hidden_sizes,
      num_classes,
      first=1,
      rngs=rngs,
    )

  def __call__(self, images: jax.Array) -> jax.Array:
    """Gives logits [batch, num_classes] of images [batch, h, w, c]."""
    return _layers.apply_head(self, images.reshape(len(images), -1))
