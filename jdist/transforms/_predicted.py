"""Prediction: a part of the parameters is trained and predicts the others.

Predicted parameters are not sent: all workers predict the same from the anchor.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, states
from jdist.states import PyTree
from jdist.transforms import _control, _shared, _state, intervals
from jdist.transforms.local import _anchor, _round

Predict = Callable[[PyTree, PyTree], PyTree]  # (its parameters, front) -> rest


class Splitter(Protocol):
  """Protocol of objects that split parameters, as `jdist.prediction.Cut`."""

  def split(self, tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the front and the rest of a tree."""

  def join(self, front: PyTree, rear: PyTree) -> PyTree:
    """Undoes `split`."""


@states.declare(
  shared=("anchor", "kept", "predicted", "predictor"), rounds=True, drains=True
)
class PredictRestState(NamedTuple):
  """State of `predict_rest`.

  Attributes:
    clock: The rounds of the front; rounds of one step if it has none.
    anchor: The parameters on which all workers agree, float32: the front at its
      last synchronization, and the rest that belongs to it.
    kept: The intended distance of the workers from the anchor, float32 scalar.
    predicted: The last prediction of the rest, float32; the initial rest before
      the first one; `()` without a residual.
    predictor: The predictor's parameters, which do not change.
    front: The state of the front's transformation.
    rest: The state of the residual's transformation, `()` without one.
  """

  clock: _round.RoundClock
  anchor: PyTree
  kept: jax.Array
  predicted: PyTree
  predictor: PyTree
  front: PyTree
  rest: PyTree

  @property
  def streams(self) -> bool:
    """Whether the front's message is sent in parts."""
    return _state.streams(self.front)

  @property
  def due_after(self) -> jax.Array | int:
    """The number of a round's steps after which the front's mean is applied."""
    return _state.arrives_after(self.front)

  def ahead(self) -> jax.Array | None:
    """Returns the next two updates, if a host may end the front's rounds."""
    return _state.rounds_ahead(self.front)

  def label(self, walk: Any) -> tuple[Any, bool]:
    """Labels all leaves as shared but those of the two transformations."""
    front, front_is = walk(self.front, False)
    rest, rest_is = walk(self.rest, False) if self.rest else ((), True)
    labels = _shared.label_fields(self._replace(front=(), rest=()))
    return labels._replace(front=front, rest=rest), front_is and rest_is


