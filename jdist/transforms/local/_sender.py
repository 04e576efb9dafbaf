"""Senders and streams: how a message of a round that is over reaches its mean.

A sender holds a worker's message while the next round is computed.  `Sender`
sends all of it when the mean is due, `_chunked_stream.ChunkedStream` some of it
in every step:

    round's end    hold        the message that is sent from now on
    every step     send        starts some of it; nothing waits for it yet
                   receive     stores the received part
    mean due       mean        of all of it; sends the missing part
"""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jdist import checks, collectives, reducers
from jdist.states import PyTree
from jdist.transforms.local import _anchor

# A `SyncState`, whose module imports this one.
SyncState = Any
# The usual numbers of steps in which a message is sent divide it.
_USUAL_STEPS = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Stream:
  """The split of a delayed message into sub-tensors.

  In a round of H steps every step sends the next `1/H` of the message, in
  sub-tensors of equal size.

  Attributes:
    max_bytes: The largest size of a sub-tensor; 4 MiB by default.
    specs: How the parameters are split over the mesh's other axes, a tree of
      PartitionSpec (`Workers.specs(params)`), for workers that are themselves
      sharded: every device then sends its own part.  It cannot be combined
      with a compression.

  >>> Stream(max_bytes=4096).cut(10_000, 5, itemsize=4)
  (2, 1000)
  """

  max_bytes: int = 4 * 2**20
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
      compression: The compression of the whole message.
      steps: The number of steps in which a message is sent; None if it varies.
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
      like: The shapes of the message.
      exact: The shapes of values that are sent after it, such as the loss.
    """
    specs = None
    if self.specs is not None:
      whole = jax.tree.map(lambda _: PartitionSpec(), exact)
      specs = collectives.spec_leaves(self.specs, like), whole
    return collectives.Buckets.of((like, exact), specs=specs)


class Contribution(NamedTuple):
  """A worker's part of a round's mean.

  Attributes:
    message: a tree, at least float32, which a compression may compress.
    exact: The round's mean loss, never compressed; `()` if none is needed.
  """

  message: PyTree
  exact: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Sender:
  """Sends a whole message when its mean is due.

  Attributes:
    compression: How the mean is taken; None takes it exactly.
    axis: The workers' axis.
  """

  compression: reducers.Compression | None
  axis: collectives.Axis

  def hold(self, new: Contribution, state: SyncState) -> Any:
    """Returns the form in which a contribution is held in the state."""
    del state
    return new

  def own(self, state: SyncState) -> Contribution:
    """Returns this worker's contribution that is held."""
    return state.flight.held

  def mean(
    self,
    state: SyncState,
    present: Contribution,
    late: jax.Array | bool,
    steps: int | None,
  ) -> tuple[Contribution, PyTree]:
    """Takes the mean of the held message, or of `present` if not `late`.

    `late` is equal on all workers, and `steps` the number of steps in which the
    message was streamed, None if it was not.  Returns the compression's state,
    too.
    """
    del steps
    # A warm-up decides on the device which of both is sent; where all rounds
    # are late the program does not wait for `present`.
    new = _anchor.either(late, state.flight.held, present)
    message, exact, memory = reducers.mean_of(
      self.compression, new.message, new.exact, state.compression, self.axis
    )
    return Contribution(message, exact), memory

  def flush(self, state: SyncState) -> tuple[PyTree, PyTree]:
    """Takes the exact mean of the message and of all residuals."""
    message = state.flight.held.message
    return reducers.flush_of(
      self.compression, message, state.compression, self.axis
    )
