"""A learner's part of Decoupled DiLoCo: local steps, fragments to and fro."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdist import states, training, transforms
from jdist.server.gradients import _learner

PyTree = Any
Leaves = list[jax.Array]


class WorkerState(NamedTuple):
  """State of a learner.

  Attributes:
    params: its parameters.
    opt_state: of its inner optimizer.
    model_state: its batch statistics.
    base: the leaves from which its progress is counted, at least float32.
  """

  params: PyTree
  opt_state: PyTree
  model_state: PyTree
  base: Leaves


class Unmerged(dict[int, dict[int, Leaves]]):
  """A learner's pushes that are not merged, by fragment and by their task."""

  def add(self, fragment: int, task: int, progress: Leaves) -> None:
    """Keeps a push as the server has it."""
    self.setdefault(fragment, {})[task] = progress

  def settle(self, settled: Mapping[int, int]) -> None:
    """Drops what is merged: of each fragment the pushes up to a task."""
    for fragment, last in settled.items():
      own = self.get(fragment, {})
      self[fragment] = {task: x for task, x in own.items() if task > last}

  def of(self, fragments: Iterable[int]) -> dict[int, list[Leaves]]:
    """Returns the pushes of some fragments, in their order."""
    return {p: list(self.get(p, {}).values()) for p in fragments}


class FragmentWorker:
  r"""Takes local steps, and says of each fragment what they have changed.

  A push of fragment p is the progress since the last one, :math:`\Delta_p = b_p
  - w_p`.  When :math:`\Theta_p` arrives, the learner keeps what it has done and
  is not in it: the pushes U that are not merged yet, and what is not pushed,

  .. math:: w_p \leftarrow \Theta_p - \sum_{j \in U} \Delta_{p,j}
            - (b_p - w_p)

  Pure functions, but for what is compiled: a driver keeps the state.

  Args:
    loss_fn: as of `training.make_step`; it heeds a batch's `"mask"`.
    optimizer: the inner one, any Optax chain; its schedules count local steps.
    params: for their structure.
    fragments: as of `transforms.fragment_steps`.
  """

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    fragments: transforms.Fragments,
  ):
    self.optimizer = optimizer
    self.indices = fragment_indices(params, fragments)
    self._dtypes = [leaf.dtype for leaf in jax.tree.leaves(params)]
    self._structure = jax.tree.structure(params)
    self._step, self._take, self._push = _programs(loss_fn, optimizer)

  def start(
    self, anchor: Sequence[jax.Array], model_state: PyTree, steps: int = 0
  ) -> WorkerState:
    """Returns the state of who begins, or begins anew.

    Args:
      anchor: leaves of all parameters, as the server has them.
      model_state: the server's.
      steps: how many local steps the learner took before: schedules go on.
    """
    leaves = [a.astype(x) for a, x in zip(anchor, self._dtypes, strict=True)]
    params = jax.tree.unflatten(self._structure, leaves)
    opt_state = self.optimizer.init(params)
    if steps:
      opt_state = _with_count(opt_state, steps)
    return WorkerState(params, opt_state, model_state, list(anchor))

  def step(
    self, state: WorkerState, batch: PyTree, key: jax.Array
  ) -> tuple[WorkerState, jax.Array]:
    """Returns the state after a local step, and the loss before it."""
    params, opt_state, model_state, loss = self._step(
      state.params, state.opt_state, state.model_state, batch, key
    )
    return WorkerState(params, opt_state, model_state, state.base), loss

  def steps(
    self,
    state: WorkerState,
    samples: _learner.Samples,
    number: int,
    stretch: tuple[int, int, int],
    key: jax.Array,
    size: int,
  ) -> tuple[WorkerState, jax.Array]:
    """Makes local steps of equal batches, and returns their mean loss.

    Args:
      state: before.
      samples: where batches come from.
      number: of the learner, from 0.
      stretch: where its samples start, how many, and in how many steps.
      key: of the random numbers in the loss.
      size: to which batches are padded.
    """
    start, whole, passes = stretch
    total = jnp.zeros(())
    for i in range(passes):
      count = whole * (i + 1) // passes - whole * i // passes
      batch = samples.batch(number, start, count, size=size)
      start += count
      state, loss = self.step(state, batch, jax.random.fold_in(key, i))
      total = total + loss * (count / whole)
    return state, total

  def push(
    self, state: WorkerState, fragment: int
  ) -> tuple[WorkerState, Leaves]:
    """Returns the state and the progress of a fragment since its last push."""
    leaves, base = jax.tree.leaves(state.params), list(state.base)
    own = self.indices[fragment]
    progress, now = self._push([base[i] for i in own], [leaves[i] for i in own])
    for i, x in zip(own, now, strict=True):
      base[i] = x
    return state._replace(base=base), progress

  def take(
    self,
    state: WorkerState,
    arrived: Mapping[int, Sequence[jax.Array]],
    unmerged: Mapping[int, Sequence[Leaves]],
  ) -> WorkerState:
    """Returns the state once merged fragments have arrived.

    Args:
      state: before.
      arrived: by fragment, leaves as the server has them.
      unmerged: by fragment, this learner's pushes that are not in them.
    """
    leaves, base = jax.tree.leaves(state.params), list(state.base)
    for fragment, anchor in arrived.items():
      own = self.indices[fragment]
      params, bases = self._take(
        [leaves[i] for i in own],
        [base[i] for i in own],
        list(anchor),
        list(unmerged.get(fragment, ())),
      )
      for i, x, b in zip(own, params, bases, strict=True):
        leaves[i], base[i] = x, b
    params = jax.tree.unflatten(self._structure, leaves)
    return state._replace(params=params, base=base)


