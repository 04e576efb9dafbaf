"""Questions to the state of a chain: the anchor, rounds, what is pending.

They work on the state of any chain, however deep the transformation that knows
the answer stands in it, inside jit or outside, for one worker's arrays or for
all workers' arrays `[workers, ...]`.  A state answers by what it is:

    clock, anchor    it has rounds, and an anchor at which they end
    kept             how far the worker stands beside the anchor on purpose
    ahead()          a host may choose programs for its next two updates
    streams          a message is sent in parts, some in every step
    drains           its transformation knows `Control(drain=True)`
    averages         its transformation makes the workers' updates equal
    update_pending   its last update comes with the next step
    jumps            its transformation replaces the parameters at times
    nonfinite_rounds()   in how many rounds a number was not finite
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist.transforms.local import _anchor, _clock

PyTree = Any


def has_rounds(state: PyTree) -> bool:
  """Whether a state is that of a method with rounds."""
  return isinstance(getattr(state, "clock", None), _clock.RoundClock)


def _declares(name: str) -> Callable[[Any], bool]:
  return lambda x: bool(getattr(type(x), name, False))


def contains(state: PyTree, is_one: Callable[[Any], bool]) -> bool:
  """Whether a part of a state is such a one, the state itself included."""
  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))


def find_rounds(state: PyTree) -> Any:
  """Finds the outermost state with rounds in a chain's state, or None.

  Raises:
    ValueError: when there are several side by side, or a jump beside one.
  """
  jumps = _declares("jumps")
  leaves = jax.tree.leaves(state, is_leaf=lambda x: has_rounds(x) or jumps(x))
  found = [x for x in leaves if has_rounds(x)]
  if found and any(map(jumps, leaves)):
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
  declares = _declares("averages")
  return contains(state, lambda x: declares(x) or has_rounds(x))


def drains(state: PyTree) -> bool:
  """Whether there is something that `drain` may have to bring in."""
  return contains(state, _declares("drains"))


def anchor(state: PyTree, params: optax.Params) -> optax.Params:
  """Returns the parameters on which all workers agree: evaluate on these.

  Args:
    state: the optimizer's state.
    params: the parameters, returned when the method keeps the workers equal
      all the time and needs no anchor.

  Returns:
    The anchor in the dtypes of `params`.

  >>> from jdist import transforms
  >>> optimizer = transforms.local_steps(optax.sgd(1.0), 8, axis=None)
  >>> state = optimizer.init(jnp.array(5.0))
  >>> anchor(state, jnp.array(3.0)).item()
  5.0
  """
  found = find_rounds(state)
  if found is None:
    return params
  return jax.tree.map(lambda a, p: a.astype(p.dtype), found.anchor, params)


def synchronized(state: PyTree) -> jax.Array | bool:
  """Returns whether the last update brought the workers together.

  The step averages batch statistics then.

  Args:
    state: the optimizer's state.

  Returns:
    A bool scalar; the Python value True for a method without rounds, so that
    nothing needs to be decided when the program runs.
  """
  found = find_rounds(state)
  return True if found is None else found.clock.synchronized


def rounds(state: PyTree, steps: jax.typing.ArrayLike) -> jax.Array:
  """Returns how often the workers have come together, an int32 scalar.

  Args:
    state: the optimizer's state.
    steps: updates so far: the answer for a method without rounds.
  """
  found = find_rounds(state)
  return jnp.asarray(steps, jnp.int32) if found is None else found.clock.round


def interval(state: PyTree) -> jax.Array | int:
  """Returns this round's local steps, int32; 1 for a method without rounds."""
  found = find_rounds(state)
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
  found = find_rounds(state)
  return found.ahead() if hasattr(type(found), "ahead") else None


def streams(state: PyTree) -> bool:
  """Whether a message is sent in parts, some in every step."""
  return bool(getattr(find_rounds(state), "streams", False))


def update_pending(state: PyTree) -> bool:
  """Whether the last step's update comes with the next, as in `update_first`.

  Evaluations drain it first; see `drain`.
  """
  return contains(state, _declares("update_pending"))


def apply_updates(
  params: optax.Params, updates: optax.Updates, state: PyTree = ()
) -> optax.Params:
  """Adds updates to the parameters, and ends rounds exactly on the anchor.

  An update is a difference, and after a round the sum may miss the anchor by a
  rounding.  Here it does not: equal parameters stay equal to the bit.

  Args:
    params: the parameters.
    updates: the updates, in any floating dtype.
    state: the state that `update` returned; without it this is
      `optax.apply_updates`.

  Returns:
    The new parameters in their dtypes.

  >>> apply_updates({"w": jnp.array(1.0)}, {"w": jnp.array(-0.5)})["w"].item()
  0.5
  """

  def moved() -> optax.Params:
    return jax.tree.map(
      lambda p, u: _anchor.moved(p, u).astype(p.dtype), params, updates
    )

  found = find_rounds(state)
  if found is None:
    return moved()
  exact = found.clock.synchronized
  if not isinstance(found.kept, tuple):
    # With a part of its own progress the worker stands beside the anchor on
    # purpose.
    exact = exact & (found.kept == 0)
  return jax.tree.map(
    lambda a, p: jnp.where(exact, a.astype(p.dtype), p), found.anchor, moved()
  )
