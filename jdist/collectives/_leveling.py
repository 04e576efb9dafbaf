"""Means over two levels: fast links inside, slow ones between."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jdist.collectives import _axis, _reducing

PyTree: TypeAlias = Any


class TwoLevelState(NamedTuple):
  """State of `TwoLevel`.

  Attributes:
    inner: the inner reducer's.
    outer: the outer reducer's; the same on all workers of a host.
  """

  inner: PyTree
  outer: PyTree


@dataclasses.dataclass(frozen=True)
class TwoLevel(_reducing.Reducer):
  r"""Reduces inside each host by one reducer, then between hosts by another.

  With the axis (inner, outer), :math:`h` the mean of a host's workers by
  `inner`, over the first name, and the mean of those by `outer`, over the
  second:

  .. math:: \mathrm{own\_share} = \mathrm{own\_share}^{inner}
            - (h - \mathrm{own\_share}^{outer})

  what `outer` has left out is everyone's of the host, so the law holds over
  all workers.  Every worker of a host takes part in the outer reduction with
  the same bytes: where the inner axis is `vmap`'s they are sent once, and where
  it is one of the mesh they are sent by each device.

  Args:
    inner: over the first name, for instance `Exact()`.
    outer: over the second, for instance `carry(codecs.Quantize(4))`.

  Raises:
    ValueError: at `init` and `reduce`, for an axis that is a single name; with
      None there is one worker on each level.
  """

  inner: _reducing.Reducer
  outer: _reducing.Reducer

  @property
  def averages(self) -> bool:
    """Whether both do."""
    return self.inner.averages and self.outer.averages

  def init(self, like: PyTree, axis: _axis.Axis) -> PyTree:
    """The states of both."""
    inner, outer = _levels(axis)
    state = TwoLevelState(
      self.inner.init(like, inner), self.outer.init(like, outer)
    )
    return _axis.varying(state, axis) if jax.tree.leaves(state) else ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: _axis.Axis
  ) -> _reducing.Reduced:
    """Takes the mean."""
    inner, outer = _levels(axis)
    if not isinstance(state, TwoLevelState):
      state = TwoLevelState((), ())
    first, second = jax.random.split(key)
    if outer is not None:
      # Hosts are workers too, for what is drawn inside of them.
      first = jax.random.fold_in(first, _axis.index(outer))
    near = self.inner.reduce(tree, state.inner, first, inner)
    far = self.outer.reduce(near.mean, state.outer, second, outer)
    share = jax.tree.map(
      lambda own, mean, sent: own - (mean.astype(jnp.float32) - sent),
      near.own_share,
      near.mean,
      far.own_share,
    )
    new = TwoLevelState(near.state, far.state)
    return _reducing.Reduced(
      far.mean, share, new if jax.tree.leaves(new) else ()
    )

  def release(
    self, state: PyTree, like: PyTree, axis: _axis.Axis
  ) -> tuple[PyTree, PyTree]:
    """What both hold back; of the hosts' the mean."""
    inner, outer = _levels(axis)
    if not isinstance(state, TwoLevelState):
      state = TwoLevelState((), ())
    near, near_state = self.inner.release(state.inner, like, inner)
    far, far_state = self.outer.release(state.outer, like, outer)
    held = jax.tree.map(jnp.add, _axis.mean(near, outer), far)
    new = TwoLevelState(near_state, far_state)
    return held, new if jax.tree.leaves(new) else ()

  def shared(self, state: PyTree) -> PyTree:
    """What `outer` shares is shared by all; what `inner` does, by a host."""
    if not isinstance(state, TwoLevelState):
      return jax.tree.map(lambda _: False, state)
    return TwoLevelState(
      jax.tree.map(lambda _: False, state.inner),
      self.outer.shared(state.outer),
    )

  def whole_leaves(self) -> str:
    """As the reducers say."""
    return self.inner.whole_leaves() or self.outer.whole_leaves()

  def not_in_parts(self) -> str:
    """As the reducers say."""
    return self.inner.not_in_parts() or self.outer.not_in_parts()

  def num_bits(self, like: PyTree, num_workers: int) -> _reducing.Bits:
    """What goes between hosts; `num_workers` is the number of **hosts**."""
    return self.outer.num_bits(like, num_workers)


def _levels(axis: _axis.Axis) -> tuple[_axis.Axis, _axis.Axis]:
  if axis is None:
    return None, None
  if isinstance(axis, str):
    raise ValueError(
      "`axis` must be two names (inner, outer) for `TwoLevel`, got "
      f"{axis!r}. With one level, use its outer reducer alone."
    )
  return axis
