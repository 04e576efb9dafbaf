"""Messages: what a worker did in a round, and who takes the mean of them.

A delayed message is held from the end of its round to the end of the next one.
When it travels in between, and by how many bytes, is all that senders differ
in:

- `AtOnce`, here, sends it at the round's end: simple, and not hidden under
  anything, because a conditional is a wall to a compiler's scheduler.
- `Streaming` in `_chunked_stream` sends a part of it in every step, exactly.
- `StreamingParts` in `_chunked_stream` does it by a reducer.

    round's end    hold      what is sent until the next one
    every step     start     sends some of it; nothing waits for it yet
                   finish    writes down what has arrived
    round's end    mean      of all of it, sending what is missing
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp

from jdist import collectives, reducers
from jdist.transforms.local import _anchor

PyTree = Any


class Message(NamedTuple):
  """What a worker did in a round.

  Attributes:
    progress: the pseudo-gradient, a tree in the anchor's dtypes.
    loss: the round's mean loss, float32 scalar; `()` when the interval needs
      none.
  """

  progress: PyTree
  loss: Any


class Sender(Protocol):
  """Holds a worker's message, and takes the workers' mean of it.

  `state` is the message in the form in which it is held; `remembered` is what
  a reduction remembers, `()` without one; `steps` is the static number of
  steps in which the whole message goes, None for all of it when it is needed.
  """

  def hold(self, message: Message, before: Any, remembered: Any) -> Any:
    """Makes a message the next one to be sent; `before` was the last one."""

  def own(self, state: Any) -> Message:
    """This worker's message that is held."""

  def start(
    self, state: Any, steps: int | None, remembered: Any
  ) -> tuple[Any, ...]:
    """Sends what this step sends; nothing waits for it yet."""

  def finish(
    self,
    state: Any,
    sent: tuple[Any, ...],
    remembered: Any,
    in_flight: jax.Array,
  ) -> tuple[Any, Any]:
    """Writes down what has been sent: state and remembered."""

  def complete(self, state: Any, sent: tuple[Any, ...]) -> jax.Array:
    """Whether all has arrived, with what is being sent in this step."""

  def mean(
    self,
    state: Any,
    present: Message,
    late: jax.Array,
    steps: int | None,
    remembered: Any,
  ) -> tuple[Message, Any]:
    """The workers' mean of what is held, or of `present` if not `late`."""

  def exact_mean(self, state: Any, remembered: Any) -> tuple[PyTree, Any]:
    """The mean of the progress that is held, every bit of it."""


# Makes one when the program is traced, for messages like an anchor.
MakeSender: TypeAlias = Callable[[PyTree], Sender]


class AtOnce:
  """Sends the whole message when it is needed.  Its state is the message."""

  def __init__(
    self, axis: collectives.Axis, reduction: reducers.Reduction | None = None
  ):
    """Takes means exactly, or by a reduction."""
    self._axis, self._reduction = axis, reduction

  def hold(
    self, message: Message, before: Message | None, remembered: Any
  ) -> Message:
    """Makes a message the next one to be sent."""
    del before, remembered
    return message

  def own(self, state: Message) -> Message:
    """This worker's message that is held."""
    return state

  def start(
    self, state: Message, steps: int | None, remembered: Any
  ) -> tuple[()]:
    """What every step sends: nothing."""
    del state, steps, remembered
    return ()

  def finish(
    self,
    state: Message,
    sent: tuple[Any, ...],
    remembered: Any,
    in_flight: jax.Array,
  ) -> tuple[Message, Any]:
    """Writes down what has been sent: nothing."""
    del sent, in_flight
    return state, remembered

  def complete(self, state: Message, sent: tuple[Any, ...]) -> jax.Array:
    """Whether the round may end."""
    del state, sent
    return jnp.asarray(True)

  def mean(
    self,
    state: Message,
    present: Message,
    late: jax.Array,
    steps: int | None,
    remembered: Any,
  ) -> tuple[Message, Any]:
    """The workers' mean of what is held, or of `present` if not `late`."""
    del steps
    return self.mean_now(_anchor.either(late, state, present), remembered)

  def mean_now(self, message: Message, remembered: Any) -> tuple[Message, Any]:
    """The workers' mean of a message."""
    if self._reduction is None:
      return collectives.mean(message, self._axis), remembered
    progress, remembered = self._reduction.mean(message.progress, remembered)
    # One number, and exactly.
    loss = collectives.mean(message.loss, self._axis)
    return Message(progress, loss), remembered

  def exact_mean(self, state: Message, remembered: Any) -> tuple[PyTree, Any]:
    """The mean of the progress, and of what a feedback holds of others."""
    if self._reduction is None:
      return collectives.mean(state.progress, self._axis), remembered
    return self._reduction.exact_mean(state.progress, remembered)
