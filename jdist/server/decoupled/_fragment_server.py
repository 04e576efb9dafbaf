"""The syncer's part of Decoupled DiLoCo: outer steps, fragment by fragment."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import checks, states, transforms
from jdist.server.decoupled import _fragment_worker
from jdist.server.gradients import _learner, _merge

PyTree = Any
Leaves = list[jax.Array]
OUTER = transforms.outer_sgd()


class FragmentServer:
  r"""Holds the parameters, and makes an outer step of a fragment's pushes.

  .. math:: \Theta_p \leftarrow \Theta_p + \mathrm{outer}\Bigl(\sum_m w_m
            \Delta_{m,p}\Bigr)

  Each fragment has an outer optimizer's state of its own.  The statistics of
  batches become the mean of the learners', with the same weights.

  Args:
    outer: the outer optimizer, any Optax chain; its schedules count a
      fragment's merges.
    params: the first parameters.
    fragments: as of `transforms.fragment_steps`.
    model_state: the first batch statistics, if any.

  Attributes:
    anchor: leaves of all parameters, float32 at least.
    opt_states: of the outer optimizer, by fragment.
    model_state: batch statistics.
  """

  def __init__(
    self,
    outer: optax.GradientTransformation,
    params: PyTree,
    fragments: transforms.Fragments,
    model_state: PyTree | None = None,
  ):
    checks.check_optimizer("outer", outer)
    self.indices = _fragment_worker.fragment_indices(params, fragments)
    leaves = jax.tree.leaves(params)
    self._dtypes = [leaf.dtype for leaf in leaves]
    self._structure = jax.tree.structure(params)
    self.anchor: Leaves = [
      jnp.array(states.wide(jnp.asarray(x)), copy=True) for x in leaves
    ]
    self.opt_states = [outer.init(self.part(p)) for p in range(self.fragments)]
    self.model_state = jax.tree.map(jnp.array, model_state or {})
    self._move = _outer_step(outer)

  @property
  def fragments(self) -> int:
    """Their number."""
    return len(self.indices)

  @property
  def parts(self) -> tuple[float, ...]:
    """Parameters in each fragment, for `DecoupledDiLoCo(parts=...)`."""
    return tuple(
      float(sum(self.anchor[i].size for i in own)) for own in self.indices
    )

  @property
  def model(self) -> _learner.ServerModel:
    """The model as it is evaluated."""
    leaves = [
      a.astype(x) for a, x in zip(self.anchor, self._dtypes, strict=True)
    ]
    params = jax.tree.unflatten(self._structure, leaves)
    return _learner.ServerModel(params, self.opt_states, self.model_state)

  def part(self, fragment: int) -> Leaves:
    """Returns a fragment's leaves."""
    return [self.anchor[i] for i in self.indices[fragment]]

  def check_fragment(self, number: int) -> None:
    """Raises a ValueError unless there is a fragment of this number."""
    if number >= self.fragments:
      raise ValueError(
        "`fragments` must be as many as the protocol's, got "
        f"{self.fragments} for a task of number {number}."
      )

  def whole(self, parts: Mapping[int, Sequence[jax.Array]]) -> Leaves:
    """Returns the leaves of all parameters, from those of each fragment."""
    leaves = dict(
      pair
      for p, own in enumerate(self.indices)
      for pair in zip(own, parts[p], strict=True)
    )
    return [leaves[i] for i in range(len(leaves))]

  def merge(
    self,
    fragment: int,
    pushes: Sequence[_merge.Pushed],
    weights: Sequence[float],
  ) -> None:
    """Makes the outer step of a fragment.

    Args:
      fragment: number of the fragment.
      pushes: learners' progress, and their batch statistics.
      weights: weight of each push.
    """
    whole = sum(weights)
    total = _merge.merge(pushes, weights, [x / whole for x in weights])
    part, self.opt_states[fragment] = self._move(
      self.part(fragment), self.opt_states[fragment], total.grads
    )
    for i, x in zip(self.indices[fragment], part, strict=True):
      self.anchor[i] = x
    self.model_state = total.change

  def prepare(self, fragment: int, pushed: _merge.Pushed) -> None:
    """Compiles the outer step of a fragment; changes nothing."""
    total = _merge.merge([pushed] * 2, [1.0] * 2, [0.5] * 2)
    jax.block_until_ready(
      self._move(self.part(fragment), self.opt_states[fragment], total.grads)
    )

  def arrays(self) -> PyTree:
    """Returns all arrays, as a tree."""
    return self.anchor, self.opt_states, self.model_state

  def load(self, arrays: PyTree) -> None:
    """Takes over what `arrays` returned."""
    anchor, opt_states, self.model_state = arrays
    self.anchor, self.opt_states = list(anchor), list(opt_states)


@functools.lru_cache(maxsize=16)
def _outer_step(outer: optax.GradientTransformation) -> Callable[..., Any]:
  """Compiles the outer optimizer's step, once for equal optimizers."""

  @jax.jit
  def move(
    part: Leaves, opt_state: PyTree, total: Leaves
  ) -> tuple[Leaves, PyTree]:
    updates, opt_state = outer.update(total, opt_state, part)
    return optax.apply_updates(part, updates), opt_state

  return move
