"""Tables break no word and no number, on consoles of 80 columns and wider."""

import re
import warnings

import pytest

from jdist.cli import _output

_HEADINGS = (
  "method", "ms a step", "± %", "faster", "waits %", "kB a step", "adds ms",
  "pays", "below Mbit/s",
)  # fmt: skip
_CELLS = (
  "msdpu H=8 int4 streamed", "43.62", "32", "11.75x", "100", "1,431.9",
  "0.0154", "yes", "9,850",
)  # fmt: skip


def drawn(width, monkeypatch, headings=_HEADINGS, cells=_CELLS):
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  monkeypatch.setenv("COLUMNS", str(width))
  columns = {x: lambda *row, i=i: row[i] for i, x in enumerate(headings)}
  grid = _output.table("Title", "Caption", columns, [cells], left=1)
  screen = _output.console()
  with screen.capture() as captured:
    screen.print(grid)
  # Bold type.
  lines = re.sub("\x1b[^m]*m", "", captured.get()).splitlines()
  assert max(map(len, lines)) <= width
  rows = [x.strip("┃│").replace("│", "┃").split("┃") for x in lines]
  rows = [x for x in rows if len(x) == len(headings)]
  return [[x.strip() for x in one] for one in zip(*rows, strict=True)]


@pytest.mark.parametrize("width", [80, 110])
def test_words_and_numbers_stay_whole(width, monkeypatch):
  found = drawn(width, monkeypatch)
  for column, heading, cell in zip(found, _HEADINGS, _CELLS, strict=True):
    assert " ".join(filter(None, column)) == f"{heading} {cell}"
    # A row is a line.
    assert cell in column


def test_cells_wrap_where_headings_do_not_suffice(monkeypatch):
  headings = ("stage", "layers", "seconds", "staleness")
  cells = ("0", " ".join(["stage0_conv"] * 9), "0.003576", "0.50 / 0.25 / 3")
  number, *found = drawn(40, monkeypatch, headings, cells)
  assert [x for x in number if x] == ["stage", "0"]
  for column, heading, cell in zip(found, headings[1:], cells[1:], strict=True):
    assert " ".join(filter(None, column)) == f"{heading} {cell}"


def test_warnings_of_this_package_are_lines():
  """Other packages' users need the line of source."""
  before, own = warnings.formatwarning, _output.__file__
  with _output.warnings_in_a_line():
    line = warnings.formatwarning("a\n  b", UserWarning, own, 7)
    other = warnings.formatwarning("a", UserWarning, "/elsewhere/x.py", 7)
  assert line == "jdist: warning: a b\n"
  assert other == before("a", UserWarning, "/elsewhere/x.py", 7)
  assert warnings.formatwarning is before


def test_cells_stay_whole_without_padding_rather_than_wrap(monkeypatch):
  """At 41 columns they fit without it, and broken ones with it."""
  headings, cells = ("a", "b"), ("x" * 8, "pqrst " * 4 + "uvwxyz")
  for width, lines in ((44, 1), (41, 1), (30, 5)):
    found = drawn(width, monkeypatch, headings, cells)
    # The heading is a line of its own.
    assert len(found[1]) == 1 + lines


def test_a_console_without_an_output_is_silent(monkeypatch):
  # Python has None for an output that was closed when it started.
  monkeypatch.setattr("sys.stdout", None)
  _output.console().print("a table")
