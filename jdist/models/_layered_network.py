"""Networks as sequences of parts, and the two forms of those for ImageNet."""

from collections.abc import Callable, Mapping
from typing import get_args, Literal, NamedTuple

import jax
from flax import nnx

from jdist import checks

Form = Literal["cifar", "imagenet"]

# The strided first layers of the ImageNet forms discard too much of an image of
# at most this size.
_LARGEST_SMALL_IMAGE = 64


class NetworkPart(NamedTuple):
  """Consecutive sub-modules of a network, and the function that they compute.

  Attributes:
    names: The names of the sub-modules; the first is the layer's name.
    run: A function `run(x, mask, *modules)` of them, which returns y.
  """

  names: tuple[str, ...]
  run: Callable[..., jax.Array]


class LayeredNetwork(nnx.Module):
  """A network that runs its parts one after the other.

  Attributes:
    parts: The parts in the order in which they run.
  """

  parts: tuple[NetworkPart, ...] = ()

  def add_part(
    self, modules: Mapping[str, nnx.Module], run: Callable[..., jax.Array]
  ) -> None:
    """Adds sub-modules by name, and `run(x, mask, *modules)`, which is next."""
    for name, module in modules.items():
      setattr(self, name, module)
    self.parts += (NetworkPart(tuple(modules), run),)

  def __call__(
    self, x: jax.Array, *, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns logits of images or tokens; `mask` [batch] is for statistics."""
    for part in self.parts:
      x = part.run(x, mask, *(getattr(self, name) for name in part.names))
    return x


class PartialNetwork(LayeredNetwork):
  """One part of a network: the same sub-modules with the same names."""

  def __init__(self, network: LayeredNetwork, part: NetworkPart):
    # Equal names give equal paths of parameters, so that a layer's tree is a
    # part of the network's.
    self.add_part({n: getattr(network, n) for n in part.names}, part.run)


def choose_form(
  name: str,
  form: Form | None,
  input_shape: tuple[int, int, int],
  smallest: Mapping[Form, int],
) -> Form:
  """Returns the form; without one it follows from the size of the images.

  A ValueError names the network if they are smaller than the `smallest` ones.
  """
  if form is None:
    # The longer side counts: one long side keeps enough for strided layers.
    small = max(input_shape[:2]) <= _LARGEST_SMALL_IMAGE
    form = "cifar" if small else "imagenet"
  checks.check_choice("form", form, get_args(Form))
  if min(input_shape[:2]) < (at_least := smallest[form]):
    other = ' or take form="cifar"' if form == "imagenet" else ", or use mlp"
    raise ValueError(
      f"`input_shape` of the {form} form of {name} must be at least "
      f"{at_least}x{at_least}, got {input_shape}. Pad the images{other}."
    )
  return form
