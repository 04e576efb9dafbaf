"""Directory of a run's checkpoints, their manifests, and the run's metadata.

A manifest is written last and in one piece. Arrays without a manifest belong to
an interrupted write, and the next write removes them. If arrays do not match
their manifest, or a manifest its own hash, the checkpoint is damaged, and the
previous one is used.
"""

import json
import pathlib
import re
import shutil
from collections.abc import Collection, Mapping
from typing import Any

from jdist import signatures
from jdist.storage import hashes, numbered_files, sealed_json

# Stand for a step if there is none. Negative ints can be broadcast like steps.
NOTHING, ALL_DAMAGED = -1, -2
_FORMAT = 2
as_json = sealed_json.check
# The files of a write: whole, partial, or not yet renamed by Orbax.
_OURS = re.compile(
  r"(step_\d{8,})(\.json(\.partial)?|\.orbax-checkpoint-tmp.*)?"
)


class CheckpointDirectory:
  """Files of checkpoints, by their steps."""

  def __init__(self, path: pathlib.Path):
    """Takes a directory, which need not exist yet."""
    self.path = path

  def target(self, step: int) -> pathlib.Path:
    """Returns the path of the arrays of a checkpoint."""
    return self.path / f"step_{step:08d}"

  def _manifest(self, step: int) -> pathlib.Path:
    return self.path / f"step_{step:08d}.json"

  def read(self, step: int) -> dict[str, Any]:
    """Reads a manifest; raises a DamagedError if it is damaged."""
    return sealed_json.read(self._manifest(step), form=_FORMAT)

  def complete(self, step: int, manifest: dict[str, Any]) -> None:
    """Writes the manifest of arrays, after which the checkpoint counts."""
    manifest["files"] = hashes.hash_files(self.target(step))
    sealed_json.write(self._manifest(step), manifest, form=_FORMAT)

  def forget(self, step: int) -> None:
    """Removes a manifest, without which a checkpoint does not count."""
    self._manifest(step).unlink(missing_ok=True)

  def tidy(self) -> None:
    """Removes arrays without a manifest: old ones and interrupted writes."""
    for path in self.path.iterdir():
      match = _OURS.fullmatch(path.name)
      # Other files in the directory belong to the user.
      if match is None:
        continue
      counts = self.path / f"{match[1]}.json"
      if path == counts or (counts.exists() and path.name == match[1]):
        continue
      if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      else:
        path.unlink(missing_ok=True)

  def steps(self) -> list[int]:
    """Returns the steps that have a manifest, the newest first."""
    return list(numbered_files.find(self.path, "step_", ".json"))

  def newest_whole(self) -> int:
    """Returns the newest undamaged step, NOTHING or ALL_DAMAGED."""

    def checked(target: pathlib.Path) -> int:
      step = int(target.name.removeprefix("step_"))
      found = self.read(step)
      if (saved := found.get("step")) != step:
        raise hashes.DamagedError(target, f"is of step {saved}")
      hashes.check_files(target, found["files"])
      return step

    steps = self.steps()
    found = numbered_files.read_newest(map(self.target, steps), checked)
    if found is None:
      return ALL_DAMAGED if steps else NOTHING
    return found


class OtherRunError(ValueError):
  """The error of a checkpoint whose run had other metadata.

  Attributes:
    differences: The values in the checkpoint and in this run, by name.
  """

  def __init__(
    self, differences: dict[str, tuple[Any, Any]], argument: str = "metadata"
  ):
    """Lists all differences of an argument."""
    listed = ", ".join(
      f"`{name}` is {there!r} there and {here!r} here"
      for name, (there, here) in differences.items()
    )
    # The message names every difference, so that one attempt shows them all.
    super().__init__(
      f"`{argument}` must be that of the checkpoint, but {listed}. Resume with "
      "the same options, or start again in another directory."
    )
    self.differences = differences
    self._argument = argument

  def __reduce__(self) -> tuple[Any, ...]:
    """Allows the error to be pickled, between processes."""
    return type(self), (self.differences, self._argument)


@signatures.checked
def check_same_run(
  found: Mapping[str, Any],
  metadata: Mapping[str, Any],
  *,
  free: Collection[str] = (),
  argument: str = "metadata",
) -> None:
  """Raises an OtherRunError if a checkpoint's metadata are of another run.

  Args:
    found: The metadata in the checkpoint, as JSON keeps them.
    metadata: The metadata of this run. A name in only one of both is a
      difference.
    free: Names whose values may differ.
    argument: The name of the caller's argument, for the message.
  """
  # JSON turns tuples into lists, so both sides must have passed through it.
  metadata = sealed_json.check("metadata", dict(metadata))
  differences = {
    name: (found.get(name), metadata.get(name))
    for name in sorted((found.keys() | metadata.keys()) - set(free))
    if _differ(found.get(name), metadata.get(name))
  }
  if differences:
    raise OtherRunError(differences, argument)


def _differ(there: Any, here: Any) -> bool:
  """Returns whether values differ; a NaN is equal to a NaN here."""
  texts = {json.dumps(x, sort_keys=True) for x in (there, here)}
  return there != here and len(texts) > 1
