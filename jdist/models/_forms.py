"""The two forms of networks that were designed for ImageNet."""

from typing import get_args, Literal

from jdist import checks

Form = Literal["cifar", "imagenet"]

# The strided first layers of the ImageNet forms discard too much of an image of
# at most this size.
_LARGEST_SMALL_IMAGE = 64


def choose_form(form: Form | None, input_shape: tuple[int, int, int]) -> Form:
  """Returns the form; without one it follows from the size of the images."""
  if form is None:
    # The longer side counts: one long side keeps enough for strided layers.
    small = max(input_shape[:2]) <= _LARGEST_SMALL_IMAGE
    return "cifar" if small else "imagenet"
  checks.check_choice("form", form, get_args(Form))
  return form


def check_size(
  name: str, form: Form, input_shape: tuple[int, int, int], at_least: int
) -> None:
  """Raises a ValueError for images that are too small for a form."""
  if min(input_shape[:2]) < at_least:
    other = ' or take form="cifar"' if form == "imagenet" else ", or use mlp"
    raise ValueError(
      f"`input_shape` of the {form} form of {name} must be at least "
      f"{at_least}x{at_least}, got {input_shape}. Pad the images{other}."
    )
