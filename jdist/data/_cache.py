"""Decoded sets in a cache, whose entries may be missing or damaged."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from jdist.storage import array_files

_WHAT = "a decoded set"


def path_of(name: str, prepared: pathlib.Path, part: str) -> pathlib.Path:
  """Returns the directory of a part of a set, as this version prepares it."""
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  cache = pathlib.Path(os.environ.get("JDIST_CACHE_DIR") or f"{base}/jdist")
  flat = name.replace("/", "-")
  return cache.expanduser() / f"{flat}-{prepared.name}-{part}"


def cached(
  path: pathlib.Path,
  names: Sequence[str],
  make: Callable[[], Sequence[np.ndarray]],
) -> list[np.ndarray]:
  """Returns arrays by name, which are made where an entry is missing.

  A damaged entry is made anew, too.
  """
  with contextlib.suppress(OSError, ValueError, KeyError):
    arrays, _ = array_files.load_arrays(path, what=_WHAT)
    return [arrays[name] for name in names]
  made = list(make())
  _write(path, dict(zip(names, made, strict=True)))
  return made


def _write(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
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
