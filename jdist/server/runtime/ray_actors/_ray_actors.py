"""Ray's actors: the server's process, a worker's, and the way between."""

import asyncio
import concurrent.futures
import importlib
import os
from typing import Any

import jax
import numpy as np

from jdist.server.runtime import _engine, _envelope
from jdist.server.runtime.ray_actors import _ray_access

# By this name workers find the server.
SERVER = "jdist-server"
# Seconds between looks at a server that is silent, and for its answer to one.
_ASK_S, _SILENCE_S = 5.0, 20.0


class ServerActor:
  """The server's process."""

  def __init__(self) -> None:
    self._server: Any = None

  async def serve(self, make: _engine.Make) -> None:
    before, self._server = self._server, None
    if before is not None:
      await asyncio.to_thread(before.stop)
    self._server = await asyncio.to_thread(make, _RayChannel())

  # Asynchronous methods, so that the pulls of all workers can wait at once.
  async def push(self, message: np.ndarray) -> dict[str, Any]:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    # A stranger's bytes are refused here, before anything reads them.
    # A shard computes before it answers.
    header, payload = _envelope.unpack(message)
    return await asyncio.to_thread(self._server.push, header, payload)

  async def pull(self, worker: str, life: int) -> np.ndarray:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    future = await asyncio.to_thread(self._server.pull, worker, life)
    return _envelope.pack(*await asyncio.wrap_future(future))

  async def ask(self, method: str, args: tuple[Any, ...]) -> Any:
    return await asyncio.to_thread(getattr(self._server, method), *args)

  async def process(self) -> int:
    return os.getpid()


class WorkerActor:
  """A worker's process."""

  def __init__(self) -> None:
    # One thread, which unpickles, too: two that import the same modules may
    # find them half made.
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._working: Any = None

  async def work(self, work: bytes | None) -> None:
    """Does pickled work; None waits for that of before, whose call was cut."""
    if work is not None:
      loads = _ray_access.import_ray().cloudpickle.loads
      self._working = self._thread.submit(lambda: loads(work)(_RayChannel()))
    await asyncio.wrap_future(self._working)

  async def warm(self, modules: tuple[str, ...]) -> None:
    """Loads what every worker needs."""
    await asyncio.wrap_future(self._thread.submit(_load, modules))

  async def process(self) -> int:
    return os.getpid()


def _load(modules: tuple[str, ...]) -> None:
  for name in modules:
    importlib.import_module(name)
  jax.devices()


class _RayChannel:
  """The way from a process to the server, or a shard, by its name."""

  def __init__(self, name: str = SERVER) -> None:
    self._ray, self._name = _ray_access.import_ray(), name
    self._server: Any = None

  def ask(self, method: str, *args: Any) -> Any:
    return self._call("ask", method, args)

  def shard(self, number: int) -> "_RayChannel":
    return _RayChannel(f"{SERVER}-{number}")

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    return self._call("push", _envelope.pack(header, payload))

  def pull(self, worker: str, life: int) -> _engine.Message:
    return _envelope.unpack(self._call("pull", worker, life))

  def _call(self, method: str, *args: Any) -> Any:
    ray, server = self._ray, self._server
    try:
      if server is None:
        server = self._server = ray.get_actor(self._name)
      call = getattr(server, method).remote(*args)
      # An answer may be lost with its connection, which only a sender notices.
      # The call is not repeated: a hello begins a new life, and the server
      # takes nothing of an earlier one.
      while not ray.wait([call], timeout=_ASK_S)[0]:
        ray.get(server.process.remote(), timeout=_SILENCE_S)
      return ray.get(call)
    except ray.exceptions.RayTaskError as error:
      # Looked up again: the server may be another actor by then.
      self._server = None
      raise error.cause from None
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
