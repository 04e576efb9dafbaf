"""Resuming with a different number of workers."""

from typing import Any

import jax
import numpy as np
import optax

from jdist import collectives, reducers, states, transforms
from jdist.training import _train_state


def resize(
  state: _train_state.TrainState,
  optimizer: optax.GradientTransformation,
  old: collectives.Workers,
  new: collectives.Workers,
  new_optimizer: optax.GradientTransformation | None = None,
) -> _train_state.TrainState:
  r"""Turns a state of N workers into one from which M workers continue.

  All pending updates are applied first (`transforms.drain`): then all workers
  stand at the anchor. Residuals that owners hold of gradients move to the
  feedbacks of all workers, and no mass is lost. Then, leaf by leaf:

  - leaves that are equal on all workers stay unchanged;
  - moments and statistics of each worker (momenta, the residuals of compressed
    gradients) become the old workers' mean on every new worker, so that the
    mean over the workers is kept:
    :math:`\tfrac1M \sum e' = \tfrac1N \sum e`;
  - counters and constants are those of worker 0;
  - keys of each worker are that of worker 0, folded by the new numbers;
  - the residuals of owners, which change, start at zero.

  Args:
    state: Arrays `[N, ...]`, restored by a run of N workers, or on fewer
      devices in this process with `old` of `substrate="vmap"`.
    optimizer: The chain, built for the axis of `old`.
    old: The N workers.
    new: The M workers.
    new_optimizer: The chain, built for the axis of `new`; by default
      `optimizer`, which requires equal axes.

  Returns:
    Arrays `[M, ...]`.

  Raises:
    ValueError: If a leaf that would start at zero is not zero, for instance
      the owners' residuals of an all-to-all without a feedback, or with
      `Smoothing`.
  """
  new_optimizer = optimizer if new_optimizer is None else new_optimizer

  def brought_in(state: _train_state.TrainState) -> _train_state.TrainState:
    params, opt_state = transforms.drain(
      optimizer, state.opt_state, state.params, residuals=True
    )
    return state._replace(params=params, opt_state=opt_state)

  if old.mesh is None:
    # A state in memory may lie on several devices, which `vmap` does not use.
    state = jax.device_put(state, old.sharding())
  # On the host, where every process of the new run gets all rows.
  rows = old.jit(brought_in)(state)
  drained = old.gather(jax.tree.map(states.key_words, rows))
  first = jax.tree.map(
    lambda x, y: states.as_key(x[0], y) if states.is_key(y) else x[0],
    drained, rows,
  )  # fmt: skip
  given = dict(state.laws.named) if state.laws else None
  template = _train_state.init_state(
    new, new_optimizer, first.params, first.model_state, laws=given
  )
  made: Any = jax.tree.structure(template)
  if jax.tree.structure(drained) != made:
    raise ValueError(
      "`new_optimizer` must be the method that made `state`, and is another."
    )
  laws = states.find_laws(template)._replace(
    model_state=states.find_laws(first.model_state, "statistic", state.laws)
  )
  num_local = len(new.local_workers)
  labels = _train_state.shared_leaves(template)

  def is_owners(x: Any) -> bool:
    return isinstance(x, reducers.AllToAllState)

  # The leaves in which each worker keeps the residuals of its part of a tree.
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
    law: str,
  ) -> jax.Array:
    if law == "random" and not same:
      key = {"key": states.as_key(rows[0], like)}
      own: jax.Array = new.replicate(key)["key"]
      return own
    if owned or rows.shape[1:] != like.shape[1:]:
      if rows.any():
        raise ValueError(
          f"`state` must hold nothing in `{jax.tree_util.keystr(path)}`, which "
          "depends on the number of workers, got up to "
          f"{np.abs(rows).max():.3g}. Use a feedback that takes it over, for "
          "instance `ErrorFeedback()`, or `owner_feedback=False`, or resume "
          f"with {old.num_workers} workers."
        )
      return like
    # Summed in float64, as a sum of many float32 rows would lose digits.
    one = rows[0]
    if not same and law in ("moment", "statistic", "iterate"):
      wide = np.complex128 if np.iscomplexobj(rows) else np.float64
      one = rows.astype(wide).mean(0).astype(rows.dtype)
    return new.place(np.broadcast_to(one, (num_local, *one.shape)))

  return jax.tree_util.tree_map_with_path(
    resized, drained, template, labels, by_owner, laws
  )
