"""Breaks lines of the library, one at a time, and sees whether a test fails.

    python scripts/mutate.py --map tests/server          # first, and again
    python scripts/mutate.py jdist/server --number 20    # 20 mutants of a room
    python scripts/mutate.py jdist/server/_weights.py:89 # all of some lines

A mutant is one change: an operator is swapped, a number moved by one, a
condition negated, a statement removed, an argument dropped or a default
changed.  It lives in a copy of the tracked files, so that the working tree
stays as it is.  It is killed if a test of the default set fails or does not
end, and survives otherwise: either a test is missing, or nothing that the
library promises depends on that line.

`--map` runs the tests of some folders and notes which file of tests comes
through which line; a mutant is tried by these files, those of its own room and
the fastest first.  With `--near N` no map is needed: a mutant is tried by the
doctests of its file and the N files of its room's tests whose names have most
words of its own.  Each verdict is a row of `--results`: what has one is not
tried again, so a run that was interrupted continues.  A changed line is another
mutant.

Python 3.12 or newer is needed for `--map`.
"""

import argparse
import ast
import collections
import contextlib
import copy
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
# As in `.ci/run`: some tests compare bits, and processors differ.
XLA_FLAGS = (
  "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX "
  "--xla_cpu_parallel_codegen_split_count=1"
)
_OUTPUT = "output.txt"
_STATING = re.compile(r"tests/(cli/test_options|test_\w+)\.py")
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
  ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
  ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
  ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Lt: ast.LtE,
  ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
  ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
  """One change of one file.

  Attributes:
    path: The file, relative to the root.
    line: The line of the changed node, from 1.
    lines: Lines by which tests are chosen: the node's own or, where these run
      when the module is imported, those of the function around it.
    kind: What is changed, and which of the equal ones in the file.
    old: The source of the changed node.
    new: What replaces it.
    start: The first character of the node in the file.
    imported: Whether the node runs when the module is imported.
  """

  path: str
  line: int
  lines: tuple[int, ...]
  kind: str
  old: str
  new: str
  start: int
  imported: bool = False

  @property
  def name(self) -> str:
    """The mutant without the place, which changes of other lines move."""
    return f"{self.path} {self.kind}: {self.old!r} -> {self.new!r}"

  def apply(self, text: str) -> str:
    """Returns the text of the file with the change."""
    end = self.start + len(self.old)
    assert text[self.start : end] == self.old, self
    return text[: self.start] + self.new + text[end:]


def mutants(path: str, text: str) -> Iterator[Mutant]:
  """Yields all mutants of a file."""
  tree = ast.parse(text)
  starts = [0]
  for line in text.splitlines(keepends=True):
    starts.append(starts[-1] + len(line))
  function: list[ast.AST] = []
  times: collections.Counter[Any] = collections.Counter()

  def one(node: Any, kind: str, new: str) -> Mutant:
    # Offsets of the tree count bytes; the library is written in ASCII.
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    lines = range(node.lineno, node.end_lineno + 1)
    imported = not function
    if function:
      # A default, as a decorator, runs when the module is imported.
      body: Any = function[-1]
      if node.lineno < body.body[0].lineno:
        lines = range(body.body[0].lineno, body.end_lineno + 1)
        imported = True
    old = text[start:end]
    times[kind, old, new] += 1
    kind += f" {times[kind, old, new]}"
    return Mutant(
      path, node.lineno, tuple(lines), kind, old, new, start, imported
    )

  def visit(node: Any) -> Iterator[Mutant]:
    # What an error says is pinned by few words, and an annotation by mypy.
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
      return
    if isinstance(node, ast.keyword) and node.arg in ("strict", "stacklevel"):
      return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      return
    for kind, changed in _changes(node):
      target = changed[0]
      new = "pass" if changed[1] is None else f"({ast.unparse(changed[1])})"
      if isinstance(target, ast.Constant | ast.Call):
        new = new[1:-1]
      yield one(target, kind, new)
    inside = isinstance(node, ast.FunctionDef)
    if inside:
      function.append(node)
    for name, value in ast.iter_fields(node):
      if name in ("annotation", "returns", "decorator_list"):
        continue
      for child in value if isinstance(value, list) else [value]:
        if isinstance(child, ast.AST):
          yield from visit(child)
    if inside:
      function.pop()

  yield from visit(tree)


