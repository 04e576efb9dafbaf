"""The networks and cuts of the MP² paper."""

from typing import Any

from jdist import models
from jdist.prediction import _cut

# The options of the authors' networks, and the number of pushed layers.
_NARROW = {"width": 32, "norm": "none"}
_PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
  "lenet": ({}, 2),
  "alexnet": ({"form": "cifar"}, 2),
  "vgg15": ({"norm": "none"}, 4),
  "resnet18": (_NARROW | {"shortcut_size": 3}, 10),
  "resnet34": (_NARROW | {"shortcut_size": 3}, 16),
  "resnet50": (_NARROW, 23),
}
_GRAY = (28, 28, 1)
_COLOR = (32, 32, 3)

PUBLISHED = tuple(_PUBLISHED)


def published_model(
  name: str,
  *,
  input_shape: tuple[int, int, int] | None = None,
  num_classes: int = 10,
  **options: Any,
) -> models.Model:
  """Builds a network of the MP² paper.

  The networks have no normalization, and the ResNets begin with 32 features
  instead of 64.  Their fronts have the authors' numbers of parameters with
  shortcuts over 3x3 pixels for ResNet-18 and 34, over one for ResNet-50.

  | name     | layers pushed | parameters pushed | of       |
  |----------|---------------|-------------------|----------|
  | lenet    | 2             | 2,572             | 61,706   |
  | alexnet  | 2             | 617,344           |          |
  | vgg15    | 4             | 260,160           | 4,722,698|
  | resnet18 | 10            | 185,664           | 3,139,274|
  | resnet34 | 16            | 351,872           |          |
  | resnet50 | 23            | 343,104           |          |

  Args:
    name: A name of the table.
    input_shape: (height, width, channels); default 28x28x1 for LeNet and
      32x32x3 for the others.
    num_classes: The number of logits, default 10.
    **options: Options of `models.build`, such as `seed` and `abstract`.

  References:
    MP², model parameter prediction.  Reconstruction: the layers behind the cut
    of AlexNet, ResNet-34 and ResNet-50, whose totals are not published, and
    the pooling among VGG-15's eight last convolutions.
  """
  fixed, _ = _published(name)
  # Another width or shortcut would be another network than the published one.
  if own := sorted(fixed.keys() & options.keys()):
    raise ValueError(
      f"`{own[0]}` must be left out, as {name} has {own[0]}="
      f"{fixed[own[0]]!r} as published, got {options[own[0]]!r}. Build other "
      "forms with `jdist.models.build`."
    )
  if input_shape is None:
    input_shape = _GRAY if name == "lenet" else _COLOR
  return models.build(
    name,
    input_shape=input_shape,
    num_classes=num_classes,
    **fixed,
    **options,
  )


def published_cut(name: str) -> _cut.Cut:
  """Returns the published cut of a network of `published_model`.

  >>> published_cut("vgg15")
  Cut(vgg15: 4 layers of 260,160 parameters (conv01, conv02, conv03, conv04)
  | 11 layers of 4,462,538)
  """
  _, num_layers = _published(name)
  return _cut.cut(published_model(name, abstract=True), num_layers, name=name)


def _published(name: str) -> tuple[dict[str, Any], int]:
  if not isinstance(name, str) or name not in _PUBLISHED:
    raise ValueError(
      f"`name` must be one of {', '.join(_PUBLISHED)}, got {name!r}. Cut "
      "other networks with `cut`."
    )
  return _PUBLISHED[name]
