"""Ray's actors: the server's process, a worker's, and the way between."""

import asyncio
import concurrent.futures
import importlib
import os
import time
from typing import Any

import jax
import numpy as np

from jdist.server.runtime import _engine, _envelope
from jdist.server.runtime.ray_actors import _ray_access

# By this name workers find the server.
SERVER = "jdist-server"
# The last messages of this worker, by task, and how many of them.
_SHARED: dict[int, np.ndarray] = {}
_LAST = 4
# Seconds between looks at a server that is silent, and for its answer to one.
_ASK_S, _SILENCE_S = 5.0, 20.0
# Payloads travel in pieces, so that a link's queue, in which heartbeats wait,
# holds one piece of each sender.  A piece takes so many seconds at the rate
# of the last payload, and the sender then rests for a part of its time.
_PIECE_S, _REST = 0.25, 0.05
_MIN_PIECE_BYTES = 2**18


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
  async def push(
    self, message: np.ndarray, pieces: list[Any], peer: Any = None
  ) -> Any:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    # A stranger's bytes are refused here, before anything reads them.
    # A shard computes before it answers.
    header, payload = _envelope.unpack(message)
    if pieces:
      found = []
      for piece in pieces:
        began_s = time.monotonic()
        found.append(await piece)
        await asyncio.sleep(_REST * (time.monotonic() - began_s))
      payload = np.concatenate(found)
    # Once more, as results of calls that are not awaited: they stay on the
    # worker's machine, from where others take them, and outlive its process,
    # because this one owns them.
    header["handle"] = payload
    if peer is not None:
      size = len(found[0]) if pieces else max(len(payload), 1)
      header["handle"] = [
        peer.message.remote(header["task"], start, start + size)
        for start in range(0, max(len(payload), 1), size)
      ]
    return await asyncio.to_thread(self._server.push, header, payload)

  async def pull(
    self, worker: str, life: int, size: int
  ) -> tuple[np.ndarray, list[Any], Any]:
    if self._server is None:
      raise _engine.LostServerError("The server has not begun.")
    future = await asyncio.to_thread(self._server.pull, worker, life)
    header, payload = await asyncio.wrap_future(future)
    handles = header.pop("messages", None)
    return *_cut(header, payload, size), handles

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

  async def message(self, task: int, start: int, end: int) -> np.ndarray:
    """Returns a part of a message that this worker has sent, for others."""
    return _SHARED[task][start:end]

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


def _cut(
  header: dict[str, Any], payload: np.ndarray | None, size: int
) -> tuple[np.ndarray, list[Any]]:
  """Returns a message, and the pieces of a payload that is too large for it."""
  if payload is None or len(payload) <= _MIN_PIECE_BYTES:
    return _envelope.pack(header, payload), []
  put = _ray_access.import_ray().put
  starts = range(0, len(payload), size)
  return _envelope.pack(header), [put(payload[x : x + size]) for x in starts]


def _load(modules: tuple[str, ...]) -> None:
  for name in modules:
    importlib.import_module(name)
  jax.devices()


class _RayChannel:
  """The way from a process to the server, or a shard, by its name."""

  def __init__(self, name: str = SERVER) -> None:
    self._ray, self._name = _ray_access.import_ray(), name
    self._server: Any = None
    # Three times as long as messages from peers took last.
    self._patience_s = _SILENCE_S
    self._size = _MIN_PIECE_BYTES

  def ask(self, method: str, *args: Any) -> Any:
    return self._call("ask", method, args)

  def shard(self, number: int) -> "_RayChannel":
    return _RayChannel(f"{SERVER}-{number}")

  def push(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> dict[str, Any]:
    began_s = time.monotonic()
    message, pieces = _cut(header, payload, self._size)
    peer = None
    if header.get("shared") and payload is not None:
      # Behind all others: an earlier run may have had a task of this number.
      _SHARED.pop(header["task"], None)
      _SHARED[header["task"]] = payload
      for task in list(_SHARED)[:-_LAST]:
        del _SHARED[task]
      peer = self._ray.get_runtime_context().current_actor
    receipt = self._call("push", message, pieces, peer)
    self._measure(pieces, payload, began_s)
    return receipt

  def pull(self, worker: str, life: int) -> _engine.Message:
    message, pieces, handles = self._call("pull", worker, life, self._size)
    header, payload = _envelope.unpack(message)
    if pieces:
      first_s, found = time.monotonic(), []
      for piece in pieces:
        began_s = time.monotonic()
        found.append(self._wait(piece))
        time.sleep(_REST * (time.monotonic() - began_s))
      payload = np.concatenate(found)
      self._measure(pieces, payload, first_s)
    if handles:
      merges = header["merges"]
      tasks = [task for merge in merges for task in merge[1]]
      names = [name for merge in merges for name in merge[3]]
      # Each begins behind itself, so that no peer's link has all at once.
      order = sorted(
        range(len(tasks)), key=lambda i: (names[i] <= worker, names[i], i)
      )
      header["messages"] = self._fetch(tasks, handles, order)
    return header, payload

  def _measure(self, pieces: list[Any], payload: Any, began_s: float) -> None:
    """Sets the size of later pieces by the rate at which these went."""
    if pieces:
      rate = len(payload) / (time.monotonic() - began_s)
      self._size = max(_MIN_PIECE_BYTES, int(rate * _PIECE_S))

  def _fetch(
    self, tasks: list[int], handles: list[Any], order: list[int]
  ) -> list[np.ndarray]:
    """Returns the messages of peers, from the server if they do not come."""
    ray, found = self._ray, [np.zeros(0, np.uint8)] * len(tasks)
    for i in order:
      first_s, parts = time.monotonic(), []
      try:
        for handle in handles[i]:
          began_s = time.monotonic()
          left_s = max(first_s + self._patience_s - began_s, 0.0)
          parts.append(ray.get(handle, timeout=left_s))
          time.sleep(_REST * (time.monotonic() - began_s))
        found[i] = np.concatenate(parts)
        self._patience_s = max(_ASK_S, 3 * (time.monotonic() - first_s))
      except ray.exceptions.RayError:
        # A peer's link may be cut, and the others' merge must not wait for it.
        found[i] = self._call("ask", "message", (tasks[i],))
    return found

  def _call(self, method: str, *args: Any) -> Any:
    return self._wait(None, method, args)

  def _wait(
    self, reference: Any, method: str = "", args: tuple[Any, ...] = ()
  ) -> Any:
    """Returns an object of the server, or a result of a call that begins."""
    ray, server, call = self._ray, self._server, reference
    try:
      if server is None:
        server = self._server = ray.get_actor(self._name)
      if call is None:
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
