"""What a model may be given, said before a layer deep inside does."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Takes = Literal["images", "tokens"]
_MEANING = {"images": "(height, width, channels)", "tokens": "(length,)"}


def check_input_shape(
  input_shape: tuple[int, ...], takes: Takes
) -> tuple[int, ...]:
  """Returns the shape of one input, or says what it must be."""
  shape = tuple(input_shape)
  num_axes = 1 if takes == "tokens" else 3
  if len(shape) != num_axes or min(shape) < 1:
    raise ValueError(
      f"`input_shape` must be {_MEANING[takes]} for a model of {takes}, got "
      f"{input_shape}."
    )
  return shape


def checked(
  apply: Callable[..., Any],
  name: str,
  input_shape: tuple[int, ...],
  takes: Takes,
) -> Callable[..., Any]:
  """The function of a model, after a look at its inputs."""
  check = _check_tokens if takes == "tokens" else _check_images

  def checked_apply(
    params: dict[str, Any],
    state: dict[str, Any],
    inputs: jax.Array,
    *,
    train: bool,
    mask: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, Any]]:
    check(inputs, name, input_shape)
    return apply(params, state, inputs, train=train, mask=mask)

  return checked_apply


def _check_images(
  images: jax.Array, name: str, input_shape: tuple[int, ...]
) -> None:
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


def _check_tokens(
  tokens: jax.Array, name: str, input_shape: tuple[int, ...]
) -> None:
  (length,) = input_shape
  if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= length:
    raise ValueError(
      f"`tokens` must be [batch, length] with a length from 1 to {length} as "
      f"this {name} was built, got shape {tokens.shape}. A worker's step sees "
      "its own tokens, without the axis of workers."
    )
  if not jnp.issubdtype(tokens.dtype, jnp.integer):
    raise ValueError(
      f"`tokens` must be integers, got {tokens.dtype}. Neither normalize nor "
      "cast them: the parameters' type is what the model computes in."
    )
