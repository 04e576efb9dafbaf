"""What a training loop asks of a state: the anchor, rounds, what is pending.

These work on the state of any chain, however deep the transformation that
knows the answer stands in it, inside jit or outside, for one worker's arrays
or for all workers' arrays `[workers, ...]`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import reducers
from jdist.transforms import _found, _search, _update_first
from jdist.transforms.local import _anchor, _clock

PyTree = Any


def anchor(state: PyTree, params: optax.Params) -> optax.Params:
  """The parameters on which all workers agree: evaluate on these.

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
  local = _found.rounds_in(state)
  if local is None:
    return params
  return jax.tree.map(lambda a, p: a.astype(p.dtype), local.anchor, params)


def synchronized(state: PyTree) -> jax.Array | bool:
  """Whether the last update brought the workers together.

  The step averages batch statistics then.

  Args:
    state: the optimizer's state.

  Returns:
    A bool scalar; the Python value True for a method without rounds, so that
    nothing needs to be decided when the program runs.
  """
  local = _found.rounds_in(state)
  return True if local is None else local.synchronized


def rounds(state: PyTree, steps: jax.typing.ArrayLike) -> jax.Array:
  """How often the workers have come together, an int32 scalar.

  Args:
    state: the optimizer's state.
    steps: updates so far: the answer for a method without rounds.
  """
  local = _found.rounds_in(state)
  return jnp.asarray(steps, jnp.int32) if local is None else local.round


def nonfinite_rounds(state: PyTree) -> jax.Array:
  """In how many rounds a feedback has met a number that is not finite.

  A NaN or an infinity at one worker does not stay in what the worker remembers;
  here it is seen nevertheless.

  Args:
    state: the optimizer's state.

  Returns:
    This worker's count, int32 scalar, the largest of all feedbacks in the
    state; 0 without any.
  """
  found = []
  for x in jax.tree.leaves(state, is_leaf=_is_feedback):
    if isinstance(x, reducers.ShardedFeedbackState):
      found += [each.max(-1) for each in x.nonfinite.values()]
    elif _is_feedback(x):
      found.append(x.nonfinite)
  if not found:
    return jnp.zeros((), jnp.int32)
  return jnp.stack(jnp.broadcast_arrays(*found)).max(0)


def _is_feedback(state: PyTree) -> bool:
  return "nonfinite" in getattr(state, "_fields", ())


def interval(state: PyTree) -> jax.Array | int:
  """Local steps of the present round, int32; 1 for a method without rounds."""
  local = _found.rounds_in(state)
  return 1 if local is None else local.interval


def stream_steps(state: PyTree) -> jax.Array | None:
  """What a host needs to choose the programs of the next two updates.

  A streamed method with an adaptive interval is compiled for a few numbers of
  steps in which a round's message is sent: `update(..., stream_steps=...)`.
  For an update in a round of so many steps the host takes the largest number
  that fits, and None where the interval is 0 or as many steps have been taken
  already.  It need not wait for anything: while one update runs, it has read
  the state before it.  `training.Trainer` does this.

  Args:
    state: the optimizer's state.

  Returns:
    For the next update and the one after it the interval of its round (or the
    steps until the message is due, if they are fewer; 0 without a delay), and
    how many updates of the round come before it, int32 [2, 2]; None when
    nothing is streamed.
  """
  found = getattr(_found.rounds_in(state), "stream_steps", ())
  if not found:
    return None
  return jnp.stack(found, axis=-1).reshape(*jnp.shape(found[0]), 2, 2)


def rounds_ahead(state: PyTree) -> jax.Array | None:
  """What a host needs to say whether the next two updates end their rounds.

  An update ends its round when all steps of the interval but one came before
  it: `update(..., round_ends=True)`.  The host need not wait for anything:
  while one update runs, it has read the state before it.
  `training.Trainer(..., host_rounds=True)` does this.

  Args:
    state: the optimizer's state.

  Returns:
    For the next update and the one after it the interval of its round, and how
    many updates of the round come before it, int32 [2, 2]; None for a method
    that does not know `round_ends`.  Where something is streamed they are
    those of `stream_steps`: 0 for a round without a delay, which the device
    ends, `round_ends=None`.
  """
  found = _found.rounds_in(state)
  if not isinstance(found, _found.TOLD):
    return None
  if not isinstance(found.arrived_loss, tuple):
    return None  # When a mean arrives in a round the device says.
  if found.stream_steps:
    return stream_steps(state)
  ahead = _clock.two_ahead(found, since_step=0)
  return jnp.stack(ahead, axis=-1).reshape(*jnp.shape(ahead[0]), 2, 2)


def update_pending(state: PyTree) -> bool:
  """Whether the last step's gradients are still to be applied.

  So it is with `update_first`, whose parameters are those of a step before:
  `drain` brings them up.

  Args:
    state: the optimizer's state.

  Returns:
    A Python bool, of the kind of state; true before the first step, too.

  >>> optimizer = _update_first.update_first(optax.sgd(0.1), axis=None)
  >>> update_pending(optimizer.init(1.0))
  True
  """
  return _search.contains(
    state, lambda x: isinstance(x, _update_first.UpdateFirstState)
  )


def apply_updates(
  params: optax.Params, updates: optax.Updates, state: PyTree = ()
) -> optax.Params:
  """Applies updates, and ends a round exactly on the anchor.

  A replacement for `optax.apply_updates`.  An update is a difference, and
  `w + (a - w)` differs from `a` in the last place of about one float32 entry
  in seven.

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

  local = _found.rounds_in(state)
  if local is None:
    return moved()
  exact = local.synchronized
  kept = getattr(local, "kept", 1.0)
  if not isinstance(kept, tuple):
    # With a part of its own progress the worker stands beside the anchor on
    # purpose.
    exact = exact & (kept == 0)
  return jax.tree.map(
    lambda a, p: jnp.where(exact, a.astype(p.dtype), p),
    local.anchor,
    moved(),
  )
