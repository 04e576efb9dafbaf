"""Measures how the library is built: folders, imports, words, traced updates.

    python scripts/measure_house.py [TREE] [--against TREE] [--notes] [--json F]

Reads the files of TREE/jdist (default: this repository) without importing
them.  Only the table of updates runs the library, in a process of its own.
With `--against` a cell shows the other tree's figure first: "45 -> 14".

Folders: a folder is a room or a sub-room.  A file stands one *floor* above the
highest file of its folder that it imports, at its top or in a function; files
that import each other in a circle share a floor.  `__init__.py` counts as a
file, as a floor and with its imports, but not for the most room-mates that one
file imports.  "transforms/**" is a room with its sub-rooms: there an import of
an `__init__.py` counts as one of the file that defines the name.

Updates: `trace_updates.py` says what is traced and counted.  "others" are the
files besides `collectives`, then also besides codecs and argument checks, then
also besides reducers.

Same features: the lines by room without those of features that came after the
tree b390ebc, named in `_LATER`: whole folders, files and definitions only, so
lines that a later feature put into an older function count as older ones.
Rooms among which files moved are one row.
"""

import argparse
import ast
import collections
import io
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

_SCRIPTS = pathlib.Path(__file__).resolve().parent
_HEADLESS = {"What", "Which", "Where", "Who", "How", "Whether", "When"}
# Counted in docstrings and comments, whatever their case.
_WORDS = {
  "tell, told": r"\b(tell|tells|told|telling)\b",
  "meet": r"meet",
  "remember": r"\bremember",
  "arrive": r"\barrive[sd]?\b",
  "staleness": r"\bstaleness\b",
  "bucket": r"\bbuckets?\b",
  "all-reduce": r"\ball-reduce",
}

