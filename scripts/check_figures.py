"""Checks that the figures of the pages follow from the experiments' rows.

    python scripts/check_figures.py                           # all pages
    python scripts/check_figures.py README.md experiments/mp2 # some

A figure is a number with a decimal point, in the text or a table of a page: of
README.md, of docs/ and of all pages of the experiments but HISTORY.md; in the
tables of README.md and of the experiments it is any number, but one within a
word.  These tables' lines are traced if all their figures are, in this order,
in one line that a report prints from the rows (`REPORTS`).  The figures of a
line of a table in docs/, and those of an interval in the text, are traced if
they are together in one printed line, or in one row, rounded as they are shown,
as they are, in percent, or in thousands or millions.  Any other figure of the
text is traced if a report prints it, or if it is a setting: of a row's config,
or its learning rate.
Signs count.  The figures may also be those of an experiment that a page links
to.  A comment names the figures of a paper, `paper: 88.98`.
"""

import argparse
import contextlib
import functools
import io
import json
import pathlib
import re
import runpy
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"

# What prints a page's figures: a program and its arguments.
REPORTS: dict[str, tuple[tuple[str, ...], ...]] = {
  "compression": (
    ("report.py", "cifar10"),
    ("report.py", "cifar10-mlp"),
    ("report.py", "cifar10-longer"),
    ("report.py", "codecs"),
  ),
  "dbs_sgd": (
    ("report.py", "mnist"),
    ("report.py", "cifar10"),
    ("report.py", "clock"),
    ("protocols_report.py", "--check"),
  ),
  "first_comparison": (("report.py",),),
  "failures": (("report.py", "mnist"), ("scale.py", "--check")),
  "gpu": (("report.py",),),
  "h_ps": (
    ("report.py",),
    ("report.py", "mnist"),
    ("report.py", "cifar10", "0.4"),
    ("report.py", "cifar10-cosine", "0.58"),
    ("report.py", "cifar10-mlp"),
    ("workers_report.py",),
  ),
  "mp2": (
    ("report.py", "mnist", "--accuracy", "96", "98"),
    ("report.py", "cifar10", "--accuracy", "50", "55", "60"),
  ),
  "msdpu": (
    ("report.py", "cifar10"),
    ("report.py", "mnist"),
    ("report.py", "mnist-mlp"),
    ("report.py", "cifar10-mlp"),
    ("report.py", "cifar10-20"),
    ("report.py", "cifar10-20-protocol"),
    ("report.py", "cifar10-20-parts"),
    ("report.py", "mnist-10"),
    ("report.py", "cifar10-parts"),
    ("report.py", "cifar10-skewed"),
    ("report.py", "overlap"),
    ("slow_links.py", "report"),
    ("stability.py",),
  ),
  "pipeline": (
    *(("report.py", name) for name in ("hosts", "many", "thin")),
    *(
      ("accuracy_report.py", name)
      for name in (
        "cifar10",
        "cifar10-long",
        "cifar10-batch16",
        "text",
        "text-long",
      )
    ),
    ("measured_report.py",),
    ("equal_accuracy.py", "hosts", "report"),
    ("full_use.py", "hosts", "report"),
    ("planner.py", "report"),
    ("late_sends.py", "report"),
  ),
  "records": (("report.py", "--check"),),
  "successor": (("report.py", "--check"),),
  "advise": (("report.py", "--check"),),
  "peers": (("report.py", "--check"),),
  "storm": (("report.py", "--check"),),
  "thin_links": (("report.py", "--check"),),
}

