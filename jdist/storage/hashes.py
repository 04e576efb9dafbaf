"""Data told apart by a hash of all of their bits."""

import hashlib
from typing import Any

import numpy as np

# Bytes at a time: what is mapped from a disk need not fit the memory.
_PART = 1 << 24


def fingerprint(*arrays: Any) -> str:
  """A hash of arrays, one after another: dtypes, shapes and all bits.

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
    for part in parts(array):
      found.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
  return found.hexdigest()


def fingerprints(**arrays: Any) -> dict[str, str]:
  """The fingerprint of each argument, by its name."""
  return {name: fingerprint(array) for name, array in arrays.items()}


def parts(array: np.ndarray) -> list[np.ndarray]:
  """An array in parts of some rows, each small beside the memory; views.

  >>> [part.shape for part in parts(np.zeros((3, 2)))]
  [(3, 2)]
  """
  if not array.ndim:
    return [array]
  row = max(array[:1].nbytes, 1)
  size = max(_PART // row, 1)
  return [array[i : i + size] for i in range(0, len(array), size)]


def refuse_other_data(theirs: Any, ours: dict[str, str]) -> None:
  """Raises a ValueError unless a directory is of a training with our data.

  Args:
    theirs: fingerprints by argument, as the directory has them; None, or
      something else, when an older version wrote it.
    ours: of what was given.
  """
  known = theirs if isinstance(theirs, dict) else {}
  for name, mine in ours.items():
    if known.get(name) != mine:
      raise ValueError(
        "`directory` holds the state of a training with other data: "
        f"`{name}` differ, or an older version wrote it. Take another "
        "directory, or the same data."
      )
