"""Messages between the processes of a pipeline: raw bytes, sent in order."""

import contextlib
import enum
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jdist import checks
from jdist.pipeline.processes import _handshake

_HEADER = struct.Struct("<4sBiiqQ")  # Magic, tag, bytes that follow.
_MAGIC = b"jdm1"


class Kind(enum.IntEnum):
  """Content of a message."""

  OUTPUT = 1
  GRADIENT = 2
  METRICS = 3
  NORM = 4
  TIED = 5
  MOVED = 6
  AGREED = 7
  LAYERS = 8
  UPDATE = 9


class Tag(NamedTuple):
  """Identity of a message.

  Attributes:
    kind: what it holds.
    stage: that it is for, or 0.
    microbatch: of its iteration, or 0.
    iteration: of the run.
  """

  kind: Kind
  stage: int = 0
  microbatch: int = 0
  iteration: int = 0

  def __str__(self) -> str:
    return (
      f"{self.kind.name.lower()} of micro-batch {self.microbatch}, iteration "
      f"{self.iteration}, for stage {self.stage}"
    )


class Peers:
  """The other processes of a pipeline.

  Arrays are sent as raw bytes: both sides know shapes and dtypes, and what has
  other sizes is refused.  Nothing of what comes is run or unpickled.  A thread
  for each other process sends what it is given, in order, so that a send
  returns at once; another one receives.

  The token is proven to both sides and never sent.  Messages are not encrypted.

  Attributes:
    device: number of this process.
    num_devices: processes there are.
  """

  def __init__(
    self,
    device: int,
    sockets: dict[int, socket.socket],
    *,
    timeout_s: float = 300.0,
  ):
    """Starts the threads; `connect` makes one.

    Args:
      device: number of this process.
      sockets: connected to each other process.
      timeout_s: how long a message is awaited.
    """
    checks.check_number("timeout_s", timeout_s, open_low=True)
    self.device, self.num_devices = device, len(sockets) + 1
    self._sockets, self._timeout_s = sockets, timeout_s
    # Of one tag in the order in which they were sent: a process may be ahead.
    self._messages: dict[tuple[int, Tag], list[memoryview]] = {}
    self._changed = threading.Condition()
    self._gone: dict[int, str] = {}
    self._closing = False
    self._queues: dict[int, queue.SimpleQueue[Any]] = {}
    self._threads: list[threading.Thread] = []
    self._senders: list[threading.Thread] = []
    for other in sockets:
      self._queues[other] = queue.SimpleQueue()
      for work, where in (
        (self._send_all, self._senders),
        (self._receive_all, self._threads),
      ):
        thread = threading.Thread(
          target=work,
          args=(other,),
          daemon=True,
          name=f"{work.__name__}{other}",
        )
        thread.start()
        where.append(thread)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  @property
  def others(self) -> list[int]:
    """The numbers of the other processes."""
    return sorted(self._sockets)

  def send(self, to: int, tag: Tag, arrays: Iterable[Any]) -> None:
    """Sends arrays, which must not change any more; returns at once."""
    self._check(to)
    self._queues[to].put((tag, list(arrays)))

  def receive(self, source: int, tag: Tag, like: Sequence[Any]) -> list[Any]:
    """Waits for arrays.

    Args:
      source: who sends them.
      tag: that they were sent with.
      like: arrays or shapes, in their order.

    Returns:
      NumPy arrays.

    Raises:
      ConnectionError: when the process that has to send them is gone.
      TimeoutError: when nothing came for as long as `timeout_s`.
      ValueError: when other sizes came.
    """
    return _arrays(self.receive_bytes(source, tag), like, source, tag)

  def receive_bytes(self, source: int, tag: Tag) -> memoryview:
    """Waits for the bytes of a message."""
    key = source, tag
    deadline = time.monotonic() + self._timeout_s
    with self._changed:
      while key not in self._messages:
        self._check(source)
        left = deadline - time.monotonic()
        if left <= 0:
          raise TimeoutError(
            f"Device {self.device} has waited {self._timeout_s:g} s for device "
            f"{source}: {tag}. Look whether that process is stuck, or give a "
            "longer `timeout_s`."
          )
        self._changed.wait(left)
      waiting = self._messages[key]
      first = waiting.pop(0)
      if not waiting:
        del self._messages[key]
      return first

  def exchange(
    self, tag: Tag, arrays: Sequence[Any], devices: Iterable[int] | None = None
  ) -> list[list[Any]]:
    """Gives arrays to other processes and returns theirs, and its own.

    Args:
      tag: of the messages.
      arrays: of the same shapes everywhere.
      devices: that take part, this one among them; all if None.

    Returns:
      The arrays of each device that takes part, in the order of their numbers,
      so that sums have the same bits everywhere.
    """
    numbers = range(self.num_devices) if devices is None else sorted(devices)
    for other in numbers:
      if other != self.device:
        self.send(other, tag, arrays)
    return [
      list(arrays) if other == self.device else self.receive(other, tag, arrays)
      for other in numbers
    ]

  def check_agreement(self, what: str, text: str, number: int = 0) -> None:
    """Compares a text with those of all others.

    Raises:
      ValueError: when a process has another one.
    """
    tag = Tag(Kind.AGREED, iteration=number)
    words = text.encode()
    for other in self.others:
      self.send(other, tag, [np.frombuffer(words, np.uint8)])
    for other in self.others:
      theirs = bytes(self.receive_bytes(other, tag)).decode(errors="replace")
      if theirs != text:
        raise ValueError(
          f"{what} must be the same in all processes, got {text} on device "
          f"{self.device} and {theirs} on device {other}."
        )

  def close(self) -> None:
    """Sends what is waiting, and closes the connections."""
    for other in self._queues:
      self._queues[other].put(None)
    for thread in self._senders:
      thread.join(timeout=self._timeout_s)
    self._closing = True
    for connection in self._sockets.values():
      with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
      connection.close()
    for thread in self._threads:
      thread.join(timeout=5.0)

  def _check(self, other: int) -> None:
    if other in self._gone:
      raise ConnectionError(
        f"Device {other} of the pipeline is gone: {self._gone[other]}. Start "
        "all processes again, from the last checkpoint."
      )

  def _lose(self, other: int, reason: str) -> None:
    with self._changed:
      self._gone.setdefault(other, reason)
      self._changed.notify_all()

  def _send_all(self, other: int) -> None:
    connection = self._sockets[other]
    while True:
      job = self._queues[other].get()
      if job is None:
        return
      tag, arrays = job
      try:
        # Here and not in the caller: this waits until they are computed.
        parts = [_bytes(x) for x in arrays]
        size = sum(len(part) for part in parts)
        connection.sendall(_HEADER.pack(_MAGIC, *tag, size))
        for part in parts:
          connection.sendall(part)
      except Exception as error:
        self._lose(other, f"sending failed ({error})")
        return

  def _receive_all(self, other: int) -> None:
    connection, reason = self._sockets[other], "it has closed the connection"
    try:
      while True:
        header = _handshake.read_whole(connection, _HEADER.size)
        if header is None:
          break
        magic, kind, *numbers, size = _HEADER.unpack(header)
        if magic != _MAGIC:
          reason = "it sends what is no message"
          break
        body = _handshake.read_whole(connection, size)
        if body is None:
          reason = "it has closed the connection within a message"
          break
        with self._changed:
          tag = Tag(Kind(kind), *numbers)
          self._messages.setdefault((other, tag), []).append(body)
          self._changed.notify_all()
    except Exception as error:
      reason = f"receiving failed ({error})"
    self._lose(other, reason)