_NUMBER = r"[-+−]?\d[\d,]*\.\d+"
_FIGURE = re.compile(rf"(?<![\w.,/-])({_NUMBER})(?![\w]*[./]\d)")
_ANY = re.compile(
  r"(?<![\w.,/-])([-+−]?\d[\d,]*(?:\.\d+)?)(?!\w*[./]\d|[\dA-Wa-wYyZz])"
)
_INTERVAL = re.compile(
  rf"{_NUMBER}(?:\s+points)?\s+\({_NUMBER}\s+to\s+{_NUMBER}\)"
  rf"|{_NUMBER}\s+(?:±|to)\s+{_NUMBER}"
)
_PAPER = re.compile(r"<!-- paper: (.*?) -->", re.DOTALL)
_LINK = re.compile(r"\]\((?:\.\./)*(?:experiments/)?(\w+)/")
_UNREAD = re.compile(
  r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+|arXiv:?\s*[\d.]+"
  r"|doi [\d./]+|\[\d{4}\.\d{4,5}\]|Python [\d.]+",
  re.DOTALL,
)
# A row's numbers as pages show them.
_SCALES = (1.0, 100.0, 1e-6, 1e-3, 1e3)


class Page(NamedTuple):
  """A page's figures.

  Attributes:
    name: of its file, below the repository's root.
    figures: how many there are.
    untraced: those that follow from nothing, in their order.
  """

  name: str
  figures: int
  untraced: tuple[str, ...]


@functools.cache
def printed(folder: pathlib.Path, command: tuple[str, ...]) -> str:
  """Runs a report here without drawing, and returns what it prints."""
  before, argv, path = set(sys.modules), sys.argv, list(sys.path)
  program, *arguments = command
  out = io.StringIO()
  sys.argv = [str(folder / program), *arguments]
  sys.path.insert(0, str(folder))
  try:
    with _nothing_drawn(), contextlib.redirect_stdout(out):
      runpy.run_path(str(folder / program), run_name="__main__")
  except (Exception, SystemExit) as error:  # What it printed still counts.
    print(f"{folder.name}/{program} failed: {error!r}", file=sys.stderr)
  finally:
    sys.argv, sys.path[:] = argv, path
    for name in set(sys.modules) - before:  # `config` is another's, too.
      file = getattr(sys.modules[name], "__file__", None) or ""
      if file.startswith(str(folder)):
        del sys.modules[name]
  return out.getvalue()


@contextlib.contextmanager
def _nothing_drawn() -> Iterator[None]:
  from matplotlib import figure

  kept = figure.Figure.savefig
  figure.Figure.savefig = lambda *args, **options: None  # type: ignore[method-assign]
  try:
    yield
  finally:
    figure.Figure.savefig = kept  # type: ignore[method-assign]


def numbers(value: Any) -> Iterator[float]:
  """Finds the numbers of a row, without the curves of its run."""
  if isinstance(value, bool) or value is None:
    return
  if isinstance(value, int | float):
    yield float(value)
  elif isinstance(value, dict):
    for key, child in value.items():
      if key not in ("curve", "commit"):
        yield from numbers(child)
  elif isinstance(value, list):
    for child in value[:50]:
      yield from numbers(child)


@functools.cache
def shown(value: float) -> set[str]:
  """Returns a row's number in all forms in which a page may show it."""
  signed = "-" if value < 0 else "+"
  scaled = [abs(value) * scale for scale in _SCALES]
  found = {f"{x:.{digits}f}" for x in scaled for digits in range(1, 5)}
  return found | {signed + x for x in found}


@functools.cache
def rows_of(folder: pathlib.Path) -> list[Any]:
  """Reads the rows of an experiment."""
  return [
    json.loads(line)
    for path in sorted(folder.glob("results/**/*.jsonl"))
    for line in path.read_text().splitlines()
  ]


@functools.cache
def settings_of(folder: pathlib.Path) -> set[str]:
  """Finds what an experiment's rows were made with, as it is."""
  found: set[float] = set()
  for row in rows_of(folder):
    found |= set(numbers([row.get("config"), row.get("learning_rate")]))
  return {f"{abs(x):.10f}".rstrip("0") for x in found}


def figures_of(text: str, pattern: re.Pattern[str] = _FIGURE) -> list[str]:
  """Finds the figures of a page or of what a report prints, signs included."""
  found = pattern.findall(_UNREAD.sub(" ", text))
  return [x.rstrip(",").replace(",", "").replace("−", "-") for x in found]


class Units(NamedTuple):
  """The figures of a page: of tables' lines, of intervals, and the others."""

  lines: list[list[str]]
  intervals: list[list[str]]
  others: list[str]


