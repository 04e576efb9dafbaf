"""Manifests: what says that a checkpoint is there, and whole.

A directory `step_00000100` counts when `step_00000100.json` is beside it, which
is written last, sealed: the files with their sizes and hashes, and what else
the checkpoint says of itself.
"""

import hashlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from jdist.storage import sealed_json

_FORMAT = 1
# What a write leaves in the directory, whole, half or not yet renamed.
OURS = re.compile(
  r"(step_\d{8,})(\.json(\.partial)?|\.orbax-checkpoint-tmp.*)?"
)


def name(step: int) -> str:
  """The name of a checkpoint's directory."""
  return f"step_{step:08d}"


def path_of(target: pathlib.Path) -> pathlib.Path:
  """Where the manifest of a directory is."""
  return target.with_name(target.name + ".json")


def hashes(target: pathlib.Path) -> Iterator[tuple[str, list[Any]]]:
  """Yields (relative path, [bytes, sha256]) of every file."""
  for path in sorted(target.rglob("*")):
    if path.is_file():
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      relative = path.relative_to(target).as_posix()
      yield relative, [path.stat().st_size, digest]


def damage(target: pathlib.Path) -> str | None:
  """What is wrong with a checkpoint, or None."""
  try:
    files = read(target)["files"]
  except sealed_json.DamagedError as error:
    return str(error)
  found = dict(hashes(target))
  for file, expected in files.items():
    if file not in found:
      return f"file {file} is missing"
    if found[file] != expected:
      return f"file {file} has changed or is cut off"
  return None


def write(target: pathlib.Path, body: dict[str, Any]) -> None:
  """Writes the manifest of a directory."""
  sealed_json.write(path_of(target), body, form=_FORMAT)


def read(target: pathlib.Path) -> dict[str, Any]:
  """What was given to `write`.

  Raises:
    DamagedError: when it cannot be read, or has changed.
    ValueError: when it has another format.
  """
  try:
    return sealed_json.read(path_of(target), form=_FORMAT)
  except sealed_json.DamagedError as error:
    raise sealed_json.DamagedError(f"its manifest {error}") from error
  except sealed_json.OtherFormatError as error:
    raise ValueError(f"Checkpoint {target} {error}") from error
