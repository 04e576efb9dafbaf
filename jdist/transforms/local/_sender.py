"""Senders: a worker's message is held, sent, and its mean taken.

`Sender` sends a held message when its mean is due, `_streaming.ExactStream` and
`_chunked_stream.ChunkedStream` a part of it in every step:

    round's end    hold        the message that is sent from now on
    every step     send        starts some of it; nothing waits for it yet
                   receive     stores what has arrived
    mean due       mean        of all of it; sends what is missing
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdist import collectives, reducers
from jdist.transforms.local import _anchor

PyTree = Any


class Contribution(NamedTuple):
  """A worker's part of a round's mean: a message, float32, by few bytes.

  With every bit what is `exact`: the round's mean loss, `()` if none is needed.
  """

  message: PyTree
  exact: PyTree


@dataclasses.dataclass(eq=False)
class Sender:
  """Sends a message when its mean is due, by few bytes or exactly."""

  axis: collectives.Axis
  compression: reducers.Compression | None

  def hold(self, new: Contribution, before: Any, memory: PyTree) -> Any:
    """Returns the form in which `new` is held, after what was held before."""
    del before, memory
    return new

  def own(self, held: Any) -> Contribution:
    """Returns this worker's contribution that is held."""
    return held

  def mean(
    self,
    held: Any,
    present: Contribution,
    late: jax.Array | bool,
    steps: int | None,
    memory: PyTree,
  ) -> tuple[Contribution, PyTree]:
    """Takes the workers' mean of what is held, or of `present` if not `late`.

    `late` is equal on all workers, and `steps` the number of steps in which the
    message was streamed, None if it was not.
    """
    del steps
    return self.mean_now(_anchor.either(late, held, present), memory)

  def mean_now(
    self, new: Contribution, memory: PyTree
  ) -> tuple[Contribution, PyTree]:
    """Takes the workers' mean of a contribution."""
    if self.compression is None:
      return collectives.mean(new, self.axis), memory
    message, memory = self.compression.mean(new.message, memory, self.axis)
    # A few numbers, and exactly.
    return Contribution(message, collectives.mean(new.exact, self.axis)), memory

  def flush(self, held: Any, memory: PyTree) -> tuple[PyTree, PyTree]:
    """Takes the message's mean with every bit, and of what is held back."""
    message = self.own(held).message
    if self.compression is None:
      return collectives.mean(message, self.axis), memory
    return self.compression.flush(message, memory, self.axis)

  def complete(self, held: Any, sent: tuple[Any, ...] = ()) -> jax.Array:
    """Returns whether all has arrived, with what this step sends."""
    del held, sent
    return jnp.asarray(True)
