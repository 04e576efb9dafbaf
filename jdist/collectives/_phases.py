"""Phases of a run: the steps in which a branch of a conditional is taken.

A method with a warm-up sends other bytes in each branch of a conditional on the
step.  A branch states its steps in its name, which JAX keeps in the traced
step, the compiled program and the profile, so that bytes are counted without
running anything.
"""

import contextlib
import dataclasses
import re
from typing import Literal

import jax

from jdist import checks

_NAME = re.compile(r"jdist_phase_from_(\d+)_to_(\d+|end)")
# The name of a branch in the names of a compiled program.
_BRANCH = re.compile(r"/branch_\d+_fun")


@dataclasses.dataclass(frozen=True)
class Phase:
  """The steps in which a branch of a conditional is taken.

  Attributes:
    start: the first step, from 0.
    stop: the first step after the phase; None for a phase without end.
    unit: whether steps are counted, or rounds, for a conditional at a round's
      end.
  """

  start: int
  stop: int | None = None
  unit: Literal["step", "round"] = "step"

  def __post_init__(self) -> None:
    checks.check_int("start", self.start, 0)
    if self.stop is not None:
      checks.check_int("stop", self.stop, 0)

  @classmethod
  def of(cls, path: str) -> "Phase | None":
    """Reads the phase of an operation off its full name in a compiled program.

    >>> Phase.of("jit(step)/cond/branch_0_fun/jdist_phase_from_2_to_5/psum")
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

  def times(self, count: int, *, after: int = 0) -> int:
    """Counts the steps of the phase among `count` that follow `after` others.

    >>> Phase(2, 5).times(4), Phase(2, 5).times(4, after=4), Phase(2).times(9)
    (2, 1, 7)
    """
    last = after + count
    if self.stop is not None:
      last = min(last, self.stop)
    return max(0, last - max(after, self.start))

  def inside(self, outer: "Phase") -> "Phase":
    """Counts this phase, which begins with the outer one, in the run's steps.

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
    """Prints for instance `steps 1-4` or `from step 5 on`, from 1.

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
  """States when a conditional's branch is taken, for the count of bytes.

  Times are counted where the conditional is reached: in steps of the run, in
  rounds at a round's end, and inside a branch with a phase in that branch's
  steps.  A wrapper that skips steps (`optax.apply_if_finite`) shifts the count.

  Args:
    start: the first time, from 0.
    stop: the first time after the phase; None for a phase without end.

  Raises:
    ValueError: unless 0 <= start < stop.

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
  """Reads the phases in a name that JAX made, the outermost first."""
  return tuple(
    Phase(int(start), None if stop == "end" else int(stop))
    for start, stop in _NAME.findall(name)
  )
