"""Phases of a run: what is sent at its beginning only, or from a step on.

A method that warms up has a conditional on how far it is, and each of its
branches sends something else.  Which branch runs is known without running
anything, if the branch says when it does.  It says so in its name, which JAX
keeps for the traced step, the compiled program and the profile alike.
"""

import contextlib
import dataclasses
import re
from typing import Literal

import jax

_NAME = re.compile(r"jdist_phase_from_(\d+)_to_(\d+|end)")
# What JAX calls a branch in the names of a compiled program.
_BRANCH = re.compile(r"/branch_\d+_fun")


@dataclasses.dataclass(frozen=True)
class Phase:
  """When a branch of a conditional is taken.

  Attributes:
    start: the first step, from 0.
    stop: the first step after it, or None: it goes on for ever.
    unit: what is counted, steps, or rounds where it stands in a round's end.
  """

  start: int
  stop: int | None = None
  unit: Literal["step", "round"] = "step"

  def __post_init__(self) -> None:
    for name, value in (("start", self.start), ("stop", self.stop)):
      if name == "stop" and value is None:
        continue
      if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(
          f"`{name}` of a phase must be an int >= 0, got {value!r}."
        )

  def times(self, count: int, *, after: int = 0) -> int:
    """How many of `count` steps that follow on the first `after` are in it.

    >>> Phase(2, 5).times(4), Phase(2, 5).times(4, after=4), Phase(2).times(9)
    (2, 1, 7)
    """
    last = after + count
    if self.stop is not None:
      last = min(last, self.stop)
    return max(0, last - max(after, self.start))

  def inside(self, outer: "Phase") -> "Phase":
    """This one, counted from the outer one's start, as one of the run.

    >>> Phase(2).inside(Phase(10, 14)), Phase(0, 3).inside(Phase(10, 12))
    (Phase(start=12, stop=14, unit='step'), \
Phase(start=10, stop=12, unit='step'))
    """
    stops = [] if outer.stop is None else [outer.stop]
    if self.stop is not None:
      stops.append(outer.start + self.stop)
    start = outer.start + self.start
    return Phase(start, min(stops) if stops else None, outer.unit)

  def __str__(self) -> str:
    """For instance `steps 1-4` or `from step 5 on`, steps from 1.

    >>> print(Phase(0, 4), Phase(4, None, "round"), sep=", ")
    steps 1-4, from round 5 on
    """
    if self.stop is None:
      return f"from {self.unit} {self.start + 1:,} on"
    if self.stop == self.start + 1:
      return f"{self.unit} {self.stop:,}"
    return f"{self.unit}s {self.start + 1:,}-{self.stop:,}"


def phase(
  start: int, stop: int | None = None
) -> contextlib.AbstractContextManager[None]:
  """Says of a conditional's branch when it is taken, for the count of bytes.

  The branch is entered, whenever the conditional is reached, from the time
  `start` until before the time `stop`.  In a chain of its own the conditional
  is reached in every step of the run, and in the end of a round in every
  round; in a branch that has a phase itself, in every step of that.  A wrapper
  that withholds steps from the chain (`delay_gradients` its first ones,
  `optax.apply_if_finite` some) shifts the count by as many.

  Args:
    start: from 0.
    stop: None for ever.

  Raises:
    ValueError: unless 0 <= start < stop.

  Returns:
    A context in which the branch does what it does.

  >>> step = lambda x, is_first: jax.lax.cond(is_first, warm, go_on, x)
  >>> def warm(x):
  ...   with phase(0, 1):
  ...     return 2 * x
  >>> def go_on(x):
  ...   with phase(1):
  ...     return x
  >>> step(3.0, True).item()
  6.0
  """
  Phase(start, stop)
  if stop is not None and stop <= start:
    raise ValueError(
      f"`stop` must be above `start`, {start}, or None, got {stop}: this "
      "branch would never be entered."
    )
  end = "end" if stop is None else stop
  return jax.named_scope(f"jdist_phase_from_{start}_to_{end}")


def phases_in(name: str) -> tuple[Phase, ...]:
  """The phases in a name that JAX made, the outermost first.

  >>> phases_in("jit(step)/cond/branch_0_fun/jdist_phase_from_2_to_end/psum")
  (Phase(start=2, stop=None, unit='step'),)
  """
  return tuple(
    Phase(int(start), None if stop == "end" else int(stop))
    for start, stop in _NAME.findall(name)
  )


def phase_of(path: str) -> Phase | None:
  """The phase of an operation by its whole name in a compiled program.

  >>> phase_of("jit(step)/cond/branch_0_fun/jdist_phase_from_2_to_5/psum")
  Phase(start=2, stop=5, unit='step')
  """
  said = phases_in(path)
  if not said:
    return None
  rare = len(_BRANCH.findall(path)) > len(said)
  found = dataclasses.replace(said[0], unit="round" if rare else "step")
  for inner in said[1:]:
    found = inner.inside(found)
  return found
