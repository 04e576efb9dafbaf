"""A resumed run names its step, may be longer and have other workers."""

import subprocess
import sys

from jdist import cli, training

_WORDS = (
  "train", "--dataset", "synthetic", "--method", "local_sgd", "--interval", "2",
  "--batch-size", "64", "--evaluate-every-epochs", "100",
)  # fmt: skip


def _run(tmp_path, *words):
  return cli.main(
    [
      *_WORDS, "--checkpoints", str(tmp_path / "saved"), "--output",
      str(tmp_path), *words,
    ]
  )  # fmt: skip


def test_resumed_run_may_be_longer_and_have_other_workers(tmp_path, capsys):
  assert _run(tmp_path, "--workers", "4", "--steps", "4") == 0
  assert "Resumes" not in capsys.readouterr().out
  assert _run(tmp_path, "--workers", "4", "--steps", "6") == 0
  out = capsys.readouterr().out
  assert (
    "Resumes from step 4, of 6 steps where it had 4; the schedule is that of "
    "the longer run." in out
  )
  assert "step 6/6" in out
  assert _run(tmp_path, "--workers", "4", "--steps", "5") == 2
  error = capsys.readouterr().err
  assert "`--steps` must not be less than when the run began, 6 steps" in error
  assert error.count("\n") == 1
  assert _run(tmp_path, "--workers", "2", "--steps", "8") == 0
  out = capsys.readouterr().out
  assert "with N = 2 in place of 4" in out and "step 8/8" in out
  rows = training.read_rows(tmp_path / "rows.jsonl")
  assert [row["steps"] for row in rows] == [4, 6, 8]
  assert [row["workers"] for row in rows] == [4, 4, 2]
  # Each row is of the whole run, and has the step of its checkpoint.
  assert [row.get("resumed_from_step") for row in rows] == [None, 4, 6]
  assert [x["step"] for x in rows[-1]["curve"]] == [4, 6, 8]
  assert rows[0]["train_s"] < rows[1]["train_s"] < rows[2]["train_s"]


# Refuses the imports of extras, each of which is made where it is used.
_CORE = """
import importlib.abc, sys
gone = {"sklearn", "grain", "tensorflow_datasets", "array_record", "PIL",
        "matplotlib", "orbax", "simpy", "ray", "safetensors", "tensorboardX"}
class Gone(importlib.abc.MetaPathFinder):
  def find_spec(self, name, path=None, target=None):
    if name.split(".")[0] in gone:
      raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
from jdist import cli
sys.exit(cli.main())
"""


def test_core_alone_trains_and_names_missing_extras(tmp_path):
  def run(*words):
    return subprocess.run(
      [sys.executable, "-c", _CORE, *words, "--output", str(tmp_path)],
      capture_output=True,
      text=True,
      timeout=300,
    )

  done = run(
    "train", "--dataset", "synthetic", "--method", "ssgd", "--workers", "1",
    "--batch-size", "64", "--steps", "2",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert "step 2/2" in done.stdout
  done = run("train", "--checkpoints", str(tmp_path), "--tensorboard", "b")
  assert done.returncode == 2
  assert done.stderr == (
    "jdist: error: `sklearn`, `orbax.checkpoint`, `tensorboardX` are needed "
    'here and not installed. Install what is missing: pip install ".[data,'
    'checkpoints,metrics]" in the clone of jdist, or pip install scikit-learn '
    "orbax-checkpoint tensorboardX\n"
  )
