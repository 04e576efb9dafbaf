"""What is where in the state of a chain."""

from typing import Any

import jax

from jdist import reducers
from jdist.transforms import (
  _averaging,
  _delayed_gradients,
  _lead_step,
  _search,
  _update_first,
)
from jdist.transforms.local import _engine, _fragments, _sync_rule

PyTree = Any

# What the state of every method with rounds has.
_ROUND_FIELDS = frozenset({"anchor", "synchronized", "round", "interval"})
# What that of `prediction.nowcast_weights` has, which is in a room above.
_JUMP_FIELDS = frozenset({"step", "history", "networks"})
# States whose transformations know `update(..., drain=True)`.
HOLDING = (
  _engine.LocalStepsState,
  _delayed_gradients.DelayGradientsState,
  _update_first.UpdateFirstState,
  _sync_rule.RoundsState,
  _lead_step.LeadStepState,
  _fragments.FragmentsState,
)
# States whose transformations know `update(..., round_ends=...)`.
TOLD = (_engine.LocalStepsState,)
# States whose transformations bring the workers' updates together, besides
# those with rounds.
_AVERAGING = (
  _averaging.AverageGradientsState,
  reducers.ReductionState,
  _update_first.UpdateFirstState,
)


def has_rounds(state: PyTree) -> bool:
  """Whether a state is that of a method with rounds."""
  return frozenset(getattr(state, "_fields", ())) >= _ROUND_FIELDS


def _jumps(state: PyTree) -> bool:
  return frozenset(getattr(state, "_fields", ())) >= _JUMP_FIELDS


def rounds_in(state: PyTree) -> Any:
  """The outermost state with rounds in a chain's state, or None."""
  leaves = jax.tree.leaves(state, is_leaf=lambda x: has_rounds(x) or _jumps(x))
  found = [x for x in leaves if has_rounds(x)]
  if found and any(map(_jumps, leaves)):
    raise ValueError(
      "`state` must not hold `nowcast_weights` beside a method with rounds, "
      f"got one beside {type(found[0]).__name__}: the jump would be lost where "
      "a round ends on the anchor. Put it last into the inner chain, as in "
      "`local_sgd(optax.chain(optimizer, nowcast_weights(...)), ...)`."
    )
  if len(found) > 1:
    raise ValueError(
      "`state` must have one `local_steps` at most, side by side there are "
      f"{len(found)}. Put one inside the other's inner chain."
    )
  return found[0] if found else None


def averages(state: PyTree) -> bool:
  """Whether something in a chain's state brings the workers together."""
  return _search.contains(
    state, lambda x: isinstance(x, _AVERAGING) or has_rounds(x)
  )


def holds(state: PyTree) -> bool:
  """Whether there is something that `drain` may have to bring in."""
  return _search.contains(state, lambda x: isinstance(x, HOLDING))
