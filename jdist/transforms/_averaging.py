"""Averaging gradients over the workers: synchronous data parallelism."""

from typing import Any, Literal, NamedTuple

import optax

from jdist import collectives, reducers


class AverageGradientsState(NamedTuple):
  """No arrays; marks that what follows in a chain is equal on all workers."""


def average_gradients(
  axis: collectives.Axis,
  reducer: reducers.Reducer | None = None,
  feedback: reducers.Feedback | None = None,
  seed: int | None = None,
  specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces every worker's gradients by their mean.

  .. math:: g \leftarrow \frac{1}{N} \sum_{i=1}^{N} g_i

  As the first element of a chain it makes any Optax optimizer synchronous
  data-parallel training: what follows sees the same numbers on all workers,
  so parameters and state stay equal to the bit.  Except for a loss, which is
  each worker's own and passes through: in front of an optimizer that uses it
  take `ssgd`, which hands it the mean.

  With a reducer the mean is taken by fewer bytes, and with a feedback what
  was left out is not lost.  All workers decode the same bytes, so what comes
  out is equal on all of them still.  The state then is a `ReductionState`,
  whose first value may depend on the number of workers: make it where the
  axis is bound, for instance `workers.jit(optimizer.init)(params)`.

  Args:
    axis: the workers' axis: None (one worker: does nothing), a name, or
      (inner, outer).
    reducer: how to take the mean, for instance
      `reducers.compressed(codecs.TopK(0.01))`; None takes it exactly, in one
      all-reduce.
    feedback: what becomes of the part of a gradient that is not sent:
      `ErrorFeedback()`, `EF21()`, `MomentumCorrection()`, or None: it is
      forgotten.  With `reducers.MajorityVote`, of which nothing is left out,
      `Smoothing()` or None.
    seed: of the random numbers of codecs that draw some, the same on all
      workers; None is 0.
    specs: for a reducer and workers that are themselves sharded: how the
      parameters are split over the mesh's other axes, a tree of PartitionSpec
      (`Workers.specs(params)`).  Every device then reduces its own shards
      (`reducers.Sharded`), with what a feedback holds of them.  None
      leaves that to the compiler, which puts leaves together first.

  Returns:
    A transformation whose updates have the shapes and dtypes of the
    gradients.  A gradient in bfloat16 is sent in bfloat16.

  Raises:
    ValueError: when `axis` is not an axis, another argument is of another kind,
      or the feedback means nothing with the reducer (a vote has no rest that
      could be sent later); when the state is made, and the reducer does not
      suit the parameters; at trace time, when the gradients are already summed
      because the parameters are shared over the axis.

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
  reduction = reducers.make(axis, reducer, feedback, seed, specs)
  if reduction is not None:
    return _reduced(axis, reduction)

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


def _reduced(
  axis: collectives.Axis, reduction: reducers.Reduction
) -> optax.GradientTransformationExtraArgs:
  """Averages through a reducer."""

  def update_fn(
    updates: optax.Updates,
    state: reducers.ReductionState,
    params: optax.Params | None = None,
    *,
    drain: bool | Literal["residuals"] = False,
    **extra_args: Any,
  ) -> tuple[optax.Updates, reducers.ReductionState]:
    del params, extra_args
    if drain == "residuals":
      return updates, reduction.handed_over(updates, state)
    collectives.check_local(updates, axis, what="`updates`")
    return reduction.mean(updates, state)

  return optax.GradientTransformationExtraArgs(reduction.init, update_fn)
