"""How the library is built: names, floors, imports, words, traced updates."""

import ast
import importlib.util
import pathlib
import sys

import pytest

from tests import _thinned

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location(
  "house", _ROOT / "scripts" / "house" / "__init__.py"
)
house = sys.modules["house"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(house)

# A file imports up to eight room-mates: a way through few files needs larger
# ones, and each of those imports more.
_MAX_FILES, _MAX_FLOORS, _MAX_MATES = 15, 6, 8
_MAX_HEADLESS = 0.02
_MAX_OPTIONS_LINES = 400
# Nouns of the field that end in -ing.
_NOUNS = {"averaging"}
# Files that list their room, an import a line.
_LISTS = {"models/_build.py", "methods/_method_registry.py"}


@pytest.fixture(scope="module")
def library():
  return house.read_sources(_ROOT)


def _names_in_ing(sources):
  names = house.names_in_ing(sources)
  return [x for x in names if sources[x].stem not in _NOUNS]


def _crowded_folders(sources):
  return [
    f"{folder}: {len(files)} files"
    for folder, files in house.by_folder(sources).items()
    if len(files) > _MAX_FILES
  ]


def _floors(sources):
  return [
    house.find_floors(house.room_graph(room, sources))
    for room in house.rooms(sources)
  ]


def _high_rooms(sources):
  return [
    f"{x.number} floors: {' > '.join(x.path)}"
    for x in _floors(sources)
    if x.number > _MAX_FLOORS
  ]


def _circles(sources):
  return [", ".join(x) for floors in _floors(sources) for x in floors.circles]


def _importers_of_many(sources):
  return [
    f"{path} imports {len(mates)} files of its folder"
    for folder in house.by_folder(sources)
    for path, mates in house.folder_graph(folder, sources).items()
    if len(mates) > _MAX_MATES
    and not sources[path].is_init
    and path not in _LISTS
  ]


def _headless(sources):
  found = [
    (place, house.is_headless(text))
    for x in sources.values()
    for place, text in house.docstrings(x)
  ]
  wrong = [place for place, headless in found if headless]
  return wrong if len(wrong) >= _MAX_HEADLESS * max(len(found), 1) else []


class _TablesOfStates(ast.NodeVisitor):
  """Finds dicts, sets, tuples and lists of types that are called XState."""

  def __init__(self):
    self.lines = []

  def visit_Subscript(self, node):
    self.visit(node.value)  # What is in brackets may be an annotation.

  def visit_Dict(self, node):
    self._check(node, node.keys)

  def visit_List(self, node):
    self._check(node, node.elts)

  def visit_Set(self, node):
    self._check(node, node.elts)

  def visit_Tuple(self, node):
    self._check(node, node.elts)

  def _check(self, node, entries):
    names = [
      getattr(x, "attr", getattr(x, "id", ""))
      for x in entries
      if isinstance(x, ast.Attribute | ast.Name)
    ]
    if any(x.endswith("State") for x in names):
      self.lines.append(node.lineno)
    self.generic_visit(node)


def _tables_of_states(sources):
  found = []
  for path, source in sources.items():
    if path.startswith("transforms/"):
      visitor = _TablesOfStates()
      visitor.visit(source.tree)
      found += [f"{path}:{line}" for line in visitor.lines]
  return found


def _long_options(sources):
  return [
    path
    for path, source in sources.items()
    if path.startswith("cli/")
    and "options" in path
    and len(source.text.splitlines()) > _MAX_OPTIONS_LINES
  ]


def _chain(folder, number):
  """Makes files of which each imports the next one."""
  return {
    f"{folder}/_f{i}.py": f"from jdist.{folder} import _f{i + 1}\n"
    for i in range(number)
  }


def _other_formats(sources):
  found = house.disk_formats(sources)
  known = {*house.KEPT, "export", "input"}
  return [
    f"{kind}: {paths}" for kind, paths in found.items() if kind not in known
  ]


_CLASS = "class Message:\n  pass\n"
_IMPORTS = "".join(f"from jdist.codecs import _f{i}\n" for i in range(9))
# A guard, and what it must find something in.
_GUARDS = {
  "no_file_is_named_in_ing": (_names_in_ing, {"codecs/_packing.py": ""}),
  "no_two_rooms_have_a_file_of_one_name": (
    lambda x: list(house.equal_names(x).items()),
    {"codecs/_packed.py": "", "collectives/_packed.py": ""},
  ),
  "no_two_public_classes_have_one_name": (
    lambda x: list(house.equal_classes(x).items()),
    {"codecs/_a.py": _CLASS, "server/_b.py": _CLASS},
  ),
  "no_folder_is_crowded": (_crowded_folders, _chain("codecs", 16)),
  "no_room_has_many_floors": (_high_rooms, _chain("codecs", 7)),
  "no_files_import_each_other": (
    _circles,
    {
      "data/_a.py": "from jdist.data import _b",
      "data/_b.py": "def f():\n  from jdist.data._a import x",
    },
  ),
  "no_file_imports_much_of_its_folder": (
    _importers_of_many,
    {"codecs/_all.py": _IMPORTS, **_chain("codecs", 9)},
  ),
  "docstrings_begin_with_a_verb_or_a_noun": (
    _headless,
    {"codecs/_a.py": 'def f():\n  """What is sent."""\n'},
  ),
  "no_table_in_transforms_knows_types_of_states": (
    _tables_of_states,
    {"transforms/_table.py": "X = {_local.LocalStepsState: {'step'}}\n"},
  ),
  "no_file_is_kept_in_another_format": (
    _other_formats,
    {"data/_a.py": "import numpy as np\nnp.savez(path, **arrays)"},
  ),
  "no_options_file_is_long": (
    _long_options,
    {"cli/_options.py": "\n" * 401},
  ),
}


@pytest.mark.parametrize("name", _GUARDS)
def test_in_the_library(name, library):
  guard, _ = _GUARDS[name]
  wrong = guard(library)
  assert not wrong, "\n".join(map(str, wrong))


def test_exempted_files_exist(library):
  assert set(library) >= _LISTS
  assert {x.stem for x in library.values()} >= _NOUNS


def test_thinned_tests_exist():
  # An entry of a renamed test would thin out nothing, unnoticed.
  missing = [
    f"{path}::{name}"
    for path, tests in _thinned.EVERY.items()
    for name in tests
    if f"def {name}(" not in (_ROOT / "tests" / path).read_text()
  ]
  assert not missing


@pytest.mark.parametrize("name", _GUARDS)
def test_guard_finds_what_is_wrong(name):
  guard, broken = _GUARDS[name]
  assert guard(house.parse_sources(broken))
  assert not guard(house.parse_sources({"codecs/_a.py": '"""Packs bits."""'}))


@pytest.mark.parametrize(
  "text",
  [
    "def f(x: tuple[LocalStepsState, int]) -> OuterState: ...",
    "def f(x): return isinstance(x, optax.EmptyState)",
    "def f(x): return LocalStepsState(x), x",
  ],
)
def test_state_may_be_named_in_transforms(text):
  assert not _tables_of_states(house.parse_sources({"transforms/_a.py": text}))


@pytest.mark.parametrize(
  ("text", "kinds"),
  [
    ("import pickle", ["pickle"]),
    ("def f():\n  from cloudpickle import dumps", ["pickle"]),
    ("np.load(path, allow_pickle=True)", ["npy", "pickle"]),
    ("with path.open('ab') as file: pass", ["raw"]),
    ("open(path, 'w')\nsealed_json.write_whole(path, data)", ["raw"]),
    ("checks.import_extra('orbax.checkpoint', 'x')", ["orbax"]),
    (
      "array_files.save_arrays(x, y, z)\njson_lines.read(x)",
      ["arrays", "json"],
    ),
    ("sealed_json.read(x, form=1)\nopen(path, 'rb')", ["json"]),
    ("figure.savefig(path)\npath.read_text()", ["export", "input"]),
    ("state.save(path)\nlearner.load(x)\nself.write(x)", []),
  ],
)
def test_formats_are_found_by_imports_and_calls(text, kinds):
  sources = house.parse_sources({"training/_a.py": text})
  assert list(house.disk_formats(sources)) == kinds


def test_floors_are_counted_by_hand():
  graph = {"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}
  assert house.find_floors(graph) == (3, ["a", "b", "c"], [])
  assert house.most_mates(graph) == (2, "a")
  circle = {"a": {"b"}, "b": {"a", "c"}, "c": set()}
  assert house.find_floors(circle) == (2, ["a", "c"], [["a", "b"]])


def test_room_is_seen_through_its_sub_rooms():
  sources = house.parse_sources(
    {
      "transforms/__init__.py": (
        "from jdist.transforms import local as local\n"
        "from jdist.transforms._clock import tick as tick\n"
      ),
      "transforms/_clock.py": "",
      "transforms/_drain.py": (
        "from jdist.transforms import local\nlocal.step()\n"
      ),
      "transforms/local/__init__.py": (
        "from jdist.transforms.local._step import step as step\n"
        "from jdist.transforms.local._rule import rule as rule\n"
      ),
      "transforms/local/_rule.py": "from jdist.transforms import tick\n",
      "transforms/local/_step.py": "from jdist.transforms.local import _rule\n",
    }
  )
  assert house.room_graph("transforms", sources) == {
    "transforms/_clock.py": set(),
    "transforms/_drain.py": {"transforms/local/_step.py"},
    "transforms/local/_rule.py": {"transforms/_clock.py"},
    "transforms/local/_step.py": {"transforms/local/_rule.py"},
  }
  assert house.folder_graph("transforms", sources) == {
    "transforms/__init__.py": {"transforms/_clock.py"},
    "transforms/_clock.py": set(),
    # The sub-room is no room-mate.
    "transforms/_drain.py": set(),
  }


def _missed(limits):
  return [
    f"{name}: {x.value:,.4g} is beyond {x.bound:,g}"
    for name, x in limits.items()
    if not x.holds
  ]


def test_figures_of_the_files_keep_their_limits():
  assert not _missed(house.file_limits(house.measure(_ROOT)))


@pytest.mark.parametrize(
  "name",
  [
    "updates",
    "option",
    "push",
  ],
)
def test_traced_ways_keep_their_limits(name):
  held = house.trace_limits(house.trace(_ROOT, [name]))
  assert held and not _missed(held)


def test_limits_have_two_directions():
  below, above = house.Limit(3, 4), house.Limit(3, 4, at_least=True)
  assert below.holds and not above.holds
  assert _missed({"floors": house.Limit(7, 6)})