def units_of(text: str, whole: bool) -> Units:
  """Finds the figures of a page that belong together, and the others.

  The numbers of tables' lines are whole ones, too, if `whole` says so.
  """
  readable = _UNREAD.sub(lambda x: "\n" * x[0].count("\n"), text)
  cells, prose = [], ""
  for line in readable.splitlines():
    if line.lstrip().startswith("|"):
      cells.append(figures_of(line, _ANY if whole else _FIGURE))
    else:
      prose += line + "\n"
  between = [figures_of(x[0]) for x in _INTERVAL.finditer(prose)]
  return Units(cells, between, figures_of(_INTERVAL.sub(" ", prose)))


class Printed:
  """The lines that reports print, and the numbers in them."""

  def __init__(self, lines: list[str]):
    """Reads lines."""
    self.lines = [figures_of(line, _ANY) for line in lines]
    self._with: dict[str, set[int]] = {}
    for i, line in enumerate(self.lines):
      for x in line:
        for form in (x, x.lstrip("+-")):
          self._with.setdefault(form, set()).add(i)

  def has(self, figures: list[str]) -> bool:
    """Returns whether one line has all figures, in their order.

    A single one, which many lines have, must be the only one of its line.
    """
    if len(figures) == 1:
      return figures in self.lines
    where = [self._with.get(x, set()) for x in figures]
    return any(
      _in_order(figures, self.lines[i]) for i in set.intersection(*where)
    )


def _in_order(figures: list[str], line: list[str]) -> bool:
  rest = iter(line)
  return all(any(x in (y, y.lstrip("+-")) for y in rest) for x in figures)


def check(page: pathlib.Path) -> Page:
  """Traces the figures of a page."""
  text = page.read_text()
  # Of its own experiment, and of those that it refers to.
  names = dict.fromkeys([page.parent.name, *_LINK.findall(text)])
  folders = [EXPERIMENTS / name for name in names if name in REPORTS]
  said = [
    line
    for folder in folders
    for command in REPORTS[folder.name]
    for line in printed(folder, command).splitlines()
  ]
  lines = [
    {form for x in figures_of(line) for form in (x, x.lstrip("+-"))}
    for line in said
  ]
  paper = {x for found in _PAPER.findall(text) for x in found.split()}
  whole = page.parent.name != "docs"
  units = units_of(text, whole)
  anywhere = paper.union(*lines, *map(settings_of, folders))
  tables, left = (
    [y for found in x if (y := [z for z in found if z not in paper])]
    for x in units[:2]
  )
  left += [] if whole else tables
  left = [x for x in left if not any(line.issuperset(x) for line in lines)]
  for folder in folders if left else ():
    for row in rows_of(folder):
      own = set().union(*map(shown, set(numbers(row))))
      left = [x for x in left if not own.issuperset(x)]
  if whole:
    known = Printed(said)
    left += [x for x in tables if not known.has(x)]
  untraced = [x for found in left for x in found]
  untraced += [x for x in units.others if x not in anywhere]
  number = len(units.others) + sum(map(len, units.lines + units.intervals))
  return Page(str(page.relative_to(ROOT)), number, tuple(untraced))


def pages(names: list[str]) -> list[pathlib.Path]:
  """Lists the pages that are checked, below some paths if given."""
  found = [*ROOT.glob("README.md"), *sorted(ROOT.glob("docs/*.md"))]
  found += sorted(EXPERIMENTS.glob("*/*.md"))
  return [
    page
    for page in found
    if page.name != "HISTORY.md"
    and (not names or any(page.is_relative_to(ROOT / name) for name in names))
  ]


def main() -> int:
  """Prints a line for each page; returns how many have untraced figures."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("paths", nargs="*", help="all if not given")
  bad = 0
  for page in map(check, pages(parser.parse_args().paths)):
    print(f"{page.name}: {page.figures} figures")
    if page.untraced:
      bad += 1
      print(f"  without a row: {' '.join(page.untraced)}")
  return bad


if __name__ == "__main__":
  raise SystemExit(main())
