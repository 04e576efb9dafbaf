"""Going on with another number of workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import collectives, reducers, transforms
from jdist.training import _train_state

PyTree = Any


def resize(
  state: _train_state.TrainState,
  optimizer: optax.GradientTransformation,
  old: collectives.Workers,
  new: collectives.Workers,
  new_optimizer: optax.GradientTransformation | None = None,
) -> _train_state.TrainState:
  r"""Turns a state of N workers into one of M that goes on from there.

  First all that was begun is brought in (`transforms.drain`), and all workers
  stand on the anchor; what owners hold back of gradients goes to the feedbacks
  of all workers.  No mass is lost.  Then, leaf by leaf:

  - what is equal on all workers stays as it is;
  - of floats and complex numbers that each worker has for itself (momenta, the
    residuals of compressed gradients) every new worker gets the old workers'
    mean, so that the mean over the workers stays:
    :math:`\tfrac1M \sum e' = \tfrac1N \sum e`;
  - counters and keys are those of worker 0;
  - the residuals of owners, who are others now, begin anew.

  Args:
    state: arrays `[N, ...]`, as restored by a run of N workers, or of one in
      this process, on fewer devices with `old` of `substrate="vmap"`.
    optimizer: the chain, built for the axis of `old`.
    old: the N workers.
    new: the M workers.
    new_optimizer: the chain, built for the axis of `new`; `optimizer` if the
      axes are the same.

  Returns:
    Arrays `[M, ...]`.

  Raises:
    ValueError: when something that begins anew is not zero: the owners'
      residuals of gradients that go through an all-to-all without a feedback,
      or with `Smoothing`, for instance.
  """
  new_optimizer = optimizer if new_optimizer is None else new_optimizer

  def brought_in(state: _train_state.TrainState) -> _train_state.TrainState:
    params, opt_state = transforms.drain(
      optimizer, state.opt_state, state.params, residuals=True
    )
    return state._replace(params=params, opt_state=opt_state)

  if old.mesh is None:  # A state in memory may lie on several devices.
    state = jax.device_put(state, old.sharding())
  drained = old.gather(old.jit(brought_in)(state))
  first = jax.tree.map(lambda x: x[0], drained)
  template = _train_state.init_state(
    new, new_optimizer, first.params, first.model_state
  )
  num_local = len(new.local_workers)
  labels = _train_state.shared_leaves(template)

  def is_owners(x: Any) -> bool:
    return isinstance(x, reducers.AllToAllState)

  # Owners' residuals, a row of the tree at each worker.
  by_owner = jax.tree.map(
    lambda x: jax.tree.map(lambda _: is_owners(x), x),
    template,
    is_leaf=is_owners,
  )

  def resized(
    path: tuple[Any, ...],
    rows: np.ndarray,
    like: jax.Array,
    same: bool,
    owned: bool,
  ) -> jax.Array:
    if owned or rows.shape[1:] != like.shape[1:]:
      if rows.any():
        raise ValueError(
          f"`state` must hold nothing in `{jax.tree_util.keystr(path)}`, which "
          "depends on the number of workers, got up to "
          f"{np.abs(rows).max():.3g}. Use a feedback that takes it over, for "
          "instance `ErrorFeedback()`, or `owner_feedback=False`, or go on "
          f"with {old.num_workers} workers."
        )
      return like
    one = rows[0]
    if not same and jnp.issubdtype(rows.dtype, jnp.inexact):
      wide = np.complex128 if np.iscomplexobj(rows) else np.float64
      one = rows.astype(wide).mean(0).astype(rows.dtype)
    return new.place(np.broadcast_to(one, (num_local, *one.shape)))

  return jax.tree_util.tree_map_with_path(
    resized, drained, template, labels, by_owner
  )
