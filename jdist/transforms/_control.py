"""The host's choices for one update, as static data."""

import dataclasses
from typing import Any, Literal

from jdist import checks


@dataclasses.dataclass(frozen=True)
class Control:
  """The host's choices for one `update`, which shape the program.

  Passed as `update(..., control=Control(...))` and static, so that a host which
  chooses among several compiles a program for each.  Transformations without
  rounds ignore it; `transforms.rounds_ahead` says for which states a host may
  choose, and `transforms.drain` passes its own.

  Attributes:
    round_ends: Whether the update ends its round; None if the device decides,
      in a conditional.
    arrives: Whether a mean that is late by steps is applied in the update; None
      if the device decides.
    stream_steps: The number of updates over which a streamed message is sent,
      of which this is one.  None sends nothing now and, if the mean is due, all
      that is left.  "fixed" is the interval, if that is one number.
    drain: Whether no step is taken and everything that was begun is brought
      into the anchor; "residuals" also brings in the residuals of reducers.
    fragments: One control for each fragment, for a method whose fragments have
      rounds of their own; None if the device decides.
  """

  round_ends: bool | None = None
  arrives: bool | None = None
  stream_steps: int | Literal["fixed"] | None = "fixed"
  drain: bool | Literal["residuals"] = False
  fragments: tuple["Control", ...] | None = None

  def __post_init__(self) -> None:
    for name in ("round_ends", "arrives"):
      checks.check_choice(name, getattr(self, name), (True, False, None))
    checks.check_choice("drain", self.drain, (False, True, "residuals"))
    each = self.fragments
    if each is not None and not (
      isinstance(each, tuple) and all(isinstance(x, Control) for x in each)
    ):
      raise ValueError(
        "`fragments` must be a tuple of `Control`, one for each fragment, or "
        f"None where the device decides, got {checks.show(each)}."
      )
    steps = self.stream_steps
    if steps is not None and not (isinstance(steps, str) and steps == "fixed"):
      checks.set_structural(self, "stream_steps", minimum=1)

  def chosen(self, *names: str) -> str | None:
    """Returns the first of all or some choices that the host has made."""
    names = names or ("round_ends", "arrives", "stream_steps", "fragments")
    usual = vars(DEVICE)
    return next((x for x in names if getattr(self, x) != usual[x]), None)


# The control of an update whose host chooses nothing.
DEVICE = Control()


def refuse(control: Control, method: str, *names: str) -> None:
  """Raises a ValueError if a host made a choice that a method cannot follow."""
  if name := control.chosen(*names):
    raise ValueError(
      f"`control` must leave `{name}` out for {method}, got "
      f"{getattr(control, name)!r}. `transforms.rounds_ahead(state)` has the "
      "rounds that a host may end, by fragment if there are any, or is None."
    )


def drains(extra_args: dict[str, Any]) -> bool:
  """Returns whether the extra arguments of an update ask for a drain."""
  return bool(extra_args.get("control", DEVICE).drain)
