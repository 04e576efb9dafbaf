"""Models by name."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jdist import checks, signatures
from jdist.models import (
  _functional,
  _layers,
  _lenet,
  _resnet,
  _transformer,
  _vgg,
)


def _cifar_resnet_of(blocks: int) -> Callable[..., nnx.Module]:
  return functools.partial(_resnet.CifarResNet, blocks_per_stage=blocks)


def _resnet_of(*blocks: int, bottleneck: bool) -> Callable[..., nnx.Module]:
  return functools.partial(
    _resnet.ResNet, blocks_per_stage=blocks, bottleneck=bottleneck
  )


def _vgg_of(*convs: int) -> Callable[..., nnx.Module]:
  return functools.partial(_vgg.VGG, convs_per_block=convs)


# A factory is called as factory(input_shape, num_classes, rngs=..., **options)
# and raises a ValueError for arguments that it cannot take. One with a true
# attribute `takes_tokens` makes a model of tokens, and the others of images.
MODELS: dict[str, Callable[..., nnx.Module]] = {  # Every model by its name.
  "mlp": _lenet.MLP,
  "lenet": _lenet.LeNet,
  "cnn": _lenet.CNN,
  "alexnet": _vgg.AlexNet,
  "vgg11": _vgg_of(1, 1, 2, 2, 2),
  "vgg13": _vgg_of(2, 2, 2, 2, 2),
  "vgg15": functools.partial(
    _vgg.VGG,
    convs_per_block=(2, 2, 3, 3, 2),
    form="cifar",
    hidden_sizes=(100, 100),
    max_growth=4,
  ),
  "vgg16": _vgg_of(2, 2, 3, 3, 3),
  "vgg19": _vgg_of(2, 2, 4, 4, 4),
  "resnet8": _cifar_resnet_of(1),
  "resnet20": _cifar_resnet_of(3),
  "resnet18": _resnet_of(2, 2, 2, 2, bottleneck=False),
  "resnet34": _resnet_of(3, 4, 6, 3, bottleneck=False),
  "resnet50": _resnet_of(3, 4, 6, 3, bottleneck=True),
  "transformer": _transformer.Transformer,
}


@signatures.checked
def build(
  name: str,
  *,
  input_shape: tuple[int, ...],
  num_classes: signatures.PositiveInt,
  seed: signatures.Seed = 0,
  abstract: bool = False,
  **options: Any,
) -> _functional.Model:
  """Builds a model by name, with random initial parameters.

  The same arguments give the same parameters to the bit on every device and
  substrate, as NumPy draws them on the host.

  | name              | network               | options                        |
  |-------------------|-----------------------|--------------------------------|
  | mlp               | fully connected       | hidden_sizes=(128,)            |
  | lenet             | LeNet-5, up to 32x32  |                                |
  | cnn               | three convolutions    | hidden_sizes                   |
  | alexnet           | AlexNet               | form, hidden_sizes             |
  | vgg11, 13, 16, 19 | VGG                   | form, width=64, max_growth=8,  |
  |                   |                       | hidden_sizes, norm, num_groups |
  | vgg15             | VGG of MP²            | norm, num_groups, width        |
  | resnet8, resnet20 | CIFAR ResNet, 1 or 3  | norm, num_groups               |
  |                   | blocks per stage      |                                |
  | resnet18, 34, 50  | ImageNet ResNet       | form, norm, num_groups,        |
  |                   |                       | width=64, shortcut_size=1      |
  | transformer       | causal language model | num_layers=4, width=128,       |
  |                   |                       | num_heads=4, hidden_size,      |
  |                   |                       | positions="learned",           |
  |                   |                       | tied=False                     |

  `form` is "cifar" or "imagenet", by default "cifar" for images up to 64x64.
  `norm` is "batch" (default of ResNets), "group" with `num_groups=8`, or
  "none" (default of VGG). The other defaults are in the network's docstring.

  The model's `apply` (see `functional`) takes normalized images, floating
  [batch, height, width, channels], and returns logits [batch, num_classes] in
  the type to which images and parameters promote. The transformer takes tokens,
  integers [batch, length] of at most the length of `input_shape`, and returns
  logits [batch, length, num_classes].

  Args:
    name: A name of the table.
    input_shape: The shape (height, width, channels) of one image; (length,) for
      the transformer.
    num_classes: The number of logits, >= 1; the transformer's vocabulary.
    seed: The seed of the initial parameters, an integer >= 0; default 0.
    abstract: Whether `params` and `state` hold `jax.ShapeDtypeStruct` in place
      of arrays, and nothing is allocated or drawn; for counting, planning and
      compiling. Default False. `apply` is the same function.
    **options: Options of the model, see the table.

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
  >>> build(
  ...   "resnet50", input_shape=(224, 224, 3), num_classes=1000, abstract=True
  ... )
  Model(25,557,032 parameters)
  """
  remedy = "For a network of your own use `jdist.models.functional`."
  checks.check_choice("name", name, tuple(MODELS), remedy)
  factory = MODELS[name]
  is_text = getattr(factory, "takes_tokens", False)
  shape = _check_input_shape(input_shape, is_text)
  known = _options_of(factory)
  if unknown := sorted(set(options) - set(known)):
    # The factory's own TypeError would not name the options that there are.
    raise ValueError(
      f"`{unknown[0]}` is no option of {name}, which has "
      f"{', '.join(known) or 'none'}."
    )
  # `jax.eval_shape` would trace the draws of NumPy, which do not allow it.
  rngs = _layers.NoKeys() if abstract else nnx.Rngs(seed)
  model = _functional.functional(
    factory(shape, num_classes, rngs=rngs, **options)
  )

  def checked(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def check_and_apply(
      params: Any, state: Any, inputs: jax.Array, **options: Any
    ) -> Any:
      # Shapes are known when a step is traced: the check costs no step time.
      _check_inputs(name, shape, inputs)
      return apply(params, state, inputs, **options)

    return check_and_apply

  def finished(part: Any, takes_inputs: bool) -> Any:
    params, state = part.params, part.state
    if abstract:
      # Normalizations have few numbers and allocate them in any case.
      params, state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, state)
      )
    apply = checked(part.apply) if takes_inputs else part.apply
    return dataclasses.replace(part, params=params, state=state, apply=apply)

  # Only the first layer takes the network's inputs.
  layers = tuple(finished(x, i == 0) for i, x in enumerate(model.layers))
  return dataclasses.replace(finished(model, True), layers=layers)


def _options_of(factory: Callable[..., nnx.Module]) -> list[str]:
  fixed = {"rngs"}
  if isinstance(factory, functools.partial):
    fixed |= set(factory.keywords)
    factory = factory.func
  # NNX hides the constructor's arguments behind its metaclass, so that
  # `inspect` must look at `__init__` itself.
  made: Any = factory  # Mypy calls `__init__` of an instance unsound.
  if isinstance(factory, type):
    made = made.__init__
  parameters = inspect.signature(made).parameters.values()
  return [
    parameter.name
    for parameter in parameters
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in fixed
  ]


def _check_input_shape(
  input_shape: tuple[int, ...], is_text: bool
) -> tuple[int, ...]:
  """Returns the shape of one input as a tuple."""
  shape = tuple(input_shape)
  num_axes, wanted = 3, "(height, width, channels) for a model of images"
  if is_text:
    num_axes, wanted = 1, "(length,) for a model of tokens"
  if len(shape) != num_axes or min(shape) < 1:
    raise ValueError(f"`input_shape` must be {wanted}, got {input_shape}.")
  return shape


def _check_inputs(name: str, shape: tuple[int, ...], inputs: jax.Array) -> None:
  kind: Any
  if len(shape) == 1:
    what, kind, wanted = "tokens", jnp.integer, "integers"
    sizes = f"length] with a length from 1 to {shape[0]}"
    remedy = "Neither normalize nor cast them: the model computes in the "
    remedy += "parameters' type."
    fits = inputs.ndim == 2 and 1 <= inputs.shape[1] <= shape[0]
  else:
    what, kind, wanted = "images", jnp.floating, "floating and normalized"
    sizes = f"{', '.join(map(str, shape))}]"
    remedy = "Pass raw pixels through `Dataset.normalize` first."
    fits = inputs.shape[1:] == shape
  if not fits:
    raise ValueError(
      f"`{what}` must be [batch, {sizes} as this {name} was built, got shape "
      f"{inputs.shape}. A worker's step sees its own {what}, without the axis "
      "of workers."
    )
  if not jnp.issubdtype(inputs.dtype, kind):
    raise ValueError(f"`{what}` must be {wanted}, got {inputs.dtype}. {remedy}")
