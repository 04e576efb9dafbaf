"""Sealing: JSON files that are there whole, and tell when they have changed.

    {"format": 1, "sha256": "of the body", ..., "body": ...}

A sealed file is what says that other files are there: it is written after them,
and in one move.
"""

import hashlib
import json
import os
import pathlib
from typing import Any


class DamagedError(Exception):
  """A sealed file cannot be read, or is not what was written.

  The message goes on from the name of the file.
  """


class OtherFormatError(Exception):
  """A sealed file is of another format.

  The message goes on from the name of what it is of.
  """


def write(path: pathlib.Path, body: Any, *, form: int, **beside: Any) -> None:
  """Writes a sealed file.

  Args:
    path: where; a file that is there is replaced.
    body: what JSON can hold.
    form: the number of the body's format.
    **beside: what else is in the file, for people; nothing reads it.
  """
  whole = {"format": form, "sha256": _digest(body), **beside, "body": body}
  write_whole(path, json.dumps(whole).encode())


def read(path: pathlib.Path, *, form: int) -> Any:
  """The body that was given to `write`.

  Raises:
    DamagedError: when the file is no sealed one, or has changed.
    OtherFormatError: when it is of another format than `form`.
    FileNotFoundError: when there is none.
  """
  try:
    whole = json.loads(path.read_text())
    found, digest, body = (whole[k] for k in ("format", "sha256", "body"))
  except (ValueError, KeyError, TypeError) as error:
    raise DamagedError(f"cannot be read: {error!r}") from error
  if found != form:
    raise OtherFormatError(
      f"has format {found}, and this version of jdist reads {form}. Use the "
      "version that wrote it."
    )
  if digest != _digest(body):
    raise DamagedError("has changed")
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
  text = json.dumps(body, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
