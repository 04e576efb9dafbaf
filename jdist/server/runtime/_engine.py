"""The thin interface behind which an engine runs server and workers.

`spawn`, `push`, `pull`, `on_lost`, `stop`: all that the drivers ask of what
starts processes and carries bytes.  `RayEngine` is one, `ThreadEngine`, all in
one process, another.

**Running a protocol of one's own.**  Nothing here knows a protocol or a model.
A run is three things:

- a protocol, any `server.Protocol`: what becomes of messages;
- a `ServerLearner`, at the server: encodes replies, takes pushes, makes
  updates, and has all state that a checkpoint keeps;
- a `WorkerLearner`, at each worker: whatever state a worker has (parameters,
  an inner optimizer, fragments); it turns a reply into the bytes of a push.

`GradientServer` and `GradientWorker` are those of plain gradients.  Another
pair, say of local steps and fragments, may put what it likes into payloads and
into the headers' `"more"`; `LiveServer`, `Recording` and the engines carry it.
"""

from collections.abc import Callable
from typing import Any
from typing import Protocol as Interface

import numpy as np


class LostServerError(ConnectionError):
  """Says that the server does not answer; it may come back."""


class LostRunError(RuntimeError):
  """Says that a run has lost a part without which it cannot go on."""


# A header that JSON can hold, and a payload, uint8 [bytes].
Message = tuple[dict[str, Any], np.ndarray]


class Channel(Interface):
  """A worker's connection to its server; each call waits for its answer.

  A push and a pull may be under way at once, from different threads.
  """

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    """Sends a message and returns the server's receipt.

    Raises:
      LostServerError: when the server does not answer.
    """

  def pull(self, worker: str, life: int) -> Message:
    """Waits for the next message to a worker.

    Raises:
      LostServerError: when the server does not answer.
    """


class Engine(Interface):
  """Starts a server and workers, and notices when one is lost."""

  def serve(self, make: Callable[[], Any]) -> None:
    """Starts the server, or starts it anew: what `make` returns there."""

  def spawn(self, name: str, work: Callable[[Channel], None]) -> None:
    """Starts a worker that does `work`, or starts a lost one anew."""

  def ask(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Calls a method of the server, from where the run is watched.

    Raises:
      LostServerError: when the server does not answer.
    """

  def on_lost(self, call: Callable[[str, str], None]) -> None:
    """Has `call(name, reason)` called when a worker is lost."""

  def poll(self) -> None:
    """Looks for lost workers, and calls what `on_lost` was given."""

  def stop(self) -> None:
    """Ends everything and leaves nothing behind."""