def _changes(node: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
  """Yields what may be changed at a node: a kind, a node, and another node."""

  def changed(**fields: Any) -> tuple[Any, Any]:
    other = copy.copy(node)
    for name, value in fields.items():
      setattr(other, name, value)
    return node, other

  match node:
    case ast.BinOp() | ast.BoolOp() if type(node.op) in SWAPPED:
      if not (isinstance(node.op, ast.BitOr) and _is_type(node)):
        yield "operator", changed(op=SWAPPED[type(node.op)]())
    case ast.Compare() if type(node.ops[0]) in SWAPPED:
      swapped = SWAPPED[type(node.ops[0])]()
      yield "comparison", changed(ops=[swapped, *node.ops[1:]])
    case ast.UnaryOp(op=ast.USub() | ast.Not()):
      yield "sign", (node, node.operand)
    case ast.Constant(value=bool()):
      yield "constant", changed(value=not node.value)
    case ast.Constant(value=int() | float()):
      yield "constant", changed(value=node.value + 1)
      if node.value:
        yield "constant", changed(value=node.value - 1)
    case ast.If() | ast.IfExp() | ast.While():
      if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
        test = ast.UnaryOp(ast.Not(), node.test)
        yield "condition", (node.test, test)
    case ast.AugAssign() | ast.Expr(value=ast.Call()):
      yield "statement", (node, None)
    case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
      yield "statement", (node, None)
    case ast.Call() if not ast.unparse(node.func).startswith("checks."):
      for given in node.keywords:
        if given.arg not in (None, "strict", "stacklevel"):
          rest = [x for x in node.keywords if x is not given]
          yield "argument", changed(keywords=rest)


def _is_type(node: ast.BinOp) -> bool:
  return any(
    isinstance(x, ast.Constant) and x.value is None
    for x in (node.left, node.right)
  )


# -- The tests that come through a line ---------------------------------------


class Recorder:
  """A plugin of pytest that notes which test file runs which line."""

  def __init__(self, path: pathlib.Path) -> None:
    self.path = path
    self.seen: dict[str, dict[str, list[int]]] = {}
    self.seconds: dict[str, float] = collections.defaultdict(float)
    self.now: str | None = None
    self.lines: dict[str, set[int]] = {}
    tool = sys.monitoring
    tool.use_tool_id(tool.COVERAGE_ID, "mutate")
    tool.register_callback(tool.COVERAGE_ID, tool.events.LINE, self._line)
    tool.set_events(tool.COVERAGE_ID, tool.events.LINE)

  def _line(self, code: Any, line: int) -> Any:
    name = code.co_filename
    if self.now is not None and name.startswith(f"{ROOT}/jdist/"):
      self.lines.setdefault(name[len(str(ROOT)) + 1 :], set()).add(line)
    return sys.monitoring.DISABLE  # Once for each file of tests is enough.

  def pytest_runtest_logstart(self, location: tuple[str, Any, str]) -> None:
    """Keeps the lines of the last file of tests."""
    if location[0] != self.now:
      self._keep()
      self.now = location[0]
      sys.monitoring.restart_events()

  def pytest_runtest_logreport(self, report: Any) -> None:
    """Adds the seconds of a test to its file's."""
    self.seconds[report.location[0]] += report.duration

  def pytest_sessionfinish(self) -> None:
    """Writes what was seen; files that did not run keep their entries."""
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, 0)
    self._keep()
    found = json.loads(self.path.read_text()) if self.path.exists() else {}
    for name, lines in self.seen.items():
      found[name] = {"seconds": self.seconds[name], "lines": lines}
    self.path.write_text(json.dumps(found))

  def _keep(self) -> None:
    if self.now is not None:
      kept = self.seen.setdefault(self.now, {})
      for name, lines in self.lines.items():
        kept[name] = sorted(lines.union(kept.get(name, ())))
    self.lines = {}


def tests_of(
  mutant: Mutant, found: dict[str, Any], budget_s: float
) -> list[str]:
  """Returns files of tests that run a mutant: its room's, the fastest first."""
  lines = set(mutant.lines)
  names = [
    name
    for name, run in found.items()
    if lines & set(run["lines"].get(mutant.path, ()))
    # Defaults and ranges are stated by tests that may run no line of the file.
    or (mutant.imported and _STATING.fullmatch(name))
  ]
  if mutant.imported and all(map(_STATING.fullmatch, names)):
    # No test that was noted has imported the module first.
    also = [x for x in found if mutant.path in found[x]["lines"]]
    names = list(dict.fromkeys(names + also))
  room = str(pathlib.Path("tests", *pathlib.Path(mutant.path).parts[1:2]))
  names.sort(key=lambda x: (not x.startswith(room), found[x]["seconds"]))
  sums = itertools.accumulate(found[name]["seconds"] for name in names)
  # At least one: the slowest test may be the only one.
  return [
    name for i, (name, sum_s) in enumerate(zip(names, sums, strict=True))
    if not i or sum_s <= budget_s
  ]  # fmt: skip


def near_tests(path: str, number: int) -> list[str]:
  """Returns a file, whose doctests may fail, and tests nearest to its name."""
  words = _words(path)
  room = ROOT / "tests" / pathlib.Path(path).parts[1]
  files = [str(x.relative_to(ROOT)) for x in sorted(room.rglob("test_*.py"))]
  # Of equal ones the smaller file, which likely ends first.
  files.sort(key=lambda x: (-len(words & _words(x)), (ROOT / x).stat().st_size))
  return [path, *files[:number]]


def _words(path: str) -> set[str]:
  """Returns the words of a path without its room, plurals like singulars."""
  names = "/".join(pathlib.Path(path).with_suffix("").parts[2:])
  return {x.rstrip("s") for x in names.replace("/", "_").split("_") if x}


# -- Trying mutants ------------------------------------------------------------


