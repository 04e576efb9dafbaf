"""What a training loop asks of a state: the anchor, rounds, what is shared.

These work on the state of any chain, however deep the transformation that
knows the answer stands in it, inside jit or outside, for one worker's arrays
or for all workers' arrays `[workers, ...]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist.transforms import (
  _anchoring,
  _averaging,
  _controlling,
  _correcting,
  _delaying,
  _finding,
  _fragmenting,
  _freezing,
  _leading,
  _meeting,
  _preceding,
  _predicting,
  _pulling,
  _reducing,
  _remembering,
  _rounds,
  _searching,
  _sending,
  _sharding,
  _slowing,
  _stepping,
  _streaming,
)

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
  local = _finding.rounds_in(state)
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
  local = _finding.rounds_in(state)
  return True if local is None else local.synchronized


def rounds(state: PyTree, steps: jax.typing.ArrayLike) -> jax.Array:
  """How often the workers have come together, an int32 scalar.

  Args:
    state: the optimizer's state.
    steps: updates so far: the answer for a method without rounds.
  """
  local = _finding.rounds_in(state)
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
    if isinstance(x, _sharding.ShardedFeedbackState):
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
  local = _finding.rounds_in(state)
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
  found = getattr(_finding.rounds_in(state), "stream_steps", ())
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
  found = _finding.rounds_in(state)
  if not isinstance(found, _finding.TOLD):
    return None
  if not isinstance(found.arrived_loss, tuple):
    return None  # When a mean arrives in a round the device says.
  if found.stream_steps:
    return stream_steps(state)
  ahead = _rounds.two_ahead(found, since_step=0)
  return jnp.stack(ahead, axis=-1).reshape(*jnp.shape(ahead[0]), 2, 2)


def update_pending(state: PyTree) -> bool:
  """Whether the last step's gradients are still to be applied.

  So it is with `update_first`, whose parameters are those of a step before:
  `drain` brings them up.

  Args:
    state: the optimizer's state.

  Returns:
    A Python bool, of the kind of state; true before the first step, too.

  >>> optimizer = _preceding.update_first(optax.sgd(0.1), axis=None)
  >>> update_pending(optimizer.init(1.0))
  True
  """
  return _searching.contains(
    state, lambda x: isinstance(x, _preceding.UpdateFirstState)
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
      lambda p, u: _anchoring.moved(p, u).astype(p.dtype), params, updates
    )

  local = _finding.rounds_in(state)
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


class Sharing(NamedTuple):
  """Which leaves are equal on all workers.

  Attributes:
    params: whether the parameters are, at every step.
    state: a tree of bools like the optimizer's state.
  """

  params: bool
  state: PyTree


# Fields of our states that are equal on all workers, besides those found by
# walking into the rest.
_SHARED_FIELDS: dict[type, frozenset[str]] = {
  _stepping.LocalStepsState: frozenset(
    {
      "step",
      "round",
      "round_step",
      "interval",
      "next_interval",
      "synchronized",
      "anchor",
      "outer",
      "interval_state",
      "in_flight",
      "kept",
      "stream_steps",
      "arrived_loss",
    }
  ),
  _sending.StreamState: frozenset({"arrived", "position"}),
  _streaming.PartsState: frozenset({"arrived", "mean_loss", "position"}),
  _delaying.DelayGradientsState: frozenset({"step"}),
  _correcting.PullToAnchorState: frozenset({"step"}),
  _meeting.RoundsState: frozenset(
    {
      "step",
      "round",
      "round_step",
      "interval",
      "next_interval",
      "synchronized",
      "anchor",
      "interval_state",
      "kept",
    }
  ),
  _pulling.LateAnchorState: frozenset({"velocity"}),
  _controlling.VariatesState: frozenset({"shared", "distance"}),
  _slowing.SlowMomentumState: frozenset({"velocity", "learning_rate"}),
  _leading.LeadStepState: frozenset(
    {
      "step",
      "round",
      "interval",
      "synchronized",
      "anchor",
      "outer",
      "in_flight",
      "kept",
    }
  ),
  _fragmenting.FragmentsState: frozenset(
    {
      "step",
      "round",
      "interval",
      "synchronized",
      "anchor",
      "outer",
      "kept",
      "drained_step",
    }
  ),
  _reducing.ReductionState: frozenset({"step", "shared"}),
  _remembering.EF21State: frozenset({"mean"}),
}

# Wrappers that hand on what their one inner transformation returns.
_TRANSPARENT: dict[type, frozenset[str]] = {
  optax.InjectStatefulHyperparamsState: frozenset(
    {"count", "hyperparams", "hyperparams_states"}
  ),
  _delaying.DelayGradientsState: frozenset({"step"}),
}


def register_shared(state_type: type, fields: frozenset[str]) -> None:
  """Declares which fields of a state are equal on all workers.

  For transformations outside jdist; what is not declared counts as each
  worker's own, which is always right and costs checkpoints space.

  Args:
    state_type: the NamedTuple of the state.
    fields: names of the fields.
  """
  unknown = set(fields) - set(state_type._fields)  # type: ignore[attr-defined]
  if unknown:
    raise ValueError(
      f"`fields` must be fields of {state_type.__name__}, got {unknown}."
    )
  _SHARED_FIELDS[state_type] = frozenset(fields)


def sharing(state: PyTree) -> Sharing:
  """Says which leaves of a state are equal on all workers.

  Behind `average_gradients` in a chain everything is, with a reducer too: the
  parameters begin equal, and all workers do the same to them.  Of the local
  steps' state the anchor, the outer optimizer and the counters are; the rest
  is each worker's own.  Optax's other wrappers are walked into but never
  trusted to keep the parameters equal.

  Args:
    state: the optimizer's state, or its shapes.

  Returns:
    The answer; a checkpoint stores shared leaves once.

  >>> optimizer = optax.chain(
  ...   optax.trace(0.9), _averaging.average_gradients(None), optax.trace(0.9)
  ... )
  >>> told = sharing(optimizer.init(jnp.array(0.0)))
  >>> told.params, [s.trace for s in (told.state[0], told.state[2])]
  (True, [False, True])
  """
  labels, out = _walk(state, False)
  return Sharing(out, labels)


def _walk(state: PyTree, shared: bool) -> tuple[PyTree, bool]:
  """Labels a state whose incoming updates are `shared` or not.

  Returns:
    The labels, and whether the outgoing updates are shared.
  """
  if isinstance(state, _averaging.AverageGradientsState):
    return state, True
  if isinstance(state, _reducing.ReductionState):
    return _reduction_labels(state), True
  if isinstance(state, _freezing.FrozenAdamState):
    return _freezing.FrozenAdamState(
      step=True,  # type: ignore[arg-type]
      mu=_all(state.mu, True),
      nu=_all(state.nu, True),
      reduction=_reduction_labels(state.reduction),
    ), True
  if isinstance(state, _predicting.PredictRestState):
    return _predict_rest_labels(state)
  if isinstance(state, _preceding.UpdateFirstState):
    return _preceding.UpdateFirstState(
      pending=_all(state.pending, False),
      in_flight=True,  # type: ignore[arg-type]
      loss=False,  # type: ignore[arg-type]
      inner=_walk(state.inner, True)[0],
    ), True
  if type(state) is tuple:  # A chain: one after the other.
    labels = []
    for element in state:
      label, shared = _walk(element, shared)
      labels.append(label)
    return tuple(labels), shared
  if isinstance(state, dict):  # Not in order: each for itself.
    each = {k: _walk(v, shared)[0] for k, v in state.items()}
    return type(state)(each), shared
  fields = getattr(state, "_fields", None)
  if fields is None:
    return _all(state, shared), shared
  known = _SHARED_FIELDS.get(type(state), frozenset())
  transparent = _TRANSPARENT.get(type(state))
  walked, outgoing = {}, shared
  for field in fields:
    value = getattr(state, field)
    if field in known or (transparent is not None and field in transparent):
      walked[field] = _all(value, True)
    elif _finding.has_rounds(state):
      # Inner steps are each worker's own, even behind an average: the
      # parameters they see are.
      inside = field != "inner" and type(value) in _SHARED_FIELDS
      walked[field] = _walk(value, False)[0] if inside else _all(value, False)
    else:
      walked[field], out = _walk(value, shared)
      if transparent is not None:
        outgoing = outgoing or out
  return type(state)(**walked), outgoing


def _reduction_labels(
  state: _reducing.ReductionState,
) -> _reducing.ReductionState:
  # What a worker keeps is its own even where what comes in is not: random
  # numbers and owned parts differ.
  return _reducing.ReductionState(
    step=True,  # type: ignore[arg-type]
    shared=_all(state.shared, True),
    own=_all(state.own, False),
    feedback=_walk(state.feedback, False)[0],
  )


def _predict_rest_labels(
  state: _predicting.PredictRestState,
) -> tuple[_predicting.PredictRestState, bool]:
  # All is, but what the two transformations keep for themselves.
  front, front_is = _walk(state.front, False)
  rest, rest_is = _walk(state.rest, False) if state.rest else ((), True)
  labels = _all(state._replace(front=(), rest=()), True)
  return labels._replace(front=front, rest=rest), front_is and rest_is


def _all(tree: PyTree, label: bool) -> PyTree:
  mark: Callable[[Any], bool] = lambda _: label  # noqa: E731
  return jax.tree.map(mark, tree)
