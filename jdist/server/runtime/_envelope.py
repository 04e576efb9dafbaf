"""Messages between server and workers: one buffer of bytes each.

A header of plain values as JSON, and the payload's bytes behind it.  Nothing
is unpickled: what a stranger sends can be refused, and does nothing.
"""

import json
from typing import Any

import numpy as np

_LENGTH_BYTES = 4
_MAX_HEADER_BYTES = 1 << 20


class MalformedError(ValueError):
  """Raised for bytes that `pack` has not made."""


def pack(header: dict[str, Any], payload: np.ndarray | None = None) -> Any:
  """Returns a message, uint8 [bytes], of values of JSON and of bytes.

  >>> message = pack({"task": 3}, np.array([1, 2], np.uint8))
  >>> header, payload = unpack(message)
  >>> header, payload.tolist()
  ({'task': 3}, [1, 2])
  """
  text = json.dumps(header).encode()
  head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
  parts = [np.frombuffer(head, np.uint8)]
  if payload is not None:
    parts.append(np.asarray(payload, np.uint8))
  return np.concatenate(parts)


def unpack(message: Any) -> tuple[dict[str, Any], np.ndarray]:
  """Returns a message's header and payload."""
  if (
    not isinstance(message, np.ndarray)
    or message.dtype != np.uint8
    or message.ndim != 1
  ):
    raise MalformedError(
      f"A message must be a uint8 array of one dimension, got {message!r:.80}."
    )
  # The length is checked before anything of that size is read or made.
  length = int.from_bytes(message[:_LENGTH_BYTES].tobytes(), "little")
  end = _LENGTH_BYTES + length
  if length > _MAX_HEADER_BYTES or end > len(message):
    raise MalformedError(
      f"A message of {len(message)} bytes says its header has {length}."
    )
  try:
    header = json.loads(message[_LENGTH_BYTES:end].tobytes())
  except ValueError:
    # Without its cause: the bytes of a stranger do not belong into a log.
    raise MalformedError("A message's header is no JSON.") from None
  if not isinstance(header, dict):
    raise MalformedError(f"A message's header is no object: {header!r:.80}.")
  return header, message[end:]