def scratch_copy() -> pathlib.Path:
  """Copies the tracked files, as they are, to a folder of their own."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="jdist-mutants-"))
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
  )
  for name in listed.stdout.decode().split("\0"):
    if name and (ROOT / name).is_file():
      (folder / name).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(ROOT / name, folder / name)
  return folder


def verdict(
  mutant: Mutant, folder: pathlib.Path, tests: list[str], limit_s: float
) -> str:
  """Runs the tests of a mutant: "killed", "survived" or "untested"."""
  if not tests:
    return "untested"
  path = folder / mutant.path
  text = path.read_text()
  path.write_text(mutant.apply(text))
  # A fork has JAX already, whose import takes longer than most tests.
  process = multiprocessing.get_context("fork").Process(
    target=_run_tests, args=(folder, tests)
  )
  try:
    process.start()
    process.join(limit_s)
  finally:
    if process.pid is not None:
      process.kill()
      # Processes that its tests have started would run on.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.join()
    path.write_text(text)
  # A mutant that hangs is killed: a test that ends it would fail.
  return "killed" if process.exitcode else "survived"


def _run_tests(folder: pathlib.Path, tests: list[str]) -> None:
  """Ends this process with the status of tests in a copy of the library."""
  os.setpgid(0, 0)  # So `verdict` ends this group alone.
  import pytest

  os.chdir(folder)
  sys.path.insert(0, str(folder))
  with (folder / _OUTPUT).open("w") as output:
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
  options = ["-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
  os._exit(pytest.main([*options, *tests]))


def prepare(folder: pathlib.Path) -> None:
  """Imports what tests need, and has them share their compiled programs."""
  os.environ |= {
    "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
    "XLA_FLAGS": XLA_FLAGS, "JAX_PLATFORMS": "cpu",
    "JDIST_TEST_PROGRAMS": str(folder),
    "JAX_COMPILATION_CACHE_DIR": str(folder / "only"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  }  # fmt: skip
  import flax.nnx
  import jax
  import optax

  del flax, jax, optax


def wanted(places: list[str]) -> list[Mutant]:
  """Returns the mutants of folders, files and lines."""
  found: list[Mutant] = []
  for place in places:
    name, _, lines = place.partition(":")
    first, _, last = lines.partition("-")
    path = ROOT / name
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
      relative = str(file.relative_to(ROOT))
      some = mutants(relative, file.read_text())
      found += (
        x for x in some
        if not lines or int(first) <= x.line <= int(last or first)
      )  # fmt: skip
  return found


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("places", nargs="*", help="folders, files or FILE:LINES")
  parser.add_argument("--map", nargs="+", metavar="TESTS", default=())
  parser.add_argument("--number", type=int, help="of mutants; all by default")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--limit-s", type=float, default=900.0)
  parser.add_argument(
    "--tests-s", type=float, default=600.0,
    help="seconds of tests for a mutant, as they were when the map was made",
  )  # fmt: skip
  parser.add_argument("--near", type=int, help="files of tests, without a map")
  parser.add_argument("--list", action="store_true", help="run nothing")
  parser.add_argument("--results", type=pathlib.Path, default=ROOT / ".mutants")
  options = parser.parse_args()
  options.results.mkdir(exist_ok=True)
  tests, rows = options.results / "tests.json", options.results / "rows.jsonl"
  if options.map:
    import pytest

    os.environ["XLA_FLAGS"] = XLA_FLAGS
    chosen = ["-q", "-p", "no:cacheprovider", *options.map]
    if status := pytest.main(chosen, plugins=[Recorder(tests)]):
      raise SystemExit(status)
  found = json.loads(tests.read_text()) if tests.exists() else {}
  known = {}
  if rows.exists():
    known = {x["name"]: x for x in map(json.loads, rows.open())}
  some = wanted(options.places)
  if options.number is not None:
    drawn = random.Random(options.seed).sample(
      some, min(options.number, len(some))
    )
    some = sorted(drawn, key=lambda x: (x.path, x.start))
  if options.list:
    for mutant in some:
      print(f"{mutant.line}: {mutant.name}")
    return
  folder = scratch_copy()
  prepare(folder)
  try:
    for number, mutant in enumerate(some, 1):
      if mutant.name not in known:
        began = time.monotonic()
        files = (
          tests_of(mutant, found, options.tests_s)
          if options.near is None
          else near_tests(mutant.path, options.near)
        )
        told = verdict(mutant, folder, files, options.limit_s)
        output = (folder / _OUTPUT).read_text() if files else ""
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
        known[mutant.name] = row = {
          "name": mutant.name, "line": mutant.line, "verdict": told,
          "by": failed and failed[1],
          "wall_s": round(time.monotonic() - began, 1),
        }  # fmt: skip
        with rows.open("a") as file:
          file.write(json.dumps(row) + "\n")
      told = known[mutant.name]["verdict"]
      text = f"{number}/{len(some)} {told}: line {mutant.line}: {mutant.name}"
      print(text, flush=True)
  finally:
    shutil.rmtree(folder)
  verdicts = collections.Counter(known[x.name]["verdict"] for x in some)
  print(dict(verdicts), f"score {verdicts['killed'] / max(len(some), 1):.0%}")


if __name__ == "__main__":
  main()
