"""Manifests: what says that a checkpoint is there, and whole.

A directory `step_00000100` counts when `step_00000100.json` is beside it, which
is written last and in one piece: the files with their sizes and hashes, and a
hash of itself.
"""

import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

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
  except DamagedError as error:
    return str(error)
  found = dict(hashes(target))
  for file, expected in files.items():
    if file not in found:
      return f"file {file} is missing"
    if found[file] != expected:
      return f"file {file} has changed or is cut off"
  return None


class DamagedError(Exception):
  """A manifest cannot be read, or is not what was written."""


def write(target: pathlib.Path, body: dict[str, Any]) -> None:
  """Writes the manifest of a directory."""
  whole = {"format": _FORMAT, "sha256": _digest(body), "body": body}
  _write_whole(path_of(target), json.dumps(whole))


def read(target: pathlib.Path) -> dict[str, Any]:
  """What was given to `write`.

  Raises:
    DamagedError: when it cannot be read, or has changed.
    ValueError: when it has another format.
  """
  try:
    whole = json.loads(path_of(target).read_text())
    written, digest, body = (whole[k] for k in ("format", "sha256", "body"))
  except (ValueError, KeyError, TypeError) as error:
    raise DamagedError(f"its manifest cannot be read: {error!r}") from error
  if written != _FORMAT:
    raise ValueError(
      f"Checkpoint {target} has format {written}, and this version of jdist "
      f"reads {_FORMAT}. Use the version that wrote it."
    )
  if digest != _digest(body):
    raise DamagedError("its manifest has changed")
  return body


def _digest(body: Any) -> str:
  text = json.dumps(body, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _write_whole(path: pathlib.Path, text: str) -> None:
  """Writes a file that is either there whole or not at all."""
  partial = path.with_name(path.name + ".partial")
  with partial.open("w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)
