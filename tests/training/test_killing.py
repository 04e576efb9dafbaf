"""Killed with SIGKILL at any moment, a run ends as if it had not been."""

import os
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from jdist import training

_ROOT = pathlib.Path(__file__).parent.parent.parent
_STEPS = 40


def _start(*arguments):
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(_ROOT),
    "PYTHONWARNINGS": "error::UserWarning:jdist",
  }
  return subprocess.Popen(
    [sys.executable, "-m", *map(str, arguments)],
    cwd=_ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _finish(process):
  """The last line that a process prints before it ends well."""
  out, _ = process.communicate(timeout=240)
  assert process.returncode == 0, out
  return out.splitlines()[-1]


def _wait(process, condition, limit_s=120.0):
  """Waits until a condition holds; False when the process ends before."""
  end_s = time.monotonic() + limit_s
  while process.poll() is None:
    if condition():
      return True
    assert time.monotonic() < end_s, "neither went on nor ended"
    time.sleep(0.0005)
  return False


def _whole(folder):
  return len(list(folder.glob("step_*.json")))


def _is_being_written(folder):
  """Whether there is a directory that has no manifest yet."""
  return any(
    not pathlib.Path(f"{path}.json").exists()
    for path in folder.glob("step_????????*")
    if path.is_dir()
  )


def _kill(start, folder, moments):
  """Starts a run once for each moment and kills it then."""
  killed = 0
  for moment in moments:
    newest = max((p.name for p in folder.glob("*.json")), default="")

    def went_on(newest=newest):
      return any(path.name > newest for path in folder.glob("step_*.json"))

    process = start()
    reached = _wait(process, went_on)
    if reached and moment == "writing":
      reached = _wait(process, lambda: _is_being_written(folder))
    elif reached:
      time.sleep(moment)
    process.kill()
    process.communicate()
    killed += process.returncode == -9
    assert _whole(folder) >= 1
  return killed


def _check(method, moments, tmp_path, steps):
  arguments = ("tests.training._killed", tmp_path / "never", method, steps)
  # To its end first: the others find its compiled programs.
  never = _finish(_start(*arguments))

  def start():
    return _start("tests.training._killed", folder, method, steps)

  # On a busy machine it may end before it could be killed.
  for attempt in range(5):
    folder = tmp_path / f"killed{attempt}"
    killed = _kill(start, folder, moments)
    ended = (folder / f"step_{steps:08d}.json").exists()
    if killed == len(moments) and not ended:
      break
  assert killed == len(moments) and not ended
  told = _finish(start())
  assert told.startswith("hash ")
  assert told == never
  assert sorted(p.name for p in folder.iterdir()) == sorted(
    p.name for p in (tmp_path / "never").iterdir()
  )


def test_run_killed_in_a_write_ends_with_the_same_bits(tmp_path):
  _check("msdpu", ["writing"], tmp_path, _STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["diloco", "msdpu"])
def test_run_killed_at_many_moments_ends_with_the_same_bits(method, tmp_path):
  seeded = random.Random(method)
  moments = ["writing", *(seeded.uniform(0.0, 0.6) for _ in range(4))] * 2
  moments += ["writing", "writing"]
  _check(method, moments, tmp_path, 400)


@pytest.mark.slow
def test_command_resumes_after_a_kill(tmp_path):
  import orbax.checkpoint as orbax

  def start(name):
    return _start(
      "jdist", "train", "--preset", "digits", "--method", "diloco",
      "--steps", 200, "--checkpoint-every-epochs", 0.4,
      "--evaluate-every-epochs", 2, "--workers", 4,
      "--checkpoints", tmp_path / name, "--output", tmp_path / f"{name}_out",
    )  # fmt: skip

  _finish(start("never"))
  seeded = random.Random(0)
  moments = [*(seeded.uniform(0.0, 0.3) for _ in range(3)), "writing"]
  assert _kill(lambda: start("killed"), tmp_path / "killed", moments) == 4
  _finish(start("killed"))
  states = []
  for name in ("never", "killed"):
    with orbax.PyTreeCheckpointer() as checkpointer:
      states.append(checkpointer.restore(tmp_path / name / "step_00000200"))
  assert states[0].keys() == states[1].keys()
  for number, array in states[0].items():
    np.testing.assert_array_equal(array, states[1][number], err_msg=number)
  rows = [
    training.read_rows(tmp_path / f"{name}_out" / "rows.jsonl")[-1]
    for name in ("never", "killed")
  ]
  for field in ("accuracy", "test_loss", "steps", "rounds", "sent_bytes"):
    assert rows[0][field] == rows[1][field], field
