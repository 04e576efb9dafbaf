"""OD-SGD's step: late mean gradients, with a local step ahead of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import checks, collectives, reducers, states
from jdist.transforms import _control, intervals
from jdist.transforms.local import _anchor, _iterates, _round

PyTree = Any
# Users have written one of these two names.
_NAME = "`lead_step` (also as `od_sgd`)"


@states.declare(
  shared=("anchor", "outer", "in_flight", "kept"), rounds=True, drains=True
)
class LeadStepState(NamedTuple):
  """State of `lead_step`.

  Attributes:
    clock: The clock of rounds of one step.
    anchor: The parameters on which all workers agree, one gradient behind,
      float32.
    inner: The local optimizer's state, each worker's own.
    outer: The state of the anchor's optimizer.
    held: This worker's last gradient, float32.
    in_flight: Whether the mean of `held` is still to be applied, bool scalar.
    kept: Whether the worker is ahead of the anchor, 0 or 1, float32 scalar.
    compression: The compression's state, `()` without one.
  """

  clock: _round.RoundClock
  anchor: PyTree
  inner: PyTree
  outer: PyTree
  held: PyTree
  in_flight: jax.Array
  kept: jax.Array
  compression: PyTree


def lead_step(
  optimizer: optax.GradientTransformation,
  local: optax.GradientTransformation,
  *,
  axis: collectives.Axis,
  warmup_steps: int = 0,
  compression: reducers.Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Moves the anchor by late means, and each worker a step in front of it.

  In step t, with worker i's gradient taken at its own parameters,

  .. math:: a \leftarrow a + \mathrm{optimizer}(\tfrac1N \sum_j
            g_j^{(t-1)}), \qquad w_i \leftarrow a + \mathrm{local}(g_i^{(t)})

  so that every gradient moves the anchor one step late, and its own worker at
  once.  The mean is taken of gradients in the state: its communication is
  independent of the present step, which hides it.  The first step leaves anchor
  and optimizer unchanged.

  `drain` applies the late mean and moves the workers to the anchor.

  It must be last in a chain: the anchor takes the updates as they are.
  `optimizer` receives no extra arguments: a worker's own loss would drive the
  anchors apart.

  Args:
    optimizer: Any Optax optimizer for the anchor, with the mean gradients.
    local: Any Optax optimizer for the worker's own step.
    axis: The axis of the workers: None, a name, or (inner, outer).
    warmup_steps: The number of synchronous steps at the beginning, with means
      of the present gradients and no local steps.  The program then selects
      between the two phases when it runs, so that every mean waits for the
      present gradients: for speed train without a warm-up.
    compression: A compression of the mean; None takes it exactly, in float32.

  Raises:
    ValueError: If an argument is out of its range; at trace time, if `params`
      is missing or gradients are already summed.

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
  optimizer = checks.check_optimizer("optimizer", optimizer)
  local = checks.check_optimizer("local", local)
  collectives.check_axis(axis)
  warmup_steps = checks.check_structural(
    "warmup_steps", warmup_steps, minimum=0
  )
  reducers.Compression.check(compression)
  optimizer, local = map(optax.with_extra_args_support, (optimizer, local))

  def init_fn(params: optax.Params) -> LeadStepState:
    anchor = jax.tree.map(_anchor.wide_copy, params)
    inner = _iterates.own_keys(local.init(params), axis)
    _iterates.refuse_iterates(inner, _NAME)
    return LeadStepState(
      clock=_round.start_clock(intervals.fixed(1)), anchor=anchor, inner=inner,
      outer=optimizer.init(anchor), held=jax.tree.map(jnp.zeros_like, anchor),
      in_flight=jnp.asarray(False), kept=jnp.zeros((), jnp.float32),
      compression=() if compression is None else compression.init(anchor, axis),
    )  # fmt: skip

  def update_fn(
    updates: optax.Updates,
    state: LeadStepState,
    params: optax.Params | None = None,
    *,
    control: _control.Control = _control.DEVICE,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LeadStepState]:
    _anchor.check_params(params, _NAME)
    if control.drain:
      return flush(state, params)
    _control.refuse(control, _NAME)
    collectives.check_local(updates, axis, what="`updates`", like=params)
    _anchor.check_anchor(state.anchor, params)
    present = jax.tree.map(
      lambda g, a: g.astype(a.dtype), updates, state.anchor
    )
    sent, due = state.held, state.in_flight
    # The phase is selected, not branched on: a collective in a conditional
    # would overlap with nothing.
    late = jnp.ones_like(state.in_flight)
    if warmup_steps:
      late = state.clock.step >= warmup_steps
      sent = _anchor.either(late, sent, present)
      due = due | ~late
    mean, _, memory = reducers.mean_of(
      compression, sent, (), state.compression, axis
    )
    state = move_anchor(state, mean, memory, due)
    own, inner = local.update(updates, state.inner, params, **extra_args)
    inner = _anchor.either(late, inner, state.inner)

    def difference(
      a: jax.Array, u: jax.Array, p: jax.Array, g: jax.Array
    ) -> jax.Array:
      target = a + jnp.where(late, u.astype(a.dtype), jnp.zeros_like(a))
      return (target - p.astype(a.dtype)).astype(g.dtype)

    # The target is computed from the anchor, not from the parameters: roundings
    # of many steps would add up in these.
    new_updates = jax.tree.map(difference, state.anchor, own, params, updates)
    clock = state.clock
    state = state._replace(
      clock=clock._replace(
        step=optax.safe_increment(clock.step),
        round=clock.round + due.astype(jnp.int32),
      ),
      inner=inner,
      held=present,
      in_flight=late,
      kept=late.astype(jnp.float32),
    )
    return new_updates, state

  def move_anchor(
    state: LeadStepState, mean: PyTree, memory: PyTree, due: jax.Array
  ) -> LeadStepState:
    """Moves the anchor by the mean gradient, if the mean is due."""
    moves, outer = optimizer.update(mean, state.outer, state.anchor)
    anchor = jax.tree.map(_anchor.moved, state.anchor, moves)
    anchor, outer, memory = _anchor.either(
      due,
      (anchor, outer, memory),
      (state.anchor, state.outer, state.compression),
    )
    return state._replace(anchor=anchor, outer=outer, compression=memory)

  def flush(
    state: LeadStepState, params: optax.Params
  ) -> tuple[optax.Updates, LeadStepState]:
    """Applies the late mean, and moves the workers to the anchor."""
    mean, memory = reducers.flush_of(
      compression, state.held, state.compression, axis
    )
    state = move_anchor(state, mean, memory, state.in_flight)
    rounds = state.clock.round + state.in_flight.astype(jnp.int32)
    state = state._replace(
      clock=state.clock._replace(round=rounds),
      in_flight=jnp.zeros_like(state.in_flight),
      kept=jnp.zeros_like(state.kept),
    )
    return _anchor.onto(state.anchor, params), state

  return _anchor.only_floats(
    optax.GradientTransformationExtraArgs(init_fn, update_fn)
  )
