"""Rows of code that can be checked out."""

import pathlib

from jdist import training
from jdist.training import comparison


def check_commit(commit: str) -> None:
  """Raises a ValueError unless a commit names code that can be checked out."""
  if not commit or commit == "unknown" or commit.endswith("+"):
    raise ValueError(
      f"`commit` must name a clean checkout, got {commit!r}: commit the "
      "changes, or give `--commit` where this is a copy without history."
    )


def read(path: pathlib.Path, *, clean: bool = True) -> list[comparison.Row]:
  """Reads rows, none if there is no file.

  Raises:
    ValueError: if they must be `clean` and one is of unknown or changed code.
  """
  rows = training.read_rows(path) if path.exists() else []
  for row in rows if clean else ():
    check_commit(row["commit"])
  return rows
