"""The state of a training run between two steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, collectives, transforms

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
  """Makes the state in which all workers begin alike, arrays `[workers, ...]`.

  Args:
    workers: the run's workers.
    optimizer: an Optax chain, for instance `jdist.diloco(...)`.
    params: one worker's parameters.
    model_state: one worker's batch statistics, if any.
    seed: of the run's random key.
    specs: how the parameters, and what the optimizer keeps beside each, are
      split over the mesh's other axes, see `Workers.replicate`; not split by
      default.
  """
  collectives.check_workers(workers)
  optimizer = checks.check_optimizer("optimizer", optimizer)
  checks.check_arrays("params", params)
  if not jax.tree.leaves(params):
    raise ValueError(
      "`params` must be one worker's parameters, a tree of arrays, got "
      f"{checks.show(params)}."
    )
  model_state = {} if model_state is None else model_state
  checks.check_arrays("model_state", model_state)
  seed = checks.check_seed(seed)
  if specs is None:
    specs = jax.sharding.PartitionSpec()
  replicated = workers.replicate(params, specs)
  key = np.asarray(jax.random.key_data(jax.random.key(seed)))
  step, model_state, key = workers.replicate(
    (np.zeros((), np.int32), model_state, key)
  )
  init = workers.jit(
    optimizer.init, out_specs=_split_alike(workers, optimizer, replicated)
  )
  return TrainState(step, replicated, init(replicated), model_state, key)


def _split_alike(
  workers: collectives.Workers,
  optimizer: optax.GradientTransformation,
  params: PyTree,
) -> PyTree:
  """Specs of an optimizer's state: leaves like a parameter go as it does.

  Such a leaf's path ends with the parameter's, and so does its shape, which may
  have one more dimension before it, as a history has.
  """
  specs = jax.tree.leaves(workers.specs(params))
  known = [
    (path, leaf.shape, spec)
    for (path, leaf), spec in zip(
      jax.tree_util.tree_leaves_with_path(params), specs, strict=True
    )
  ]

  def spec_of(path: Any, leaf: Any) -> jax.sharding.PartitionSpec:
    if (axes := transforms.buffer_axes(path)) is not None:
      return jax.sharding.PartitionSpec(axes)
    for end, shape, spec in known:
      if path[len(path) - len(end) :] != end:
        continue
      if leaf.shape == shape:
        return spec
      if leaf.shape[2:] == shape[1:]:
        return jax.sharding.PartitionSpec(None, *spec)
    return jax.sharding.PartitionSpec()

  shapes = jax.eval_shape(workers.spmd(optimizer.init), params)
  return jax.tree_util.tree_map_with_path(spec_of, shapes)


def is_finite(model: PyTree, arrays: PyTree) -> jax.Array:
  """Returns whether training can continue from a model and its other arrays.

  Traceable: a bool scalar, for the arrays that it is given alone.

  Args:
    model: parameters and batch statistics, which must be finite.
    arrays: all else that is saved, for instance an optimizer's state or
      gradients under way, which must not hold a NaN.

  >>> is_finite(jnp.ones(2), (jnp.array([jnp.inf]), jnp.array(jnp.nan))).item()
  True
  >>> is_finite(jnp.ones(2), jnp.array([jnp.nan])).item()
  False
  """

  def floats(tree: PyTree) -> list[jax.Array]:
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]

  good = [jnp.isfinite(x).all() for x in floats(model)]
  # Some optimizers start from infinities, so these are allowed outside the
  # model. A NaN scalar is allowed because it may be the loss of a skipped step.
  good += [~jnp.isnan(x).any() for x in floats(arrays) if x.ndim]
  return jnp.stack(good).all() if good else jnp.asarray(True)


def shared_leaves(state: TrainState) -> TrainState:
  """Marks the leaves that are equal on all workers, as a state of bools.

  Checkpoints store those once.

  >>> import optax
  >>> from jdist import collectives, methods
  >>> one = collectives.workers(1, substrate="none")
  >>> optimizer = methods.local_sgd(optax.trace(0.9), 8, axis=None)
  >>> shared = shared_leaves(init_state(one, optimizer, np.zeros(3)))
  >>> shared.params, shared.opt_state.anchor, shared.opt_state.inner.trace
  (False, True, False)
  """
  labels = transforms.sharing(state.opt_state)

  def every(tree: PyTree, label: bool) -> PyTree:
    return jax.tree.map(lambda _: label, tree)

  return TrainState(
    step=True,  # type: ignore[arg-type]
    params=every(state.params, labels.params),
    opt_state=labels.state,
    model_state=every(state.model_state, False),
    key=True,  # type: ignore[arg-type]
  )
