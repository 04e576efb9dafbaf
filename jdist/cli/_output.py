"""The directory and the console to which a command writes its results."""

import datetime
import os
import pathlib
import sys
from typing import Any


def output_directory(output: str | None, label: str) -> pathlib.Path:
  """Makes the directory that is named, or a new one under runs/."""
  now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  path = pathlib.Path(output or f"runs/{label}-{now}")
  make_directory("--output", path)
  return path


def make_directory(option: str, path: str | pathlib.Path) -> None:
  """Makes a directory that the user has named, and that takes files."""
  try:
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    if os.access(path, os.W_OK):
      return
    reason = "not writable"
  except OSError as error:
    reason = str(error.strerror).lower()
  raise ValueError(
    f"`{option}` {path} cannot be used: {reason}. Take another directory."
  )


def console() -> Any:
  """Returns a console as wide as the tables in a file or a pipe."""
  from rich import console

  return console.Console(
    width=None if sys.stdout.isatty() else 100, highlight=False
  )
