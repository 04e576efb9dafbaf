"""Metadata in checkpoints, which a resumed run must have in common."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from jdist import signatures
from jdist.storage import sealed_json


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


def as_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a dict as a file of JSON holds it, with lists for tuples."""
  sealed_json.check(name, dict(value))
  return dict(json.loads(json.dumps(dict(value))))


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
  metadata = as_json("metadata", metadata)
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
