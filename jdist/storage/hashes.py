"""Hashes of all bits of files and arrays, which show damage and other data."""

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jdist import checks, signatures

# Bytes at a time: an array that is mapped from a disk need not fit the memory.
_PART = 1 << 24


class DamagedError(ValueError):
  """A file is missing, cannot be read, or has changed since it was written."""

  def __init__(self, path: pathlib.Path, fault: str):
    super().__init__(
      f"`directory` is damaged: {path} {fault}. Make it again in another "
      "directory."
    )
    self.reason = f"{path.name} {fault}"


def hash_bytes(data: Any) -> str:
  """Returns the SHA-256 of bytes, or of an array's bits without its type."""
  if not isinstance(data, bytes):
    data = np.ascontiguousarray(checks.check_array("data", data)).data
  return hashlib.sha256(data).hexdigest()


@signatures.checked
def hash_file(path: pathlib.Path) -> str:
  """Returns the SHA-256 of a file's content."""
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


@signatures.checked
def hash_files(folder: pathlib.Path) -> dict[str, str]:
  """Returns the hash of every file below a directory, by its name there."""
  files = (path for path in sorted(folder.rglob("*")) if path.is_file())
  return {x.relative_to(folder).as_posix(): hash_file(x) for x in files}


def check_files(folder: pathlib.Path, expected: Mapping[str, str]) -> None:
  """Raises a DamagedError unless files have the hashes expected by name."""
  for name, digest in expected.items():
    path = folder / name
    if not path.is_file():
      raise DamagedError(path, "is missing")
    if hash_file(path) != digest:
      raise DamagedError(path, "has changed or is cut off")


def fingerprint(*arrays: Any) -> str:
  """Returns a hash of arrays, one after another: dtypes, shapes and all bits.

  >>> one = fingerprint(np.float32([1, 2]), np.float32([3]))
  >>> one == fingerprint(np.float32([1]), np.float32([2, 3]))
  False
  >>> fingerprint(np.float32([1])) == fingerprint(np.float32([[1]]))
  False
  """
  found = hashlib.sha256()
  for each in arrays:
    array = np.asarray(each)
    found.update(f"{array.dtype}{list(array.shape)}".encode())
    array = np.atleast_1d(array)
    rows = max(_PART // max(array[:1].nbytes, 1), 1)
    for first in range(0, len(array), rows):
      part = np.ascontiguousarray(array[first : first + rows])
      found.update(part.reshape(-1).view(np.uint8).data)
  return found.hexdigest()
