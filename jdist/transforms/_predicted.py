"""Predicting: a part of the parameters is trained, the others follow from it.

What is predicted is not sent, and all workers predict the same from what they
agree on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, states
from jdist.transforms import _control, _shared, _state, intervals
from jdist.transforms.local import _anchor, _round_state

PyTree = Any
Predict = Callable[[PyTree, PyTree], PyTree]


class Splitter(Protocol):
  """Splits parameters in two, as `jdist.prediction.Cut` or one's own."""

  def split(self, tree: PyTree) -> tuple[PyTree, PyTree]:
    """The front and the rest of a tree."""

  def join(self, front: PyTree, rear: PyTree) -> PyTree:
    """Undoes `split`."""


@states.declare(
  shared=("anchor", "kept", "predicted", "predictor"), rounds=True, drains=True
)
class PredictRestState(NamedTuple):
  """State of `predict_rest`.

  Attributes:
    clock: the rounds of the front; of one step where it has none.
    anchor: the parameters all workers agree on, float32: the front when it
      was last brought together, and the rest that goes with it.
    kept: how far the workers stand beside the anchor, float32 scalar.
    predicted: the last prediction of the rest, float32; at first the rest as
      it was given; `()` where nothing is added to it.
    predictor: the predictor's parameters, frozen.
    front: the state of the front's transformation.
    rest: that of the rest's own, `()` without one.
  """

  clock: _round_state.RoundClock
  anchor: PyTree
  kept: jax.Array
  predicted: PyTree
  predictor: PyTree
  front: PyTree
  rest: PyTree

  @property
  def streams(self) -> bool:
    """Returns whether the front's message is sent in parts."""
    return _state.streams(self.front)

  @property
  def due_after(self) -> jax.Array | int:
    """After how many steps of a round the front's mean arrives."""
    return _state.arrives_after(self.front)

  def ahead(self) -> jax.Array | None:
    """The next two updates, if a host may end the front's rounds."""
    return _state.rounds_ahead(self.front)

  def label(self, walk: Any) -> tuple[Any, bool]:
    """All is equal on all workers, but what the two transformations keep."""
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

  The front f is all that `front` sees, its state too: synchronous training or
  local steps, delayed or not, with any reducer and feedback.  Whenever it
  brings the workers together, at the anchor a,

  .. math:: \hat r \leftarrow \mathrm{predict}(\theta, a), \qquad
            (f, r) \leftarrow (a, \hat r)

  with the frozen parameters :math:`\theta`.  The anchor is equal on all
  workers to the bit, and every worker predicts for itself: so the rest is
  equal, too, and none of its bytes are sent, in either direction.  Until the
  first round's end, and within a round, it stays as it is.

  **No residual is kept of what is not sent**: gradients of the rest have no
  effect, by design, and a compiler leaves them out.  No feedback can make up
  for that; with `rest` they have one.  Then the rest is a prediction and a
  residual e, zero until the first round's end and trained from there on with
  the same gradients, by a transformation with means of its own:

  .. math:: r = \hat r + e, \qquad e \leftarrow e + \mathrm{rest}(\partial
            L / \partial r)

  Where it brings a part of e together, say a layer in turn
  (`fragment_steps`, or a reducer of few entries), that part is a refreshed
  value, and until its next turn it goes where the prediction goes: the last
  refreshed value + (the prediction now - the prediction then).

  Stands last in a chain: the anchor takes the updates as done.  On devices of
  several kinds the predictions may differ in the last place; the front's anchor
  does not, and the next prediction comes from that.

  Args:
    front: a chain that brings the workers together: `ssgd`, `local_steps`,
      `diloco`, `msdpu`, ...; with `axis=None` any.  It gets the front's updates
      and parameters, and all extra arguments.  A transformation of one's own
      stands behind `average_gradients`, by which it is known.
    cut: how to cut the parameters, an object with `split(tree) -> (front,
      rest)` and `join(front, rest) -> tree`: `jdist.prediction.cut`.
    predict: a pure function of the predictor's parameters and the front,
      float32, that gives the rest: `jdist.prediction.Predictor.apply`.
    predictor_params: the trained predictor's.  They are kept in the state,
      equal on all workers, and never change.
    axis: the workers' axis: None, a name, or (inner, outer).
    rest: a chain that brings the workers together for the residual, float32,
      whose gradients it gets; None (default) has no residual: MP².  It gets
      the extra arguments; its rounds the device ends.

  Returns:
    A transformation; `update` needs `params`.  `jdist.anchor` gives front and
    rest: evaluate on it.  Interval, rounds and streaming are the front's.

  Raises:
    ValueError: when an argument is of another kind; when the state is made,
      and `predict` does not give the rest of these parameters, or, with an
      axis, `front` or `rest` never brings the workers together; at trace time,
      when `params` is missing or does not suit the cut.

  >>> from jdist.transforms import _averaging
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
  front = checks.check_optimizer("front", front)
  if rest is not None:
    rest = checks.check_optimizer("rest", rest)
    rest = optax.with_extra_args_support(rest)
  for name in ("split", "join"):
    if not callable(getattr(cut, name, None)):
      raise ValueError(
        "`cut` must have `split(tree)` and `join(front, rest)`, for instance "
        f"`jdist.prediction.cut(model, num_layers)`, got {cut!r}."
      )
  checks.check_function(
    "predict", predict, "the predictor's parameters and the front"
  )
  checks.check_arrays("predictor_params", predictor_params)
  collectives.check_axis(axis)
  front = optax.with_extra_args_support(front)

  def init_fn(params: optax.Params) -> PredictRestState:
    ahead, behind = cut.split(params)
    # A buffer of its own, because the state may be donated.
    predictor = jax.tree.map(
      lambda x: jnp.array(x, copy=True), predictor_params
    )
    _check_prediction(predict, predictor, ahead, behind)
    predicted = jax.tree.map(_anchor.wide_copy, behind)
    front_state = front.init(ahead)
    rest_state = (
      () if rest is None else rest.init(jax.tree.map(jnp.zeros_like, predicted))
    )
    if axis is not None:
      _check_together("front", front_state)
      if rest is not None:
        _check_together("rest", rest_state)
    return PredictRestState(
      clock=_round_state.start_clock(intervals.fixed(1))._replace(
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
    ahead, behind = cut.split(params)
    moves, gradients = cut.split(updates)
    moves, state = move_front(moves, state, ahead, extra_args)
    found = _anchor.find_rounds(state.front)
    over = jnp.asarray(True) if found is None else found.clock.synchronized
    agreed = (
      jax.tree.map(_anchor.moved, ahead, moves)
      if found is None
      else found.anchor
    )
    before = cut.split(state.anchor)
    old = before[1] if rest is None else state.predicted
    anchor, predicted = jax.lax.cond(
      collectives.agreed(over, axis),
      lambda: bring_together(agreed, old, state.predictor),
      lambda: collectives.varying((before[0], old), axis),
    )
    synchronized, kept = over, _kept(found)
    if rest is None:
      target = together = predicted
    else:
      # A worker keeps the sum only, in its dtype.
      residual = jax.tree.map(
        lambda p, r: _anchor.wide(p) - r, behind, state.predicted
      )
      residual, state = move_rest(gradients, state, residual, extra_args)
      target = jax.tree.map(jnp.add, predicted, residual)
      together = target
      following = _anchor.find_rounds(state.rest)
      if following is not None:
        together = _anchor.either(
          over | following.clock.synchronized,
          jax.tree.map(jnp.add, predicted, following.anchor),
          before[1],
        )
        synchronized = over & following.clock.synchronized
        kept = jnp.maximum(kept, _kept(following))
    changes = jax.tree.map(
      lambda t, p, g: (t - _anchor.wide(p)).astype(g.dtype),
      target, behind, gradients,
    )  # fmt: skip
    if rest is None:  # Nothing moves by a rounding between two rounds.
      changes = _anchor.either(
        over, changes, jax.tree.map(jnp.zeros_like, changes)
      )
    step = state.clock.step
    if not control.drain:
      step = optax.safe_increment(step)
    clock = state.clock._replace(
      step=step,
      round=jnp.copy(step if found is None else found.clock.round),
      interval=jnp.array(_state.interval(state.front), jnp.int32),
      synchronized=jnp.copy(synchronized),
    )
    state = state._replace(
      clock=clock,
      anchor=cut.join(anchor, together),
      kept=kept,
      predicted=() if rest is None else predicted,
    )
    return collectives.varying((cut.join(moves, changes), state), axis)

  def move_front(
    moves: PyTree,
    state: PredictRestState,
    ahead: PyTree,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PredictRestState]:
    if _control.drains(extra_args) and not _state.drains(state.front):
      return jax.tree.map(jnp.zeros_like, moves), state
    moves, new = front.update(moves, state.front, ahead, **extra_args)
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
    # A host's control is of the front's rounds; the rest has its own.
    control = extra_args.get("control", _control.DEVICE)
    extra_args = extra_args | {"control": _control.Control(drain=control.drain)}
    if _control.drains(extra_args) and not _state.drains(state.rest):
      return residual, state
    # Until the first prediction there is nothing that a residual could add to.
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
  """Refuses a state of which nothing keeps the workers equal."""
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
  """Refuses what does not predict this rest, before anything is compiled."""
  rule = (
    "`predict` must give the rest from `predictor_params` and the front, but"
  )
  remedy = (
    "Take the predictor that was made for this cut of this network, and its "
    "own trained parameters."
  )

  def predicted(predictor: PyTree, front: PyTree) -> PyTree:
    return predict(predictor, jax.tree.map(_anchor.wide, front))

  try:
    # Of shapes, as it will be the same on every substrate.
    found = jax.eval_shape(predicted, *jax.tree.map(_shape, (predictor, front)))
  except (TypeError, ValueError, LookupError, AttributeError) as error:
    reason = str(error).partition("\n")[0]
    raise ValueError(
      f"{rule} it fails: {type(error).__name__}: {reason} {remedy}"
    ) from error
  theirs, ours = _leaves(found), _leaves(jax.tree.map(_shape, rest))
  for name in {**ours, **theirs}:
    given, wanted = theirs.get(name, "missing"), ours.get(name, "none of them")
    if given != wanted:
      raise ValueError(
        f"{rule} its leaf {name} is {given} and not {wanted}. {remedy}"
      )
  given, wanted = str(jax.tree.structure(found)), str(jax.tree.structure(rest))
  if given != wanted:
    raise ValueError(f"{rule} it gives {given} and not {wanted}. {remedy}")


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
  weak = getattr(x, "weak_type", False)
  return jax.ShapeDtypeStruct(
    jnp.shape(x), jnp.asarray(x).dtype, weak_type=weak
  )


def _leaves(tree: PyTree) -> dict[str, str]:
  """Describes leaves by their paths: floats of any width are alike."""

  def described(leaf: jax.ShapeDtypeStruct) -> str:
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    return f"{'float' if is_float else leaf.dtype}{list(leaf.shape)}"

  named = checks.named_leaves(tree)
  return {name or "(alone)": described(x) for name, x in named.items()}


def _kept(found: Any) -> jax.Array:
  """Returns how far workers stand beside the anchor of a state with rounds."""
  kept = () if found is None else found.kept
  if isinstance(kept, tuple):
    return jnp.zeros((), jnp.float32)
  return jnp.asarray(kept, jnp.float32)
