"""Ray's actors: the server's process, a worker's, and the way between."""

import asyncio
import importlib
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdist.server.runtime import _engine, _envelope
from jdist.server.runtime.ray_actors import _ray_access

# By this name workers find the server.
SERVER = "jdist-server"


class ServerActor:
  """The server's process."""

  def __init__(self) -> None:
    self._server: Any = None

  async def serve(self, make: Callable[[], Any]) -> None:
    loop = asyncio.get_running_loop()
    before, self._server = self._server, None
    if before is not None:
      await loop.run_in_executor(None, before.stop)
    self._server = await loop.run_in_executor(None, make)

  # Asynchronous methods, so that the pulls of all workers can wait at once.
  async def push(self, message: np.ndarray) -> dict[str, Any]:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    # A stranger's bytes are refused here, before anything reads them.
    return self._server.push(*_envelope.unpack(message))

  async def pull(self, worker: str, life: int) -> np.ndarray:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    found = await asyncio.wrap_future(self._server.pull(worker, life))
    return _envelope.pack(*found)

  async def ask(self, method: str, args: tuple[Any, ...]) -> Any:
    function = getattr(self._server, method)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: function(*args))

  async def process(self) -> int:
    return os.getpid()


class WorkerActor:
  """A worker's process."""

  async def work(self, work: Callable[[_engine.Channel], None]) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, work, _RayChannel())

  async def warm(self, modules: tuple[str, ...]) -> None:
    """Loads what every worker needs."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, _load, modules)

  async def process(self) -> int:
    return os.getpid()


def _load(modules: tuple[str, ...]) -> None:
  for name in modules:
    importlib.import_module(name)
  jax.devices()


class _RayChannel:
  """The way from a worker's process to the server, by the server's name."""

  def __init__(self) -> None:
    self._ray = _ray_access.import_ray()
    self._server: Any = None

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    return self._call("push", 60.0, _envelope.pack(header, payload))

  def pull(self, worker: str, life: int) -> _engine.Message:
    return _envelope.unpack(self._call("pull", None, worker, life))

  def _call(self, method: str, timeout_s: float | None, *args: Any) -> Any:
    ray = self._ray
    server = self._server
    try:
      if server is None:
        server = self._server = ray.get_actor(SERVER)
      return ray.get(getattr(server, method).remote(*args), timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
      # Looked up again: the server may be another actor by then.
      self._server = None
      if isinstance(error.cause, _engine.LostServerError):
        raise error.cause from None
      raise
    except (
      ray.exceptions.RayActorError,
      ray.exceptions.GetTimeoutError,
      ray.exceptions.ObjectLostError,
      ValueError,  # There is no actor of this name.
    ) as error:
      self._server = None
      raise _engine.LostServerError(one_line(error)) from None


def one_line(error: BaseException) -> str:
  """Returns what an error of Ray says, on a line."""
  return " ".join(str(error).split())[:200]
