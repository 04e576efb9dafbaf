"""Weight prediction: gradients at the parameters that they will update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks
from jdist.states import PyTree
from jdist.transforms.delays import _delayed_gradients
from jdist.transforms.local import _anchor


class PredictWeightsState(NamedTuple):
  """State of `predict_weights`.

  Attributes:
    ahead: The predicted parameters minus the present ones, in their dtypes.
    inner: The optimizer's state.
  """

  ahead: PyTree
  inner: PyTree


def predict_weights(
  optimizer: optax.GradientTransformation,
  steps: PyTree,
  *,
  b2: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Predicts the parameters s updates ahead, to take late gradients there.

  The updates are those of `optimizer`.  After each one `predicted_weights(
  state, w)` gives the parameters :math:`\hat w` for the next gradient, which
  will be applied s updates later; `training.make_step` and
  pipelines use it.  The optimizer reaches them in s more steps with gradients
  of zero, which costs s updates in each step.  For SGD with the rate
  :math:`\eta`, momentum c and velocity v

  .. math:: \hat w = w - \eta v \sum_{k=1}^{s} c^k
            = w - \eta v \, \frac{c - c^{s+1}}{1 - c}

  and for Adam's moments m and v after t updates, with `b2` given,

  .. math:: \hat w = w - \sum_{k=1}^{s} \frac{\eta}{1 - b_1^{t+k}} \,
            \frac{m b_1^k}{\sqrt{v / (1 - b_2^{t+k})} + \epsilon}

  It belongs inside the delay, `delay_gradients(predict_weights(optimizer, k),
  k)`, and behind an averaging transformation; in a pipeline it belongs in the
  chain, with s as `grid.delay`.

  Args:
    optimizer: Any Optax optimizer that does not communicate.  Schedules and
      weight decay advance in the predicted steps.
    steps: s, or a tree of numbers as for `delay_gradients`; 0 predicts nothing.
    b2: The decay of Adam's second moment, to hold it in the predicted steps;
      None lets it decay, as under gradients of zero.

  Raises:
    ValueError: If an argument is out of its range; at `init`, if `steps` does
      not fit the parameters, or `optimizer` averages or has rounds.

  References:
    The code of Eliad et al., FTPipe (USENIX ATC 2021).  Departures: a forward
    pass and its backward pass share one prediction, and any optimizer is run
    itself, where the code has formulas.

  >>> optimizer = predict_weights(optax.sgd(1.0, momentum=0.5), steps=2)
  >>> w = jnp.array(0.0)
  >>> updates, state = optimizer.update(jnp.array(4.0), optimizer.init(w), w)
  >>> w = optax.apply_updates(w, updates)
  >>> w.item(), predicted_weights(state, w).item()  # -4 - (2 + 1)
  (-4.0, -7.0)
  """
  optimizer = _anchor.lenient(optimizer)
  if b2 is not None:
    checks.check_continuous("b2", b2, open_low=True, high=1.0)
  farthest = _delayed_gradients.check_steps(steps)[-1]

  def init_fn(params: optax.Params) -> PredictWeightsState:
    _delayed_gradients.broadcast(steps, params)
    inner = optimizer.init(params)
    # In the predicted steps such a transformation would communicate or count.
    for what in ("averages", "rounds", "drains"):
      if _anchor.contains(inner, _anchor.declares(what)):
        raise ValueError(
          "`optimizer` must send nothing and hold nothing back, got one that "
          "averages, delays or has rounds: it would do so in every predicted "
          "step. Put `predict_weights` around the optimizer alone, inside "
          "these."
        )
    return PredictWeightsState(jax.tree.map(jnp.zeros_like, params), inner)

  def update_fn(
    updates: optax.Updates,
    state: PredictWeightsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, PredictWeightsState]:
    new_updates, inner = optimizer.update(
      updates, state.inner, params, **extra_args
    )
    own = _delayed_gradients.broadcast(steps, updates)
    # The prediction must be made now: the next gradient is taken at it.
    ahead = coast(new_updates, inner, params, own, extra_args)
    ahead = jax.tree.map(lambda x, a: x.astype(a.dtype), ahead, state.ahead)
    return new_updates, PredictWeightsState(ahead, inner)

  def coast(
    updates: optax.Updates,
    state: PyTree,
    params: optax.Params | None,
    own: PyTree,
    extra_args: dict[str, Any],
  ) -> PyTree:
    zero = jax.tree.map(jnp.zeros_like, updates)
    ahead = zero
    for i in range(farthest):
      if params is not None:
        params = optax.apply_updates(params, updates)
      # Otherwise the step length would grow by the decay of the variance.
      if b2 is not None:
        state = _held(state, b2)
      updates, state = optimizer.update(zero, state, params, **extra_args)
      ahead = jax.tree.map(
        lambda k, a, u, i=i: a + u if i < k else a, own, ahead, updates
      )
    return ahead

  return _anchor.transformation(init_fn, update_fn)


def predicted_weights(state: PyTree, params: optax.Params) -> optax.Params:
  """Returns the parameters at which to compute the next gradient.

  Args:
    state: The state of any chain.
    params: The parameters, which are returned if nothing in the chain predicts.
  """
  leaves = jax.tree.leaves(state, is_leaf=_predicts)
  found = [x for x in leaves if _predicts(x)]
  if len(found) > 1:
    raise ValueError(
      f"`state` must hold one `predict_weights` at most, got {len(found)}. "
      "Give one of them a tree of `steps` for all leaves."
    )
  if not found:
    return params
  return jax.tree.map(
    lambda p, a: p + a.astype(p.dtype), params, found[0].ahead
  )


def _predicts(x: Any) -> bool:
  return isinstance(x, PredictWeightsState)


def _held(state: PyTree, b2: jax.typing.ArrayLike) -> PyTree:
  """Raises Adam's second moments by the decay of the next step."""

  def adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)

  def one(x: Any) -> Any:
    if not adam(x):
      return x
    decay = jnp.asarray(b2)
    return x._replace(
      nu=jax.tree.map(lambda v: v / decay.astype(v.dtype), x.nu)
    )

  return jax.tree.map(one, state, is_leaf=adam)
