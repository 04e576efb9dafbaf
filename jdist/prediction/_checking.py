"""Checks of arguments, before anything is trained or drawn."""

import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdist.prediction import _fingerprinting


def check_int(name: str, value: Any, minimum: int) -> int:
  """An argument as a Python int; a ValueError unless it is one >= `minimum`.

  >>> check_int("rank", np.int64(2), 1)
  2
  """
  try:
    number = operator.index(value)
  except TypeError:
    number = minimum - 1
  if isinstance(value, bool) or number < minimum:
    raise ValueError(f"`{name}` must be an int >= {minimum}, got {value!r}.")
  return number


def check_finite(name: str, array: Any) -> None:
  """Raises a ValueError when a row holds a NaN or an infinity."""
  array = np.asarray(array)
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    return
  first = 0
  for part in _fingerprinting.parts(array):
    good = np.isfinite(part).reshape(len(part), -1).all(1)
    if not good.all():
      raise ValueError(
        f"`{name}` must be finite, but row {first + int(np.argmin(good))} "
        "holds a NaN or an infinity. Leave such rows out; those of parameters "
        "are of a run that has diverged."
      )
    first += len(part)
