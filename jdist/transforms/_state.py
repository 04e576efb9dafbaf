"""Queries of a chain's state: rounds, intervals and pending updates.

They find the state that knows the answer at any depth of a chain, inside jit or
outside, for one worker's arrays or for all workers' arrays `[workers, ...]`.
States answer by their declarations (`jdist.states`), feedbacks by `nonfinite`,
and by `ahead()`, if a host may choose programs for the next two updates.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jdist.states import PyTree
from jdist.transforms.local import _anchor


def averages(state: PyTree) -> bool:
  """Returns whether a transformation in the chain synchronizes workers."""
  averages, rounds = map(_anchor.declares, ("averages", "rounds"))
  return _anchor.contains(state, lambda x: averages(x) or rounds(x))


def drains(state: PyTree) -> bool:
  """Returns whether `drain` may have something to bring in."""
  return _anchor.contains(state, _anchor.declares("drains"))


def synchronized(state: PyTree) -> jax.Array | bool:
  """Returns whether the last update brought the workers together.

  The training step then averages batch statistics.

  Returns:
    A bool scalar; the Python value True for a method without rounds, so that
    nothing needs to be decided when the program runs.
  """
  found = _anchor.find_rounds(state)
  if found is None:
    return True
  flag = found.clock.synchronized
  for outer in _anchor.accumulates(state):
    # Between two of its updates `optax.MultiSteps` leaves the flag of the
    # last one in the inner state.
    flag = flag & (outer.mini_step == 0)
  return flag


def rounds(state: PyTree, steps: jax.typing.ArrayLike) -> jax.Array:
  """Returns the number of synchronizations so far, an int32 scalar.

  Args:
    state: The optimizer's state.
    steps: The number of updates so far, returned for a method without rounds.
  """
  found = _anchor.find_rounds(state)
  return jnp.asarray(steps, jnp.int32) if found is None else found.clock.round


def interval(state: PyTree) -> jax.Array | int:
  """Returns this round's interval, int32; 1 for a method without rounds."""
  found = _anchor.find_rounds(state)
  return 1 if found is None else found.clock.interval


def nonfinite_rounds(state: PyTree) -> jax.Array:
  """Returns the number of rounds in which a feedback met a non-finite number.

  A feedback drops a worker's NaN or infinity, so that no residual shows it.

  Returns:
    This worker's count, int32 scalar, the largest of all feedbacks in the
    state; 0 without any.
  """

  def counts(x: Any) -> bool:
    return hasattr(type(x), "nonfinite")

  leaves = jax.tree.leaves(state, is_leaf=counts)
  found = [x.nonfinite for x in leaves if counts(x)]
  # A feedback on shards counts for each device of a worker.
  found = [
    next(iter(x.values())).max(-1) if isinstance(x, dict) else x for x in found
  ]
  if not found:
    return jnp.zeros((), jnp.int32)
  return jnp.stack(jnp.broadcast_arrays(*found)).max(0)


def rounds_ahead(state: PyTree) -> jax.Array | None:
  """Returns the facts by which a host chooses the next two programs.

  The host passes its choice as `update(..., control=Control(...))` and never
  waits: it reads the state before an update while the update runs, as
  `training.Trainer` does.  An update ends its round (`round_ends=True`) if all
  other steps of the interval precede it; a streamed message takes the largest
  number of steps that fits into its window.

  Returns:
    For the next update and the one after it, int32 [2, 3]: the window, the
    number of updates of the round before it, and the interval.  The window is
    the number of the round's updates after which the message in flight is
    applied (the interval, if that is at the round's end; 0 with nothing in
    flight; -1 for a round that the device ends).  With fragments
    [fragments, 2, 3].  None for a method without rounds that a host could end.
  """
  found = _anchor.find_rounds(state)
  # Under `optax.MultiSteps` a round has more updates than the clock counts.
  if _anchor.accumulates(state):
    return None
  return found.ahead() if hasattr(type(found), "ahead") else None


def arrives_after(state: PyTree) -> jax.Array | int:
  """Returns the number of a round's updates after which a late mean is applied.

  With `rounds_ahead` it determines the programs that a run may need.

  Returns:
    A constant of the run, int32 scalar; 0 if a mean is applied at a round's
    end, and for a method without rounds.
  """
  return getattr(_anchor.find_rounds(state), "due_after", 0)


def streams(state: PyTree) -> bool:
  """Returns whether a message is sent in parts over several steps."""
  return bool(getattr(_anchor.find_rounds(state), "streams", False))


def update_pending(state: PyTree) -> bool:
  """Returns whether the next step applies a pending update.

  This is the case for `update_first`; evaluations `drain` it first.
  """
  return _anchor.contains(state, _anchor.declares("update_pending"))
