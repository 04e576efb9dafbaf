"""The state of a training run between two steps, and its resizing."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, collectives, reducers, signatures, states, transforms
from jdist.states import PyTree


# The key of a run is equal on all workers, unlike those of a model.
@states.declare(laws={"key": "constant"})
class TrainState(NamedTuple):
  """One worker's part of a run, which is all that a resumed run needs.

  Attributes:
    step: The number of updates so far, an int32 scalar. It is also the
      position in the data.
    params: The model's parameters.
    opt_state: The optimizer's state, including the anchor if there is one.
    model_state: Batch statistics and the like, which differ between workers
      within a round; `{}` for most models.
    key: The run's random key, uint32 [2], equal on all workers and constant. A
      step derives its own key from it, the step and the worker.
    laws: Laws of leaves of `model_state` that `jdist.states` does not infer, no
      arrays; `()` for most models.
  """

  step: jax.Array
  params: PyTree
  opt_state: PyTree
  model_state: PyTree
  key: jax.Array
  laws: states.Laws | tuple[()] = ()


@signatures.checked
def init_state(
  workers: collectives.Workers,
  optimizer: optax.GradientTransformation,
  params: signatures.Arrays,
  model_state: signatures.Arrays = None,
  *,
  seed: signatures.Seed = 0,
  specs: Any = None,
  laws: Mapping[str, states.Law] | None = None,
) -> TrainState:
  """Makes the initial state, arrays `[workers, ...]` equal on all workers.

  Random keys in the states of the model and of the optimizer are not equal: the
  worker's number is folded into them where there are several workers.

  Args:
    workers: The run's workers.
    optimizer: An Optax chain, for instance `jdist.diloco(...)`.
    params: One worker's parameters.
    model_state: One worker's batch statistics, if any.
    seed: The seed of the run's random key.
    specs: The partition of the parameters over the mesh's other axes, see
      `Workers.replicate`. Leaves of the optimizer's state that correspond to a
      parameter are split alike. By default nothing is split.
    laws: Laws of leaves of `model_state`, by their names, instead of those
      that `jdist.states` infers: floats are statistics, constant if they are
      infinite here, as a mask of an attention is. `{"scale": "constant"}`
      excludes a leaf from the mean of the workers.
  """
  optimizer = checks.check_optimizer("optimizer", optimizer)
  checks.check_some("params", params)
  if infinite := states.exceptions(params):
    raise ValueError(
      f"`params` must be finite, got an infinity in {infinite.named[0][0]!r}. "
      "Keep constants, such as masks, out of them, in `model_state`."
    )
  model_state = {} if model_state is None else model_state
  found = states.exceptions(model_state, laws)
  specs = jax.sharding.PartitionSpec() if specs is None else specs
  replicated = workers.replicate(params, specs)
  key = np.asarray(jax.random.key_data(jax.random.key(seed)))
  step, key = workers.replicate((np.zeros((), np.int32), key))
  model_state = workers.replicate(model_state, laws=laws)

  def first(params: PyTree) -> PyTree:
    return transforms.own_keys(optimizer.init(params), workers.axis)

  # Without output specs the compiler may replicate moments as large as sharded
  # parameters, which then do not fit into memory.
  opt_state = workers.jit(
    first, out_specs=_split_alike(workers, optimizer, replicated)
  )(replicated)
  return TrainState(step, replicated, opt_state, model_state, key, found)


def _split_alike(
  workers: collectives.Workers,
  optimizer: optax.GradientTransformation,
  params: PyTree,
) -> PyTree:
  """Returns the specs of an optimizer's state.

  A leaf is split like the parameter whose path and shape its own path and shape
  end with. A history of a parameter has one more dimension in front.
  """
  specs = jax.tree.leaves(workers.specs(params))
  named = jax.tree_util.tree_leaves_with_path(params)
  known = list(zip(named, specs, strict=True))

  def spec_of(path: Any, leaf: Any) -> jax.sharding.PartitionSpec:
    # A flat buffer of several leaves resembles no parameter, so that its owner
    # declares its axes.
    if (axes := reducers.split_axes(path)) is not None:
      return jax.sharding.PartitionSpec(axes)
    for (end, like), spec in known:
      if path[len(path) - len(end) :] != end:
        continue
      if leaf.shape == like.shape:
        return spec
      # The first dimension is the workers', and the second the history's.
      if leaf.shape[2:] == like.shape[1:]:
        return jax.sharding.PartitionSpec(None, *spec)
    return jax.sharding.PartitionSpec()

  shapes = jax.eval_shape(workers.spmd(optimizer.init), params)
  return jax.tree_util.tree_map_with_path(spec_of, shapes)


def is_finite(
  model: PyTree,
  arrays: PyTree,
  model_state: PyTree = (),
  laws: states.Laws | tuple[()] = (),
) -> jax.Array:
  """Returns whether training can continue from a model and its other arrays.

  It can be traced, and judges only the arrays that it is given: under
  `shard_map` they are one worker's own.

  Args:
    model: The parameters and batch statistics, which must be finite.
    arrays: All other arrays that are saved, for instance an optimizer's state
      or gradients in flight, which must not hold a NaN.
    model_state: Statistics, which must be finite, and constants, which may be
      infinite.
    laws: `TrainState.laws`, which says which leaves are constants.

  >>> is_finite(jnp.ones(2), (jnp.array([jnp.inf]), jnp.array(jnp.nan))).item()
  True
  >>> is_finite(jnp.ones(2), jnp.array([jnp.nan])).item()
  False
  """

  def floats(tree: PyTree) -> list[jax.Array]:
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]

  kinds = states.find_laws(model_state, "statistic", laws)
  pairs = zip(jax.tree.leaves(model_state), jax.tree.leaves(kinds), strict=True)
  parts: tuple[list[Any], list[Any]] = ([], [])
  for leaf, law in pairs:
    parts[law == "constant"].append(leaf)
  good = [jnp.isfinite(x).all() for x in floats((model, parts[0]))]
  # Some optimizers start from infinities, so these are allowed outside the
  # model. A NaN scalar is allowed because it may be the loss of a skipped step.
  good += [~jnp.isnan(x).any() for x in floats((arrays, parts[1])) if x.ndim]
  return jnp.stack(good).all() if good else jnp.asarray(True)


def shared_leaves(state: PyTree) -> PyTree:
  """Marks the leaves that are equal on all workers, as a tree of bools.

  `Checkpoints.save` stores these leaves once. In any other tree than a
  `TrainState` the methods' states declare them.

  >>> import optax
  >>> from jdist import collectives, methods
  >>> one = collectives.workers(1, substrate="none")
  >>> optimizer = methods.local_sgd(optax.trace(0.9), 8, axis=None)
  >>> shared = shared_leaves(init_state(one, optimizer, np.zeros(3)))
  >>> shared.params, shared.opt_state.anchor, shared.opt_state.inner.trace
  (False, True, False)
  """

  def declared(x: Any) -> bool:
    return states.is_declared(type(x))

  if not isinstance(state, TrainState):
    return jax.tree.map(
      lambda x: transforms.sharing(x).state if declared(x) else False,
      state, is_leaf=declared,
    )  # fmt: skip
  labels = transforms.sharing(state.opt_state)
  laws = states.find_laws(state.model_state, "statistic", state.laws)
  return TrainState(
    step=True,  # type: ignore[arg-type]
    params=jax.tree.map(lambda _: labels.params, state.params),
    opt_state=labels.state,
    model_state=jax.tree.map(lambda law: law == "constant", laws),
    key=True,  # type: ignore[arg-type]
    laws=state.laws,
  )


def silent_step_error(argument: str, num_workers: int) -> ValueError:
  """Makes the error of a step or optimizer that never communicates."""
  return ValueError(
    f"`{argument}` must bring the workers together, but of {num_workers} "
    "workers nothing of their gradients or parameters is ever sent: each would "
    "train a model of its own. Make it by a method with the workers' axis, for "
    "instance `jdist.ssgd(optimizer, axis=workers.axis)`, or pass "
    "`independent=True` if that is meant."
  )


def shared_flags(shared: PyTree, state: PyTree) -> list[bool]:
  """Returns a bool for each leaf of a state, by `shared_leaves` with None."""
  if shared is None:
    return jax.tree.leaves(shared_leaves(state))
  try:
    flags = jax.tree.leaves(jax.tree.broadcast(shared, state))
  except ValueError as error:
    flags = [str(error).partition("\n")[0]]
  wrong = [x for x in flags if not isinstance(x, bool | np.bool_)]
  if wrong:
    raise ValueError(
      "`shared` must be a bool, or a tree of bools like `state` or its upper "
      f"part, got {checks.show(wrong[0])}. Leave it out for states of jdist."
    )
  return flags


def resize(
  state: TrainState,
  optimizer: optax.GradientTransformation,
  old: collectives.Workers,
  new: collectives.Workers,
  new_optimizer: optax.GradientTransformation | None = None,
) -> TrainState:
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

  def brought_in(state: TrainState) -> TrainState:
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
  template = init_state(
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
  labels = shared_leaves(template)

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
    own = law == "random" and not same
    if own or states.is_key(like):
      key = {"key": states.as_key(rows[0], like)}
      fixed: Any = None if own else {"key": "constant"}
      return new.replicate(key, laws=fixed)["key"]
    if owned or rows.shape[1:] != like.shape[1:]:
      if rows.any():
        raise ValueError(
          f"`state` must hold nothing in `{jax.tree_util.keystr(path)}`, which "
          "depends on the number of workers, got up to "
          f"{np.abs(rows).max():.3g}. Use a feedback that takes it over, for "
          "instance `ErrorFeedback()`, or `owner_feedback=False`, or resume "
          f"with {checks.counted(old.num_workers, 'worker')}."
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
