"""Gradients that an optimizer receives late, and predictions of its weights."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, states
from jdist.states import PyTree
from jdist.transforms import _control, _shared
from jdist.transforms.local import _anchor


def check_steps(steps: PyTree) -> list[int]:
  """Returns the distinct delays of a tree in order, ints >= 0."""
  # An empty tree, and None in it, must be refused as well.
  leaves = jax.tree.leaves(steps, is_leaf=lambda x: x is None)
  return sorted(
    {
      checks.check_structural("steps", one, minimum=0)
      for one in leaves or [None]
    }
  )


def broadcast(steps: PyTree, tree: PyTree) -> PyTree:
  """Broadcasts delays to the leaves of a tree, of which they are a prefix.

  >>> broadcast({"a": 2, "b": 1}, {"a": (0.0, 0.0), "b": 0.0})
  {'a': (2, 2), 'b': 1}
  """
  try:
    return jax.tree.broadcast(steps, tree)
  except ValueError as error:
    given, wanted = map(jax.tree.structure, (steps, tree))
    raise ValueError(
      "`steps` must be a number, or a tree of numbers with the structure of "
      f"the parameters or a prefix of it, got {given} for {wanted}. Give a "
      "number for each part of the parameters."
    ) from error


def compensated(
  gradient: jax.Array,
  strength: jax.typing.ArrayLike,
  now: jax.Array,
  then: jax.Array,
) -> jax.Array:
  r"""Returns :math:`g + \lambda \, g \odot g \odot (w_{now} - w_{then})`.

  Args:
    gradient: The gradient g at the parameters `then`.
    strength: The factor lambda >= 0; the paper's value is 0.04.
    now: The parameters to which the gradient will be applied.
    then: The parameters at which the gradient was computed.

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation (arXiv 1609.08326).
  """
  # The squared gradient stands for the diagonal of the Hessian.
  term = strength * gradient * gradient * (now - then)
  return gradient + term.astype(gradient.dtype)


@states.declare(shared=("step",), drains=True)
class DelayGradientsState(NamedTuple):
  """State of `delay_gradients`.

  Attributes:
    step: The number of gradients so far, int32 scalar.
    pending: The last k gradients of each leaf, arrays [k, ...] in the
      parameters' dtype; row t mod k has that of step t; () for k = 0.
    inner: The state of the delayed optimizer.
  """

  step: jax.Array
  pending: PyTree
  inner: PyTree

  def label(self, walk: Any) -> tuple[Any, bool]:
    """Labels the workers as equal if the inner transformation keeps them so."""
    inner, equal = walk(self.inner, False)
    labels = _shared.label_fields(self)
    return labels._replace(inner=inner), equal


def delay_gradients(
  optimizer: optax.GradientTransformation, steps: PyTree
) -> optax.GradientTransformationExtraArgs:
  r"""Feeds an optimizer with the gradients from k steps ago.

  .. math:: u_t = \mathrm{optimizer}(g_{t-k})

  Around a synchronous chain, `chain(average_gradients(axis), ...)`, the mean is
  taken of gradients in the state: its communication is independent of the
  present step, which hides it.

  In the first k steps the updates are zero and the optimizer's state does not
  change (a gradient of zero would still advance schedules, decay weights and
  move a momentum).  Other arguments of `update` are not delayed: the optimizer
  sees the present loss with the old gradient.

  With a tree of delays each leaf has its own k, as the stages of PipeDream
  have.  Before its first gradient is due, a leaf and its part of the
  optimizer's state do not change; a step count advances with the first gradient
  of any leaf.

  `drain` applies all pending gradients.

  Args:
    optimizer: Any Optax optimizer, for instance one that averages.
    steps: k, or a tree of delays with the structure of the parameters or a
      prefix of it; 0 is no delay.

  Raises:
    ValueError: If `steps` is not of ints >= 0; at `init`, if it does not fit
      the parameters.

  References:
    Xu et al., OD-SGD (arXiv 2005.06728) for k = 1.  Departure: no local update
    with the present gradient in between.  Narayanan et al., PipeDream (SOSP
    2019) for a delay S - 1 - s of stage s of S.  Departure: all stages have one
    optimizer and share its count.

  >>> optimizer = delay_gradients(optax.sgd(1.0), steps=1)
  >>> w = jnp.array(0.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (1.0, 10.0, 100.0):
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   print(updates.item())
  0.0
  -1.0
  -10.0
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  delays = check_steps(steps)
  # Without a delay the result is the optimizer's to the bit, with its state.
  if delays == [0]:
    plain = optax.with_extra_args_support(optimizer)

    def checked(params: optax.Params) -> PyTree:
      broadcast(steps, params)
      return plain.init(params)

    return plain._replace(init=checked)
  optimizer = _anchor.lenient(optimizer)

  def ring(p: jax.Array, k: int) -> Any:
    zero = jnp.zeros_like(p)
    # Orbax refuses to save an array of size zero.
    return jnp.full((k, *zero.shape), zero, zero.dtype) if k else ()

  def init_fn(params: optax.Params) -> DelayGradientsState:
    return DelayGradientsState(
      step=jnp.zeros((), jnp.int32),
      pending=jax.tree.map(ring, params, broadcast(steps, params)),
      inner=optimizer.init(params),
    )

  def update_fn(
    updates: optax.Updates,
    state: DelayGradientsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayGradientsState]:
    if _control.drains(extra_args):
      del extra_args["control"]
      return flush(updates, state, params, **extra_args)
    checks.check_gradients("updates", updates)
    own = broadcast(steps, updates)
    new_updates, inner = step_with(
      {k: state.step >= k for k in delays}, updates, state, params, extra_args
    )
    # Written after it was read: row t mod k still held the gradient of t - k.
    pending = jax.tree.map(
      lambda g, k, p: p.at[state.step % k].set(g.astype(p.dtype)) if k else p,
      updates, own, state.pending,
    )  # fmt: skip
    step = optax.safe_increment(state.step)
    return new_updates, DelayGradientsState(step, pending, inner)

  def step_with(
    moving: Mapping[int, jax.Array],
    updates: optax.Updates,
    state: DelayGradientsState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
  ) -> tuple[optax.Updates, PyTree]:
    """Updates the leaves whose delays are `moving`."""
    own = broadcast(steps, updates)
    arrived = jax.tree.map(
      lambda g, k, p: p[state.step % k].astype(g.dtype) if k else g, updates,
      own, state.pending,
    )  # fmt: skip
    # The update is selected afterwards: inside a conditional its collective
    # would overlap with nothing.
    new_updates, inner = optimizer.update(
      arrived, state.inner, params, **extra_args
    )
    new_updates = jax.tree.map(
      lambda u, k: jnp.where(moving[k], u, jnp.zeros_like(u)), new_updates, own
    )
    return new_updates, _chosen(moving, own, inner, state.inner)

  def flush(
    updates: optax.Updates,
    state: DelayGradientsState,
    params: optax.Params | None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayGradientsState]:
    """Feeds the optimizer with all pending gradients, oldest first."""
    zero = jax.tree.map(jnp.zeros_like, updates)
    total = zero
    for i in range(delays[-1]):
      # A leaf with a shorter delay has fewer gradients pending.
      moving = {k: (state.step >= k) & (i < k) for k in delays}
      one, inner = step_with(moving, zero, state, params, extra_args)
      state = state._replace(step=optax.safe_increment(state.step), inner=inner)
      total = jax.tree.map(jnp.add, total, one)
      if params is not None:
        params = optax.apply_updates(params, one)
    # A step count of zero marks the ring as empty.
    return total, DelayGradientsState(
      jnp.zeros_like(state.step),
      jax.tree.map(jnp.zeros_like, state.pending),
      state.inner,
    )

  return _anchor.transformation(init_fn, update_fn)


def _chosen(
  moving: Mapping[int, jax.Array], delays: PyTree, new: PyTree, old: PyTree
) -> PyTree:
  """Selects the new state for moving leaves and for parts without leaves."""
  # Parts of an optimizer's state with the structure of the parameters hold one
  # entry for each leaf; anything else, such as a count, belongs to all.
  structure: Any = jax.tree.structure(delays)

  def of_params(x: Any) -> bool:
    # A wrapper may have masked some of them.
    return bool(jax.tree.structure(x, is_leaf=_anchor.is_masked) == structure)

  some = functools.reduce(jnp.logical_or, moving.values())

  def one(new: Any, old: Any) -> Any:
    if not of_params(new):
      return jnp.where(some, new, old)
    return jax.tree.map(
      lambda k, n, o: n if _anchor.is_masked(n) else jnp.where(moving[k], n, o),
      delays, new, old,
    )  # fmt: skip

  return jax.tree.map(one, new, old, is_leaf=of_params)


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
  farthest = check_steps(steps)[-1]

  def init_fn(params: optax.Params) -> PredictWeightsState:
    broadcast(steps, params)
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
    own = broadcast(steps, updates)
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

  Raises:
    ValueError: If several transformations predict.
  """
  found = _anchor.parts(state, lambda x: isinstance(x, PredictWeightsState))
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
