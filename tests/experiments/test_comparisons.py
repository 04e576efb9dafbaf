"""The comparisons run end to end, as their READMEs say."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from jdist import training
from tests import _processes

_ROOT = pathlib.Path(__file__).parent.parent.parent


# What the smoke preset of each compares with synchronous SGD.
_OTHERS = {"msdpu": "msdpu H0=8", "compression": "int4 + feedback"}


def copied(name, tmp_path):
  """An experiment's programs in a folder of their own, without results."""
  there = tmp_path / "experiments"
  # Experiments share `optax_chains` and `studies`, which lie next to them.
  for own in (name, "optax_chains", "studies"):
    for path in (_ROOT / "experiments" / own).glob("*.py"):
      target = there / own / path.name
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(path, target)
  return there / name


def run(folder, *command):
  done = subprocess.run(
    [sys.executable, *command],
    cwd=folder,
    env=_processes.environment(),
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name == "msdpu" else pytest.mark.slow)
    for name in _OTHERS
  ],
)
def test_smoke_preset_runs_and_is_reported(name, tmp_path):
  folder = copied(name, tmp_path)
  pytest.importorskip("sklearn")
  pytest.importorskip("matplotlib")
  told = run(folder, "run.py", "smoke")
  assert told.count("comparison ") == 2  # Two variants, a seed each.
  rows = training.read_rows(folder / "results" / "smoke.jsonl")
  synchronous, other = rows
  assert (synchronous["method"], other["method"]) == ("ssgd", _OTHERS[name])
  for row in rows:
    assert row["config"]["dataset"] == "digits" and row["workers"] == 2
    assert row["purpose"] == "comparison" and row["steps"] == 11
    assert 0.2 < row["accuracy"] <= 1.0
  assert synchronous["rounds"] == 11
  assert 2 < other["rounds"] < 8 if name == "msdpu" else other["rounds"] == 11
  assert other["sent_bytes"] < synchronous["sent_bytes"]
  # The report draws only what a page shows.
  (folder / "PAGE.md").write_text("![bytes](results/smoke.png)")
  table = run(folder, "report.py", "smoke").split("\n\n")[0].splitlines()
  assert table[0].startswith("| variant | test accuracy")
  assert {line.split("|")[1].strip() for line in table[2:]} == {
    "ssgd", _OTHERS[name],
  }  # fmt: skip
  assert (folder / "results" / "smoke.png").stat().st_size > 0


def test_protocols_are_compared_in_virtual_time(tmp_path):
  folder = copied("dbs_sgd", tmp_path)
  pytest.importorskip("sklearn")
  pytest.importorskip("simpy")
  told = run(folder, "run.py", "smoke")
  assert told.count("4x shared, comparison") == 2
  rows = training.read_rows(folder / "results" / "smoke.jsonl")
  assert [row["method"] for row in rows] == ["asgd", "dbs"]
  for row in rows:
    assert row["clock"] == "virtual" and len(row["curve"]) == 2
    assert row["config"]["speed"] == 4.0 and row["accuracy"] > 0.4
    # The same virtual time, a pass in which no worker waits.
    assert row["train_s"] == pytest.approx(rows[0]["train_s"], rel=0.05)
    assert row["samples"] == pytest.approx(1442, rel=0.05)
  assert rows[1]["iteration_spread"] < 2 < rows[0]["iteration_spread"]


@pytest.mark.slow
def test_owned_data_make_another_comparison(tmp_path):
  folder = copied("dbs_sgd", tmp_path)
  pytest.importorskip("sklearn")
  pytest.importorskip("simpy")
  run(folder, "run.py", "smoke")
  assert run(folder, "run.py", "smoke") == ""  # Nothing is left to do.
  told = run(folder, "run.py", "smoke", "--data", "skewed")
  assert told.count("4x skewed, comparison") == 2


@pytest.mark.slow
def test_times_are_measured_and_reported(tmp_path):
  folder = copied("compression", tmp_path)
  pytest.importorskip("sklearn")
  pytest.importorskip("matplotlib")
  command = ["run.py", "smoke", "--times"]
  run(folder, *command, "--variants", "ssgd", "int4 + feedback")
  rows = training.read_rows(folder / "results" / "smoke-times.jsonl")
  named = {row["method"]: row for row in rows}
  assert list(named) == ["ssgd", "ssgd again", "int4 + feedback"]
  assert named["ssgd"]["ratio"] == 1.0
  # By 2 workers: an all-reduce; an all-to-all and an all-gather.
  assert [row["messages_per_step"] for row in rows] == [2, 2, 2]


@pytest.mark.slow
def test_failures_are_compared_in_time_and_with_gradients(tmp_path):
  folder = copied("failures", tmp_path)
  for extra in ("simpy", "sklearn", "matplotlib"):
    pytest.importorskip(extra)
  run(folder, "train.py", "smoke")
  rows = training.read_rows(folder / "results" / "smoke.jsonl")
  assert [row["config"]["fraction"] for row in rows] == [0.0, 0.2, 0.0, 0.2]
  assert all(0.5 < row["goodput"] < 1.0 for row in rows)
  told = run(
    folder,
    "-c",
    "import config, run\n"
    "setting = config.Setting(0.3, 20, cycle_s=60.0)\n"
    "for name in config.VARIANTS:\n"
    "  print(run.row(setting, name, 300.0)['goodput'])",
  )
  goodputs = [float(word) for word in told.split()]
  assert goodputs[0] == min(goodputs)
  assert goodputs[0] < 0.6 < max(goodputs)
