"""Which leaves of a state are equal on all workers.

A checkpoint stores those once.  What is not known counts as each worker's own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jdist import reducers
from jdist.transforms import (
  _averaging,
  _delayed_gradients,
  _found,
  _frozen_adam,
  _lead_step,
  _predicted,
  _proximal,
  _update_first,
)
from jdist.transforms.local import (
  _chunked_stream,
  _control_variates,
  _elastic,
  _engine,
  _fragments,
  _slow_momentum,
  _streaming,
  _sync_rule,
)

PyTree = Any


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
  _engine.LocalStepsState: frozenset(
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
  _streaming.StreamState: frozenset({"arrived", "position"}),
  _chunked_stream.PartsState: frozenset({"arrived", "mean_loss", "position"}),
  _delayed_gradients.DelayGradientsState: frozenset({"step"}),
  _proximal.PullToAnchorState: frozenset({"step"}),
  _sync_rule.RoundsState: frozenset(
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
  _elastic.LateAnchorState: frozenset({"velocity"}),
  _control_variates.VariatesState: frozenset({"shared", "distance"}),
  _slow_momentum.SlowMomentumState: frozenset({"velocity", "learning_rate"}),
  _lead_step.LeadStepState: frozenset(
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
  _fragments.FragmentsState: frozenset(
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
  reducers.ReductionState: frozenset({"step", "shared"}),
  reducers.EF21State: frozenset({"mean"}),
}

# Wrappers that hand on what their one inner transformation returns.
_TRANSPARENT: dict[type, frozenset[str]] = {
  optax.InjectStatefulHyperparamsState: frozenset(
    {"count", "hyperparams", "hyperparams_states"}
  ),
  _delayed_gradients.DelayGradientsState: frozenset({"step"}),
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
  >>> told = sharing(optimizer.init(jax.numpy.array(0.0)))
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
  if isinstance(state, reducers.ReductionState):
    return _reduction_labels(state), True
  if isinstance(state, _frozen_adam.FrozenAdamState):
    return _frozen_adam.FrozenAdamState(
      step=True,  # type: ignore[arg-type]
      mu=_all(state.mu, True),
      nu=_all(state.nu, True),
      reduction=_reduction_labels(state.reduction),
    ), True
  if isinstance(state, _predicted.PredictRestState):
    return _predict_rest_labels(state)
  if isinstance(state, _update_first.UpdateFirstState):
    return _update_first.UpdateFirstState(
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
    elif _found.has_rounds(state):
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
  state: reducers.ReductionState,
) -> reducers.ReductionState:
  # What a worker keeps is its own even where what comes in is not: random
  # numbers and owned parts differ.
  return reducers.ReductionState(
    step=True,  # type: ignore[arg-type]
    shared=_all(state.shared, True),
    own=_all(state.own, False),
    feedback=_walk(state.feedback, False)[0],
  )


def _predict_rest_labels(
  state: _predicted.PredictRestState,
) -> tuple[_predicted.PredictRestState, bool]:
  # All is, but what the two transformations keep for themselves.
  front, front_is = _walk(state.front, False)
  rest, rest_is = _walk(state.rest, False) if state.rest else ((), True)
  labels = _all(state._replace(front=(), rest=()), True)
  return labels._replace(front=front, rest=rest), front_is and rest_is


def _all(tree: PyTree, label: bool) -> PyTree:
  mark: Callable[[Any], bool] = lambda _: label  # noqa: E731
  return jax.tree.map(mark, tree)
