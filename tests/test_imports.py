"""Who may import whom, and what `import jdist` costs."""

import ast
import pathlib
import subprocess
import sys

import pytest

import jdist

_PACKAGE = pathlib.Path(jdist.__file__).parent

# Rooms that a room may use. The same table stands in CONTRIBUTING.
_MAY_USE = {
  "checks": set(),
  "signatures": set(),
  "states": set(),
  "storage": set(),
  "channel": set(),
  "codecs": set(),
  "cluster": set(),
  "models": set(),
  "data": {"storage"},
  "collectives": {"channel"},
  "reducers": {"codecs", "collectives"},
  "transforms": {"collectives", "reducers"},
  "methods": {"codecs", "collectives", "reducers", "transforms"},
  "training": {
    "channel",
    "storage",
    "cluster",
    "collectives",
    "reducers",
    "transforms",
  },
  # Above training, which does not use it.
  "training/comparison": {
    "cluster",
    "collectives",
    "data",
    "models",
    "training",
  },
  "profiling": {"cluster", "collectives", "training"},
  "advice": {"cluster", "collectives", "training", "transforms"},
  "prediction": {"collectives", "models", "storage", "training"},
  "pipeline": {
    "channel",
    "cluster",
    "codecs",
    "collectives",
    "reducers",
    "storage",
    "training",
    "transforms",
  },
  "elastic": {"reducers", "server", "transforms"},
  "server": {
    "channel",
    "cluster",
    "codecs",
    "collectives",
    "reducers",
    "storage",
    "training",
    "transforms",
  },
}
# Every room may use these.
_GROUND = {"checks", "signatures", "states"}
# They may use everything, and no room may use them.
_TOPS = {"cli", "conformance", "__main__"}
_EXTRAS = {
  "array_record",
  "grain",
  "importlib_resources",
  "matplotlib",
  "orbax",
  "PIL",
  "ray",
  "simpy",
  "sklearn",
  "tensorflow",
  "tensorflow_datasets",
  "tyro",
}


def _imports(path):
  """Yields (module, whether it is imported at the top of the file)."""
  tree = ast.parse(path.read_text())
  top = set(map(id, tree.body))
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield alias.name, id(node) in top
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: imports are absolute"
      for alias in node.names:
        yield f"{node.module}.{alias.name}", id(node) in top


def _rooms():
  for path in sorted(_PACKAGE.rglob("*.py")):
    relative = path.relative_to(_PACKAGE)
    if relative.name in ("__init__.py", "_version.py") and (
      len(relative.parts) == 1
    ):
      continue
    room = "/".join(relative.parts[:2])
    if room not in _MAY_USE:
      room = relative.parts[0].removesuffix(".py")
    yield path, room


def test_every_room_uses_only_the_rooms_it_may():
  wrong = []
  for path, room in _rooms():
    if room in _TOPS:
      continue
    assert room in _MAY_USE, f"{room} is not in the table of rooms"
    for module, _ in _imports(path):
      parts = module.split(".")
      if parts[0] != "jdist" or len(parts) == 1:
        continue
      target = "/".join(parts[1:3])
      if target not in _MAY_USE:
        target = parts[1]
      if target not in _MAY_USE[room] | _GROUND | {room, "_version"}:
        wrong.append(f"{path.relative_to(_PACKAGE)} imports {module}")
  assert not wrong, "\n".join(wrong)


def test_private_modules_stay_in_their_room():
  wrong = []
  for path, room in _rooms():
    for module, _ in _imports(path):
      parts = module.split(".")
      private = parts[0] == "jdist" and any(
        part.startswith("_") for part in parts[2:]
      )
      if private and parts[1] != room.split("/")[0]:
        wrong.append(f"{path.relative_to(_PACKAGE)} imports {module}")
  assert not wrong, "\n".join(wrong)


def test_extras_are_imported_where_they_are_used_and_not_above():
  wrong = [
    f"{path.relative_to(_PACKAGE)} imports {module}"
    for path, _ in _rooms()
    for module, at_top in _imports(path)
    # Type annotation is what tyro is there for, in the command line only.
    if at_top
    and module.split(".")[0] in _EXTRAS
    and path.relative_to(_PACKAGE).parts[0] != "cli"
  ]
  assert not wrong, "\n".join(wrong)


def test_table_finds_a_forbidden_import(tmp_path):
  path = tmp_path / "bad.py"
  path.write_text("def f():\n  from jdist.training import fit\n")
  assert list(_imports(path)) == [("jdist.training.fit", False)]


@pytest.mark.smoke
def test_importing_jdist_loads_no_extra():
  program = (
    "import sys, jdist, jdist.training, jdist.data, jdist.models\n"
    f"print(*sorted(set(sys.modules) & {_EXTRAS!r}))"
  )
  # What flax itself loads is not ours to avoid.
  base = "import sys, jax, flax, optax\n" + program.split("\n")[1]
  ours, theirs = (
    set(
      subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
      ).stdout.split()
    )
    for text in (program, base)
  )
  assert ours <= theirs


def test_command_that_trains_nothing_does_not_load_training():
  run = (
    "import sys; from jdist import cli; cli.main(['--version']); "
    "print([x for x in sys.modules if x.startswith('jdist.training')])"
  )
  done = subprocess.run(
    [sys.executable, "-c", run], check=True, capture_output=True, text=True
  )
  assert done.stdout.splitlines()[-1] == "[]"


def test_importing_jdist_costs_little_more_than_its_dependencies():
  """In modules and not in seconds, which another process would disturb."""
  count = "print(len(sys.modules))"
  programs = (
    f"import sys, jax, optax, flax; {count}",
    f"import sys, jax, optax, flax, jdist; {count}",
  )
  before, after = (
    int(
      subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
      ).stdout
    )
    for text in programs
  )
  own = len(
    [
      path
      for path, room in _rooms()
      if room
      in (
        "channel",
        "checks",
        "codecs",
        "collectives",
        "methods",
        "reducers",
        "transforms",
      )
    ]
  )
  assert after - before <= own + 15
