"""Checks of arguments, before anything is trained or drawn."""

import contextlib
import math
import operator
from collections.abc import Mapping
from types import UnionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist.storage import array_files, hashes

# A value that takes more letters is told by its kind.
_NUM_LETTERS = 100
_HIGHEST_SEED = 2**63 - 1


def told(value: Any) -> str:
  """A value in a message, or its kind where that would be long.

  >>> told(3), told(np.zeros((9, 9)))
  ('3', 'a `ndarray`')
  """
  text = repr(value)
  short = len(text) <= _NUM_LETTERS and "\n" not in text
  return text if short else f"a `{type(value).__name__}`"


def check_kind(
  name: str, value: Any, kind: type | UnionType, wanted: str
) -> None:
  """Raises a ValueError unless an argument is of a kind.

  Args:
    name: of the argument.
    value: what was given.
    kind: its type, or several.
    wanted: what it must be, for the message.
  """
  if not isinstance(value, kind):
    raise ValueError(f"`{name}` must be {wanted}, got {told(value)}.")


def check_function(
  name: str, value: Any, wanted: str, *, optional: bool = False
) -> None:
  """Raises a ValueError unless an argument can be called.

  Args:
    name: of the argument.
    value: what was given.
    wanted: a function of what, for the message.
    optional: whether None will do, too.
  """
  if not (callable(value) or (optional and value is None)):
    rule = f"`{name}` must be a function of {wanted}"
    raise ValueError(
      f"{rule}{', or None' if optional else ''}, got {told(value)}."
    )


def check_list(name: str, value: Any, wanted: str) -> list[Any]:
  """An argument as a list; a ValueError unless it has items.

  Args:
    name: of the argument.
    value: what was given; text and dicts are no lists.
    wanted: of what it must be a list, for the message.

  >>> check_list("steps", range(3), "numbers")
  [0, 1, 2]
  """
  try:
    if not isinstance(value, str | bytes | Mapping):
      return list(value)
  except TypeError:
    pass
  raise ValueError(f"`{name}` must be a list of {wanted}, got {told(value)}.")


def check_int(name: str, value: Any, minimum: int, remedy: str = "") -> int:
  """An argument as a Python int; a ValueError unless it is one >= `minimum`.

  Args:
    name: of the argument.
    value: what was given.
    minimum: the least that it may be.
    remedy: what a message ends with, a sentence.

  >>> check_int("rank", np.int64(2), 1)
  2
  """
  try:
    number = operator.index(value)
  except TypeError:
    number = minimum - 1
  if isinstance(value, bool) or number < minimum:
    rule = f"`{name}` must be an int >= {minimum}, got {value!r}."
    raise ValueError(f"{rule} {remedy}".rstrip())
  return number


def check_seed(value: Any) -> int:
  """A seed as a Python int; a ValueError unless `jax.random.key` takes it.

  >>> check_seed(np.uint32(3))
  3
  """
  seed = check_int("seed", value, 0)
  if seed > _HIGHEST_SEED:
    raise ValueError(
      f"`seed` must be below 2**63, as `jax.random.key` takes it, got {seed}."
    )
  return seed


def check_key(value: Any) -> None:
  """Raises a ValueError unless an argument is a random key."""
  dtype = getattr(value, "dtype", None)
  if dtype is None or not (
    jnp.issubdtype(dtype, jax.dtypes.prng_key)
    or (dtype == jnp.uint32 and jnp.ndim(value) == 1)
  ):
    raise ValueError(
      f"`key` must be a random key, got {told(value)}. Make one with "
      "`jax.random.key(seed)`."
    )


def check_steps_per_epoch(value: Any) -> int:
  """Likewise, with what to do about a part of a step."""
  return check_int(
    "steps_per_epoch",
    value,
    1,
    "Of `data.Batches` take the whole steps, `int(batches.steps_per_epoch)`.",
  )


def check_number(
  name: str,
  value: Any,
  *,
  low: float = 0.0,
  high: float = math.inf,
  above: bool = False,
) -> float:
  """An argument as a Python float; a ValueError unless it is in its range.

  Args:
    name: of the argument.
    value: what was given; text, a truth value and what is not finite is out of
      every range.
    low: the least that it may be.
    high: the most that it may be.
    above: whether it must be above `low`.

  >>> check_number("mixup", np.float32(0.5))
  0.5
  """
  number = math.nan
  if not isinstance(value, bool | str | bytes):
    with contextlib.suppress(TypeError, ValueError, OverflowError):
      number = float(value) if np.ndim(value) == 0 else math.nan
  inside = low < number if above else low <= number
  if not (inside and number <= high and math.isfinite(number)):
    rule = f"above {low:g}" if above else f">= {low:g}"
    if high < math.inf:
      rule = f"from {low:g} to {high:g}"
    raise ValueError(f"`{name}` must be a finite number {rule}, got {value!r}.")
  return number


def check_leaves(
  rule: str, remedy: str, params: Any, wanted: Mapping[str, tuple[int, ...]]
) -> None:
  """Raises a ValueError that names the first leaf that is not as wanted.

  Args:
    rule: what a message begins with.
    remedy: what it ends with.
    params: a tree of arrays or shapes.
    wanted: the shape of each leaf, by its name of `array_files.named`.
  """
  found = {name: jnp.shape(x) for name, x in array_files.named(params).items()}
  for name, shape in wanted.items():
    if name not in found:
      raise ValueError(f"{rule} there is no leaf {name}. {remedy}")
    if found[name] != shape:
      raise ValueError(
        f"{rule} {name} has shape {list(found[name])} and not {list(shape)}. "
        f"{remedy}"
      )
  if more := sorted(found.keys() - wanted.keys()):
    raise ValueError(f"{rule} there is a leaf {more[0]} besides. {remedy}")


def check_trained(name: str, params: Any) -> None:
  """Raises a ValueError unless all leaves are float32 and finite.

  Args:
    name: of the argument.
    params: a tree of arrays.
  """
  for leaf, value in array_files.named(params).items():
    array = np.asarray(value)
    if array.dtype != np.float32:
      raise ValueError(
        f"`{name}` must be float32, as they are trained, but {leaf} is "
        f"{array.dtype}. Make it so with `.astype(jnp.float32)`."
      )
    if not np.isfinite(array).all():
      raise ValueError(
        f"`{name}` must be finite, but {leaf} holds a NaN or an infinity: they "
        "are of a training that has diverged. Train with a lower rate."
      )


def check_finite(name: str, array: Any) -> None:
  """Raises a ValueError when a row holds a NaN or an infinity."""
  array = np.asarray(array)
  if not jnp.issubdtype(array.dtype, jnp.inexact):
    return
  first = 0
  for part in hashes.parts(array):
    good = np.isfinite(part).reshape(len(part), -1).all(1)
    if not good.all():
      raise ValueError(
        f"`{name}` must be finite, but row {first + int(np.argmin(good))} "
        "holds a NaN or an infinity. Leave such rows out; those of parameters "
        "are of a run that has diverged."
      )
    first += len(part)
