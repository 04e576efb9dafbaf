"""The comparison of MSDPU runs end to end, as its README says."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from jdist import training

_ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def folder(tmp_path):
  """The experiment's programs in a folder of their own, without results."""
  there = tmp_path / "experiments"
  for source in ("*.py", "msdpu/*.py"):
    for path in (_ROOT / "experiments").glob(source):
      target = there / path.relative_to(_ROOT / "experiments")
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(path, target)
  return there / "msdpu"


def run(folder, *command):
  environment = os.environ | {
    "PYTHONPATH": str(_ROOT),
    "JAX_PLATFORMS": "cpu",
  }
  # Those of this process are not the experiment's.
  environment.pop("XLA_FLAGS", None)
  done = subprocess.run(
    [sys.executable, *command],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_the_smoke_preset_runs_and_is_reported(folder):
  pytest.importorskip("sklearn")
  pytest.importorskip("matplotlib")
  told = run(folder, "run.py", "smoke")
  assert told.count("comparison ") == 2  # Two variants, a seed each.
  rows = training.read_rows(folder / "results" / "smoke.jsonl")
  synchronous, msdpu = rows
  assert (synchronous["method"], msdpu["method"]) == ("ssgd", "msdpu H0=8")
  for row in rows:
    assert row["config"]["dataset"] == "digits" and row["workers"] == 2
    assert row["purpose"] == "comparison" and row["steps"] == 11
    assert 0.2 < row["accuracy"] <= 1.0
  assert synchronous["rounds"] == 11
  assert 2 < msdpu["rounds"] < 8
  assert msdpu["sent_bytes"] < synchronous["sent_bytes"]
  table = run(folder, "report.py", "smoke").splitlines()
  assert table[0].startswith("| variant | test accuracy")
  assert {line.split("|")[1].strip() for line in table[2:]} == {
    "ssgd", "msdpu H0=8",
  }  # fmt: skip
  assert (folder / "results" / "smoke.png").stat().st_size > 0
