"""Launched runs that are killed at random moments end like undisturbed ones.

Where `JDIST_KILLS_LOG` names a file, each kill, and each run that has ended as
it should, adds a line to it.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jdist import training
from tests import _processes

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_METHODS = {
  "ssgd": ("--method", "ssgd"),
  "msdpu": ("--method", "msdpu", "--stream"),
  "powersgd": ("--method", "powersgd"),
  "diloco": ("--method", "diloco", "--codec", "int4", "--feedback", "error"),
}
_BOTH = (signal.SIGKILL, signal.SIGTERM)
# Method, processes, kills, signals.
_CASES = [
  *((x, y, 5, _BOTH) for x in _METHODS for y in (1, 4)),
  ("ssgd", 2, 50, (signal.SIGKILL,)),
]
_STEPS_A_KILL = 40
# A busy machine may suspend these processes for minutes.
_LIMIT_S = 3600.0


def _launch(folder, method, processes, steps):
  """Starts a run; its checkpoints are ten steps apart."""
  command = [
    sys.executable, "-m", "jdist", "launch", "-n", str(processes),
    "--backoff-s", "0.1", "--", "train", "--dataset", "synthetic", "--workers",
    "4", "--batch-size", "200", "--steps", str(steps),
    "--checkpoint-every-epochs", "1", "--evaluate-every-epochs", "1000",
    "--checkpoints", str(folder / "saved"), "--output", str(folder),
    *_METHODS[method],
  ]  # fmt: skip
  with (folder / "log").open("w") as log:
    return subprocess.Popen(
      command, cwd=_ROOT, env=_processes.environment(), stdout=log, stderr=log
    )


def _children(process):
  if process.poll() is not None:  # Its files in /proc are gone.
    return []
  listed = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
  return [int(pid) for pid in listed.read_text().split()]


def _newest(folder):
  found = (folder / "saved").glob("step_*.json")
  return max((int(path.stem[5:]) for path in found), default=0)


def _note(**row):
  if "JDIST_KILLS_LOG" in os.environ:
    with open(os.environ["JDIST_KILLS_LOG"], "a") as log:
      log.write(json.dumps(row) + "\n")


def _disturb(process, folder, seeded, processes, number_of_kills, signals):
  """Kills a process of the run now and then.

  Returns:
    The signal, the process, and the step of the last checkpoint of each kill.
  """
  end_s = time.monotonic() + _LIMIT_S
  kills = []

  def newer():
    before, begin_s = _newest(folder), time.monotonic()
    while process.poll() is None and _newest(folder) == before:
      assert time.monotonic() < end_s, (folder / "log").read_text()
      time.sleep(0.01)
    return time.monotonic() - begin_s

  while len(kills) < number_of_kills and process.poll() is None:
    newer()
    # The moment lies between two checkpoints, or while one is written.
    time.sleep(seeded.uniform(0.0, min(newer(), 2.0)))
    how = seeded.choice(signals)
    running = _children(process)
    if len(running) < processes:
      continue
    # The process may have ended meanwhile.
    with contextlib.suppress(ProcessLookupError):
      number = seeded.randrange(len(running))
      os.kill(running[number], how)
      kills.append((how.name, number, _newest(folder)))
      _note(run=str(folder), kill=kills[-1])
      # Wait until the remaining ones have ended.
      while process.poll() is None and set(running) & set(_children(process)):
        time.sleep(0.01)
  return kills


def _arrays(folder, steps):
  import orbax.checkpoint as orbax

  path = folder / "saved" / f"step_{steps:08d}"
  with orbax.PyTreeCheckpointer() as checkpointer:
    # Several processes have written the arrays, which one process reads here.
    named = checkpointer.metadata(path).item_metadata.tree
    as_numpy = {x: orbax.RestoreArgs(restore_type=np.ndarray) for x in named}
    return checkpointer.restore(path, restore_args=as_numpy)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
  ("method", "processes", "number_of_kills", "signals"), _CASES
)
def test_killed_run_restarts_without_help(
  method, processes, number_of_kills, signals, tmp_path
):
  steps = _STEPS_A_KILL * number_of_kills
  seeded = random.Random(f"{method} {processes}")
  folders = [tmp_path / name for name in ("never", "killed")]
  for folder in folders:
    folder.mkdir()
  started = []
  try:
    started.append(_launch(folders[0], method, processes, steps))
    assert started[0].wait(timeout=_LIMIT_S) == 0, (
      folders[0] / "log"
    ).read_text()
    started.append(_launch(folders[1], method, processes, steps))
    kills = _disturb(
      started[1], folders[1], seeded, processes, number_of_kills, signals
    )
    assert started[1].wait(timeout=_LIMIT_S) == 0, (
      folders[1] / "log"
    ).read_text()
  finally:
    for process in started:
      process.terminate()
      process.wait()
  told = (folders[1] / "log").read_text()
  assert "Traceback" not in told, told
  assert len(kills) == number_of_kills, "it ended before it could be killed"
  assert told.count("Resumes from step") == number_of_kills, told
  rows = [training.read_rows(x / "rows.jsonl")[-1] for x in folders]
  # Process 0, on which the others wait, is among the killed ones.
  assert number_of_kills < 50 or {number for _, number, _ in kills} == {0, 1}
  for field in ("accuracy", "test_loss", "steps", "rounds", "sent_bytes"):
    assert rows[0][field] == rows[1][field], field
  never, killed = (_arrays(x, steps) for x in folders)
  assert never.keys() == killed.keys()
  for number, array in never.items():
    np.testing.assert_array_equal(array, killed[number], err_msg=number)
  _note(method=method, processes=processes, kills=len(kills), equal=True)
