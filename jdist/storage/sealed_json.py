"""Sealed JSON: files that are there whole, and show when they have changed.

    {"format": 1, "sha256": "of the body", "body": ...}

A sealed file is the manifest of other files: it is written after them, in one
move, so that all listed files are complete.
"""

import json
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any, IO

from jdist import checks, signatures
from jdist.storage import hashes


def check(name: str, value: Any) -> Any:
  """Returns a value as JSON restores it; a ValueError if it cannot hold it."""
  try:
    return json.loads(json.dumps(value))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"`{name}` must be a value of JSON, got {checks.show(value)}: "
      f"{error}. Make numbers of arrays by `float` or `.tolist()`."
    ) from error


@signatures.checked
def write(path: pathlib.Path, body: Any, *, form: int) -> None:
  """Writes a sealed file whose body is a JSON value."""
  whole = {"format": form, "sha256": _digest(body), "body": body}
  write_whole(path, json.dumps(whole).encode())


@signatures.checked
def read(path: pathlib.Path, *, form: int) -> Any:
  """Returns the body that was given to `write`.

  Raises:
    ValueError: If the file is of another format, and as a DamagedError when
      it cannot be read or has changed.
  """
  try:
    whole = json.loads(path.read_text())
    found, digest, body = (whole[k] for k in ("format", "sha256", "body"))
    # A file of thousands of brackets is too deep for the parser.
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise hashes.DamagedError(path, f"cannot be read ({error!r})") from error
  if found != form:
    raise ValueError(
      f"`directory`: {path} has format {found}, and this version of jdist "
      f"reads {form}. Use the version that wrote it."
    )
  if digest != _digest(body):
    raise hashes.DamagedError(path, "has changed")
  return body


def write_text(path: pathlib.Path, text: str) -> None:
  """Writes a whole text, which other writers may replace at the same time."""
  own = f".{os.getpid()}-{threading.get_native_id()}.partial"
  write_whole(path, text.encode(), own)


def write_whole(
  path: pathlib.Path,
  data: bytes | Callable[[IO[bytes]], object],
  suffix: str = ".partial",
) -> None:
  """Writes a file that is either there whole or not at all.

  The `data` may also be a function that writes them to a file. Until then they
  are in a file with a `suffix`, of which there must be one writer at a time.
  """
  partial = path.with_name(path.name + suffix)
  with partial.open("wb") as file:
    data(file) if callable(data) else file.write(data)
    file.flush()
    # Without it the new name may reach the disk before the content does.
    os.fsync(file.fileno())
  partial.replace(path)


def _digest(body: Any) -> str:
  # JSON turns keys that are numbers into text, which sorts differently.
  text = json.dumps(json.loads(json.dumps(body)), sort_keys=True)
  return hashes.hash_bytes(text.encode())
