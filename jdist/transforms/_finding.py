"""What is where in the state of a chain."""

from typing import Any

import jax

from jdist.transforms import (
  _averaging,
  _delaying,
  _fragmenting,
  _leading,
  _meeting,
  _preceding,
  _reducing,
  _stepping,
)

PyTree = Any

# What the state of every method with rounds has.
_ROUND_FIELDS = frozenset({"anchor", "synchronized", "round", "interval"})
# States whose transformations know `update(..., drain=True)`.
HOLDING = (
  _stepping.LocalStepsState,
  _delaying.DelayGradientsState,
  _preceding.UpdateFirstState,
  _meeting.RoundsState,
  _leading.LeadStepState,
  _fragmenting.FragmentsState,
)
# States whose transformations bring the workers' updates together, besides
# those with rounds.
_AVERAGING = (
  _averaging.AverageGradientsState,
  _reducing.ReductionState,
  _preceding.UpdateFirstState,
)


def has_rounds(state: PyTree) -> bool:
  """Whether a state is that of a method with rounds."""
  return frozenset(getattr(state, "_fields", ())) >= _ROUND_FIELDS


def rounds_in(state: PyTree) -> Any:
  """The outermost state with rounds in a chain's state, or None."""
  leaves = jax.tree.leaves(state, is_leaf=has_rounds)
  found = [x for x in leaves if has_rounds(x)]
  if len(found) > 1:
    raise ValueError(
      "`state` must have one `local_steps` at most, side by side there are "
      f"{len(found)}. Put one inside the other's inner chain."
    )
  return found[0] if found else None


def averages(state: PyTree) -> bool:
  """Whether something in a chain's state brings the workers together."""

  def is_one(x: Any) -> bool:
    return isinstance(x, _AVERAGING) or has_rounds(x)

  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))


def holds(state: PyTree) -> bool:
  """Whether there is something that `drain` may have to bring in."""

  def is_one(x: Any) -> bool:
    return isinstance(x, HOLDING)

  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))
