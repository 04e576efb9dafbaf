"""Bringing in what a method has begun and not yet applied."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist.transforms import _delaying, _inspecting, _localizing, _preceding

PyTree = Any
# States whose transformations know `update(..., drain=True)`.
_HOLDING = (
  _localizing.LocalStepsState,
  _delaying.DelayGradientsState,
  _preceding.UpdateFirstState,
)


def drain(
  optimizer: optax.GradientTransformation,
  state: PyTree,
  params: optax.Params,
) -> tuple[optax.Params, PyTree]:
  """Applies what is under way, so that nothing that was done is missing.

  A method with a delay holds the progress, or the gradients, of its last
  steps; local steps hold an unfinished round.  At the end of training these
  would be lost, and an evaluation on the anchor does not see them.  This is
  what one worker does to bring them in: a collective operation, to be run by
  all workers, in a program of its own.  Training may go on afterwards, from
  there.

  Args:
    optimizer: any chain.  What stands before the transformation that holds
      something sees a gradient of zero.
    state: its state.
    params: this worker's parameters.

  Returns:
    The parameters, equal on all workers, and the state.  Of a method that
    holds nothing, what was given; so, for now, of `easgd`, `scaffold`,
    `slow_mo`, `overlap_local_sgd`, `od_sgd` and `streaming_diloco`, whose
    unfinished rounds it does not know.

  >>> optimizer = _delaying.delay_gradients(optax.sgd(1.0), steps=1)
  >>> w = jnp.array(0.0)
  >>> updates, state = optimizer.update(jnp.array(3.0), optimizer.init(w), w)
  >>> w = optax.apply_updates(w, updates)
  >>> w.item(), drain(optimizer, state, w)[0].item()
  (0.0, -3.0)
  """
  if not _holds(state):
    return params, state
  optimizer = optax.with_extra_args_support(optimizer)
  nothing = jax.tree.map(jnp.zeros_like, params)
  updates, state = optimizer.update(nothing, state, params, drain=True)
  return _inspecting.apply_updates(params, updates, state), state


def _holds(state: PyTree) -> bool:
  def is_one(x: Any) -> bool:
    return isinstance(x, _HOLDING)

  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))
