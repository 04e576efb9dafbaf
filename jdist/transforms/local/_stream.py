"""Streams: how a delayed message is cut into sub-tensors."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, reducers

PyTree = Any
_MEBIBYTE = 2**20
# The usual numbers of steps in which a message is sent divide it.
_USUAL_STEPS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """The split of a delayed message into sub-tensors.

  In a round of H steps every step sends the next `1/H` of the message, in
  sub-tensors of equal size.

  Attributes:
    max_bytes: the largest size of a sub-tensor; 4 MiB by default.
    specs: how the parameters are split over the mesh's other axes, a tree of
      PartitionSpec (`Workers.specs(params)`), for workers that are themselves
      sharded: every device then sends its own part.  It cannot be combined
      with a compression.

  >>> Stream(max_bytes=4096).cut(10_000, 5, itemsize=4)
  (2, 1000)
  """

  max_bytes: int = 4 * _MEBIBYTE
  specs: PyTree = None

  def __post_init__(self) -> None:
    checks.set_structural(self, "max_bytes", minimum=8)

  def cut(self, length: int, steps: int, *, itemsize: int) -> tuple[int, int]:
    """Returns the number of sub-tensors in a step, and the elements of each."""
    in_step = -(-length // steps)
    number = -(-in_step * itemsize // self.max_bytes)
    return number, -(-in_step // number)

  def chunks(
    self, compression: reducers.Compression, steps: int | None
  ) -> reducers.Compression:
    """Returns the compression by sub-tensors; a chunked one stays as it is.

    Args:
      compression: the compression of the whole message.
      steps: the number of steps in which a message is sent; None if it varies.
    """
    if isinstance(compression.reducer, reducers.Chunked):
      return compression
    if self.specs is not None or compression.specs is not None:
      raise ValueError(
        "`specs` must be None where a compressed message is streamed, whose "
        "sub-tensors are of whole workers. Leave `stream` out where a worker "
        "is itself sharded."
      )
    reducer = reducers.Chunked(
      compression.reducer,
      max_bytes=self.max_bytes,
      multiple=_USUAL_STEPS if steps is None else steps,
    )
    return dataclasses.replace(compression, reducer=reducer)

  def buckets(self, like: PyTree, exact: PyTree) -> collectives.Buckets:
    """Returns the buckets of an exact message, in the order of their names.

    Args:
      like: the shapes of the message.
      exact: the shapes of what is sent after it, the loss for instance.
    """
    specs = None
    if self.specs is not None:
      whole = jax.tree.map(lambda _: PartitionSpec(), exact)
      specs = collectives.spec_leaves(self.specs, like), whole
    return collectives.Buckets.of((like, exact), specs=specs)
