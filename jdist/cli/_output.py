"""The directory, the console and the warnings of a command."""

import contextlib
import datetime
import importlib.util
import io
import os
import pathlib
import select
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jdist import checks
from jdist.cli import _options
from jdist.storage import json_lines

_PACKAGE = pathlib.Path(__file__).parent.parent


def output_directory(output: str | None, label: str) -> pathlib.Path:
  """Makes the named directory, or a new one under runs/."""
  # Two runs in one second share a directory, and append their rows.
  now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  path = pathlib.Path(output or f"runs/{label.replace(':', '-')}-{now}")
  make_directory("--output", path)
  return path


def make_directory(option: str, path: str | pathlib.Path) -> None:
  """Makes a directory that an option names, and checks that it is writable."""
  cause = None
  try:
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    # A directory can exist and be read-only: training would fail at its end.
    if os.access(path, os.W_OK):
      return
    reason = "not writable"
  except OSError as error:
    reason, cause = str(error.strerror).lower(), error
  raise ValueError(
    f"`{option}` {path} cannot be used: {reason}. Take another directory."
  ) from cause


def finish(
  output: pathlib.Path, options: Any, *, timelines: bool = False
) -> None:
  """Writes the page of a directory, and prints where everything is."""
  status = output / "status.json"
  if not status.exists():
    command = _options.command_line(options, output)
    json_lines.write(status, [{"state": "ended", "command": command}])
  # Rich's console would break a long path into lines.
  print(f"Rows: {output / 'rows.jsonl'}")
  if timelines:
    print(f"Timelines for https://ui.perfetto.dev: {output}/*.json")
  if importlib.util.find_spec("vl_convert"):
    # The import takes long.
    from jdist.cli.report import _page

    print(f"Report: {_page.write(output, options)}")
  else:
    print(f"No report was made. {checks.install({'vl_convert': 'report'})}")


def table(
  title: str,
  caption: str,
  columns: Mapping[str, Callable[..., str]],
  items: Iterable[Any],
  *,
  left: int = 1,
) -> Any:
  """Returns a table for the console, with a row for each item.

  A column's function shows an item, or a tuple as several arguments. The first
  `left` columns are text, and the others are aligned like numbers. On a narrow
  console headings wrap first, then cells but the first ones, and no word.
  """
  # The import takes long, and only some commands draw tables.
  from rich import table

  given = [item if isinstance(item, tuple) else (item,) for item in items]
  first, *others = cells = [
    [x, *(show(*one) for one in given)] for x, show in columns.items()
  ]
  ways = [
    [max(map(len, own)) for own in cells],
    [max([_longest(own[0]), *map(len, own[1:])]) for own in cells],
    [max(map(len, first)), *(max(map(_longest, own)) for own in others)],
  ]
  fitting = (
    (way, padding)
    for padding in (1, 0)
    for way in ways[: 3 - padding]
    if sum(way) + (2 * padding + 1) * len(cells) < console().width
  )
  widths, padding = next(fitting, (ways[-1], 0))
  grid = table.Table(title=title, caption=caption, padding=(0, padding))
  for number, (own, width) in enumerate(zip(cells, widths, strict=True)):
    side: Any = "left" if number < left else "right"
    grid.add_column(own[0], justify=side, width=width, overflow="fold")
  for row in zip(*(own[1:] for own in cells), strict=True):
    grid.add_row(*row)
  return grid


def _longest(text: str) -> int:
  return max(map(len, text.split()), default=0)


@contextlib.contextmanager
def warnings_in_a_line() -> Iterator[None]:
  """Shows jdist's own warnings like its errors, without a line of source."""
  before = warnings.formatwarning

  # Warnings of other packages keep their form: their users need the line.
  def show(message: Any, category: Any, filename: str, *place: Any) -> str:
    if not pathlib.Path(filename).is_relative_to(_PACKAGE):
      return before(message, category, filename, *place)
    return f"jdist: warning: {' '.join(str(message).split())}\n"

  warnings.formatwarning = show  # type: ignore[assignment]
  try:
    yield
  finally:
    warnings.formatwarning = before


def is_unread(error: OSError) -> bool:
  """Returns whether an error is of unread output, and drops such output."""
  poll = select.poll()
  try:
    poll.register(sys.stdout, 0)
    sys.stdout.flush()
  except io.UnsupportedOperation:  # It is a notebook's, and no file.
    return False
  except OSError:  # Python would try once more, and change the status.
    sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
  return isinstance(error, BrokenPipeError) and bool(poll.poll(0))


def doing(what: str) -> Any:
  """Returns a context that shows on a terminal what takes its time."""
  # The import takes long.
  from rich import console

  return console.Console(file=sys.stderr).status(what)


def console() -> Any:
  """Returns a console that is as wide in a file or a pipe as a table needs."""
  from rich import console

  return console.Console(
    width=None if sys.stdout and sys.stdout.isatty() else 100, highlight=False
  )
