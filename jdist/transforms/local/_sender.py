"""Senders: how a message of a round that is over reaches its mean.

A sender holds a worker's message while the next round is computed.  `Sender`
sends all of it when the mean is due, `_chunked_stream.ChunkedStream` some of it
in every step:

    round's end    hold        the message that is sent from now on
    every step     send        starts some of it; nothing waits for it yet
                   receive     stores what was received
    mean due       mean        of all of it; sends what is missing
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from jdist import collectives, reducers
from jdist.transforms.local import _anchor

PyTree = Any
# A `SyncState`, whose module stands above this one.
SyncState = Any


class Contribution(NamedTuple):
  """A worker's part of a round's mean.

  Attributes:
    message: a tree, at least float32, which a compression may compress.
    exact: the round's mean loss, never compressed; `()` if none is needed.
  """

  message: PyTree
  exact: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Sender:
  """Sends a whole message when its mean is due.

  Attributes:
    compression: how the mean is taken; None takes it exactly.
    axis: the workers' axis.
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
    """Takes the workers' mean of what is held, or of `present` if not `late`.

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
