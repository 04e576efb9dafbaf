"""Models of images by name, as shapes, to compile without any."""

from typing import Any

from jdist import models

# Made for gray images of 28x28, and for images of 32x32; others for 224x224.
_GRAY = ("mlp", "lenet")
_SMALL = ("cnn", "resnet8", "resnet20")


def image_model(
  name: str, size: int | None = None, **options: Any
) -> tuple[models.Model, tuple[int, int, int]]:
  """Returns a model and its input's shape, by default what it was made for."""
  if size is None:
    size = 28 if name in _GRAY else 32 if name in _SMALL else 224
  shape = (size, size, 1 if name in _GRAY else 3)
  model = models.build(
    name,
    input_shape=shape,
    num_classes=10 if size <= 32 else 1000,
    abstract=True,
    **options,
  )
  return model, shape
