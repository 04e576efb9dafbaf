"""Networks as rows of parts, each a layer by itself too."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx


class NetworkPart(NamedTuple):
  """Consecutive sub-modules of a network, and what they compute.

  Attributes:
    names: of the sub-modules; the first is the layer's name.
    run: `run(network, x, mask)` gives y. Of the network it takes these
      sub-modules only, so that it also runs on a `PartialNetwork`.
  """

  names: tuple[str, ...]
  run: Callable[[Any, jax.Array, jax.Array | None], jax.Array]


class LayeredNetwork(nnx.Module):
  """A network that runs its parts one after the other."""

  def parts(self) -> tuple[NetworkPart, ...]:
    """Returns the parts in their order."""
    raise NotImplementedError

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Gives logits of images or tokens; `mask` [batch] is for statistics."""
    for part in self.parts():
      x = part.run(self, x, mask)
    return x


class PartialNetwork(nnx.Module):
  """A part of a network by itself: the same sub-modules, of the same names."""

  def __init__(self, network: LayeredNetwork, part: NetworkPart):
    for name in part.names:
      setattr(self, name, getattr(network, name))
    self.run = part.run

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Gives what the next part takes."""
    return self.run(self, x, mask)
