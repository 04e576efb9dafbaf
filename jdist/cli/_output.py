"""The directory and the console to which a command writes its results."""

import datetime
import pathlib
import sys
from typing import Any

from jdist.cli import _experiment


def make_directory(output: str | None, label: str) -> pathlib.Path:
  """Makes the directory that is named, or a new one under runs/."""
  now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  path = pathlib.Path(output or f"runs/{label}-{now}")
  _experiment.make_directory("--output", path)
  return path


def console() -> Any:
  """Returns a console as wide as the tables in a file or a pipe."""
  from rich import console

  return console.Console(
    width=None if sys.stdout.isatty() else 100, highlight=False
  )
