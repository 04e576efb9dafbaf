"""Models by name."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdist.models import _functional, _lenet, _mlp, _resnet

# A factory is called as factory(input_shape, num_classes, rngs=..., **options)
# and refuses what it cannot do with a ValueError. A new family is a file with
# factories, and a line here for each.
_FACTORIES: dict[str, Callable[..., nnx.Module]] = {
  "mlp": _mlp.MLP,
  "lenet": _lenet.LeNet,
  "cnn": _lenet.CNN,
  "resnet8": functools.partial(_resnet.ResNet, blocks_per_stage=1),
  "resnet20": functools.partial(_resnet.ResNet, blocks_per_stage=3),
}

NAMES = tuple(_FACTORIES)


def build(
  name: str,
  *,
  input_shape: tuple[int, int, int],
  num_classes: int,
  seed: int = 0,
  **options: Any,
) -> _functional.Model:
  """Builds a model by name, with random initial parameters.

  The same arguments give the same parameters to the bit on every device and
  under every way of running workers: NumPy draws them, on the host.

  | name     | network                     | options                      |
  |----------|-----------------------------|------------------------------|
  | mlp      | fully connected             | hidden_sizes=(128,)          |
  | lenet    | LeNet-5, up to 32x32        |                              |
  | cnn      | three convolutions          |                              |
  | resnet8  | CIFAR ResNet, 1 block/stage | norm="batch"|"group"|"none", |
  | resnet20 | CIFAR ResNet, 3             | num_groups=8                 |

  The model's `apply` (see `functional`) takes normalized images, floating
  [batch, height, width, channels], and gives logits [batch, num_classes] in
  the type that images and parameters promote to.

  Args:
    name: one of the table.
    input_shape: (height, width, channels) of one image.
    num_classes: number of logits, >= 1.
    seed: of the initial parameters, integer >= 0; default 0.
    **options: of the model, see the table.

  Returns:
    The model.

  Raises:
    ValueError: if there is no such model or option, or the model cannot work
      on such images.

  >>> import jax.numpy as jnp
  >>> model = build("mlp", input_shape=(8, 8, 1), num_classes=10, seed=0)
  >>> model
  Model(9,610 parameters)
  >>> images = jnp.zeros((5, 8, 8, 1))
  >>> logits, state = model.apply(
  ...   model.params, model.state, images, train=True
  ... )
  >>> logits.shape, state
  ((5, 10), {})
  """
  if name not in NAMES:
    raise ValueError(
      f"`name` must be one of {', '.join(NAMES)}, got {name!r}. For a network "
      "of your own use `jdist.models.functional`."
    )
  shape = tuple(input_shape)
  if len(shape) != 3 or min(shape) < 1:
    raise ValueError(
      f"`input_shape` must be (height, width, channels), got {input_shape}."
    )
  if num_classes < 1:
    raise ValueError(f"`num_classes` must be >= 1, got {num_classes}.")
  if operator.index(seed) < 0:
    raise ValueError(f"`seed` must be an integer >= 0, got {seed}.")
  factory = _FACTORIES[name]
  known = _options_of(factory)
  if unknown := sorted(set(options) - set(known)):
    raise ValueError(
      f"`{unknown[0]}` is no option of {name}, which has "
      f"{', '.join(known) or 'none'}."
    )
  module = factory(shape, num_classes, rngs=nnx.Rngs(seed), **options)
  model = _functional.functional(module)
  return dataclasses.replace(model, apply=_checked(model.apply, name, shape))


def _options_of(factory: Callable[..., nnx.Module]) -> list[str]:
  fixed = {"rngs"}
  if isinstance(factory, functools.partial):
    fixed |= set(factory.keywords)
    factory = factory.func
  # Of `__init__`, as NNX hides it from `inspect` behind its metaclass.
  parameters = inspect.signature(factory.__init__).parameters.values()
  return [
    parameter.name
    for parameter in parameters
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in fixed
  ]


def _checked(
  apply: Callable[..., Any], name: str, input_shape: tuple[int, ...]
) -> Callable[..., Any]:
  """Says what is wrong with images before a layer deep inside does."""

  def checked(
    params: dict[str, Any],
    state: dict[str, Any],
    images: jax.Array,
    *,
    train: bool,
    mask: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    if images.ndim != 4 or images.shape[1:] != input_shape:
      raise ValueError(
        f"`images` must be [batch, {', '.join(map(str, input_shape))}] as "
        f"this {name} was built, got shape {images.shape}. A worker's step "
        "sees its own images, without the axis of workers."
      )
    if not jnp.issubdtype(images.dtype, jnp.floating):
      raise ValueError(
        f"`images` must be floating and normalized, got {images.dtype}. Pass "
        "raw pixels through `Dataset.normalize` first."
      )
    return apply(params, state, images, train=train, mask=mask)

  return checked
