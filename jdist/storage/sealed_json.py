"""Sealed JSON: files that are there whole, and show when they have changed.

    {"format": 1, "sha256": "of the body", ..., "body": ...}

A sealed file is the manifest of other files: it is written after them, in one
move, so that what it lists is complete.
"""

import hashlib
import json
import os
import pathlib
from typing import Any


class DamagedError(ValueError):
  """A file is missing, cannot be read, or is not what was written."""

  def __init__(self, path: pathlib.Path, fault: str):
    super().__init__(
      f"`directory` is damaged: {path} {fault}. Make it anew in another "
      "directory."
    )
    self.reason = f"{path.name} {fault}"


class FormatError(ValueError):
  """A sealed file is of another format."""


def write(path: pathlib.Path, body: Any, *, form: int, **beside: Any) -> None:
  """Writes a sealed file, with entries beside the body that nothing reads."""
  whole = {"format": form, "sha256": _digest(body), **beside, "body": body}
  write_whole(path, json.dumps(whole).encode())


def read(path: pathlib.Path, *, form: int) -> Any:
  """Returns the body that was given to `write`; refuses another format."""
  try:
    whole = json.loads(path.read_text())
    found, digest, body = (whole[k] for k in ("format", "sha256", "body"))
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise DamagedError(path, f"cannot be read ({error!r})") from error
  if found != form:
    raise FormatError(
      f"`directory`: {path} has format {found}, and this version of jdist "
      f"reads {form}. Use the version that wrote it."
    )
  if digest != _digest(body):
    raise DamagedError(path, "has changed")
  return body


def write_whole(path: pathlib.Path, data: bytes) -> None:
  """Writes a file that is either there whole or not at all."""
  partial = path.with_name(path.name + ".partial")
  with partial.open("wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)


def _digest(body: Any) -> str:
  # As it is read again: keys that are numbers become texts, in another order.
  text = json.dumps(json.loads(json.dumps(body)), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
