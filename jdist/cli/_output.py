"""The directory and the console to which a command writes its results."""

import contextlib
import datetime
import os
import pathlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_PACKAGE = pathlib.Path(__file__).parent.parent


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


@contextlib.contextmanager
def warnings_in_a_line() -> Iterator[None]:
  """Shows jdist's own warnings as its errors are, without a line of source."""
  before = warnings.formatwarning

  def show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
  ) -> str:
    if not pathlib.Path(filename).is_relative_to(_PACKAGE):
      return before(message, category, filename, lineno, line)
    return f"jdist: warning: {' '.join(str(message).split())}\n"

  warnings.formatwarning = show
  try:
    yield
  finally:
    warnings.formatwarning = before


def console() -> Any:
  """Returns a console as wide as the tables in a file or a pipe."""
  from rich import console

  return console.Console(
    width=None if sys.stdout.isatty() else 100, highlight=False
  )
