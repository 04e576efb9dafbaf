"""All messages of a run in a file, and a replay of them in no time."""

import contextlib
import hashlib
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, IO

import numpy as np

from jdist.server import _messages, _protocol
from jdist.server.runtime import _delivery, _engine, _envelope

_KINDS = {
  each.__name__: each
  for each in (
    _messages.Join,
    _messages.Leave,
    _messages.Pull,
    _messages.Push,
    _messages.Expired,
  )
}
_LENGTH = struct.Struct("<Q")


class Recorder:
  """Writes messages as the protocol gets them: time, fields, payload.

  Args:
    path: of the file; written anew.
    names: of all workers.
    workers: who was there at the beginning.
  """

  def __init__(
    self, path: str | pathlib.Path, names: Sequence[str], workers: list[str]
  ):
    self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115
    self._write({"kind": "begin", "names": list(names), "workers": workers})

  def message(
    self,
    now_s: float,
    message: _messages.Message,
    more: dict[str, Any] | None = None,
    payload: np.ndarray | None = None,
  ) -> None:
    """Writes a message that the protocol gets."""
    header = {
      "kind": type(message).__name__,
      "now_s": now_s,
      "fields": list(message),
      "more": more,
    }
    self._write(header, payload)

  def sent(self, sent: _delivery.SentTask) -> None:
    """Writes what a reply's payload was, by its hash."""
    self._write(
      {"kind": "sent", "task": sent.reply.task, "hash": _hash(sent.payload)}
    )

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def _write(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> None:
    message = _envelope.pack(header, payload)
    self._file.write(_LENGTH.pack(len(message)))
    self._file.write(message.tobytes())


def read(path: str | pathlib.Path) -> Iterator[tuple[dict[str, Any], Any]]:
  """Yields headers and payloads; a last one that was cut off is left out."""
  with contextlib.ExitStack() as stack:
    file = stack.enter_context(open(path, "rb"))
    while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
      (length,) = _LENGTH.unpack(head)
      found = file.read(length)
      if len(found) < length:
        return
      yield _envelope.unpack(np.frombuffer(found, np.uint8))


def replay(
  path: str | pathlib.Path,
  protocol: _protocol.Protocol,
  learner: _engine.ServerLearner,
) -> _delivery.Delivery:
  """Hands recorded messages to a protocol again, each at its recorded time.

  The clock is virtual: it stands at a message's time when that is handed over.
  With the same protocol, a learner at the same beginning, and programs that are
  compiled by the same flags for the same machine, the server ends with the same
  bits.

  Args:
    path: of the recording.
    protocol: as it was.
    learner: as it was at the beginning; any that takes the same payloads.

  Returns:
    The protocol's state, the learner and all counts.

  Raises:
    ValueError: when a reply is not what was sent then.
  """
  delivery: _delivery.Delivery | None = None
  sent: dict[int, str] = {}
  for header, payload in read(path):
    if header["kind"] == "begin":
      delivery = _delivery.Delivery(
        protocol, learner, header["names"], header["workers"]
      )
      continue
    assert delivery is not None, "a recording begins with its workers"
    if header["kind"] == "sent":
      if sent.pop(header["task"], None) != header["hash"]:
        raise ValueError(
          f"`path` must be a recording of this protocol and learner: the "
          f"reply of task {header['task']} is another one."
        )
      continue
    message = _KINDS[header["kind"]](*header["fields"])
    if isinstance(message, _messages.Push) and header["more"] is not None:
      delivery.accept(message, header["more"], payload)
    replies, _ = delivery.hand_over(header["now_s"], message)
    sent |= {x.reply.task: _hash(x.payload) for x in replies}
  if delivery is None:
    raise ValueError(f"`path` must be a recording, got {path}.")
  return delivery


def _hash(payload: np.ndarray | None) -> str:
  if payload is None:
    return ""
  return hashlib.sha256(payload.tobytes()).hexdigest()[:16]
