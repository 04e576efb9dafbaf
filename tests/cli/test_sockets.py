"""Runs of one process listen at no address, while they train."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from tests import _processes

_ROOT = pathlib.Path(__file__).parents[2]
RUNS = {
  "collectives": "--workers 2 --batch-size 64",
  "a pipeline": "--stages 2 --model mlp --batch-size 64",
  "elastic, in threads": "--elastic --method diloco --workers 2",
  "elastic, on the clock": (
    "--elastic --method diloco --workers 2 --driver clock"
  ),
  "a server": "--protocol asp --driver threads --cluster machines.toml",
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
  "words",
  [
    pytest.param(words, id=name, marks=() if i == 2 else pytest.mark.slow)
    for i, (name, words) in enumerate(RUNS.items())
  ],
)
def test_run_of_one_process_listens_nowhere(words, tmp_path):
  (tmp_path / "machines.toml").write_text(
    "[[nodes]]\nname = 'worker'\ncount = 2\n"
    "[profile]\nseconds_per_sample = 0.001\npush_bytes = 38_440\n"
  )
  process = subprocess.Popen(
    [sys.executable, "-m", "jdist", "train", "--dataset", "synthetic",
     "--epochs", "100000", "--evaluate-every-epochs", "1", "--checkpoints",
     str(tmp_path / "saved"), "--output", str(tmp_path), *words.split()],
    env=_processes.environment() | {"PYTHONPATH": str(_ROOT)}, cwd=tmp_path,
    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip
  try:
    found = []
    # The first checkpoint is made while it trains.
    while not any((tmp_path / "saved").glob("[!l]*")):  # Not the lease.
      assert process.poll() is None, process.stderr.read()
      found += _processes.listening(process.pid)
      time.sleep(0.2)
    found += _processes.listening(process.pid)
  finally:
    process.kill()
    process.communicate()
  assert found == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_that_ends_meanwhile_listens_nowhere(monkeypatch):
  """A run asks git for its commit, in a process that ends at once."""
  process = subprocess.Popen([sys.executable, "-c", ""])
  process.wait()
  ended = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "glob", lambda *_: [ended])
    assert _processes.descendants(os.getpid()) == []
  monkeypatch.setattr(_processes, "descendants", lambda _: [process.pid])
  with socket.create_server(("127.0.0.1", 0)) as server:
    assert server.getsockname() in _processes.listening(os.getpid())
