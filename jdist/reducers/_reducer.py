"""What every reducer is: the workers' mean of a tree, by few bytes."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, collectives

PyTree: TypeAlias = Any


class Reduced(NamedTuple):
  """What a reducer returns.

  Attributes:
    mean: the workers' mean as all of them know it, equal to the bit on all
      workers, in the tree's dtypes.
    own_share: what this worker has contributed to it, float32.  What it
      wanted to send and has not, `wanted - own_share`, is what error feedback
      keeps.
    state: the reducer's new state.
  """

  mean: PyTree
  own_share: PyTree
  state: PyTree


class Bits(NamedTuple):
  """What a worker's network interface moves in one reduction, in bits.

  Attributes:
    payload: of one worker's own message, as its codec counts it.
    sent: by one worker, with what a ring or an all-to-all really moves.
    received: by one worker.
  """

  payload: int
  sent: float
  received: float


class Reducer(abc.ABC):
  r"""The mean of the workers' trees, exactly or nearly.

  Reducers are frozen dataclasses without arrays, like codecs; what they
  remember is in their state.  The law that all of them obey:

  .. math:: \sum_i x_i = N \cdot \mathrm{mean}
            + \sum_i (x_i - \mathrm{own\_share}_i)
            + N \sum_j \Delta e_j

  where :math:`e_j` are the residuals in the reducer's own state (those of the
  owners of parts of the tree), if it has any: nothing is lost on the way.
  """

  @property
  def averages(self) -> bool:
    """Whether the mean is made of the own shares, so that the law holds.

    What `wanted - own_share` leaves for the next time means nothing elsewhere,
    and feedbacks that keep it are refused.
    """
    return True

  @abc.abstractmethod
  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """The first state of one worker, a tree of arrays; `()` for none.

    Args:
      like: one worker's tree, arrays or `jax.ShapeDtypeStruct`.
      axis: the workers' axis, bound, because shapes may depend on how many
        there are.

    Raises:
      ValueError: when the reducer does not suit the tree, with the reason.
    """

  @abc.abstractmethod
  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> Reduced:
    """Takes the mean; a collective operation.

    Args:
      tree: this worker's floats.
      state: this worker's.
      key: a typed PRNG key, **the same on all workers**; a reducer folds the
        worker's index in where workers are to differ.
      axis: the workers' axis; None for one worker.
    """

  def shared(self, state: PyTree) -> PyTree:
    """Which leaves of the state are equal on all workers: a tree of bools."""
    return jax.tree.map(lambda _: False, state)

  def release(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """Gives out what the state holds back; a collective operation.

    Args:
      state: this worker's.
      like: what is reduced, arrays or `jax.ShapeDtypeStruct`.
      axis: the workers' axis.

    Returns:
      The owners' residuals e as one tree, float32 in units of the mean, equal
      on all workers; and the state without them.
    """
    del axis
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
    return nothing, state

  def whole_leaves(self) -> str:
    """Why it cannot reduce a shard of a leaf alone; empty if it can."""
    return ""

  def not_in_parts(self) -> str:
    """Why it cannot reduce vectors cut from the tree; empty if it can.

    A reducer that goes by the shapes or the paths of leaves, or whose
    collectives stand in a conditional, gives its reason here.
    """
    return self.whole_leaves()

  @abc.abstractmethod
  def num_bits(self, like: PyTree, num_workers: int) -> Bits:
    """What one reduction costs."""

  def told_workers(self, axis: collectives.Axis) -> int:
    """How many workers `num_bits` means, where `axis` is bound."""
    return collectives.size(axis)


@dataclasses.dataclass(frozen=True)
class Exact(Reducer):
  """Takes the plain mean, by an all-reduce; `own_share` is all of the tree.

  Integers give floats, as in `mean`.  A leaf narrower than float32 is summed
  as it is, and then the law holds within its rounding.

  >>> Exact().num_bits(jax.ShapeDtypeStruct((25,), jnp.float32), 4)
  Bits(payload=800, sent=1200.0, received=1200.0)
  """

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Nothing is kept."""
    del like, axis
    return ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> Reduced:
    """Takes the mean."""
    del key
    share = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    return Reduced(collectives.mean(tree, axis), share, state)

  def num_bits(self, like: PyTree, num_workers: int) -> Bits:
    """The bits of the leaves, around a ring."""
    payload = sum(
      math.prod(x.shape) * np.dtype(x.dtype).itemsize * 8
      for x in jax.tree.leaves(like)
    )
    sent = ring_bits(payload, num_workers)
    return Bits(payload, sent, sent)


def ring_bits(payload_bits: float, num_workers: int) -> float:
  """Bits that each worker sends in an all-reduce over a ring.

  >>> ring_bits(800, 4)
  1200.0
  """
  return 2 * payload_bits * (num_workers - 1) / num_workers


def check_reducer(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a reducer."""
  if not isinstance(value, Reducer):
    raise ValueError(
      f"`{name}` must be a `Reducer`, for instance `Exact()` or "
      f"`compressed(codec)`, got {checks.told(value)}."
    )
