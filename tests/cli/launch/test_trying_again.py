"""`launch` tries again what heals: a full disk that empties, a taken port."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from jdist import training
from jdist.cli.launch import _local_run
from tests import _processes

_TRAIN = (
  "--dataset", "synthetic", "--workers", "2", "--batch-size", "100", "--steps",
  "40", "--checkpoint-every-epochs", "1",
)  # fmt: skip
_LIMIT_S = 600.0


@pytest.mark.slow
@pytest.mark.skipif(
  os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a small disk"
)
def test_full_disk_that_empties_is_survived(tmp_path):
  disk, log = tmp_path / "disk", tmp_path / "log"
  disk.mkdir()
  words = ("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk))
  subprocess.run(words, check=True)
  try:
    with (disk / "ballast").open("wb") as file:
      while shutil.disk_usage(disk).free:
        file.write(bytes(4096))
        file.flush()
    with log.open("w") as told:
      process = subprocess.Popen(
        (sys.executable, "-m", "jdist", "launch", "-n", "2", "--backoff-s",
         "0.1", "--restarts", "100", "--", "train", *_TRAIN, "--checkpoints",
         str(disk / "saved"), "--output", str(tmp_path)),
        env=_processes.environment(), stdout=told, stderr=told,
      )  # fmt: skip
    try:
      end_s = time.monotonic() + _LIMIT_S
      while "(try again); restarting" not in log.read_text():
        assert process.poll() is None and time.monotonic() < end_s, (
          log.read_text()
        )
        time.sleep(0.1)
      (disk / "ballast").unlink()
      assert process.wait(timeout=_LIMIT_S) == 0, log.read_text()
    finally:
      process.terminate()
      process.wait()
    assert "Traceback" not in log.read_text()
    assert list((disk / "saved").glob("step_*40.json"))
  finally:
    subprocess.run(("umount", str(disk)), check=True)


@pytest.mark.slow
def test_taken_port_is_survived(tmp_path, monkeypatch, capfd):
  for name in {*os.environ} - {*_processes.environment()}:
    monkeypatch.delenv(name)
  for name, value in _processes.environment().items():
    monkeypatch.setenv(name, value)
  draw = _local_run._free_port
  with socket.create_server(("127.0.0.1", 0)) as taken:
    ports = iter((taken.getsockname()[1],))
    monkeypatch.setattr(_local_run, "_free_port", lambda: next(ports, draw()))
    run = _local_run.LocalRun(
      (sys.executable, "-m", "jdist", "train", *_TRAIN, "--output",
       str(tmp_path), "--checkpoints", str(tmp_path / "saved")),
      2, checkpoints=str(tmp_path / "saved"), restarts=3, backoff_s=0.1,
    )  # fmt: skip
    assert run.run() == 0
  told = capfd.readouterr().err
  assert told.count("status 75 (try again); restarting all from") == 1, told
  assert "Traceback" not in told
  assert training.read_rows(tmp_path / "rows.jsonl")[-1]["steps"] == 40


def test_drawn_port_is_free():
  drawn = []
  with contextlib.ExitStack() as stack:
    for _ in range(3):
      drawn.append(_local_run._free_port())
      stack.enter_context(socket.create_server(("127.0.0.1", drawn[-1])))
  assert len({*drawn}) == 3
