"""Checks of arguments, made when a transformation is built.

Under `optax.inject_hyperparams` a factory runs again inside jit with traced
numbers.  Then there is nothing to compare: continuous arguments pass, and
structural ones, which shape the program, are refused with the remedy.
"""

from typing import Any

import jax
import optax


def is_traced(value: Any) -> bool:
  """Whether a value is known only when the program runs."""
  return isinstance(value, jax.core.Tracer)


def check_structural(name: str, value: Any, *, minimum: int) -> None:
  """Raises a ValueError unless `value` is a Python int >= `minimum`."""
  if isinstance(value, jax.Array):
    raise ValueError(
      f"`{name}` shapes the program and must be a Python int, got an array. "
      "Under `optax.inject_hyperparams` name it in `static_args`: "
      f"`static_args=({name!r},)`."
    )
  if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
    raise ValueError(f"`{name}` must be an int >= {minimum}, got {value!r}.")


def check_continuous(
  name: str,
  value: Any,
  *,
  low: float = 0.0,
  high: float = float("inf"),
  open_low: bool = False,
) -> None:
  """Raises a ValueError unless a number lies in [low, high] or (low, high].

  Traced values pass: they are hyper-parameters under
  `optax.inject_hyperparams`.
  """
  if is_traced(value):
    return
  bracket = "(" if open_low else "["
  try:
    number = float(value)
  except (TypeError, ValueError):
    raise ValueError(
      f"`{name}` must be a number in {bracket}{low:g}, {high:g}], got "
      f"{value!r}."
    ) from None
  above = number > low if open_low else number >= low
  if not (above and number <= high):
    raise ValueError(
      f"`{name}` must be in {bracket}{low:g}, {high:g}], got {value}."
    )


def check_optimizer(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is an Optax transformation."""
  if not isinstance(value, optax.GradientTransformation):
    raise ValueError(
      f"`{name}` must be an Optax transformation, for instance "
      f"`optax.sgd(0.1)`, got {value!r}."
    )


def check_rate(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a positive number or a schedule."""
  if not callable(value):
    check_continuous(name, value, open_low=True)
