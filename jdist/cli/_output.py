"""The directory, the console and the warnings of a command."""

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
  """Makes the named directory, or a new one under runs/."""
  now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  path = pathlib.Path(output or f"runs/{label}-{now}")
  make_directory("--output", path)
  return path


def make_directory(option: str, path: str | pathlib.Path) -> None:
  """Makes a directory that an option names, and checks that it is writable."""
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


def print_files(output: pathlib.Path, **names: str) -> None:
  """Prints where files are, with `Rows: PATH` for `rows="PATH"`."""
  # Not through Rich's console, which would break long paths into lines.
  for title, name in names.items():
    print(f"{title}: {output / name}")


def grid(title: str, caption: str, first: str, *others: str) -> Any:
  """Returns a table for the console, with numbers in all columns but one."""
  from rich import table

  made = table.Table(title=title, caption=caption)
  made.add_column(first, no_wrap=True)
  for name in others:
    made.add_column(name, justify="right")
  return made


@contextlib.contextmanager
def warnings_in_a_line() -> Iterator[None]:
  """Shows jdist's own warnings like its errors, without a line of source."""
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
  """Returns a console that is as wide in a file or a pipe as a table needs."""
  from rich import console

  return console.Console(
    width=None if sys.stdout.isatty() else 100, highlight=False
  )
