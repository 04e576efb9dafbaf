"""Metadata of a run, in its checkpoints: what must be the same to go on."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from jdist import checks
from jdist.storage import sealed_json


class OtherRunError(ValueError):
  """A checkpoint is of a run with other metadata.

  Attributes:
    differences: by name, the value in the checkpoint and the one here.
  """

  def __init__(
    self, differences: dict[str, tuple[Any, Any]], argument: str = "metadata"
  ):
    """Tells of all that differs, in what argument."""
    told = ", ".join(
      f"`{name}` is {there!r} there and {here!r} here"
      for name, (there, here) in differences.items()
    )
    super().__init__(
      f"`{argument}` must be that of the checkpoint, but {told}. Resume with "
      "the same options, or start anew in another directory."
    )
    self.differences = differences
    self._argument = argument

  def __reduce__(self) -> tuple[Any, ...]:
    """Lets it come from another process."""
    return type(self), (self.differences, self._argument)


def check_same_run(
  found: Mapping[str, Any],
  metadata: Mapping[str, Any],
  *,
  free: Collection[str] = (),
  argument: str = "metadata",
) -> None:
  """Raises an OtherRunError if a checkpoint's metadata are of another run.

  Args:
    found: in the checkpoint, as JSON keeps them.
    metadata: of this run; those of one alone differ, too.
    free: names in them that may have other values.
    argument: what the caller calls them.
  """
  metadata = json.loads(json.dumps(dict(metadata)))  # Tuples become lists.
  differences = {
    name: (found.get(name), metadata.get(name))
    for name in sorted((found.keys() | metadata.keys()) - set(free))
    if _differ(found.get(name), metadata.get(name))
  }
  if differences:
    raise OtherRunError(differences, argument)


def _differ(there: Any, here: Any) -> bool:
  """Returns whether values differ; a NaN is equal to a NaN here."""
  if there == here:
    return False
  one, other = (json.dumps(x, sort_keys=True) for x in (there, here))
  return one != other


def check_is_json(metadata: Any) -> None:
  """Raises a ValueError unless metadata are None or a dict of JSON's values."""
  checks.check_type("metadata", metadata, dict | None, "a dict or None")
  sealed_json.check("metadata", metadata)
