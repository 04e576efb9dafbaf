"""Refusing what a host tells a method that cannot be told.

`local_steps` takes `round_ends` and `stream_steps`.  Any other method with
rounds would hand them on to its inner optimizer, which ignores what it does
not know, and the host would believe that it was heard.
"""

from collections.abc import Sequence
from typing import Any

from jdist.transforms import _search
from jdist.transforms.local import _engine

PyTree = Any

# Why a method cannot be told, and what to do.
_TOLD = {
  "round_ends": (
    "whose rounds no host ends",
    "Leave it out, as `Trainer(..., host_rounds=False)` does: `local_steps` "
    "and what is made of it take it.",
  ),
  "stream_steps": (
    "which streams nothing",
    "Leave it out, as `Trainer(..., stream_steps=())` does: `local_steps(..., "
    "delay_rounds=1, stream=Stream())` takes it.",
  ),
}


def check_told(
  method: str,
  extra_args: dict[str, Any],
  inner: PyTree,
  options: Sequence[str] = tuple(_TOLD),
) -> None:
  """Raises a ValueError when a host tells what nobody hears.

  Args:
    method: what is told, for the error.
    extra_args: of its `update`.
    inner: the state of what they are handed on to; a `local_steps` in there
      hears them, and refuses itself what it cannot do.
    options: of which to ask.
  """
  for name in options:
    value = extra_args.get(name)
    # What these options are where nobody tells anything.
    if value is None or value == "usual" or can_be_told(inner):
      continue
    why, remedy = _TOLD[name]
    raise ValueError(
      f"`{name}` must be None for {method}, {why}, got {value!r}. {remedy}"
    )


def can_be_told(state: PyTree) -> bool:
  """Whether there is a `local_steps` in a state."""
  return _search.contains(
    state, lambda x: isinstance(x, _engine.LocalStepsState)
  )
