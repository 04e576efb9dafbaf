"""Checks of settings, made when a codec is built."""

from typing import Any

ROUNDINGS = ("nearest", "stochastic")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
  """Raises a ValueError unless `value` is one of `choices`."""
  if value not in choices:
    told = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
    raise ValueError(f"`{name}` must be {told}, got {value!r}.")


def check_int(
  name: str, value: Any, low: int, high: int | None = None, remedy: str = ""
) -> None:
  """Raises a ValueError unless `value` is a Python int in [low, high]."""
  inside = isinstance(value, int) and not isinstance(value, bool)
  inside = inside and value >= low and (high is None or value <= high)
  if not inside:
    bound = f"in {low}..{high}" if high is not None else f"at least {low}"
    raise ValueError(
      f"`{name}` must be a Python int {bound}, got {value!r}."
      + (f" {remedy}" if remedy else "")
    )


def check_block(block: Any, multiple: int = 1) -> None:
  """Raises a ValueError unless `block` is None or a multiple of `multiple`."""
  if block is None:
    return
  check_int(
    "block", block, 1, remedy="None means one scale for the whole array."
  )
  if block % multiple:
    near = -(-block // multiple) * multiple
    raise ValueError(
      f"`block` must be a multiple of {multiple}, so that it fills whole "
      f"bytes, got {block}. The next one is {near}."
    )
