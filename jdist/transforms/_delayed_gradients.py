"""Gradients that an optimizer gets some steps after they were computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, states
from jdist.transforms import _control, _shared

PyTree = Any


@states.declare(shared=("step",), drains=True)
class DelayGradientsState(NamedTuple):
  """State of `delay_gradients`.

  Attributes:
    step: gradients seen so far, int32 scalar.
    pending: the last k gradients, arrays [k, ...] in the parameters' dtype,
      the gradient of step t in row t mod k.
    inner: state of the delayed optimizer.
  """

  step: jax.Array
  pending: PyTree
  inner: PyTree

  def label(self, walk: Any) -> tuple[Any, bool]:
    """The inner transformation says whether the workers are kept equal."""
    inner, equal = walk(self.inner, False)
    labels = _shared.label_fields(self)
    return labels._replace(inner=inner), equal


def delay_gradients(
  optimizer: optax.GradientTransformation, steps: int
) -> optax.GradientTransformationExtraArgs:
  r"""Feeds an optimizer with the gradients of k steps ago.

  .. math:: u_t = \mathrm{optimizer}(g_{t-k})

  Around a synchronous chain, `chain(average_gradients(axis), ...)`, the mean
  is that of gradients in the state: its communication depends on nothing in
  the present step, and hides under all of it.

  In the first k steps nothing has arrived: the updates are zero and the
  optimizer's state stays untouched (a gradient of zero would still advance
  schedules, decay weights and move a momentum).  Other arguments of `update`
  are not delayed: the optimizer sees the present loss with the old gradient.

  `drain` applies all that is pending.

  Args:
    optimizer: any Optax optimizer, an averaging one for instance.
    steps: k; 0 is no delay.

  Returns:
    A transformation with the updates of `optimizer`.

  Raises:
    ValueError: when `steps` is not an int >= 0.

  References:
    Xu et al., OD-SGD (ACM TACO 17(4), 2020) for k = 1.  Departure: no local
    update with the present gradient in between.

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
  checks.check_optimizer("optimizer", optimizer)
  checks.check_structural("steps", steps, minimum=0)
  optimizer = optax.with_extra_args_support(optimizer)
  if steps == 0:
    return optimizer

  def init_fn(params: optax.Params) -> DelayGradientsState:
    return DelayGradientsState(
      step=jnp.zeros((), jnp.int32),
      pending=jax.tree.map(
        lambda p: jnp.zeros((steps, *jnp.shape(p)), jnp.asarray(p).dtype),
        params,
      ),
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
    row = state.step % steps
    arrived = jax.tree.map(
      lambda p, g: p[row].astype(g.dtype), state.pending, updates
    )
    pending = jax.tree.map(
      lambda p, g: p.at[row].set(g.astype(p.dtype)), state.pending, updates
    )
    # Selected and not under a conditional, where a collective would overlap
    # with nothing.
    new_updates, inner = optimizer.update(
      arrived, state.inner, params, **extra_args
    )
    begun = state.step >= steps
    new_updates = jax.tree.map(
      lambda u: jnp.where(begun, u, jnp.zeros_like(u)), new_updates
    )
    inner = jax.tree.map(
      lambda new, old: jnp.where(begun, new, old), inner, state.inner
    )
    step = optax.safe_increment(state.step)
    return new_updates, DelayGradientsState(step, pending, inner)

  def flush(
    updates: optax.Updates,
    state: DelayGradientsState,
    params: optax.Params | None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, DelayGradientsState]:
    """Feeds the optimizer with all that is pending, oldest first."""
    zero = jax.tree.map(jnp.zeros_like, updates)
    total, moving = zero, params
    for _ in range(steps):
      # A gradient of zero behind the last one pushes the others out.
      one, state = update_fn(zero, state, moving, **extra_args)
      total = jax.tree.map(jnp.add, total, one)
      if moving is not None:
        moving = optax.apply_updates(moving, one)
    # The zeros that are pending now must not arrive.
    return total, state._replace(step=jnp.zeros_like(state.step))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
