"""Leading: a worker's own step in front of the mean that comes a step late."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives
from jdist.transforms import _control
from jdist.transforms.local import _anchor

PyTree = Any
# For errors: whoever reads them has written the one or the other.
_NAME = "`lead_step` (also as `od_sgd`)"


class LeadStepState(NamedTuple):
  """State of `lead_step`.

  Attributes:
    step: steps so far, int32 scalar.
    round: means that have arrived, int32 scalar.
    interval: one, int32 scalar.
    synchronized: true, bool scalar: every step is a round.
    anchor: the parameters all workers agree on, one gradient behind, float32.
    inner: the local optimizer's state, each worker its own.
    outer: the optimizer's state, of the anchor.
    pending: this worker's last gradient, float32.
    in_flight: whether `pending` is still to arrive, bool scalar.
    kept: whether the worker leads the anchor, 0 or 1, float32 scalar.
  """

  step: jax.Array
  round: jax.Array
  interval: jax.Array
  synchronized: jax.Array
  anchor: PyTree
  inner: PyTree
  outer: PyTree
  pending: PyTree
  in_flight: jax.Array
  kept: jax.Array


def lead_step(
  optimizer: optax.GradientTransformation,
  local: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  warmup_steps: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Moves the anchor by late means, and each worker a step in front of it.

  In step t, with worker i's gradient taken at its own parameters,

  .. math:: a \leftarrow a + \mathrm{optimizer}(\tfrac1N \sum_j
            g_j^{(t-1)}), \qquad w_i \leftarrow a + \mathrm{local}(g_i^{(t)})

  so that every gradient reaches the anchor one step late, and reaches the
  worker that computed it at once.  The mean comes from the state: its
  communication depends on nothing in the present step, and hides under all of
  it.  In the first step nothing has arrived and the optimizer's state stays
  untouched.

  `update` with the static `drain=True` ignores the updates, moves the anchor
  by the mean that is under way, and puts the workers on it; see `drain`.

  Stands last in a chain: the anchor takes the updates as done.  `optimizer`
  gets no extra arguments: a worker's own loss would drive the anchors apart.

  Args:
    optimizer: any Optax optimizer, for the anchor; gets the mean gradients.
    local: any Optax optimizer, for the worker's own step.
    axis: the workers' axis: None, a name, or (inner, outer).
    warmup_steps: steps at the beginning that are synchronous: the mean is of
      the present gradients, and nobody leads.  With a warm-up the program
      chooses between the two when it runs, so that the mean waits for the
      present gradients throughout: for speed train on without one.

  Returns:
    A transformation; `update` needs `params`.  Gradients travel in float32.

  Raises:
    ValueError: when an argument is out of its range; at trace time, when
      `params` is missing or gradients are already summed.

  >>> optimizer = lead_step(optax.sgd(1.0), optax.sgd(0.5), axis=None)
  >>> w = jnp.array(0.0)
  >>> state = optimizer.init(w)
  >>> for gradient in (2.0, 20.0):
  ...   updates, state = optimizer.update(jnp.array(gradient), state, w)
  ...   w = optax.apply_updates(w, updates)
  ...   print(state.anchor.item(), w.item())
  0.0 -1.0
  -2.0 -12.0
  """
  checks.check_optimizer("optimizer", optimizer)
  checks.check_optimizer("local", local)
  collectives.check_axis(axis)
  checks.check_structural("warmup_steps", warmup_steps, minimum=0)
  local = optax.with_extra_args_support(local)

  def init_fn(params: optax.Params) -> LeadStepState:
    anchor = jax.tree.map(_anchor.wide_copy, params)
    return LeadStepState(
      step=jnp.zeros((), jnp.int32),
      round=jnp.zeros((), jnp.int32),
      interval=jnp.ones((), jnp.int32),
      synchronized=jnp.asarray(True),
      anchor=anchor,
      inner=local.init(params),
      outer=optimizer.init(anchor),
      pending=jax.tree.map(jnp.zeros_like, anchor),
      in_flight=jnp.asarray(False),
      kept=jnp.zeros((), jnp.float32),
    )

  def update_fn(
    updates: optax.Updates,
    state: LeadStepState,
    params: optax.Params | None = None,
    *,
    drain: bool = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LeadStepState]:
    if params is None:
      raise ValueError(
        f"`params` must be given to `update` of {_NAME}: call "
        "`optimizer.update(grads, state, params)`."
      )
    if drain:
      return bring_all(state, params)
    _control.check_told(_NAME, extra_args, state.inner)
    collectives.check_local(updates, axis, what="`updates`")
    present = jax.tree.map(
      lambda g, a: g.astype(a.dtype), updates, state.anchor
    )
    sent, arrived = state.pending, state.in_flight
    late = jnp.ones_like(state.in_flight)
    if warmup_steps:
      late = state.step >= warmup_steps
      sent = _anchor.either(late, sent, present)
      arrived = arrived | ~late
    anchor, outer = arrive(state, sent, arrived)
    own, inner = local.update(updates, state.inner, params, **extra_args)
    inner = _anchor.either(late, inner, state.inner)

    def difference(
      a: jax.Array, u: jax.Array, p: jax.Array, g: jax.Array
    ) -> jax.Array:
      target = a + jnp.where(late, u.astype(a.dtype), jnp.zeros_like(a))
      return (target - p.astype(a.dtype)).astype(g.dtype)

    new_updates = jax.tree.map(difference, anchor, own, params, updates)
    state = state._replace(
      step=optax.safe_increment(state.step),
      round=state.round + arrived.astype(jnp.int32),
      anchor=anchor,
      inner=inner,
      outer=outer,
      pending=present,
      in_flight=late,
      kept=late.astype(jnp.float32),
    )
    return new_updates, state

  def arrive(
    state: LeadStepState, sent: PyTree, arrived: jax.Array
  ) -> tuple[PyTree, PyTree]:
    """Moves the anchor by the mean of what was sent, if it has arrived."""
    mean = collectives.mean(sent, axis)
    moves, outer = optimizer.update(mean, state.outer, state.anchor)
    anchor = jax.tree.map(_anchor.moved, state.anchor, moves)
    return _anchor.either(arrived, (anchor, outer), (state.anchor, state.outer))

  def bring_all(
    state: LeadStepState, params: optax.Params
  ) -> tuple[optax.Updates, LeadStepState]:
    """Applies the gradients that are under way; nobody leads."""
    anchor, outer = arrive(state, state.pending, state.in_flight)
    state = state._replace(
      round=state.round + state.in_flight.astype(jnp.int32),
      anchor=anchor,
      outer=outer,
      in_flight=jnp.zeros_like(state.in_flight),
      kept=jnp.zeros_like(state.kept),
    )
    return _anchor.onto(anchor, params), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
