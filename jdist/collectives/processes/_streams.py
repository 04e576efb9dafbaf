"""Connections: sends notes as lines, relays bytes, and notices their ends."""

import asyncio
import contextlib
import json
import socket
from typing import Any

# If a host loses power, the kernel of the other end sends probes after 3 s, 2 s
# apart, and gives up after the third.  The kernel of a process that is slow or
# stopped still answers them.
_PROBES = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
_CHUNK = 1 << 16

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def write(writer: asyncio.StreamWriter, note: dict[str, Any]) -> None:
  """Sends a note in a line of its own."""
  writer.write(json.dumps(note).encode() + b"\n")
  await writer.drain()


async def relay(a: Stream, b: Stream, *, both_ends: bool = True) -> None:
  """Copies bytes both ways until `a` ends, or either one with `both_ends`."""

  async def copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    with contextlib.suppress(OSError):
      while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()

  there = asyncio.ensure_future(copy(a[0], b[1]))
  back = asyncio.ensure_future(copy(b[0], a[1]))
  await asyncio.wait(
    {there, back} if both_ends else {there},
    return_when=asyncio.FIRST_COMPLETED,
  )
  for _, writer in (a, b):
    writer.close()


def probe(writer: asyncio.StreamWriter) -> None:
  """Lets the kernel notice a machine that does not answer any more."""
  connection = writer.get_extra_info("socket")
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
  for name, value in _PROBES.items():
    if hasattr(socket, name):
      option = getattr(socket, name)
      connection.setsockopt(socket.IPPROTO_TCP, option, value)


def free_port() -> int:
  """Returns a free port of this machine."""
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return int(found.getsockname()[1])
