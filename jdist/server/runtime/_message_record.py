"""A file of all messages of a live run."""

import base64
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np

from jdist.server import _messages
from jdist.storage import hashes, json_lines, plain_data

MESSAGES = {x.__name__: x for x in get_args(_messages.Message)}
# The entries of lines that are no message.
_FIELDS = {"begin": {"names", "workers"}, "sent": {"task", "hash"}}


class Recorder:
  """Writes messages in the order in which the protocol is given them."""

  def __init__(self, path: str | pathlib.Path):
    self._path = pathlib.Path(path)
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._path.unlink(missing_ok=True)
      self._path.touch()
    except OSError as error:
      raise ValueError(
        f"`record` must be a file that can be written, got {str(path)!r}: "
        f"{error.strerror}. Take another path."
      ) from None

  def begin(self, names: Sequence[str], workers: list[str]) -> None:
    """Writes the names of all workers, and of those that are there."""
    self._write({"kind": "begin", "names": list(names), "workers": workers})

  def message(
    self,
    now_s: float,
    message: _messages.Message,
    more: dict[str, Any] | None = None,
    payload: np.ndarray | None = None,
  ) -> None:
    """Writes a message that the protocol is given."""
    header = {
      "kind": type(message).__name__,
      "now_s": now_s,
      "message": plain_data.to_plain(message),
      "more": more,
    }
    self._write(header, payload)

  def sent(self, task: int, payload: np.ndarray | None) -> None:
    """Writes the hash of a task's payload."""
    # A replay compares it; the payload itself follows from the messages.
    self._write({"kind": "sent", "task": task, "hash": hash_of(payload)})

  def _write(
    self, header: dict[str, Any], payload: np.ndarray | None = None
  ) -> None:
    if payload is not None:
      # JSON has no bytes.  Base64 is a third longer, and a recording stays a
      # text that any program reads.
      header["payload"] = base64.b64encode(payload.tobytes()).decode()
    json_lines.append(self._path, [header])


def read(path: str | pathlib.Path) -> Iterator[tuple[dict[str, Any], Any]]:
  """Yields headers and payloads, without a last one that was cut off."""
  for number, header in enumerate(json_lines.read(path)):
    kind = header.get("kind") if isinstance(header, dict) else None
    fits = kind == "begin" if not number else kind in ("sent", *MESSAGES)
    wanted = _FIELDS.get(str(kind), {"now_s", "message", "more"})
    if not fits or not wanted <= header.keys():
      raise ValueError(
        f"`path` must be a recording, got {path}: line {number + 1} is none."
      )
    payload = base64.b64decode(header.pop("payload", ""))
    yield header, np.frombuffer(payload, np.uint8)


def hash_of(payload: np.ndarray | None) -> str:
  """Returns a payload's hash, `""` if nothing was sent."""
  return "" if payload is None else hashes.hash_bytes(payload)[:16]
