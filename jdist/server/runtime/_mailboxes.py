"""Mailboxes: messages to workers that have not been pulled yet."""

import collections
import concurrent.futures
import dataclasses

import numpy as np

from jdist.server.runtime import _engine

_NOTHING = np.zeros(0, np.uint8)


@dataclasses.dataclass
class Mailbox:
  """A worker as its server serves it."""

  # The number of its process: messages of an earlier one are dropped.
  life: int = 0
  # Rises whenever its tasks are taken from it.
  generation: int = 0
  # At most as many tasks as it may have, and control messages.
  messages: collections.deque[_engine.Message] = dataclasses.field(
    default_factory=collections.deque
  )
  # Its pending pull.
  waiting: concurrent.futures.Future[_engine.Message] | None = None
  # Whether its process is alive, as far as is known.
  here: bool = False
  # True once that process has pushed.
  pushed: bool = False

  def put(self, message: _engine.Message) -> None:
    """Delivers a message, immediately if a pull is pending."""
    if self.waiting is not None:
      waiting, self.waiting = self.waiting, None
      waiting.set_result(message)
    else:
      self.messages.append(message)

  def pull(
    self, life: int, future: concurrent.futures.Future[_engine.Message]
  ) -> None:
    """Answers a pull, now or with the next message."""
    if life != self.life:
      # An earlier process of this worker may still be alive, behind a network
      # that was interrupted: it must not take its successor's messages.
      future.set_result(word("stop"))
    elif self.messages:
      future.set_result(self.messages.popleft())
    else:
      self.waiting = future

  def empty(self) -> None:
    """Drops messages that were not pulled, and ends a pending pull."""
    self.messages.clear()
    if self.waiting is not None:
      self.put(word("stop"))

  def take_tasks(self) -> None:
    """Drops a worker's tasks, and asks it to join again if it is alive."""
    # Messages that are still on modelled links are dropped by their generation.
    self.generation += 1
    self.messages.clear()
    if self.here:
      self.put(word("rejoin", generation=self.generation))


def word(
  kind: str, payload: np.ndarray | None = None, **more: object
) -> _engine.Message:
  """Returns a message to a worker, without a payload unless one is given."""
  return {"kind": kind} | more, _NOTHING if payload is None else payload
