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


def told(value: Any) -> str:
  """A value in an error; of a tuple of functions its kind, not addresses.

  >>> told(0.1), told(optax.sgd(0.1))
  ('0.1', 'a GradientTransformationExtraArgs')
  """
  if isinstance(value, tuple) and any(map(callable, value)):
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
  return repr(value)


def check_structural(name: str, value: Any, *, minimum: int) -> None:
  """Raises a ValueError unless `value` is a Python int >= `minimum`."""
  if isinstance(value, jax.Array):
    raise ValueError(
      f"`{name}` shapes the program and must be a Python int, got an array. "
      "Under `optax.inject_hyperparams` name it in `static_args`: "
      f"`static_args=({name!r},)`."
    )
  if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
    raise ValueError(
      f"`{name}` must be an int >= {minimum}, got {told(value)}."
    )


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
      f"{told(value)}."
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
      f"`optax.sgd(0.1)`, got {told(value)}."
    )


def check_arrays(name: str, tree: Any) -> None:
  """Raises a ValueError that names the first leaf that is no array."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    try:
      jax.eval_shape(lambda x: x, leaf)
    except TypeError:
      where = jax.tree_util.keystr(path, simple=True, separator=".")
      raise ValueError(
        f"`{name}` must be a tree of arrays, got {told(leaf)}"
        f"{f' at {where!r}' if where else ''}."
      ) from None


def check_rate(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a positive number or a schedule."""
  if isinstance(value, tuple) and any(map(callable, value)):
    raise ValueError(
      f"`{name}` must be a positive number or a schedule, a function of the "
      f"step, got {told(value)}. An interval policy is given as `interval`, "
      "and of an optimizer its rate is meant."
    )
  if not callable(value):
    check_continuous(name, value, open_low=True)