# Rooms that files have moved between since the tree b390ebc, by their row.
_MOVED = {
  "codecs": ("codecs",),
  "collectives, reducers, profiling": (
    "collectives", "reducers", "profiling", "cluster",
  ),
  "transforms, methods": ("transforms", "methods"),
  "training, prediction, storage": ("training", "prediction", "storage"),
  "data, models": ("data", "models"),
  "cli": ("cli",),
  "checks, states": (".",),
}  # fmt: skip
# Features that the tree b390ebc had not: folders, files, path:definition,
# path:class.method.
_LATER = {
  "delays that begin late": """transforms/intervals/_growth.py
    transforms/delays/_stability.py""",
  "pipelines": """pipeline/ cli/pipelines/ collectives/_model_parts.py
    cli/programs/_stages_overlap.py
    cli/_groups.py:StageOptions cli/_options.py:Pipeline
    cli/_options.py:check_left_out cli/__init__.py:_pipeline_trained
    cli/_train.py:_Prepared
    training/loop/_training_run.py:TrainingRun.count_from
    models/_layered_network.py
    models/_functional.py:Layer models/_layers.py:head_parts
    models/_alexnet.py:_run_conv models/_lenet.py:_run_conv
    models/_resnet.py:_run_first models/_resnet.py:_run_head
    models/_transformer.py:_run_first models/_transformer.py:_run_last
    models/_vgg.py:_run_conv profiling/_timeline.py:Loop
    models/_alexnet.py:AlexNet.parts models/_lenet.py:LeNet.parts
    models/_resnet.py:ResNet.parts models/_vgg.py:VGG.parts
    models/_transformer.py:Transformer.parts
    transforms/delays/_delayed_gradients.py:_chosen
    collectives/_workers.py:Workers.inner_axes
    profiling/_timeline.py:read_loop transforms/delays/_leaf_delays.py
    transforms/delays/_weight_prediction.py transforms/delays/_look_ahead.py
    transforms/delays/_delay_rate.py
    transforms/delays/_delay_compensation.py""",
  "servers": """server/ cluster/_cluster.py cluster/_cluster_file.py
    cluster/_failures.py
    cluster/_gantt.py cluster/_node.py cluster/_profile.py
    cluster/_topology.py cluster/_trace.py cluster/_virtual_network.py
    cli/servers/ cli/_options.py:Simulate
    data/_sample_stream.py training/_gradient.py
    training/_losses.py:masked_mean training/_step.py:_weighted
    training/_evaluation.py:Evaluator.measure
    data/_dataset.py:Dataset.select data/_dataset.py:Dataset.batch
    profiling/_forecast.py:Forecast.trace
    profiling/_model_profile.py prediction/mp2/_exchange_learner.py""",
  "one comparison, from experiments": """training/comparison/
    training/loop/_progress.py:Progress.extend
    training/loop/_progress.py:Progress.aside""",
  "registry, compression of every method": """methods/_method.py
    methods/_method_registry.py cli/_composition.py
    cli/_groups.py:MeanOptions cli/_groups.py:OuterOptions""",
  "means between CPU hosts in one buffer, programs of late means": """
    collectives/_operations.py:_sends_leaf_by_leaf
    transforms/_state.py:arrives_after
    transforms/_predicted.py:PredictRestState.due_after
    transforms/local/_round_state.py:SyncState.due_after""",
  "fragments that a host streams": """
    transforms/local/_fragments.py:_controls_of
    transforms/local/_fragments.py:FragmentsState.streams
    transforms/local/_fragments.py:FragmentsState.ahead""",
  "texts": """data/_text.py data/_text_dataset.py cli/_presets.py
    training/_losses.py:language_model_loss
    training/_losses.py:label_loss training/_plots.py:_quality
    training/_losses.py:labels_of cli/_compare.py:_is_text cli/_compare.py:_bits
    data/_records.py:decode_text cli/_datasets.py:named
    cli/_datasets.py:words cli/_datasets.py:quality cli/_datasets.py:speed
    cli/_datasets.py:evaluation_batch""",
  "divergence, workers apart, warm-ups": """cli/_divergence.py
    cli/_compare.py:_tell_diverged transforms/_skip_nonfinite.py
    cli/_run_end.py:DivergedError cli/_run_end.py:check
    training/_train_state.py:all_finite
    training/loop/_training_run.py:is_diverged
    training/loop/_compiled_step.py:CompiledStep.is_finite
    training/loop/_compiled_step.py:CompiledStep.check_communicates
    training/_step.py:_check_communicates collectives/_traffic.py:communicates
    collectives/_traffic.py:_has_collective
    transforms/intervals/_scheduled_interval.py:_check_falls""",
  "launched processes, and how they end": """cli/launch/
    collectives/processes/_lifeline.py
    collectives/processes/_stop_agreement.py collectives/processes/_streams.py
    collectives/processes/_process_group.py:leave_processes
    collectives/processes/_process_group.py:processes_stop
    collectives/processes/_process_group.py:watches_processes
    collectives/processes/_process_group.py:await_verdict
    training/loop/_preemption.py training/_checkpoints.py:OtherWorkers
    cli/__init__.py:_parse_launch cli/_interrupts.py:raised_by_sigterm
    cli/__init__.py:_processes cli/_interrupts.py:SigtermError
    cli/_run_end.py:TerminatedError cli/_train.py:_resumed
    training/_checkpoints.py:Checkpoints._restore_other
    cli/_experiment.py:Prepared.other_workers""",
  "files of models, boards of metrics": """training/_model_file.py
    training/_metrics_writer.py cli/_train.py:_save_model""",
  "loops of one's own": """training/loop/_round_host.py
    training/loop/_compiled_step.py:_takes_control
    training/_step.py:step_by training/_step.py:synchronize_statistics""",
  "wrong calls, wrappers of Optax's": """checks.py:check_extras
    training/_checkpoints.py:Checkpoints._written
    checks.py:install cli/_experiment.py:_check_extras
    collectives/_workers.py:Workers._in_team
    collectives/_workers.py:_check_context
    collectives/_workers.py:_is_explicit
    collectives/_workers.py:check_workers
    collectives/_operations.py:_arrays
    collectives/_manual_axes.py:team_of collectives/_manual_axes.py:bound_names
    collectives/_manual_axes.py:same_form
    collectives/_manual_axes.py:check_alike
    collectives/_manual_axes.py:for_workers
    collectives/_manual_axes.py:_left_out
    collectives/_manual_axes.py:_is_array_tree
    collectives/_manual_axes.py:_retraced
    collectives/_manual_axes.py:_evaluate
    collectives/_manual_axes.py:_apply
    transforms/local/_anchor.py:_check_last
    transforms/local/_anchor.py:accumulates
    transforms/local/_anchor.py:_kind
    transforms/local/_anchor.py:_not_last
    transforms/local/_anchor.py:is_trained
    transforms/local/_anchor.py:over
    transforms/local/_anchor.py:only_floats
    transforms/local/_anchor.py:check_anchor""",
}


