"""Queries of a chain's state: rounds, intervals and pending updates.

They find the state that knows the answer at any depth of a chain, inside jit or
outside, for one worker's arrays or for all workers' arrays `[workers, ...]`.
States answer by their declarations (`jdist.states`), feedbacks by `nonfinite`,
and by `ahead()`, if a host may choose programs for the next two updates.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, states
from jdist.states import PyTree
from jdist.transforms.local import _anchor, _iterates


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
  for outer in _accumulates(state):
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

  found = [x.nonfinite for x in _anchor.parts(state, counts)]
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
  if _accumulates(state):
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


def evaluation_params(
  state: PyTree,
  params: optax.Params,
  model_state: PyTree = None,
  *,
  axis: collectives.Axis = None,
  samples: jax.typing.ArrayLike | None = None,
  laws: states.Laws | tuple[()] = (),
) -> Any:
  r"""Returns the parameters to evaluate, and the workers' mean statistics.

  The parameters are the anchor, at any step of a round, or follow from it:
  :math:`x = (y - (1 - \beta_1) z) / \beta_1` for `optax.contrib.schedule_free`,
  the slow parameters for `optax.lookahead`, and the field "average" of a state
  that is declared by `states.declare(evaluates="average")`.

  Args:
    state: The optimizer's state.
    params: The parameters, whose dtypes the result has.
    model_state: a model's statistics, if any.
    axis: The workers' axis, over which statistics are averaged; the call then
      belongs into `workers.jit`.
    samples: The number of this worker's samples, by which its statistics
      count; all count alike by default.
    laws: `TrainState.laws`, exceptions to those of `states.find_laws`.

  Returns:
    The parameters; with `model_state` a pair of both.

  >>> from jdist import transforms
  >>> optimizer = transforms.local_steps(optax.sgd(1.0), 8, axis=None)
  >>> state = optimizer.init(jnp.array(5.0))
  >>> evaluation_params(state, jnp.array(3.0)).item()
  5.0
  """
  found = anchor(state, params)
  if _anchor.contains(state, _evaluates):
    state = _iterates.at_anchor(state)
  for part in _anchor.parts(state, _evaluates):
    found = _evaluated(part, found)
  if isinstance(found, optax.LookaheadParams):
    found = found.slow
  if model_state is None:
    return found
  return found, mean_statistics(model_state, axis, samples, laws)


def _evaluates(state: Any) -> bool:
  return states.evaluated_field(type(state)) is not None


def _evaluated(state: Any, params: PyTree) -> PyTree:
  """Returns the parameters to evaluate, where a state keeps others."""
  iterate = getattr(state, states.evaluated_field(type(state)) or "")
  b1 = getattr(state, "b1", None)

  def one(x: jax.Array, y: jax.Array) -> jax.Array:
    if b1 is None:
      return x.astype(y.dtype)
    # With an axis of workers in front it is a row.
    beta = _anchor.wide(b1).reshape(b1.shape + (1,) * (y.ndim - b1.ndim))
    wide = (_anchor.wide(y) - (1 - beta) * _anchor.wide(x)) / beta
    return wide.astype(y.dtype)

  return _anchor.over(iterate, params, one)


def mean_statistics(
  model_state: PyTree,
  axis: collectives.Axis,
  samples: jax.typing.ArrayLike | None = None,
  laws: states.Laws | tuple[()] = (),
) -> PyTree:
  """Averages a worker's statistics; all other leaves stay its own.

  The arguments are those of `evaluation_params`.
  """
  leaves, structure = jax.tree.flatten(model_state)
  found = jax.tree.leaves(states.find_laws(model_state, "statistic", laws))
  chosen = [i for i, law in enumerate(found) if law == "statistic"]
  mine = [leaves[i] for i in chosen]
  if samples is not None:
    share = jnp.asarray(samples, jnp.float32)
    whole = collectives.mean(share, axis)
    # Without any sample all count alike; one without has no statistics.
    share = jnp.where(whole > 0, share / jnp.maximum(whole, 1e-9), 1.0)
    mine = [jnp.where(share > 0, x, jnp.zeros_like(x)) for x in mine]
    mine = [(_anchor.wide(x) * share).astype(x.dtype) for x in mine]
  leaves = collectives.varying(leaves, axis)
  for i, value in zip(chosen, collectives.mean(mine, axis), strict=True):
    leaves[i] = value
  return jax.tree.unflatten(structure, leaves)


def anchor(state: PyTree, params: optax.Params) -> optax.Params:
  """Returns the parameters on which all workers agree: evaluate on these.

  Args:
    state: The optimizer's state.
    params: The parameters, whose dtypes the result has.  They are returned
      for a method that keeps the workers equal and needs no anchor.

  >>> from jdist import transforms
  >>> optimizer = transforms.local_steps(optax.sgd(1.0), 8, axis=None)
  >>> state = optimizer.init(jnp.array(5.0))
  >>> anchor(state, jnp.array(3.0)).item()
  5.0
  """
  found = _anchor.find_rounds(state)
  if found is None:
    return params
  _anchor.check_anchor(found.anchor, params)
  return _anchor.over(found.anchor, params, lambda a, p: a.astype(p.dtype))


def _accumulates(state: PyTree) -> list[Any]:
  """Returns the states of `optax.MultiSteps` around a method with rounds."""
  rounds, found = _anchor.declares("rounds"), []

  def around(x: Any) -> bool:
    if isinstance(x, optax.MultiStepsState) and _anchor.contains(x, rounds):
      found.append(x)
    return rounds(x)

  jax.tree.leaves(state, is_leaf=around)
  return found
