"""Questions to the state of a chain: the anchor, rounds, what is pending.

They work on the state of any chain, however deep the transformation that knows
the answer stands in it, inside jit or outside, for one worker's arrays or for
all workers' arrays `[workers, ...]`.  States answer by what they declare
(`jdist.states`), and by two methods: `ahead()`, where a host may choose
programs for the next two updates, and `nonfinite_rounds()`, of feedbacks.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jdist.transforms.local import _anchor

PyTree = Any


def averages(state: PyTree) -> bool:
  """Returns whether a chain's state has something that synchronizes workers."""
  averages, rounds = map(_anchor.declares, ("averages", "rounds"))
  return _anchor.contains(state, lambda x: averages(x) or rounds(x))


def drains(state: PyTree) -> bool:
  """Returns whether there is something that `drain` may have to bring in."""
  return _anchor.contains(state, _anchor.declares("drains"))


def synchronized(state: PyTree) -> jax.Array | bool:
  """Returns whether the last update brought the workers together.

  The step averages batch statistics then.

  Args:
    state: the optimizer's state.

  Returns:
    A bool scalar; the Python value True for a method without rounds, so that
    nothing needs to be decided when the program runs.
  """
  found = _anchor.find_rounds(state)
  if found is None:
    return True
  flag = found.clock.synchronized
  for outer in _anchor.accumulates(state):  # Between two of its updates.
    flag = flag & (outer.mini_step == 0)
  return flag


def rounds(state: PyTree, steps: jax.typing.ArrayLike) -> jax.Array:
  """Returns how often the workers have come together, an int32 scalar.

  Args:
    state: the optimizer's state.
    steps: updates so far: the answer for a method without rounds.
  """
  found = _anchor.find_rounds(state)
  return jnp.asarray(steps, jnp.int32) if found is None else found.clock.round


def interval(state: PyTree) -> jax.Array | int:
  """Returns this round's local steps, int32; 1 for a method without rounds."""
  found = _anchor.find_rounds(state)
  return 1 if found is None else found.clock.interval


def nonfinite_rounds(state: PyTree) -> jax.Array:
  """Returns in how many rounds a feedback has seen a number that is not finite.

  A NaN or an infinity at one worker does not stay in a residual; here it is
  counted nevertheless.

  Args:
    state: the optimizer's state.

  Returns:
    This worker's count, int32 scalar, the largest of all feedbacks in the
    state; 0 without any.
  """

  def counts(x: Any) -> bool:
    return hasattr(type(x), "nonfinite_rounds")

  leaves = jax.tree.leaves(state, is_leaf=counts)
  found = [x.nonfinite_rounds() for x in leaves if counts(x)]
  if not found:
    return jnp.zeros((), jnp.int32)
  return jnp.stack(jnp.broadcast_arrays(*found)).max(0)


def rounds_ahead(state: PyTree) -> jax.Array | None:
  """Returns what a host needs to choose the programs of the next two updates.

  The host passes its choice as `update(..., control=Control(...))`, and need
  not wait for anything: while one update runs, it has read the state before it.
  `training.Trainer` does this.  An update ends its round (`round_ends=True`)
  when all steps of the interval but one came before it; a message that is
  streamed goes in the largest number of steps that fits into its window.

  Args:
    state: the optimizer's state.

  Returns:
    For the next update and the one after it, int32 [2, 3]: the window, which is
    the number of the round's updates after which the message that is under way
    arrives (the interval, where that is at the round's end; 0 when nothing is
    under way; -1 for a round that the device ends), how many updates of the
    round come before it, and the interval.  With fragments [fragments, 2, 3].
    None for a method without rounds that a host could end.
  """
  found = _anchor.find_rounds(state)
  if _anchor.accumulates(state):  # A round then has more updates than counted.
    return None
  return found.ahead() if hasattr(type(found), "ahead") else None


def arrives_after(state: PyTree) -> jax.Array | int:
  """Returns after how many updates of a round a mean that is late arrives.

  With `rounds_ahead` it says which programs a run may need.

  Args:
    state: the optimizer's state.

  Returns:
    A constant of the run, int32 scalar; 0 where a mean arrives at a round's
    end, and for a method without rounds.
  """
  return getattr(_anchor.find_rounds(state), "due_after", 0)


def streams(state: PyTree) -> bool:
  """Returns whether a message is sent in parts, some in every step."""
  return bool(getattr(_anchor.find_rounds(state), "streams", False))


def update_pending(state: PyTree) -> bool:
  """Returns whether an update comes with the next step, as in `update_first`.

  Evaluations drain it first; see `drain`.
  """
  return _anchor.contains(state, _anchor.declares("update_pending"))
