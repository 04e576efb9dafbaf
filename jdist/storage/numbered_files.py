"""Checkpoints by their numbers, of which the newest whole one counts."""

import pathlib
import re
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

from jdist import signatures
from jdist.storage import hashes, plain_data

T = TypeVar("T")
_NAME = re.compile(r"(step_|update_)(\d{8,})(.*)")  # A trainer's or a server's.


@signatures.checked
def find(
  folder: pathlib.Path, prefix: str, ending: str = ""
) -> dict[int, pathlib.Path]:
  """Returns paths in a directory by the number in their names, newest first.

  The directory need not exist. It may not have names of another prefix.
  """
  paths = sorted(folder.iterdir(), reverse=True) if folder.exists() else []
  found = [(x, path) for path in paths if (x := _NAME.fullmatch(path.name))]
  for other in (path for name, path in found if name[1] != prefix):
    raise ValueError(
      "`directory` must have checkpoints of trainers or of servers alone, got "
      f"{other}. Take another directory."
    )
  numbers = ((int(x[2]), path) for x, path in found if x[3] == ending)
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