class Source(NamedTuple):
  """A file of the library.

  Attributes:
    path: below jdist/, with slashes.
    text: its content.
    tree: its syntax tree.
  """

  path: str
  text: str
  tree: ast.Module

  @property
  def folder(self) -> str:
    """Returns the folder below jdist/, "." for jdist/ itself."""
    return str(pathlib.PurePosixPath(self.path).parent)

  @property
  def stem(self) -> str:
    """Returns the name without `.py` and without leading underscores."""
    stem = pathlib.PurePosixPath(self.path).stem
    return stem if stem.endswith("__") else stem.lstrip("_")

  @property
  def is_init(self) -> bool:
    """Returns whether the file is an `__init__.py`."""
    return self.stem == "__init__"


Sources = Mapping[str, Source]
Graph = Mapping[str, set[str]]


def read_sources(tree: pathlib.Path) -> dict[str, Source]:
  """Reads all files of a tree's library, by their paths below jdist/."""
  package = tree / "jdist"
  files = sorted(package.rglob("*.py"))
  return parse_sources(
    {x.relative_to(package).as_posix(): x.read_text() for x in files}
  )


def parse_sources(texts: Mapping[str, str]) -> dict[str, Source]:
  """Parses files, given as texts by their paths below jdist/."""
  return {x: Source(x, text, ast.parse(text)) for x, text in texts.items()}


def by_folder(sources: Sources) -> dict[str, list[Source]]:
  """Groups files by their folders."""
  found: dict[str, list[Source]] = collections.defaultdict(list)
  for source in sources.values():
    found[source.folder].append(source)
  return dict(sorted(found.items()))


# Imports.


def find_file(module: str, sources: Sources) -> str | None:
  """Returns the file of a module, or of a name in one; None elsewhere."""
  parts = module.split(".")
  if parts[0] != "jdist":
    return None
  for end in (len(parts), len(parts) - 1):
    stem = "/".join(parts[1:end])
    for path in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
      if path in sources:
        return path
  return None


