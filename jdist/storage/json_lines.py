"""Files to which lines are appended, each one JSON value."""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

# A cut-off line is looked for from the end, in parts of this many bytes.
_PART = 1 << 16


def append(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
  """Appends values to a file, each as a line, in one write.

  Raises:
    OSError: when a line cannot be written, for instance because the disk is
      full.
  """
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


def read(path: str | os.PathLike[str]) -> Iterator[Any]:
  """Yields the values of all whole lines; a cut-off last line is left out.

  Raises:
    ValueError: when a whole line is not JSON.
  """
  with pathlib.Path(path).open() as file:
    for line in file:
      if line.endswith("\n") and line.strip():
        yield json.loads(line)


def _drop_cut_off_line(path: pathlib.Path) -> None:
  """Removes the part of a line that a killed process has left."""
  if not path.exists():
    return
  # Appending to it would join two rows in one line, which is then unreadable.
  with path.open("rb+") as file:
    end = size = file.seek(0, os.SEEK_END)
    while end:
      start = max(end - _PART, 0)
      file.seek(start)
      whole = file.read(end - start).rfind(b"\n") + 1
      if whole:
        end = start + whole
        break
      end = start
    if end < size:
      file.truncate(end)
