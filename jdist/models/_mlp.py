"""Fully connected networks."""

import math
from collections.abc import Sequence

import jax
from flax import nnx

from jdist.models import _layers


class MLP(nnx.Module):
  """Fully connected layers with rectifiers between them.

  Args:
    input_shape: of one image; it is flattened.
    num_classes: number of logits.
    hidden_sizes: units of each hidden layer; default one layer of 128. Empty
      makes the model linear.
    rngs: source of the initial values.

  Raises:
    ValueError: if a size is below 1.
  """

  def __init__(
    self,
    input_shape: tuple[int, int, int],
    num_classes: int,
    *,
    hidden_sizes: Sequence[int] = (128,),
    rngs: nnx.Rngs,
  ):
    if any(size < 1 for size in hidden_sizes):
      raise ValueError(
        f"`hidden_sizes` must be positive, got {tuple(hidden_sizes)}."
      )
    sizes = [math.prod(input_shape), *hidden_sizes, num_classes]
    num_layers = len(sizes) - 1
    # Digits enough that the names sort in the order of the layers.
    width = len(str(num_layers))
    self.names = tuple(f"dense{i + 1:0{width}}" for i in range(num_layers))
    for i, name in enumerate(self.names):
      last = i == num_layers - 1
      layer = _layers.dense(sizes[i], sizes[i + 1], last=last, rngs=rngs)
      setattr(self, name, layer)

  def __call__(self, images: jax.Array) -> jax.Array:
    """Gives logits [batch, num_classes] of images [batch, h, w, c]."""
    x = images.reshape(len(images), -1)
    for name in self.names[:-1]:
      x = jax.nn.relu(getattr(self, name)(x))
    return getattr(self, self.names[-1])(x)