def _imports(source: Source) -> Iterator[tuple[str, str]]:
  """Yields the dotted name of each import, and what it is called here."""
  for node in ast.walk(source.tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name, alias.asname or alias.name
    elif isinstance(node, ast.ImportFrom):
      for alias in node.names:
        yield f"{node.module}.{alias.name}", alias.asname or alias.name


def folder_graph(folder: str, sources: Sources) -> Graph:
  """Returns which of its room-mates each file of a folder imports."""
  mates = {x.path for x in sources.values() if x.folder == folder}

  def imported(path: str) -> set[str | None]:
    return {find_file(x, sources) for x, _ in _imports(sources[path])}

  return {path: (mates & imported(path)) - {path} for path in sorted(mates)}


def room_graph(room: str, sources: Sources) -> Graph:
  """Returns which files of a room and its sub-rooms each of them imports.

  An `__init__.py` is no file of this graph: a name that is imported from one
  counts as imported from the file that defines it.
  """
  mates = {
    x.path
    for x in sources.values()
    if x.path.startswith(f"{room}/") and not x.is_init
  }
  return {
    path: (mates & _definitions(sources[path], sources)) - {path}
    for path in sorted(mates)
  }


def _definitions(source: Source, sources: Sources) -> set[str | None]:
  """Returns the files that define the names which a file imports."""
  attributes: dict[str, set[str]] = collections.defaultdict(set)
  for node in ast.walk(source.tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      attributes[node.value.id].add(node.attr)
  found: set[str | None] = set()
  for module, name in _imports(source):
    path = find_file(module, sources)
    if path is None or not sources[path].is_init:
      found.add(path)
    elif path == find_file(f"{module}.__init__", sources):
      # The folder itself is imported: its names are used as attributes.
      found |= {_defining_file(path, x, sources) for x in attributes[name]}
    else:
      found.add(_defining_file(path, module.split(".")[-1], sources))
  return found


def _defining_file(init: str, name: str, sources: Sources) -> str | None:
  """Returns the file that defines a name of an `__init__.py`."""
  for module, alias in _imports(sources[init]):
    path = find_file(module, sources)
    if alias == name and path not in (None, init):
      if not sources[path].is_init:
        return path
      return _defining_file(path, module.split(".")[-1], sources)
  return None


class Floors(NamedTuple):
  """The floors of a graph of imports.

  Attributes:
    number: of files on the longest path, a circle counted once.
    path: that path, from the highest file to the lowest.
    circles: the files that import each other, one list a circle.
  """

  number: int
  path: list[str]
  circles: list[list[str]]


def find_floors(graph: Graph) -> Floors:
  """Counts the floors of a graph and finds its circles."""
  reached = {x: set(graph[x]) for x in graph}
  for middle, x in itertools.product(graph, graph):
    if middle in reached[x]:
      reached[x] |= reached[middle]
  circle = {
    x: sorted({y for y in reached[x] if x in reached[y]} | {x}) for x in graph
  }
  paths: dict[str, list[str]] = {}

  def longest(x: str) -> list[str]:
    x = circle[x][0]
    if x not in paths:
      below = {y for z in circle[x] for y in graph[z]} - set(circle[x])
      paths[x] = [x, *max(map(longest, sorted(below)), key=len, default=[])]
    return paths[x]

  path = max(map(longest, graph), key=len, default=[])
  found = {tuple(x) for x in circle.values() if len(x) > 1}
  return Floors(len(path), path, sorted(map(list, found)))


def most_mates(graph: Graph) -> tuple[int, str]:
  """Returns the most room-mates that one file imports, and which file."""
  files = [x for x in graph if not x.endswith("__init__.py")]
  return max(((len(graph[x]), x) for x in files), default=(0, ""))


# Names.


def names_in_ing(sources: Sources) -> list[str]:
  """Lists the files below a room whose names end in -ing."""
  return [
    x.path for x in sources.values() if "/" in x.path and x.stem.endswith("ing")
  ]


def equal_names(sources: Sources) -> dict[str, list[str]]:
  """Finds names that files of several folders have.

  Files of `cli` are named by their commands and do not count.
  """
  files = [
    x
    for x in sources.values()
    if x.stem not in ("__init__", "__main__")
    and x.folder.split("/")[0] != "cli"
  ]
  return _twice((x.stem, x.path) for x in files)


def equal_classes(sources: Sources) -> dict[str, list[str]]:
  """Finds names that public classes of several files have."""
  return _twice(
    (node.name, x.path)
    for x in sources.values()
    for node in x.tree.body
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
  )


def _twice(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
  places: dict[str, list[str]] = collections.defaultdict(list)
  for name, place in found:
    places[name].append(place)
  return {name: x for name, x in sorted(places.items()) if len(x) > 1}


# Words.


def docstrings(source: Source) -> Iterator[tuple[str, str]]:
  """Yields path:line and text of each docstring, private ones included."""
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in ast.walk(source.tree):
    if isinstance(node, kinds) and (text := ast.get_docstring(node)):
      yield f"{source.path}:{getattr(node, 'lineno', 1)}", text


def is_headless(docstring: str) -> bool:
  """Returns whether a docstring opens with a clause that has no main clause."""
  return docstring.split()[0] in _HEADLESS


def comments(source: Source) -> Iterator[str]:
  """Yields the comments of a file."""
  lines = io.StringIO(source.text).readline
  for token in tokenize.generate_tokens(lines):
    if token.type == tokenize.COMMENT:
      yield token.string


# Updates.


def trace_updates(tree: pathlib.Path) -> dict[str, Any]:
  """Runs `trace_updates.py` with a tree's library and returns what it prints.

  Raises:
    RuntimeError: when a method cannot be made or traced.
  """
  answer = subprocess.run(
    [sys.executable, str(_SCRIPTS / "trace_updates.py")],
    cwd=tree,
    env={**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
  )
  if answer.returncode:
    raise RuntimeError(f"Tracing failed:\n{answer.stderr}")
  found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
  return found


def besides(files: Iterable[str], *rooms: str) -> list[str]:
  """Returns the files that are in none of some rooms."""
  return [x for x in files if _room(x) not in rooms]


def _room(path: str) -> str:
  """Returns a file's room; argument checks are a room wherever they are."""
  stem = pathlib.PurePosixPath(path).stem.lstrip("_")
  return "checks" if stem in ("checks", "checking") else path.split("/")[0]


# Figures and tables.


def measure(tree: pathlib.Path) -> dict[str, Any]:
  """Measures all figures of a tree."""
  sources = read_sources(tree)
  folders = {
    name: _folder_figures(files, folder_graph(name, sources))
    for name, files in by_folder(sources).items()
  }
  for room in sorted({x.split("/")[0] for x in folders if x != "."}):
    files = [x for x in sources.values() if x.path.startswith(f"{room}/")]
    figures = _folder_figures(files, room_graph(room, sources))
    folders[f"{room}/**"] = figures
  texts = [text for x in sources.values() for _, text in docstrings(x)]
  headless = [
    place
    for x in sources.values()
    for place, text in docstrings(x)
    if is_headless(text)
  ]
  prose = "\n".join(
    [*texts, *(c for x in sources.values() for c in comments(x))]
  )
  commit = subprocess.run(
    ["git", "rev-parse", "--short", "HEAD"],
    cwd=tree,
    capture_output=True,
    text=True,
  )
  return {
    "commit": commit.stdout.strip(),
    "python": ".".join(map(str, sys.version_info[:2])),
    "folders": dict(sorted(folders.items())),
    "files": len(sources),
    "lines": sum(_num_lines(x) for x in sources.values()),
    "names_in_ing": names_in_ing(sources),
    "equal_names": equal_names(sources),
    "equal_classes": equal_classes(sources),
    "docstrings": len(texts),
    "headless": headless,
    "words": {
      word: len(re.findall(pattern, prose, re.IGNORECASE))
      for word, pattern in _WORDS.items()
    },
    "same_features": same_features(sources),
    "updates": trace_updates(tree),
  }


def _num_lines(source: Source) -> int:
  return len(source.text.splitlines())


def _folder_figures(files: list[Source], graph: Graph) -> dict[str, Any]:
  floors = find_floors(graph)
  number, importer = most_mates(graph)
  return {
    "files": len(files),
    "lines": sum(map(_num_lines, files)),
    "floors": floors.number,
    "longest_path": floors.path,
    "circles": floors.circles,
    "imports": sum(map(len, graph.values())),
    "most_mates": number,
    "most_mates_file": importer,
    "names_in_ing": sum(x.stem.endswith("ing") for x in files if "/" in x.path),
  }


def _definitions_in(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
  """Yields a file's functions, classes and methods by their names."""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      yield node.name, node
    if isinstance(node, ast.ClassDef):
      for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
          yield f"{node.name}.{inner.name}", inner


def same_features(sources: Sources) -> dict[str, int]:
  """Counts the lines of each row of rooms without later features."""
  later = {x for places in _LATER.values() for x in places.split()}
  rows = dict.fromkeys(_MOVED, 0)
  for path, source in sources.items():
    folders = {f"{x}/" for x in map(str, pathlib.PurePosixPath(path).parents)}
    if later & {path, *folders}:
      continue
    spans = [
      (node.end_lineno or 0) - node.lineno + 1
      for name, node in _definitions_in(source.tree)
      if f"{path}:{name}" in later
    ]
    room = path.split("/")[0] if "/" in path else "."
    (row,) = (name for name, rooms in _MOVED.items() if room in rooms)
    rows[row] += _num_lines(source) - sum(spans)
  return rows


Rows = dict[str, list[str]]


def _tables(figures: Mapping[str, Any]) -> dict[str, tuple[list[str], Rows]]:
  """Returns each table's columns and its rows, by the name of the row."""
  columns = {
    "files": "files",
    "lines": "lines",
    "floors": "floors",
    "circles": "circles",
    "imports": "imports",
    "most_mates": "most mates",
    "names_in_ing": "-ing",
  }
  folders = {
    name: [str(len(x[key]) if key == "circles" else x[key]) for key in columns]
    for name, x in figures["folders"].items()
  }
  percent = 100 * len(figures["headless"]) / max(figures["docstrings"], 1)
  library = {
    "files": figures["files"],
    "lines": figures["lines"],
    "files named in -ing": len(figures["names_in_ing"]),
    "file names of several folders": len(figures["equal_names"]),
    "public class names that occur twice": len(figures["equal_classes"]),
    "docstrings": figures["docstrings"],
    "headless docstrings, %": f"{percent:.1f}",
    **{f'"{word}"': n for word, n in figures["words"].items()},
  }
  updates = {}
  for name, x in figures["updates"].items():
    files, others = x["files"], besides(x["files"], "collectives")
    ideas = besides(others, "codecs", "checks")
    counts = [
      len(files),
      x["hops"],
      len(files) - len(others),
      len(others),
      len(ideas),
      len(besides(ideas, "reducers")),
    ]
    updates[name] = list(map(str, counts))
  rooms = ["collectives", "others", "-codecs -checks", "-reducers"]
  return {
    "folder": (list(columns.values()), folders),
    "library": ([""], {name: [str(x)] for name, x in library.items()}),
    "same features": (["lines"], _summed(figures["same_features"])),
    "traced update": (["files", "hops", *rooms], updates),
  }


def _summed(lines: Mapping[str, int]) -> Rows:
  rows = {**lines, "all": sum(lines.values())}
  return {name: [str(x)] for name, x in rows.items()}


def draw_table(title: str, columns: list[str], rows: Rows) -> str:
  """Draws a table in plain text, the figures to the right."""
  cells = [[title, *columns], *([name, *row] for name, row in rows.items())]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return "\n".join(
    "  ".join(
      [row[0].ljust(widths[0])]
      + [x.rjust(width) for x, width in zip(row[1:], widths[1:], strict=True)]
    ).rstrip()
    for row in cells
  )


def _beside(rows: Rows, before: Rows) -> Rows:
  """Puts the cells of another tree before those of this one."""
  width = len(next(iter({**before, **rows}.values())))
  none = ["-"] * width
  return {
    name: [
      f"{old} -> {new}"
      for old, new in zip(
        before.get(name, none), rows.get(name, none), strict=True
      )
    ]
    for name in [*rows, *(x for x in before if x not in rows)]
  }


def _with_sub_rooms(folders: Iterable[str]) -> list[str]:
  """Drops the whole rooms, such as "codecs/**", that have no sub-room."""
  names = list(folders)
  rooms = {x.split("/")[0] for x in names if "/" in x and x[-2:] != "**"}
  return [x for x in names if x[-2:] != "**" or x[:-3] in rooms]


def _notes(figures: Mapping[str, Any]) -> Iterator[str]:
  """Yields what the tables count, by name."""
  for name in _with_sub_rooms(figures["folders"]):
    x = figures["folders"][name]
    for circle in x["circles"]:
      yield f"circle in {name}: {', '.join(circle)}"
    if x["floors"] > 6:
      yield f"floors of {name}: {' > '.join(x['longest_path'])}"
    if x["most_mates"] > 6:
      yield f"{x['most_mates_file']} imports {x['most_mates']} room-mates"
  for kind in ("equal_names", "equal_classes"):
    for name, places in figures[kind].items():
      yield f"{name}: {', '.join(places)}"
  for name, x in figures["updates"].items():
    found = besides(x["files"], "collectives")
    yield f"{name} enters {', '.join(found)}"


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument(
    "tree", nargs="?", type=pathlib.Path, default=_SCRIPTS.parent
  )
  parser.add_argument("--against", type=pathlib.Path, help="another tree")
  parser.add_argument("--json", type=pathlib.Path, help="where to write all")
  parser.add_argument(
    "--notes", action="store_true", help="names what the tables count"
  )
  options = parser.parse_args()
  figures = measure(options.tree.resolve())
  tables = _tables(figures)
  written = {"tree": figures}
  if options.against is not None:
    written["against"] = measure(options.against.resolve())
    for title, (columns, before) in _tables(written["against"]).items():
      tables[title] = (columns, _beside(tables[title][1], before))
  columns, folders = tables["folder"]
  kept = {name: folders[name] for name in _with_sub_rooms(sorted(folders))}
  tables["folder"] = (columns, kept)
  print(
    "\n\n".join(draw_table(title, *table) for title, table in tables.items())
  )
  if options.notes:
    print("", *_notes(figures), sep="\n")
  if options.json is not None:
    options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
  main()
