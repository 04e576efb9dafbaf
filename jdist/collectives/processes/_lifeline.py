"""Connections by which the processes of a run notice when one of them ends.

JAX notices a dead process by missing heartbeats, after minutes.  If that is
process 0, whose service coordinates the others, its runtime aborts them with a
C++ stack trace.  Here every process keeps one idle connection to process 0.
The kernel closes it when the process ends, for any reason; each of the others
then prints one line that names the lost process, and exits.

    process 1 -- lifeline ------------------> port of the coordinator (hub)
    process 1 -- relay of its own -- bytes -> the same port -> JAX's service

JAX's own connections pass through the same port and through a relay within
each process, so that JAX's runtime sees none of them close.
"""

import asyncio
import atexit
import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

from jdist.collectives.processes import _stop_agreement, _streams

# EX_TEMPFAIL, as the watchdog's: the run can be started again, and resumes.
EXIT_STATUS = 75
_HELLO = b"jdist lifeline 1\n"
# The time in which the other processes may exit with a status of their own:
# usually all of them have met the same error.
_GRACE_S = 8.0
# The time in which a lost process is noticed after a collective has failed.
_VERDICT_S = 5.0


class Lifeline:
  """The connections of one process, served by a thread of their own."""

  def __init__(self, address: str, num_processes: int, process_id: int):
    """Prepares the connections to `host:port` of process 0 for `join`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
      raise ValueError(
        f"`coordinator_address` must be host:port, got {address!r}."
      )
    self._host, self._port = host.strip("[]"), int(port)
    self._num, self._id = num_processes, process_id
    self._loop = asyncio.new_event_loop()
    # In process 0, the hub: the others' connections and names.
    self._members: dict[int, asyncio.StreamWriter] = {}
    self._names: dict[int, str] = {}
    self._hub: _streams.Stream | None = None
    self._goodbyes: set[int] = set()
    self._leaving = False
    self._complete = asyncio.Event()
    self._agreement = _stop_agreement.StopAgreement(
      num_processes, process_id, self._send
    )
    self._tasks: set[asyncio.Task[None]] = set()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="jdist-lifeline", daemon=True
    )

  def join(self, timeout_s: float) -> tuple[str, str | None]:
    """Connects to all other processes.

    Args:
      timeout_s: the time after which an error names the missing processes.

    Returns:
      The addresses for JAX: that of its service, and in process 0 the one at
      which its service listens.

    Raises:
      TimeoutError: when not all processes have joined.
      ValueError: when two processes have the same number, for instance.
    """
    self._thread.start()
    work = self._serve if self._id == 0 else self._connect
    found = self._wait(work(timeout_s), timeout_s + 10)
    atexit.register(self.leave, 0)
    return found

  def await_verdict(self) -> None:
    """Waits until this process is ended, if another one has died."""
    # A collective fails before the lifeline knows which process was lost.
    threading.Event().wait(_VERDICT_S)

  def leave(self, status: int, reason: str = "") -> None:
    """Announces that this process exits; after an error the others exit, too.

    After status 1, an unexpected error, they exit at once.
    """
    if self._leaving:
      return
    self._leaving = True
    note = {"goodbye": self._id, "status": status, "reason": reason}
    with contextlib.suppress(Exception):
      self._wait(self._send(note), 2.0)

  def stops_after(self, step: int, wanted: bool) -> bool:
    """Returns whether all processes stop after this step.

    Once one of them wants to stop, each reports the last step for which it has
    asked, and waits until all know the highest.  They stop one step later.
    Every process asks for each step, in order.
    """
    if wanted and self._agreement.want():
      self._wait(self._agreement.begin(), 10.0)
    return self._agreement.stops_after(step)

  def _wait(self, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

  def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
    task = self._loop.create_task(work)
    self._tasks.add(task)  # The loop holds a weak reference only.
    task.add_done_callback(self._tasks.discard)

  # Methods of process 0.

  async def _serve(self, timeout_s: float) -> tuple[str, str]:
    service_port = _streams.free_port()
    service = f"127.0.0.1:{service_port}"

    async def on_connect(
      reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
      with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        first = await reader.readexactly(len(_HELLO))
        if first == _HELLO:
          await self._admit(reader, writer)
          return
        other = await asyncio.open_connection("127.0.0.1", service_port)
        other[1].write(first)
        await _streams.relay((reader, writer), other)

    try:
      await asyncio.start_server(on_connect, None, self._port)
    except OSError as error:
      raise ValueError(
        f"`coordinator_address` must be a port of this machine that is free, "
        f"but {self._host}:{self._port} cannot be listened at: "
        f"{error.strerror}. Take another port."
      ) from None
    self._names[0] = _own_name(0)
    if self._num > 1:
      await self._await_all(timeout_s)
    return service, service

  async def _await_all(self, timeout_s: float) -> None:
    try:
      await asyncio.wait_for(self._complete.wait(), timeout_s)
    except TimeoutError:
      missing = sorted(set(range(1, self._num)) - self._names.keys())
      told = (
        f"of {self._num} processes {', '.join(map(str, missing))} did not "
        f"join at {self._host}:{self._port} within {timeout_s:g} s. Start "
        "every process with the same address and its own number."
      )
      await self._send({"error": told})
      raise TimeoutError(told) from None

  async def _admit(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    """Admits another process, and watches it until it ends."""
    hello = json.loads(await reader.readline())
    number = hello["process"]
    wrong = None
    if hello["of"] != self._num:
      wrong = (
        f"`num_processes` must be the same everywhere, got {hello['of']} in "
        f"process {number} and {self._num} in process 0."
      )
    elif number in self._names:
      wrong = (
        f"`process_id` must be different everywhere, got {number} of "
        f"{self._names[number]} and of {hello['name']}."
      )
    if wrong is not None:
      await _streams.write(writer, {"error": wrong})
      writer.close()
      return
    _streams.probe(writer)
    self._members[number] = writer
    self._names[number] = hello["name"]
    if len(self._names) == self._num:
      await self._send({"joined": self._num})
      self._complete.set()
    await self._watch(number, reader)

  async def _watch(self, number: int, reader: asyncio.StreamReader) -> None:
    try:
      while line := await reader.readline():
        note = json.loads(line)
        if "stop" in note:
          await self._agreement.take(number, note)
        elif "goodbye" in note:
          self._goodbyes.add(number)
          if note["status"]:
            self._spawn(self._lose_later(number, note))
    except (OSError, ValueError):
      pass
    if number not in self._goodbyes:
      await self._lose(number, "has died")

  async def _lose_later(self, number: int, note: dict[str, Any]) -> None:
    # Status 1 is an unexpected error, which the others do not share.
    await asyncio.sleep(0.0 if note["status"] == 1 else _GRACE_S)
    reason = f": {note['reason']}" if note["reason"] else ""
    await self._lose(number, f"has ended with status {note['status']}{reason}")

  async def _lose(self, number: int, how: str) -> None:
    lost = f"{self._names.get(number, f'process {number}')} {how}"
    await self._send({"lost": lost})
    self._end(lost)

  # Methods of the other processes.

  async def _connect(self, timeout_s: float) -> tuple[str, None]:
    reader, writer = self._hub = await self._reach(timeout_s)
    _streams.probe(writer)
    writer.write(_HELLO)
    name = _own_name(self._id)
    await _streams.write(
      writer, {"process": self._id, "of": self._num, "name": name}
    )
    answer: dict[str, Any] = {}
    with contextlib.suppress(TimeoutError, OSError, ValueError):
      line = await asyncio.wait_for(reader.readline(), timeout_s + 5)
      answer = json.loads(line)
    if "joined" not in answer:
      told = answer.get(
        "error",
        f"what answers at {self._host}:{self._port} is no process 0 of such a "
        "run. Give the `host:port` of process 0.",
      )
      kind = ValueError if told.startswith("`") else TimeoutError
      raise kind(told)
    self._names[0] = f"process 0 ({self._host})"
    self._spawn(self._listen(reader))
    server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    self._server = server  # A server without a reference is closed.
    return f"127.0.0.1:{port}", None

  async def _reach(self, timeout_s: float) -> _streams.Stream:
    """Connects to process 0, which may have to start first."""
    end_s = time.monotonic() + timeout_s
    while True:
      try:
        async with asyncio.timeout(max(0.1, end_s - time.monotonic())):
          return await asyncio.open_connection(self._host, self._port)
      except OSError as error:  # A TimeoutError is one, too.
        if time.monotonic() > end_s:
          raise TimeoutError(
            f"process 0 did not answer at {self._host}:{self._port} within "
            f"{timeout_s:g} s ({_reason(error)}). Give the `host:port` of "
            "process 0, and start it."
          ) from None
      await asyncio.sleep(0.2)

  async def _relay(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    with contextlib.suppress(OSError):
      other = await asyncio.open_connection(self._host, self._port)
      # The end of the connection is not passed on to JAX, because the lifeline
      # reports the death of process 0.
      await _streams.relay((reader, writer), other, both_ends=False)

  async def _listen(self, reader: asyncio.StreamReader) -> None:
    ended = False
    try:
      while line := await reader.readline():
        note = json.loads(line)
        if "lost" in note:
          self._end(note["lost"])
        elif "stop" in note:
          await self._agreement.take(0, note)
        elif "goodbye" in note:
          ended = True
          if note["status"]:
            self._spawn(self._lose_later(0, note))
    except (OSError, ValueError):
      pass
    if not ended:
      self._end(f"{self._names[0]} has died")

  # Methods of all processes.

  async def _send(self, note: dict[str, Any]) -> None:
    writers = list(self._members.values())
    if self._hub is not None:
      writers.append(self._hub[1])
    for writer in writers:
      with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(_streams.write(writer, note), 1.0)

  def _end(self, lost: str) -> None:
    if self._leaving:
      return
    command = " ".join(shlex.join(sys.orig_argv).split())
    # It is written at once, so that no other line is printed inside it.
    message = (
      f"jdist: {lost}; this process ends, too, with status {EXIT_STATUS}. To "
      f"go on from the last checkpoint start all again: {command}\n"
    )
    with contextlib.suppress(Exception):
      sys.stdout.flush()
    with contextlib.suppress(OSError):
      os.write(2, message.encode())
    # The main thread waits in a collective, which sys.exit cannot interrupt.
    os._exit(EXIT_STATUS)


def _own_name(number: int) -> str:
  return f"process {number} ({socket.gethostname()}, pid {os.getpid()})"


def _reason(error: OSError) -> str:
  return (error.strerror or "no answer").lower()
