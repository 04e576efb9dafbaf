"""Delays that begin within a run: a pipeline that changes its table."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import transforms

PyTree = Any


class LateStartState(NamedTuple):
  """State of `delay_from`.

  Attributes:
    step: gradients seen so far, int32 scalar.
    pending: the last k gradients, arrays [k, ...].
    inner: the optimizer's.
  """

  step: jax.Array
  pending: PyTree
  inner: PyTree


def delay_from(
  start: int, optimizer: optax.GradientTransformation, delay: int
) -> optax.GradientTransformationExtraArgs:
  """Feeds an optimizer with gradients that are late from a step on.

  As a pipeline does that runs a table with a flush first, and after `start`
  updates one without: that one is empty then, so that its first `delay` steps
  apply nothing.  Until an update of its own has been made nothing is predicted.

  Args:
    start: the first step whose gradient is late.
    optimizer: any, one that predicts weights too.
    delay: k >= 1, in steps.

  >>> optimizer = delay_from(1, optax.sgd(1.0), 1)
  >>> w = jnp.array(0.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (1.0, 10.0, 100.0):
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   print(updates.item())
  -1.0
  0.0
  -10.0
  """
  optimizer = optax.with_extra_args_support(optimizer)

  def init_fn(params: optax.Params) -> LateStartState:
    pending = jax.tree.map(lambda p: jnp.stack([p * 0] * delay), params)
    return LateStartState(
      jnp.zeros((), jnp.int32), pending, optimizer.init(params)
    )

  def update_fn(
    updates: optax.Updates,
    state: LateStartState,
    params: optax.Params | None = None,
    **given: Any,
  ) -> tuple[optax.Updates, LateStartState]:
    late, row = state.step >= start, state.step % delay
    full = state.step >= start + delay
    arrived = jax.tree.map(
      lambda g, ring: jnp.where(late, ring[row], g), updates, state.pending
    )
    new, inner = optimizer.update(arrived, state.inner, params, **given)
    still = jax.tree.map(jnp.zeros_like, new), state.inner
    new, inner = jax.tree.map(
      lambda x, y: jnp.where(full | ~late, x, y), (new, inner), still
    )
    pending = jax.tree.map(
      lambda g, ring: ring.at[row].set(g), updates, state.pending
    )
    return new, LateStartState(
      state.step + 1, pending, _unpredicted(inner, full)
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _unpredicted(state: PyTree, predicts: jax.Array) -> PyTree:
  """Sets to zero what is predicted, unless it `predicts` already."""

  def holds(x: Any) -> bool:
    return isinstance(x, transforms.PredictWeightsState)

  def one(x: Any) -> Any:
    if not holds(x):
      return x
    ahead = jax.tree.map(lambda a: jnp.where(predicts, a, 0 * a), x.ahead)
    return x._replace(ahead=ahead)

  return jax.tree.map(one, state, is_leaf=holds)
