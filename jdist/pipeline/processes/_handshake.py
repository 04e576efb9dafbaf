"""Connections between processes that prove that they know a shared token.

The process with the larger number of two calls the other:

    caller                                called
    device, nonce                 ----->
                                  <-----  proof of it, and another nonce
    proof of the called's nonce   ----->

A proof is an HMAC of the nonce under the token.  So the token is never sent,
and a recorded proof does not fit another nonce.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence

# Magic, device, nonce.
_HELLO = struct.Struct("<4sI32s")
_MAGIC = b"jdp1"
_NONCE = 32
# How long a connected process may take to answer: a stranger that says nothing
# must not block the others.
_PATIENCE_S = 10.0

Address = tuple[str, int]


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
  """Opens the socket on which a process waits for the others.

  Args:
    host: The name or address of this machine, as the others see it.
    port: The port; 0 chooses a free one, which `socket.getsockname()` returns.
  """
  return socket.create_server((host, port), backlog=128)


def read_whole(connection: socket.socket, size: int) -> memoryview | None:
  """Reads `size` bytes; returns None if the other side closes before."""
  buffer = memoryview(bytearray(size))
  have = 0
  while have < size:
    count = connection.recv_into(buffer[have:])
    if not count:
      return None
    have += count
  return buffer


def call(
  device: int,
  other: int,
  addresses: Sequence[Address],
  secret: bytes,
  deadline: float,
) -> socket.socket:
  """Connects to a process that may not listen yet."""
  host, port = addresses[other]
  while True:
    try:
      connection = socket.create_connection((host, port), _PATIENCE_S)
      break
    except OSError as error:
      if time.monotonic() > deadline:
        raise TimeoutError(
          f"Device {device} has not reached device {other} at {host}:{port}: "
          f"{error}. Look whether its process runs."
        ) from None
      time.sleep(0.05)
  nonce = secrets.token_bytes(_NONCE)
  try:
    connection.sendall(_HELLO.pack(_MAGIC, device, nonce))
    # The called process proves itself first, so a caller never shows a proof to
    # a stranger that listens at the address.
    answer = bytes(read_whole(connection, 2 * _NONCE) or b"")
    wanted = _proof(secret, b"called", other, nonce)
    if hmac.compare_digest(answer[:_NONCE], wanted):
      connection.sendall(_proof(secret, b"caller", device, answer[_NONCE:]))
      return connection
  except OSError:
    pass
  connection.close()
  raise PermissionError(
    f"Device {other} at {host}:{port} has another token than device {device}, "
    "or is no process of this pipeline. Give every process the same `token`."
  )


def answer(
  listener: socket.socket,
  device: int,
  number: int,
  secret: bytes,
  deadline: float,
) -> tuple[int, socket.socket] | None:
  """Waits for a process that knows the token; returns None after the deadline.

  Other connections are closed, and the wait continues.
  """
  while True:
    listener.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
      connection, _ = listener.accept()
    except TimeoutError:
      return None
    try:
      connection.settimeout(_PATIENCE_S)
      hello = read_whole(connection, _HELLO.size)
      if hello is not None:
        magic, other, theirs = _HELLO.unpack(hello)
        if magic == _MAGIC and device < other < number:
          nonce = secrets.token_bytes(_NONCE)
          proof = _proof(secret, b"called", device, theirs)
          connection.sendall(proof + nonce)
          answer = bytes(read_whole(connection, _NONCE) or b"")
          wanted = _proof(secret, b"caller", other, nonce)
          if hmac.compare_digest(answer, wanted):
            return other, connection
    except OSError:
      pass
    connection.close()


def _proof(secret: bytes, side: bytes, device: int, nonce: bytes) -> bytes:
  # With the side in it, a proof cannot be reflected to its author.
  words = side + struct.pack("<I", device) + nonce
  return hmac.digest(secret, words, "sha256")
