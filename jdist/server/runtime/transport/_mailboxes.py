"""Messages to workers that they have not pulled yet."""

import collections
import concurrent.futures
import dataclasses

import numpy as np

from jdist.server.runtime import _engine

_NOTHING = np.zeros(0, np.uint8)


@dataclasses.dataclass
class Mailbox:
  """A worker as its server serves it.

  Attributes:
    life: of its process; messages of an earlier one are dropped.
    generation: goes up whenever its tasks were taken from it.
    messages: those that it has not pulled; as many as it may have tasks, and
      words of control.
    waiting: its pull that waits.
    here: whether its process lives, as far as is known.
  """

  life: int = 0
  generation: int = 0
  messages: collections.deque[_engine.Message] = dataclasses.field(
    default_factory=collections.deque
  )
  waiting: concurrent.futures.Future[_engine.Message] | None = None
  here: bool = False

  def put(self, message: _engine.Message) -> None:
    """Hands a message over, at once if its pull waits."""
    if self.waiting is not None:
      waiting, self.waiting = self.waiting, None
      waiting.set_result(message)
    else:
      self.messages.append(message)

  def pull(
    self, life: int, future: concurrent.futures.Future[_engine.Message]
  ) -> None:
    """Fills a pull's future, now or with the next message."""
    if life != self.life:
      future.set_result(word("stop"))
    elif self.messages:
      future.set_result(self.messages.popleft())
    else:
      self.waiting = future

  def empty(self) -> None:
    """Drops what was not pulled, and ends a pull that waits."""
    self.messages.clear()
    if self.waiting is not None:
      self.put(word("stop"))

  def take_tasks(self) -> None:
    """Drops a worker's tasks and tells it, should it live, to join again."""
    self.generation += 1
    self.messages.clear()
    if self.here:
      self.put(word("rejoin", generation=self.generation))


def word(
  kind: str, payload: np.ndarray | None = None, **more: object
) -> _engine.Message:
  """Returns a message to a worker, without a payload unless one is given."""
  return {"kind": kind} | more, _NOTHING if payload is None else payload
