"""Files to which lines are appended, each one JSON value."""

import json
import math
import mmap
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jdist import signatures
from jdist.storage import sealed_json


@signatures.checked
def append(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
  """Appends values to a file, each as a line, in one write."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(value) + "\n" for value in values]
  _drop_cut_off_line(path)
  try:
    with path.open("a") as file:
      for line in lines:
        file.write(line)
        file.flush()
  except OSError as error:
    raise OSError(
      f"a row could not be written to {path}: {error.strerror}. Make room, or "
      "take another `path`."
    ) from error


def plain(x: Any) -> Any:
  """Returns a value as JSON can hold it, with null for NaN and infinities."""
  if isinstance(x, dict):
    return {name: plain(value) for name, value in x.items()}
  if isinstance(x, list | tuple):
    return [plain(value) for value in x]
  if isinstance(x, np.generic):
    x = x.item()
  return None if isinstance(x, float) and not math.isfinite(x) else x


@signatures.checked
def write(path: pathlib.Path, values: Iterable[Any]) -> None:
  """Replaces all lines of a file in one move."""
  text = "".join(json.dumps(value) + "\n" for value in values)
  sealed_json.write_whole(path, text.encode())


@signatures.checked
def read(path: str | os.PathLike[str]) -> Iterator[Any]:
  """Yields the values of all whole lines; a cut-off last line is left out."""
  with pathlib.Path(path).open() as file:
    try:
      for line in file:
        if line.endswith("\n") and line.strip():
          yield json.loads(line)
    except (ValueError, RecursionError) as error:  # Or bytes that are no text.
      raise ValueError(
        f"`path` must be a file of JSON in lines, got {path}: {error}."
      ) from None


def _drop_cut_off_line(path: pathlib.Path) -> None:
  """Removes the part of a line that a killed process has left."""
  if not path.exists() or not path.stat().st_size:
    return
  # A row appended to it would be unreadable with it.  The file is mapped, as
  # the search from its end looks at one line of perhaps gigabytes.
  with (
    path.open("rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
  ):
    whole, size = content.rfind(b"\n") + 1, len(content)
  if whole < size:
    os.truncate(path, whole)
