"""Checkpoints by their numbers, of which the newest whole one counts."""

import pathlib
import re
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

from jdist.storage import hashes, plain_data

T = TypeVar("T")


def find(folder: pathlib.Path, name: str) -> dict[int, pathlib.Path]:
  """Returns paths in a directory by number, the newest first.

  Args:
    folder: The directory, which need not exist.
    name: A regular expression of their names, whose first group is the number;
      a trainer's begin with "step_", and a server's with "update_".
  """
  paths = [*folder.iterdir()] if folder.exists() else []
  other = r"update_\d{8}" if name.startswith("step_") else r"step_\d{8}"
  if others := sorted(x for x in paths if re.match(other, x.name)):
    raise ValueError(
      "`directory` must have checkpoints of trainers or of servers alone, got "
      f"{others[-1]}. Take another directory."
    )
  found = ((re.fullmatch(name, path.name), path) for path in paths)
  numbers = ((int(match[1]), path) for match, path in found if match)
  return dict(sorted(numbers, reverse=True))


def read_newest(
  paths: Iterable[pathlib.Path], read: Callable[[pathlib.Path], T]
) -> T | None:
  """Returns the first result of `read` that raises no error of damage.

  It warns of each damaged checkpoint, and returns None without a whole one.
  """
  for path in paths:
    try:
      return read(path)
    except (
      OSError, hashes.DamagedError, plain_data.PlainDataError
    ) as error:  # fmt: skip
      warnings.warn(
        f"Checkpoint {path} is damaged ({getattr(error, 'reason', error)}); "
        "the one before it is used, if there is one.",
        stacklevel=4,
      )
  return None
