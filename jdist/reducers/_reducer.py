"""The interface of reducers, which take the workers' mean of a tree."""

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import checks, codecs, collectives, signatures
from jdist.states import PyTree

_WIDE = ("float64", "complex64", "complex128")


class Reduced(NamedTuple):
  """The result of a reduction.

  Attributes:
    mean: The workers' mean after compression, equal to the bit on all workers,
      in the tree's dtypes.
    own_share: This worker's contribution to it, float32, or the dtype of
      complex or wider numbers.  Error feedback keeps `wanted - own_share`.
    state: The reducer's new state.
  """

  mean: PyTree
  own_share: PyTree
  state: PyTree


@signatures.explained
class Bits(NamedTuple):
  """The bits that a worker sends in one reduction; it receives as many.

  Attributes:
    payload: The bits of one worker's message, counted by its codec.
    sent: The bits that one worker sends, over a ring or an all-to-all.
  """

  payload: int
  sent: float

  @classmethod
  def in_ring(cls, payload: int, num_workers: signatures.PositiveInt) -> "Bits":
    """Counts an all-reduce, or two exchanges of rows.

    >>> Bits.in_ring(800, 4)
    Bits(payload=800, sent=1200.0)
    """
    # A reduce-scatter and an all-gather, each of (N - 1) / N of the payload.
    return cls(payload, 2 * payload * (num_workers - 1) / num_workers)

  @classmethod
  def total(cls, parts: "Iterable[Bits]") -> "Bits":
    """Adds up several reductions.

    >>> Bits.total([Bits(1, 2.0), Bits(3, 4.0)])
    Bits(payload=4, sent=6.0)
    """
    return cls(*map(sum, zip((0, 0.0), *parts, strict=True)))

  def times(self, count: signatures.NonNegativeInt) -> "Bits":
    """Counts several equal reductions."""
    return Bits(count * self.payload, count * self.sent)


class Reducer(signatures.Explained, abc.ABC):
  r"""Takes the mean of the workers' trees, exactly or compressed.

  Reducers are frozen dataclasses without arrays, like codecs.  Their memory is
  in their state, whose class declares its shared fields (`jdist.states`).  All
  reducers obey the law

  .. math:: \sum_i x_i = N \cdot \mathrm{mean}
            + \sum_i (x_i - \mathrm{own\_share}_i)
            + N \sum_j \Delta e_j

  where :math:`e_j` are the residuals in the reducer's own state (those of the
  owners of parts of the tree), if it has any: no part of a tree is lost.
  """

  @property
  def reducers(self) -> "tuple[Reducer, ...]":
    """The reducers of which it is composed, by default those in its fields."""
    return tuple(x for x in vars(self).values() if isinstance(x, Reducer))

  @property
  def averages(self) -> bool:
    """Whether the mean is that of the own shares, as the law says."""
    # Otherwise `wanted - own_share` means nothing, and feedbacks that keep it
    # are refused.
    return all(reducer.averages for reducer in self.reducers)

  @property
  def contractive(self) -> bool:
    """Whether the part that it leaves out is smaller than the tree."""
    # Otherwise a residual grows from round to round, and feedbacks that keep
    # one are refused.
    own = [x for x in vars(self).values() if isinstance(x, codecs.Codec)]
    return all(map(operator.attrgetter("contractive"), (*own, *self.reducers)))

  @abc.abstractmethod
  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    """Returns the first state of one worker, a tree of arrays or `()`.

    Args:
      like: One worker's tree, arrays or `jax.ShapeDtypeStruct`.
      axis: The workers' axis.  It must be bound, because shapes may depend on
        the number of workers.

    Raises:
      ValueError: If the reducer does not suit the tree, with the reason.
    """

  @abc.abstractmethod
  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> Reduced:
    """Takes the mean; a collective operation.

    Args:
      tree: This worker's floats.
      state: This worker's state.
      key: a typed PRNG key, **the same on all workers**.  A reducer folds the
        worker's index in where workers need different numbers.
      axis: The workers' axis; None for one worker.
    """

  def flush(
    self, state: PyTree, like: PyTree, axis: collectives.Axis
  ) -> tuple[PyTree, PyTree]:
    """Empties the owners' residuals; a collective operation.

    Returns:
      The owners' residuals e as one tree, float32 in units of the mean, equal
      on all workers, and the state without them.
    """
    del axis
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return as_share(zeros), state

  def check_shards(self) -> None:
    """Raises a ValueError if it cannot reduce a shard of a leaf alone."""
    for reducer in self.reducers:
      reducer.check_shards()

  def check_chunks(self) -> None:
    """Raises a ValueError if it cannot reduce chunks of the flattened tree."""
    self.check_shards()

  @abc.abstractmethod
  def num_bits(self, like: PyTree, num_workers: int) -> Bits:
    """Counts the bits of one reduction."""

  def num_workers(self, axis: collectives.Axis) -> int:
    """Returns the number of workers for `num_bits`, where `axis` is bound."""
    # A composed reducer counts as its parts do: `Hierarchical` counts hosts.
    if self.reducers:
      return self.reducers[0].num_workers(axis)
    return collectives.size(axis)


@dataclasses.dataclass(frozen=True)
class Exact(Reducer):
  """Takes the exact mean by an all-reduce; `own_share` is all of the tree.

  Integers give floats, as in `mean`.  A leaf narrower than float32 is summed in
  its dtype, and the law holds within its rounding.
  """

  def init(self, like: PyTree, axis: collectives.Axis) -> PyTree:
    del like, axis
    return ()

  def reduce(
    self, tree: PyTree, state: PyTree, key: jax.Array, axis: collectives.Axis
  ) -> Reduced:
    del key
    # Integers have shares, too, so that a policy may send them this way.
    return Reduced(collectives.mean(tree, axis), as_share(tree), state)

  def num_bits(self, like: PyTree, num_workers: int) -> Bits:
    """Counts the bits of the leaves, around a ring."""
    payload = sum(map(codecs.Dense().num_bits, jax.tree.leaves(like)))
    return Bits.in_ring(payload, num_workers)


def as_share(tree: PyTree) -> PyTree:
  """Returns a tree in the dtypes of its `own_share`, at least float32."""
  return jax.tree.map(
    lambda x: x if x.dtype.name in _WIDE else x.astype(jnp.float32), tree
  )


def check_reducer(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a reducer."""
  wanted = "a `Reducer`, for instance `PowerSGD(2)` or `compressed(codec)`"
  checks.check_type(name, value, Reducer, wanted)


def check_leaves(
  reducer: Any, tree: PyTree, check: Callable[[Any], None]
) -> None:
  """Raises a ValueError that names the first leaf that `check` refuses."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    # Nothing is sent of an empty leaf, and so every codec suits it.
    try:
      if leaf.size:
        check(leaf)
    except ValueError as error:
      raise ValueError(
        f"`{reducer}` does not suit leaf "
        f"`{jax.tree_util.keystr(path)}`: {error} "
        "`PerLeaf` reduces some leaves in another way."
      ) from None


def not_of_state(got: Any) -> ValueError:
  """Returns the error for a state that was made for another tree."""
  return ValueError(
    "`tree` must have the dtypes, and be of as many workers, for which `state` "
    f"was made, got {got} that do not fit it. Give `update` the parameters, or "
    "cast the gradients to their dtypes."
  )


def unsuited(reducer: Reducer, to: str, reason: str) -> ValueError:
  """Returns the error of `check_shards` and `check_chunks`."""
  return ValueError(
    f"`reducer` must be one for {to} of leaves, got {reducer}: {reason} Take "
    "`compressed(codec)`, or reduce whole leaves at once."
  )
