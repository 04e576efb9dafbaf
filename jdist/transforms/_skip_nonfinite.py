"""A guard in front of a method that skips gradients which are not finite."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, states

PyTree = Any


@states.declare(shared=("skipped",))
class SkipNonfiniteState(NamedTuple):
  """State of `skip_nonfinite`.

  Attributes:
    skipped: The number of steps whose gradients were replaced by zeros, int32
      scalar.
  """

  skipped: jax.Array


def skip_nonfinite(
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces all workers' gradients by zeros if one worker's are not finite.

  .. math:: g_i \leftarrow g_i \prod_j [g_j \text{ is finite}]

  It must be the first element of a chain, in front of a method, whose means
  then stay finite.  All workers, and all stages of a pipeline, decide alike, by
  one scalar all-reduce in every step.  Rounds and schedules continue, momenta
  and weight decay act as on a gradient of zero.  `optax.apply_if_finite` stops
  the whole optimizer instead, each worker by itself, after which workers would
  end their rounds in different steps.

  Returns:
    A transformation.  `transforms.skipped` reads the count from a chain's
    state.

  >>> optimizer = optax.chain(skip_nonfinite(None), optax.sgd(0.1))
  >>> state = optimizer.init(jnp.zeros(2))
  >>> updates, state = optimizer.update(jnp.array([1.0, jnp.nan]), state)
  >>> updates.tolist(), skipped(state).item()
  ([-0.0, -0.0], 1)
  """
  collectives.check_axis(axis)

  def init_fn(params: optax.Params) -> SkipNonfiniteState:
    del params
    return SkipNonfiniteState(jnp.zeros((), jnp.int32))

  def update_fn(
    updates: optax.Updates,
    state: SkipNonfiniteState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SkipNonfiniteState]:
    del params, extra_args
    found = [jnp.isfinite(x).all() for x in jax.tree.leaves(updates)]
    wrong = ~jnp.stack(found).all() if found else jnp.asarray(False)
    # The parts of one model are the stages of a pipeline; the axis has the
    # workers.
    count = collectives.sum_of_parts(wrong.astype(jnp.float32))
    wrong = collectives.sum(count, axis) > 0
    # The zeros are selected: NaN times zero is NaN.
    updates = jax.tree.map(
      lambda x: jnp.where(wrong, jnp.zeros_like(x), x), updates
    )
    return updates, SkipNonfiniteState(state.skipped + wrong.astype(jnp.int32))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def skipped(state: PyTree) -> jax.Array | None:
  """Returns the number of steps that `skip_nonfinite` has skipped.

  Returns:
    An int32 scalar; None without `skip_nonfinite`.
  """

  def is_guard(x: Any) -> bool:
    return isinstance(x, SkipNonfiniteState)

  leaves = jax.tree.leaves(state, is_leaf=is_guard)
  found = [x.skipped for x in leaves if is_guard(x)]
  return found[0] if found else None
