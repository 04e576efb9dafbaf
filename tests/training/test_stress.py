"""Virtual CPU devices on a busy machine do not deadlock."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests import _processes

_ROOT = pathlib.Path(__file__).parent.parent.parent
_BUSY = "while True: sum(range(10**6))"


@pytest.mark.slow
def test_many_steps_on_a_loaded_machine_never_hang():
  load = [
    subprocess.Popen([sys.executable, "-c", _BUSY])
    for _ in range(os.cpu_count() or 2)
  ]
  try:
    done = subprocess.run(
      [sys.executable, "-m", "tests.training._stress", "3000"],
      cwd=_ROOT,
      env=_processes.environment(),
      capture_output=True,
      text=True,
      timeout=900,
    )
  finally:
    for process in load:
      process.kill()
      process.wait()
  assert done.returncode == 0, done.stdout + done.stderr
  assert "ended 3000 steps" in done.stdout
