"""Connections of framed messages whose two ends prove that they share a key.

    caller                                   called
    magic, nonce a                    ----->
                                      <----- nonce b, proof by the called
    proof by the caller, first frame  ----->

A proof is an HMAC of both nonces under the key, so the key is never sent and a
recorded proof fits no other connection. The called process proves itself first,
and a caller shows nothing to a stranger that listens at the address. Frames
carry JSON and raw bytes, both bounded; nothing received is run or unpickled.
Frames are neither encrypted nor signed.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jdist import checks

_MAGIC = b"jdc1"
_NONCE = 32
# Magic, bytes of the note, bytes of the body.
_FRAME = struct.Struct("<4sIQ")
# A note of 10,000 leaves with their fingerprints takes about 1 MB.
_MAX_NOTE = 1 << 24
# The time in which a connection must prove the key, whatever it sends.
_PATIENCE_S = 10.0
# Connections that have not proved the key yet. A further one takes the place of
# the oldest, so that a flood of silent ones blocks no peer for long.
_PENDING = 64
# If a host loses power, the kernel of the other end sends probes after 3 s, 2 s
# apart, and gives up after the third. The kernel of a process that is slow or
# stopped still answers them.
_PROBES = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

Address = tuple[str, int]


class Frame(NamedTuple):
  """A received frame: a value of JSON, and bytes that belong to it."""

  note: Any
  body: memoryview


class Connection:
  """An authenticated connection; one thread may send while another receives.

  Attributes:
    socket: The connected socket, for bytes without frames.
  """

  def __init__(self, connected: socket.socket, max_body: int = 0):
    """Takes a proved socket, and the bytes of the largest body to receive."""
    self.socket, self._max_body = connected, max_body
    self._lock = threading.Lock()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
      if option := getattr(socket, name, None):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)

  def send(self, note: Any, parts: Iterable[Any] = ()) -> None:
    """Sends a value of JSON and bytes; raises an OSError without a receiver."""
    words, parts = json.dumps(note).encode(), list(parts)
    head = _FRAME.pack(_MAGIC, len(words), sum(len(x) for x in parts))
    with self._lock:
      # The parts are written separately, as joining them would copy them.
      for part in (head + words, *parts):
        self.socket.sendall(part)

  def receive(self, deadline: float | None = None) -> Frame | None:
    """Waits for a message, until a time of `time.monotonic` or forever.

    It returns None after the other end has closed, and raises a ValueError for
    bytes that are no message or too many.
    """
    head = _read(self.socket, _FRAME.size, deadline)
    if not head:
      return None
    magic, words, size = _FRAME.unpack(head)
    if magic != _MAGIC or words > _MAX_NOTE or size > self._max_body:
      raise ValueError("it has sent something that is not a message")
    text, body = (_read(self.socket, x, deadline) for x in (words, size))
    if len(text) < words or len(body) < size:
      raise ConnectionError("it has closed the connection within a message")
    return Frame(json.loads(bytes(text)), body)

  def close(self) -> None:
    """Closes the connection, and wakes a thread that receives."""
    _close(self.socket)


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
  """Opens the socket on which a process waits for others.

  The host is this machine, as the others see it; port 0 chooses a free one.
  """
  checks.check_int("port", port, 0, 2**16 - 1)
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  return socket.create_server((host, port), family=family, backlog=128)


class Listener:
  """Admits connections that prove a key; strangers never block the others.

  Attributes:
    refused: The number of connections without the key.
  """

  def __init__(
    self,
    listening: socket.socket,
    key: bytes,
    admit: Callable[[Any, Connection], None],
    max_body: int = 0,
  ):
    """Starts to accept connections at a socket, which `close` closes.

    `admit` is called with the first note and the connection, in a thread of the
    connection's own, which it may keep.
    """
    self.refused = 0
    self._socket, self._key, self._admit = listening, key, admit
    self._max_body, self._closed = max_body, False
    self._pending: dict[socket.socket, None] = {}
    self._lock = threading.Lock()
    threading.Thread(target=self._accept, daemon=True).start()

  def close(self) -> None:
    """Accepts no further connection; those that are admitted stay."""
    self._closed = True
    _close(self._socket)

  def _accept(self) -> None:
    while not self._closed:
      try:
        connected, _ = self._socket.accept()
      except OSError:  # Closed, or too many open files for a moment.
        time.sleep(0.05)
        continue
      with self._lock:
        if len(self._pending) >= _PENDING:
          oldest = next(iter(self._pending))
          del self._pending[oldest]
          with contextlib.suppress(OSError):  # Its thread ends, and closes it.
            oldest.shutdown(socket.SHUT_RDWR)
        self._pending[connected] = None
      threading.Thread(
        target=self._answer, args=(connected,), daemon=True
      ).start()

  def _answer(self, connected: socket.socket) -> None:
    first = None
    connection = Connection(connected, self._max_body)
    with contextlib.suppress(OSError, ValueError):
      deadline = time.monotonic() + _PATIENCE_S
      theirs = bytes(_read(connected, len(_MAGIC) + _NONCE, deadline))
      if theirs.startswith(_MAGIC):
        ours = secrets.token_bytes(_NONCE)
        nonces = theirs[len(_MAGIC) :] + ours
        connected.sendall(ours + _proof(self._key, b"called", nonces))
        wanted = _proof(self._key, b"caller", nonces)
        if hmac.compare_digest(_read(connected, _NONCE, deadline), wanted):
          first = connection.receive(deadline)
    with self._lock:
      self._pending.pop(connected, None)
      self.refused += first is None
    if first is None:
      connection.close()
    else:
      connected.settimeout(None)
      self._admit(first.note, connection)


def call(
  address: Address,
  key: bytes,
  deadline: float,
  first: Any,
  who: str,
  max_body: int = 0,
) -> Connection:
  """Connects to a process that may not listen yet, and sends a first note.

  The process must prove the key before the deadline, which is one of
  `time.monotonic`.  Messages call it `who`, and a body has at most `max_body`
  bytes.

  Raises:
    PermissionError: If something else answers, or one with another key.
    TimeoutError: If nothing answers.
  """
  where, begin = f"{address[0]}:{address[1]}", time.monotonic()
  while True:
    try:
      connection = _prove(address, key, deadline, max_body)
    except OSError as error:
      if time.monotonic() > deadline:
        reason = (error.strerror or str(error)).lower()
        raise TimeoutError(
          f"{who} did not answer at {where} within {deadline - begin:.3g} s "
          f"({reason}). Look whether its process runs and has this address."
        ) from None
      time.sleep(0.1)
      continue
    if connection is None:
      raise PermissionError(
        f"{who} at {where} is of another run or has another secret or token, "
        "or is another program. Give all processes the same token, or the same "
        "`JDIST_SECRET` (else ~/.config/jdist/secret), and take a free port."
      )
    connection.send(first)
    return connection


def _prove(
  address: Address, key: bytes, deadline: float, max_body: int
) -> Connection | None:
  """Connects once; returns None if the other end does not prove the key."""
  left = max(deadline - time.monotonic(), 0.1)
  connected = socket.create_connection(address, left)
  try:
    ours = secrets.token_bytes(_NONCE)
    connected.sendall(_MAGIC + ours)
    answer = bytes(_read(connected, 2 * _NONCE, deadline))
    if len(answer) < 2 * _NONCE:
      raise ConnectionError("the connection was closed")
    nonces = ours + answer[:_NONCE]
    wanted = _proof(key, b"called", nonces)
    if hmac.compare_digest(answer[_NONCE:], wanted):
      connected.sendall(_proof(key, b"caller", nonces))
      connected.settimeout(None)
      return Connection(connected, max_body)
  except OSError:
    _close(connected)
    raise
  _close(connected)
  return None


def _read(
  connected: socket.socket, size: int, deadline: float | None
) -> memoryview:
  """Reads `size` bytes; returns fewer if the other end closes before."""
  buffer, have = memoryview(bytearray(size)), 0
  while have < size:
    if deadline is not None:
      # One deadline for all of them: each byte would get a new one otherwise.
      connected.settimeout(max(deadline - time.monotonic(), 0.001))
    count = connected.recv_into(buffer[have:])
    if not count:
      break
    have += count
  return buffer[:have]


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
  # With the side in it, a proof cannot be reflected to its author.
  return hmac.digest(key, side + nonces, "sha256")


def _close(closed: socket.socket) -> None:
  with contextlib.suppress(OSError):
    closed.shutdown(socket.SHUT_RDWR)
  closed.close()


def lost_process(error: BaseException) -> bool:
  """Returns whether a collective was cut off: JAX may raise a ValueError."""
  return "Gloo" in str(error)