def predict_rest(
  front: optax.GradientTransformation,
  cut: Splitter,
  predict: Predict,
  predictor_params: PyTree,
  *,
  axis: collectives.Axis,
  rest: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains the front of a network with `front`, and predicts the rest of it.

  The transformation `front` sees the front f and its gradients only: it may be
  synchronous training or local steps, delayed or not, with any reducer and
  feedback.  Whenever it synchronizes the workers, at the anchor a,

  .. math:: \hat r \leftarrow \mathrm{predict}(\theta, a), \qquad
            (f, r) \leftarrow (a, \hat r)

  with the frozen parameters :math:`\theta`.  The anchor is equal on all workers
  to the bit, and every worker predicts for itself.  The rest is therefore equal
  as well, and none of its bytes are sent.  It does not change within a round,
  nor before the end of the first one.

  Gradients of the rest have no effect, and a compiler drops them, unless `rest`
  is given.  The rest then is a prediction plus a residual e, zero until the
  first round's end, that is trained with these gradients by a transformation
  with means of its own:

  .. math:: r = \hat r + e, \qquad e \leftarrow e + \mathrm{rest}(\partial
            L / \partial r)

  A part of e that `rest` has synchronized, for instance each layer in turn by
  `fragment_steps` or a few entries by a reducer, is a refreshed value.  Until
  its next turn it follows the prediction: it is the last refreshed value +
  (the prediction now - the prediction then).

  It must be last in a chain: the anchor takes its updates as they are.  On
  devices of several kinds predictions may differ in the last place; the front's
  anchor does not, and the next prediction starts from it.

  Args:
    front: A chain that synchronizes the workers: `ssgd`, `local_steps`,
      `diloco`, `msdpu`, ...; with `axis=None` any chain.  It receives the
      front's updates and parameters, and all extra arguments.  A transformation
      of your own must be behind `average_gradients`, by which it is recognized.
    cut: The cut of the parameters, an object with `split(tree) -> (front,
      rest)` and `join(front, rest) -> tree`: `jdist.prediction.cut`.
    predict: A pure function of the predictor's parameters and the front,
      float32, that returns the rest: `jdist.prediction.Predictor.apply`.
    predictor_params: The trained parameters of the predictor.  The state keeps
      them, equal on all workers.
    axis: The axis of the workers: None, a name, or (inner, outer).
    rest: A chain that synchronizes the workers for the residual, float32, and
      receives its gradients and the extra arguments; the device ends its
      rounds.  None (default) has no residual: MP².

  Returns:
    A transformation; `update` needs `params`.  `jdist.anchor` gives front and
    rest: evaluate on it.  Interval, rounds and streaming are the front's.

  Raises:
    ValueError: If an argument is of another kind; when the state is made, if
      `predict` does not give the rest of these parameters, or, with an axis,
      `front` or `rest` never synchronizes the workers; at trace time, if
      `params` is missing or does not suit the cut.

  >>> class Halves:  # The front is half of the rest.
  ...   split = staticmethod(lambda tree: (tree[0], tree[1]))
  ...   join = staticmethod(lambda front, rest: (front, rest))
  >>> optimizer = predict_rest(
  ...   optax.sgd(1.0), Halves, lambda theta, f: theta * f, jnp.array(2.0),
  ...   axis=None,
  ... )
  >>> w = (jnp.array(5.0), jnp.array(0.0))
  >>> gradients = (jnp.array(1.0), jnp.array(9.0))
  >>> updates, state = optimizer.update(gradients, optimizer.init(w), w)
  >>> [x.item() for x in optax.apply_updates(w, updates)]
  [4.0, 8.0]
  """
  front = _anchor.lenient(front, "front")
  if rest is not None:
    rest = _anchor.lenient(rest, "rest")
  for name in ("split", "join"):
    if not callable(getattr(cut, name, None)):
      raise ValueError(
        "`cut` must have `split(tree)` and `join(front, rest)`, for instance "
        f"`jdist.prediction.cut(model, num_layers)`, got {cut!r}."
      )
  checks.check_function("predict", predict, "the predictor and the front", 2)
  checks.check_arrays("predictor_params", predictor_params)
  collectives.check_axis(axis)

  def init_fn(params: optax.Params) -> PredictRestState:
    front_params, rest_params = cut.split(params)
    # The state may be donated, and needs a buffer of its own.
    predictor = jax.tree.map(
      lambda x: jnp.array(x, copy=True), predictor_params
    )
    _check_prediction(predict, predictor, front_params, rest_params)
    predicted = jax.tree.map(_anchor.wide_copy, rest_params)
    front_state = front.init(front_params)
    rest_state = (
      () if rest is None else rest.init(jax.tree.map(jnp.zeros_like, predicted))
    )
    if axis is not None:
      _check_together("front", front_state)
      if rest is not None:
        _check_together("rest", rest_state)
    return PredictRestState(
      clock=_round.start_clock(intervals.fixed(1))._replace(
        interval=jnp.array(_state.interval(front_state), jnp.int32)
      ),
      anchor=jax.tree.map(_anchor.wide_copy, params),
      kept=jnp.zeros((), jnp.float32),
      predicted=() if rest is None else predicted,
      predictor=predictor,
      front=front_state,
      rest=rest_state,
    )

  def update_fn(
    updates: optax.Updates,
    state: PredictRestState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PredictRestState]:
    _anchor.check_params(params, "`predict_rest`")
    control = extra_args.get("control", _control.DEVICE)
    if state.ahead() is None:
      _control.refuse(control, "`predict_rest` around such a front")
    front_params, rest_params = cut.split(params)
    moves, gradients = cut.split(updates)
    moves, state = move_front(moves, state, front_params, extra_args)
    step = state.clock.step
    if not control.drain:
      step = optax.safe_increment(step)
    front_rounds = _anchor.find_rounds(state.front)
    if front_rounds is None:
      # Every step of a synchronous front ends a round.
      over, number = jnp.asarray(True), step
      agreed = jax.tree.map(_anchor.moved, front_params, moves)
    else:
      clock, agreed = front_rounds.clock, front_rounds.anchor
      over, number = clock.synchronized, clock.round
    before = cut.split(state.anchor)
    old = before[1] if rest is None else state.predicted
    # A prediction costs a forward pass, and only the end of a round needs it.
    anchor, predicted = jax.lax.cond(
      collectives.agreed(over, axis),
      lambda: bring_together(agreed, old, state.predictor),
      lambda: collectives.varying((before[0], old), axis),
    )
    synchronized, kept = over, _kept(front_rounds)
    target = together = predicted
    if rest is not None:
      # The parameters hold the sum only, in their dtype.  Subtracting the
      # float32 prediction recovers the residual as this worker has it.
      residual = jax.tree.map(
        lambda p, r: _anchor.wide(p) - r, rest_params, state.predicted
      )
      residual, state = move_rest(gradients, state, residual, extra_args)
      target = together = jax.tree.map(jnp.add, predicted, residual)
      rest_rounds = _anchor.find_rounds(state.rest)
      if rest_rounds is not None:
        # The anchor of the rest changes at the end of either kind of round.
        together = _anchor.either(
          over | rest_rounds.clock.synchronized,
          jax.tree.map(jnp.add, predicted, rest_rounds.anchor),
          before[1],
        )
        synchronized = over & rest_rounds.clock.synchronized
        kept = jnp.maximum(kept, _kept(rest_rounds))
    changes = jax.tree.map(
      lambda t, p, g: (t - _anchor.wide(p)).astype(g.dtype),
      target, rest_params, gradients,
    )  # fmt: skip
    if rest is None:
      # Between two rounds the difference is a rounding, which must not move.
      changes = _anchor.either(
        over, changes, jax.tree.map(jnp.zeros_like, changes)
      )
    clock = state.clock._replace(
      step=step,
      round=jnp.copy(number),
      interval=jnp.array(_state.interval(state.front), jnp.int32),
      synchronized=jnp.copy(synchronized),
    )
    state = state._replace(
      clock=clock, anchor=cut.join(anchor, together), kept=kept,
      predicted=() if rest is None else predicted,
    )  # fmt: skip
    return collectives.varying((cut.join(moves, changes), state), axis)

  def move_front(
    moves: PyTree,
    state: PredictRestState,
    front_params: PyTree,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PredictRestState]:
    # A front that holds nothing would take a step with gradients of zero.
    if _control.drains(extra_args) and not _state.drains(state.front):
      return jax.tree.map(jnp.zeros_like, moves), state
    moves, new = front.update(moves, state.front, front_params, **extra_args)
    return moves, state._replace(front=new)

  def bring_together(
    agreed: PyTree, old: PyTree, predictor: PyTree
  ) -> tuple[PyTree, PyTree]:
    predicted = jax.tree.map(
      lambda new, like: new.astype(like.dtype), predict(predictor, agreed), old
    )
    return collectives.varying((agreed, predicted), axis)

  def move_rest(
    gradients: PyTree,
    state: PredictRestState,
    residual: PyTree,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PredictRestState]:
    assert rest is not None
    # The host's control concerns the front's rounds; the rest has its own.
    control = extra_args.get("control", _control.DEVICE)
    extra_args = extra_args | {"control": _control.Control(drain=control.drain)}
    if _control.drains(extra_args) and not _state.drains(state.rest):
      return residual, state
    # A residual needs a prediction, which the first round's end makes.
    met = state.clock.round > 0
    gradients = jax.tree.map(
      lambda g: jnp.where(met, _anchor.wide(g), 0.0), gradients
    )
    moves, new = rest.update(gradients, state.rest, residual, **extra_args)
    residual = jax.tree.map(_anchor.moved, residual, moves)
    return residual, state._replace(rest=new)

  return _anchor.only_floats(
    optax.GradientTransformationExtraArgs(init_fn, update_fn)
  )


def _check_together(name: str, state: PyTree) -> None:
  """Raises a ValueError for a chain that never synchronizes the workers."""
  if not _state.averages(state):
    raise ValueError(
      f"`{name}` must bring the workers together where there is an `axis`, but "
      "its state is neither that of a mean nor one with rounds, and the "
      f"workers would drift apart. Give `ssgd({name}, axis=axis)`, or put it "
      "into `local_steps`."
    )


def _check_prediction(
  predict: Predict, predictor: PyTree, front: PyTree, rest: PyTree
) -> None:
  """Raises a ValueError unless a function predicts this rest."""
  rule = "`predict` must give the rest from `predictor_params` and the front"
  remedy = (
    "Take the predictor that was made for this cut of this network, and its "
    "own trained parameters."
  )

  def predicted(predictor: PyTree, front: PyTree) -> PyTree:
    return predict(predictor, jax.tree.map(_anchor.wide, front))

  try:
    # Shapes suffice, and nothing is compiled for a wrong predictor.
    found = jax.eval_shape(predicted, predictor, front)
  except (TypeError, ValueError, LookupError, AttributeError) as error:
    reason = str(error).partition("\n")[0]
    raise ValueError(
      f"{rule}, but it fails: {type(error).__name__}: {reason} {remedy}"
    ) from error
  checks.check_form(rule, found, rest, remedy)


def _kept(found: Any) -> jax.Array:
  """Returns the intended distance of workers from the anchor of a state."""
  kept = () if found is None else found.kept
  return jnp.asarray(0.0 if isinstance(kept, tuple) else kept, jnp.float32)
