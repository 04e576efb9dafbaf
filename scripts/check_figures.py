"""Checks that the figures of the experiments' pages follow from their rows.

    python scripts/check_figures.py                 # all pages
    python scripts/check_figures.py msdpu --show    # and what is untraced

A figure is a number with a decimal point, in the text or a table of a page.  A
line of a table is traced if all its figures are in one line that a report
prints from the rows (`REPORTS`), or in one row, rounded as they are shown, as
they are, in percent, or in thousands or millions.  A figure of the text is
traced if a report prints it.  What a paper says is told by a comment, `paper:
88.98`.  A page may have so many other figures as `UNTRACED` says, never more.
"""

import argparse
import contextlib
import io
import json
import pathlib
import re
import runpy
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent / "experiments"

# What prints a page's figures: a program and its arguments.
REPORTS: dict[str, tuple[tuple[str, ...], ...]] = {
  "compression": (
    ("report.py", "cifar10"),
    ("report.py", "cifar10-mlp"),
    ("report.py", "cifar10-longer"),
    ("report.py", "codecs"),
  ),
  "dbs_sgd": (("report.py", "mnist"), ("report.py", "cifar10")),
  "first_comparison": (("report.py",),),
  "failures": (("report.py", "mnist"),),
  "h_ps": (
    ("report.py",),
    ("report.py", "mnist"),
    ("report.py", "cifar10", "0.4"),
    ("workers_report.py",),
  ),
  "mp2": (
    ("report.py", "mnist", "--accuracy", "96", "98"),
    ("report.py", "cifar10", "--accuracy", "50", "55", "60"),
  ),
  "msdpu": (
    ("report.py", "cifar10"),
    ("report.py", "mnist"),
    ("report.py", "cifar10-skewed"),
    ("stability.py",),
  ),
  "pipeline": (
    *(("report.py", name) for name in ("hosts", "many", "thin")),
    *(
      ("accuracy_report.py", name)
      for name in ("cifar10", "cifar10-batch16", "text")
    ),
    ("measured_report.py",),
    ("planner.py", "report"),
    ("late_sends.py", "report"),
  ),
}

_FIGURE = re.compile(r"(?<![\w.,/-])[-+−]?(\d[\d,]*\.\d+)(?![\w]*[./]\d)")
_PAPER = re.compile(r"<!-- paper: (.*?) -->", re.DOTALL)
_UNREAD = re.compile(
  r"```.*?```|`[^`\n]*`|<!--.*?-->|\]\([^)]*\)|https?://\S+|arXiv:?\s*[\d.]+"
  r"|doi [\d./]+",
  re.DOTALL,
)
# A row's numbers as pages show them.
_SCALES = (1.0, 100.0, 1e-6, 1e-3, 1e3)


class Page(NamedTuple):
  """A page's figures.

  Attributes:
    name: of its file, below `experiments`.
    figures: how many there are.
    untraced: those that follow from nothing, in their order.
  """

  name: str
  figures: int
  untraced: tuple[str, ...]


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
  except Exception as error:  # What it printed before still counts.
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


def shown(value: float) -> set[str]:
  """Returns a row's number in all forms in which a page may show it."""
  scaled = [abs(value) * scale for scale in _SCALES]
  return {f"{x:.{digits}f}" for x in scaled for digits in range(1, 5)}


def rows_of(folder: pathlib.Path) -> Iterator[set[str]]:
  """Reads the figures that each row of an experiment holds."""
  for path in sorted(folder.glob("results/**/*.jsonl")):
    for line in path.read_text().splitlines():
      found: set[str] = set()
      for value in set(numbers(json.loads(line))):
        found |= shown(value)
      yield found


def figures_of(text: str) -> list[str]:
  """Finds the figures of a page or of what a report prints."""
  return [x.replace(",", "") for x in _FIGURE.findall(_UNREAD.sub(" ", text))]


def check(folder: pathlib.Path) -> list[Page]:
  """Traces the figures of all pages of an experiment but its history."""
  pages = [x for x in sorted(folder.glob("*.md")) if x.name != "HISTORY.md"]
  texts = {page: page.read_text() for page in pages}
  # Also of experiments that a page refers to.
  linked = {
    name
    for text in texts.values()
    for name in re.findall(r"\]\(\.\./(\w+)/", text)
  }
  told = [
    set(figures_of(line))
    for name in (folder.name, *sorted(linked - {folder.name}))
    for command in REPORTS.get(name, ())
    for line in printed(folder.parent / name, command).splitlines()
  ]
  return [_traced(folder, page, text, told) for page, text in texts.items()]


def _traced(
  folder: pathlib.Path, page: pathlib.Path, text: str, told: list[set[str]]
) -> Page:
  paper = {x for found in _PAPER.findall(text) for x in found.split()}
  anywhere = paper.union(*told)
  readable = _UNREAD.sub(lambda x: "\n" * x[0].count("\n"), text)
  figures, left, lines = 0, [], []
  for line in readable.splitlines():
    found = figures_of(line)
    figures += len(found)
    if not line.lstrip().startswith("|"):
      left += [x for x in found if x not in anywhere]
    elif (rest := set(found) - paper) and not any(rest <= one for one in told):
      lines.append((found, rest))
  if lines:
    for row in rows_of(folder):
      lines = [(found, rest) for found, rest in lines if not rest <= row]
  left += [x for found, rest in lines for x in found if x in rest]
  return Page(f"{folder.name}/{page.name}", figures, tuple(left))


def main() -> int:
  """Prints a line for each page; returns how many have too many untraced."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("experiments", nargs="*", help="of all if not given")
  parser.add_argument("--show", action="store_true", help="the untraced ones")
  options = parser.parse_args()
  names = options.experiments or sorted(
    path.parent.name for path in ROOT.glob("*/README.md")
  )
  bad = 0
  for name in names:
    for page in check(ROOT / name):
      most = UNTRACED.get(page.name)
      wrong = most is not None and len(page.untraced) > most
      bad += wrong
      print(
        f"{page.name}: {page.figures} figures, {len(page.untraced)} untraced, "
        f"{'not held' if most is None else f'at most {most}'}"
      )
      if options.show or wrong:
        print("  " + " ".join(page.untraced))
  return bad


# Figures that no report prints yet, at most; fewer are better.  Pages that are
# not here are told and not held: their reports do not print all their tables.
UNTRACED: dict[str, int] = {
  "compression/README.md": 2,
  "dbs_sgd/README.md": 1,
  "failures/README.md": 0,
  "first_comparison/README.md": 0,
  "h_ps/RAY.md": 0,
  "h_ps/README.md": 1,
  "mp2/README.md": 0,
  "msdpu/README.md": 0,
  "pipeline/ACCURACY.md": 0,
  "pipeline/LATE_SENDS.md": 0,
  "pipeline/TABLES.md": 0,
  "pipeline/MEASURED.md": 0,
  "pipeline/README.md": 0,
}

if __name__ == "__main__":
  raise SystemExit(main())
