"""Networks as sequences of parts, each of which can run on its own."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from flax import nnx


class NetworkPart(NamedTuple):
  """Consecutive sub-modules of a network, and the function that they compute.

  Attributes:
    names: The names of the sub-modules; the first is the layer's name.
    run: A function `run(network, x, mask)` that returns y. It accesses these
      sub-modules only, so that it also runs on a `PartialNetwork`.
  """

  names: tuple[str, ...]
  run: Callable[[Any, jax.Array, jax.Array | None], jax.Array]


class LayeredNetwork(nnx.Module):
  """A network that runs its parts one after the other.

  Attributes:
    parts: The parts in the order in which they run.
  """

  parts: tuple[NetworkPart, ...] = ()

  def add_part(
    self,
    modules: Mapping[str, nnx.Module],
    run: Callable[[Any, jax.Array, jax.Array | None], jax.Array],
  ) -> None:
    """Adds sub-modules by name, and the function that runs them next."""
    for name, module in modules.items():
      setattr(self, name, module)
    self.parts += (NetworkPart(tuple(modules), run),)

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns logits of images or tokens; `mask` [batch] is for statistics."""
    for part in self.parts:
      x = part.run(self, x, mask)
    return x


class PartialNetwork(nnx.Module):
  """One part of a network: the same sub-modules with the same names."""

  def __init__(self, network: LayeredNetwork, part: NetworkPart):
    # Equal names give equal paths of parameters, so that a layer's tree is a
    # part of the network's.
    for name in part.names:
      setattr(self, name, getattr(network, name))
    self.run = part.run

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns the input of the next part."""
    return self.run(self, x, mask)
