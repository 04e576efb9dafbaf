"""Averaging gradients over the workers: synchronous data parallelism."""

from typing import Any, NamedTuple

import optax

from jdist import collectives


class AverageGradientsState(NamedTuple):
  """No arrays; marks that what follows in a chain is equal on all workers."""


def average_gradients(
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces every worker's gradients by their mean.

  .. math:: g \leftarrow \frac{1}{N} \sum_{i=1}^{N} g_i

  As the first element of a chain it makes any Optax optimizer synchronous
  data-parallel training: what follows sees the same numbers on all workers,
  so parameters and state stay equal to the bit.

  Args:
    axis: the workers' axis: None (one worker: does nothing), a name, or
      (inner, outer).

  Returns:
    A transformation whose updates have the shapes and dtypes of the
    gradients.  A gradient in bfloat16 is sent in bfloat16.

  Raises:
    ValueError: when `axis` is not an axis; at trace time, when the gradients
      are already summed because the parameters are shared over the axis.

  >>> import jax, jax.numpy as jnp
  >>> optimizer = optax.chain(average_gradients("worker"), optax.sgd(0.1))
  >>> def step(w, gradient):
  ...   updates, _ = optimizer.update(gradient, optimizer.init(w), w)
  ...   return optax.apply_updates(w, updates)
  >>> gradients = jnp.array([1.0, 3.0])  # Of two workers.
  >>> new = jax.vmap(step, axis_name="worker")(jnp.ones(2), gradients)
  >>> [round(w, 6) for w in new.tolist()]
  [0.8, 0.8]
  """
  collectives.check_axis(axis)

  def init_fn(params: optax.Params) -> AverageGradientsState:
    del params
    return AverageGradientsState()

  def update_fn(
    updates: optax.Updates,
    state: AverageGradientsState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AverageGradientsState]:
    del params, extra_args
    collectives.check_local(updates, axis, what="`updates`")
    return collectives.mean(updates, axis), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
