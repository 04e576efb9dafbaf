"""Arrays of decoded sets, kept in files that may be missing or damaged."""

import os
import pathlib
import tempfile
import zipfile
from typing import Any

import numpy as np


def cache_dir() -> pathlib.Path:
  """Returns the folder in which decoded sets are kept."""
  if given := os.environ.get("JDIST_CACHE_DIR"):
    return pathlib.Path(given).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(base).expanduser() / "jdist"


def path_of(name: str, prepared: pathlib.Path, what: str) -> pathlib.Path:
  """Returns the file of a part of a set, of the version that is prepared."""
  flat = name.replace("/", "-")
  return cache_dir() / f"{flat}-{prepared.name}-{what}.npz"


def read(path: pathlib.Path, *names: str) -> tuple[np.ndarray, ...] | None:
  """Returns arrays of a file by name; None where it is missing or damaged."""
  try:
    with open(path, "rb") as file, np.load(file) as arrays:
      return tuple(arrays[name] for name in names)
  # A RuntimeError where a bit says that the file is encrypted, or of a later
  # version of the format.
  except (
    OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile
  ):  # fmt: skip
    return None


def write(path: pathlib.Path, **arrays: Any) -> None:
  """Writes the cache in one move, so that no reader sees half of it.

  One that cannot be written costs the next run seconds, and does not end this.
  """
  temporary = None
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
      dir=path.parent, prefix=path.name, suffix=".partial", delete=False
    ) as file:
      temporary = file.name
      np.savez(file, **arrays)
    # Temporary files are for their owner only; a cache may be shared.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
  except OSError:
    if temporary is not None:
      pathlib.Path(temporary).unlink(missing_ok=True)
