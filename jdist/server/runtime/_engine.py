"""The thin interface behind which an engine runs server and workers.

`RayEngine` starts processes, `ThreadEngine` runs all in one.

**Your own protocol.**  An engine depends on no protocol and no model.  A run
consists of

- a `server.Protocol`, which decides by messages alone;
- a `ServerLearner`, which encodes replies, decodes pushes, makes updates, and
  has all state that a checkpoint keeps;
- a `WorkerLearner` for each worker, which has the worker's state (parameters,
  an inner optimizer, fragments) and turns a reply into a push.

`GradientServer` and `GradientWorker` are the pair of plain gradients.  Another
pair may put anything into payloads and the headers' `"more"`: servers and
engines only carry it.
"""

import threading
from collections.abc import Callable
from typing import Any
from typing import Protocol as Interface

import numpy as np


class LostServerError(ConnectionError):
  """Raised while the server does not answer; it may be started again."""


class LostRunError(RuntimeError):
  """Raised when a run has lost a part without which it cannot continue."""


# The reason of a worker that is lost because its work has ended, without error.
RETURNED = "its work returned before the server had stopped it"

# A header that JSON can hold, and a payload, uint8 [bytes].
Message = tuple[dict[str, Any], np.ndarray]
# Builds a server in its process, from a channel to others.
Make = Callable[[Any], Any]


class Channel(Interface):
  """A worker's connection to its server; each call waits for its answer.

  A push and a pull may be under way at once, from different threads.  Both
  raise a LostServerError if the server does not answer.
  """

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    """Sends a message and returns the server's receipt.

    Raises:
      LostServerError: If the server does not answer.
    """

  def pull(self, worker: str, life: int) -> Message:
    """Waits for the next message to a worker.

    Raises:
      LostServerError: If the server does not answer, or has forgotten a message
        that another worker has lost; a hello then begins anew.
    """


class Engine(Interface):
  """Starts a server and workers, and notices when one is lost."""

  def serve(self, make: Make, *shards: Make) -> None:
    """Starts, or restarts, the server that `make` returns, and its shards.

    Each function is given a channel, whose `shard(number)` is that of a shard,
    from 1.
    """

  def spawn(self, name: str, work: Callable[[Channel], None]) -> None:
    """Starts a worker that does `work`, or restarts a lost one."""

  def ask(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Calls a method of the server, for the process that watches the run.

    Raises:
      LostServerError: If the server does not answer.
    """

  def on_lost(self, call: Callable[[str, str], None]) -> None:
    """Has `call(name, reason)` called when a worker is lost or `RETURNED`."""

  def poll(self) -> None:
    """Looks for lost workers, and calls the function of `on_lost`."""

  def stop(self) -> None:
    """Ends everything and leaves nothing behind."""


class ThreadEngine:
  """Runs the server and all workers as threads, and copies no message.

  All compute with one process's devices, for experiments and tests.  A thread
  that raises counts as a lost worker.  `server` is the one that was started.
  """

  def __init__(self) -> None:
    self.server: Any = None
    self.shards: list[Any] = []
    self._lost: list[tuple[str, str]] = []
    self._call: Callable[[str, str], None] = lambda name, reason: None
    self._threads: dict[str, threading.Thread] = {}

  def serve(self, make: Make, *shards: Make) -> None:
    """Starts the server."""
    channel = _ThreadChannel(self)
    self.shards = [each(channel) for each in shards]
    self.server = make(channel)

  def spawn(self, name: str, work: Callable[[Channel], None]) -> None:
    """Starts a worker."""
    lost = self._lost  # A thread may end after its session.

    def run() -> None:
      reason = RETURNED
      try:
        work(_ThreadChannel(self))
      # Also a SystemExit, by which a test or a user's code may end a worker.
      except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
      lost.append((name, reason))

    self._threads[name] = threading.Thread(target=run, daemon=True)
    self._threads[name].start()

  def ask(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Calls a method of the server."""
    del timeout_s
    return getattr(self.server, method)(*args)

  def on_lost(self, call: Callable[[str, str], None]) -> None:
    """Has `call(name, reason)` called when a worker is lost."""
    self._call, self._lost = call, []

  def poll(self) -> None:
    """Reports the workers that were lost."""
    # In the caller's thread: `on_lost` may raise, and spawns workers.
    while self._lost:
      name, reason = self._lost.pop(0)
      self._call(name, reason)

  def stop(self) -> None:
    """Ends server and workers."""
    for each in (self.server, *self.shards):
      if each is not None:
        each.stop()
    for thread in self._threads.values():
      thread.join(timeout=5.0)


class _ThreadChannel:
  def __init__(self, engine: ThreadEngine, number: int = 0):
    self._engine, self._number = engine, number

  def shard(self, number: int) -> "_ThreadChannel":
    return _ThreadChannel(self._engine, number)

  def ask(self, method: str, *args: Any) -> Any:
    return getattr(self._server, method)(*args)

  @property
  def _server(self) -> Any:
    return [self._engine.server, *self._engine.shards][self._number]

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    return self._server.push(header, payload)

  def pull(self, worker: str, life: int) -> Message:
    return self._server.pull(worker, life).result()