def connect(
  device: int,
  addresses: Sequence[_handshake.Address],
  token: str | bytes,
  *,
  listener: socket.socket | None = None,
  connect_s: float = 60.0,
  timeout_s: float = 300.0,
) -> Peers:
  """Connects the processes of a pipeline.

  Args:
    device: number of this process, from 0.
    addresses: host and port of each process, the same list everywhere.
    token: secret that all processes know; what connects without it is closed.
    listener: open socket at this process's address; opened here if None.
    connect_s: until which all processes must have started.
    timeout_s: how long a message is awaited later.

  Raises:
    ValueError: when an argument is out of its range.
    PermissionError: when another process has another token.
    TimeoutError: when not all processes have come.
  """
  sockets = _handshake.connect_all(
    device, addresses, token, listener=listener, timeout_s=connect_s
  )
  return Peers(device, sockets, timeout_s=timeout_s)


def _bytes(x: Any) -> memoryview:
  array = np.ascontiguousarray(np.asarray(x))
  return array.reshape(-1).view(np.uint8).data


def _arrays(
  body: memoryview, like: Sequence[Any], source: int, tag: Tag
) -> list[np.ndarray]:
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
  sizes = [x.size * np.dtype(x.dtype).itemsize for x in shapes]
  if sum(sizes) != len(body):
    raise ValueError(
      f"Device {source} has sent {len(body)} bytes where {sum(sizes)} were "
      f"expected: {tag}. All processes must be given the same stages, "
      "micro-batch and dtypes."
    )
  found, start = [], 0
  for x, size in zip(shapes, sizes, strict=True):
    part = np.frombuffer(body[start : start + size], np.uint8)
    found.append(part.view(x.dtype).reshape(x.shape))
    start += size
  return found