def fragment_indices(
  params: PyTree, fragments: transforms.Fragments
) -> tuple[tuple[int, ...], ...]:
  """Returns the numbers of each fragment's leaves."""
  labels = transforms.fragments_of(params, fragments)
  return tuple(
    tuple(i for i, label in enumerate(labels) if label == fragment)
    for fragment in range(max(labels) + 1)
  )


@functools.lru_cache(maxsize=16)
def _programs(
  loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation
) -> tuple[Callable[..., Any], ...]:
  """Builds a learner's programs, once for equal arguments."""
  chain = optax.with_extra_args_support(optimizer)
  compute = training.make_gradient(loss_fn)

  def step(
    params: PyTree,
    opt_state: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: jax.Array,
  ) -> tuple[PyTree, PyTree, PyTree, jax.Array]:
    found = compute(params, model_state, batch, key)
    updates, opt_state = chain.update(
      found.grads, opt_state, params, loss=found.loss, value=found.loss
    )
    params = optax.apply_updates(params, updates)
    return params, opt_state, found.model_state, found.loss

  def push(base: Leaves, leaves: Leaves) -> tuple[Leaves, Leaves]:
    now = [states.wide(x) for x in leaves]
    return [b - x for b, x in zip(base, now, strict=True)], now

  def take(
    leaves: Leaves, base: Leaves, anchor: Leaves, unmerged: list[Leaves]
  ) -> tuple[Leaves, Leaves]:
    params, bases = [], []
    for i, (x, b, a) in enumerate(zip(leaves, base, anchor, strict=True)):
      start = a - sum(each[i] for each in unmerged) if unmerged else a
      now = (start - (b - states.wide(x))).astype(x.dtype)
      params.append(now)
      # What is not pushed stays what it is.
      bases.append(states.wide(now) + (b - states.wide(x)))
    return params, bases

  return jax.jit(step), jax.jit(take), jax.jit(push)


def _with_count(opt_state: PyTree, steps: int) -> PyTree:
  """Returns an optimizer's state whose schedules have made some steps."""
  kinds = (optax.ScaleByScheduleState, optax.InjectStatefulHyperparamsState)

  def counted(state: Any) -> Any:
    if isinstance(state, kinds):
      return state._replace(count=jnp.full_like(state.count, steps))
    return state

  return jax.tree.map(
    counted, opt_state, is_leaf=lambda x: isinstance(x, kinds)
  )
