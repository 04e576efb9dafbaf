"""Server and workers as threads of one process: an engine without Ray."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jdist.server.runtime import _engine


class ThreadEngine:
  """Runs the server and all workers as threads, and copies no message.

  All compute with one process's devices, for experiments and tests.  A thread
  that raises counts as a lost worker.
  """

  def __init__(self) -> None:
    self._server: Any = None
    self._lost: list[tuple[str, str]] = []
    self._call: Callable[[str, str], None] = lambda name, reason: None
    self._threads: dict[str, threading.Thread] = {}

  def serve(self, make: Callable[[], Any]) -> None:
    """Starts the server."""
    self._server = make()

  def spawn(self, name: str, work: Callable[[_engine.Channel], None]) -> None:
    """Starts a worker."""

    def run() -> None:
      try:
        work(_ThreadChannel(self))
      # Also a SystemExit, by which a test or a user's code may end a worker.
      except BaseException as error:
        self._lost.append((name, f"{type(error).__name__}: {error}"))

    self._threads[name] = threading.Thread(target=run, daemon=True)
    self._threads[name].start()

  def ask(self, method: str, *args: Any, timeout_s: float = 60.0) -> Any:
    """Calls a method of the server."""
    del timeout_s
    return getattr(self._server, method)(*args)

  def on_lost(self, call: Callable[[str, str], None]) -> None:
    """Has `call(name, reason)` called when a worker is lost."""
    self._call = call

  def poll(self) -> None:
    """Reports the workers that were lost."""
    # In the caller's thread: `on_lost` may raise, and spawns workers.
    while self._lost:
      name, reason = self._lost.pop(0)
      self._call(name, reason)

  def stop(self) -> None:
    """Ends server and workers."""
    if self._server is not None:
      self._server.stop()
    for thread in self._threads.values():
      thread.join(timeout=5.0)

  @property
  def server(self) -> Any:
    """The server, as long as there is one."""
    if self._server is None:
      raise _engine.LostServerError("There is no server yet.")
    return self._server


class _ThreadChannel:
  def __init__(self, engine: ThreadEngine):
    self._engine = engine

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    return self._engine.server.push(header, payload)

  def pull(self, worker: str, life: int) -> _engine.Message:
    return self._engine.server.pull(worker, life).result()
