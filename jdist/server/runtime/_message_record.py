"""All messages of a run in a file, and a replay of them in no time."""

import base64
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jdist.server import _messages, _protocol
from jdist.server.gradients import _learner
from jdist.server.runtime import _delivery
from jdist.storage import hashes, json_lines, plain_data

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
    self._path = pathlib.Path(path)
    self._path.unlink(missing_ok=True)
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
      "message": plain_data.to_plain(message),
      "more": more,
    }
    self._write(header, payload)

  def sent(self, sent: _delivery.SentTask) -> None:
    """Writes what a reply's payload was, by its hash."""
    self._write(
      {"kind": "sent", "task": sent.reply.task, "hash": _hash(sent.payload)}
    )

  def _write(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> None:
    if payload is not None:
      # JSON has no bytes.  Base64 is a third longer, and a recording stays a
      # text that any program reads.
      header["payload"] = base64.b64encode(payload.tobytes()).decode()
    json_lines.append(self._path, [header])


def read(path: str | pathlib.Path) -> Iterator[tuple[dict[str, Any], Any]]:
  """Yields headers and payloads; a last one that was cut off is left out."""
  for header in json_lines.read(path):
    payload = base64.b64decode(header.pop("payload", ""))
    yield header, np.frombuffer(payload, np.uint8)


def replay(
  path: str | pathlib.Path,
  protocol: _protocol.Protocol,
  learner: _learner.ServerLearner,
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
    message = plain_data.from_plain(header["message"], _KINDS[header["kind"]])
    if isinstance(message, _messages.Push) and header["more"] is not None:
      delivery.accept(message, header["more"], payload)
    delivery.deliver(message, header["now_s"])
    replies, _ = delivery.take_sent()
    sent |= {x.reply.task: _hash(x.payload) for x in replies}
  if delivery is None:
    raise ValueError(f"`path` must be a recording, got {path}.")
  return delivery


def _hash(payload: np.ndarray | None) -> str:
  if payload is None:
    return ""
  return hashes.hash_bytes(payload)[:16]
