"""What a training run is made of between two steps."""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jdist import collectives, transforms

PyTree = Any


class TrainState(NamedTuple):
  """One worker's part of a run; nothing else is needed to go on with it.

  Attributes:
    step: updates so far, int32 scalar; also the position in the data.
    params: the model's parameters.
    opt_state: the optimizer's state, with the anchor where there is one.
    model_state: batch statistics and the like, each worker its own between
      rounds; `{}` for most models.
    key: the run's random key, uint32 [2], equal on all workers and constant:
      a step derives its own from it, the step and the worker.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  model_state: PyTree
  key: jax.Array


def init_state(
  workers: collectives.Workers,
  optimizer: optax.GradientTransformation,
  params: PyTree,
  model_state: PyTree | None = None,
  *,
  seed: int = 0,
  specs: Any = None,
) -> TrainState:
  """Makes the state in which all workers begin alike.

  Args:
    workers: the run's workers.
    optimizer: an Optax chain, for instance `jdist.diloco(...)`.
    params: one worker's parameters.
    model_state: one worker's batch statistics, if any.
    seed: of the run's random key.
    specs: how the parameters are split over the mesh's other axes, see
      `Workers.replicate`; not split by default.

  Returns:
    Arrays `[workers, ...]`.
  """
  replicated = (
    workers.replicate(params)
    if specs is None
    else workers.replicate(params, specs)
  )
  key = np.asarray(jax.random.key_data(jax.random.key(seed)))
  common = workers.replicate(
    (np.zeros((), np.int32), {} if model_state is None else model_state, key)
  )
  step, model_state, key = common
  opt_state = workers.jit(optimizer.init)(replicated)
  return TrainState(step, replicated, opt_state, model_state, key)


def shared_leaves(state: TrainState) -> TrainState:
  """Which leaves are equal on all workers, as a state of bools.

  Checkpoints store those once.

  >>> import optax
  >>> from jdist import collectives, transforms
  >>> one = collectives.workers(1, substrate="none")
  >>> optimizer = transforms.local_sgd(optax.trace(0.9), 8, axis=None)
  >>> shared = shared_leaves(init_state(one, optimizer, jnp.zeros(3)))
  >>> shared.params, shared.opt_state.anchor, shared.opt_state.inner.trace
  (False, True, False)
  """
  told = transforms.sharing(state.opt_state)

  def every(tree: PyTree, label: bool) -> PyTree:
    return jax.tree.map(lambda _: label, tree)

  return TrainState(
    step=True,  # type: ignore[arg-type]
    params=every(state.params, told.params),
    opt_state=told.state,
    model_state=every(state.model_state, False),
    key=True,  # type: ignore[arg-type]
  )
