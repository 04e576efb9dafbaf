"""Fully connected networks."""

import math
from collections.abc import Sequence

from jdist.models import _layered_network, _layers


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
