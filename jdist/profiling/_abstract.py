"""Shapes in place of the arrays of a run, for compiling without arrays."""

from typing import Any

import jax
import jax.numpy as jnp

from jdist import collectives, signatures, training

PyTree = Any


@signatures.checked
def abstract(workers: collectives.Workers, tree: signatures.Arrays) -> PyTree:
  """Returns shapes `[workers, ...]` for one worker's arrays `[...]`.

  `workers.jit(step).lower(...)` takes them, so that a program is compiled
  without arrays and without the devices it is for.

  >>> team = collectives.workers(4, substrate="vmap")
  >>> abstract(team, jax.ShapeDtypeStruct((3,), "float32")).shape
  (4, 3)
  """
  sharding = workers.sharding()
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (workers.num_workers, *jnp.shape(x)),
      getattr(x, "dtype", type(x)),
      sharding=sharding,
    ),
    tree,
  )


@signatures.checked
def abstract_state(
  workers: collectives.Workers,
  optimizer: signatures.Optimizer,
  params: signatures.Arrays,
  model_state: signatures.Arrays = None,
) -> training.TrainState:
  """Returns the shapes of `training.init_state`, `[workers, ...]`.

  Args:
    workers: The run's workers, possibly on devices that are only described.
    optimizer: An Optax chain.
    params: One worker's parameters, arrays or `jax.ShapeDtypeStruct`, for
      instance of `models.build(..., abstract=True)`.
    model_state: One worker's batch statistics, likewise.
  """
  if not jax.tree.leaves(params):
    raise ValueError("`params` must have an array at least, got none.")
  # `init_state` would place real arrays on devices that cannot hold any.
  step: Any = jax.ShapeDtypeStruct((), jnp.int32)
  key: Any = jax.ShapeDtypeStruct((2,), jnp.uint32)
  model_state = {} if model_state is None else model_state
  state = training.TrainState(step, params, (), model_state, key)
  state = abstract(workers, state)
  sharding = workers.sharding()
  opt_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    jax.eval_shape(workers.spmd(optimizer.init), state.params),
  )
  return state._replace(opt_state=opt_state)
