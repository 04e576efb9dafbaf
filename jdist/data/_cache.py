"""Decoded sets in a cache, whose entries may be missing or damaged."""

import contextlib
import os
import pathlib
import tempfile
from typing import Any

import numpy as np

from jdist.storage import array_files

_WHAT = "a decoded set"


def path_of(name: str, prepared: pathlib.Path, part: str) -> pathlib.Path:
  """Returns the directory of a part of a set, as this version prepares it."""
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  cache = pathlib.Path(os.environ.get("JDIST_CACHE_DIR") or f"{base}/jdist")
  flat = name.replace("/", "-")
  return cache.expanduser() / f"{flat}-{prepared.name}-{part}"


def read(path: pathlib.Path, *names: str) -> tuple[np.ndarray, ...] | None:
  """Returns arrays by name; None where an entry is missing or damaged."""
  try:
    arrays, _ = array_files.load_arrays(path, what=_WHAT)
    return tuple(arrays[name] for name in names)
  except (OSError, ValueError, KeyError):
    return None


def write(path: pathlib.Path, **arrays: Any) -> None:
  """Writes an entry in one move, so that no reader sees half of it.

  An entry that cannot be written costs the next run seconds and does not end
  this one.
  """
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each process writes to a directory of its own: several runs may decode
    # the same set at once, and the last one to finish stays.
    with tempfile.TemporaryDirectory(
      dir=path.parent, prefix=f".{path.name}-"
    ) as own:
      made = pathlib.Path(own) / path.name
      array_files.save_arrays(made, arrays, {"what": _WHAT})
      array_files.remove(path)
      made.rename(path)
