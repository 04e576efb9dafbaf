"""Mutants of a small file: what is changed, and by which tests it is tried."""

import importlib.util
import os
import pathlib
import select
import subprocess
import sys

_PATH = pathlib.Path(__file__).parents[2] / "scripts" / "mutate.py"
_SPEC = importlib.util.spec_from_file_location("mutate", _PATH)
mutate = importlib.util.module_from_spec(_SPEC)
sys.modules["mutate"] = mutate
_SPEC.loader.exec_module(mutate)

_TEXT = '''\
def mean(values, *, scale=2):
  """Returns 1 + 1, which is no code."""
  if not values:
    raise ValueError("1 + 1")
  total = 0.0
  for x in values:
    total += x * scale
  return round(total, ndigits=3) / len(values)
'''


def _changes():
  return {x.name: x for x in mutate.mutants("mean.py", _TEXT)}


def test_every_kind_of_change_is_made():
  changed = {
    mutant.apply(_TEXT).splitlines()[mutant.line - 1].strip()
    for mutant in _changes().values()
  }
  assert {
    "def mean(values, *, scale=3):",
    "if (values):",
    "total = 1.0",
    "pass",
    "total += (x / scale)",
    "return (round(total, ndigits=3) * len(values))",
    "return round(total) / len(values)",
  } <= changed
  # Neither errors nor docstrings.
  assert not any("1 + 1" in x.old for x in _changes().values())


def test_nearest_tests_have_most_words_of_a_path():
  path = "jdist/reducers/_power_sgd.py"
  doctests, nearest, *others = mutate.near_tests(path, 3)
  assert doctests == path and nearest == "tests/reducers/test_power_sgd.py"
  assert len(others) == 2


def test_default_is_tried_by_tests_of_its_function_and_of_defaults():
  (mutant,) = (x for x in _changes().values() if x.new == "3")
  seen = {
    "slow": {"seconds": 9.0, "lines": {"mean.py": [7]}},
    "fast": {"seconds": 1.0, "lines": {"mean.py": [7, 8]}},
    "other": {"seconds": 0.1, "lines": {"mean.py": [1]}},
    "tests/test_defaults.py": {"seconds": 0.5, "lines": {}},
  }
  defaults = "tests/test_defaults.py"
  assert mutate.tests_of(mutant, seen, 100.0) == [defaults, "fast", "slow"]
  assert mutate.tests_of(mutant, seen, 2.0) == [defaults, "fast"]
  # Only the first import of a module was noted.
  for name in ("slow", "fast"):
    seen[name]["lines"] = {}
  assert mutate.tests_of(mutant, seen, 100.0) == [defaults, "other"]
  (inside,) = (
    x for x in _changes().values() if x.old == "round(total, ndigits=3)"
  )
  assert mutate.tests_of(inside, seen, 100.0) == []


_LEAVES_A_PROCESS = """
import subprocess


def test_fails():
  subprocess.Popen(["sleep", "100"], pass_fds=[{held}])
  assert False
"""
_VERDICT = """
import pathlib, sys
import mutate
mutant = next(mutate.mutants("mean.py", pathlib.Path("mean.py").read_text()))
print(mutate.verdict(mutant, pathlib.Path.cwd(), ["test_mean.py"], 100.0))
"""


def test_what_tests_of_a_mutant_have_started_ends_with_them(tmp_path):
  ends, held = os.pipe()
  (tmp_path / "mean.py").write_text(_TEXT)
  (tmp_path / "test_mean.py").write_text(_LEAVES_A_PROCESS.format(held=held))
  told = subprocess.run(
    [sys.executable, "-c", _VERDICT], cwd=tmp_path, pass_fds=[held],
    env=os.environ | {"PYTHONPATH": str(_PATH.parent)}, check=True,
    capture_output=True, text=True,
  )  # fmt: skip
  os.close(held)
  assert told.stdout == "killed\n"
  assert (tmp_path / "mean.py").read_text() == _TEXT
  # The pipe ends when no process holds it.
  with open(ends, "rb") as pipe:
    assert select.select([pipe], [], [], 50)[0]
