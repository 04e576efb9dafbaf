"""A run that hangs ends with a message instead of forever."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from jdist import training

_HANGS = """
import io, sys, threading
from jdist.training import _watchdog
if {notebook}:
  sys.stderr = io.StringIO()  # Has no file below it, as in a notebook.
with _watchdog.Watchdog(0.5) as watchdog:
  watchdog.beat("the last was step 7")
  threading.Lock().acquire()
  lock = threading.Lock()
  lock.acquire()
  lock.acquire()
"""


@pytest.mark.smoke
@pytest.mark.parametrize("notebook", [False, True])
def test_a_step_that_hangs_ends_the_process_with_a_message(notebook):
  done = subprocess.run(
    [sys.executable, "-c", _HANGS.format(notebook=notebook)],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 75
  if not notebook:
    assert "no training step has finished for 0.5 s" in done.stderr
    assert "the last was step 7" in done.stderr
    assert "start the run again" in done.stderr
  assert "lock.acquire" in done.stderr or "most recent call" in done.stderr


def test_beats_keep_it_alive_and_leaving_ends_its_thread():
  with training.Watchdog(0.4) as watchdog:
    for _ in range(4):
      time.sleep(0.2)
      watchdog.beat()
    assert "jdist-watchdog" in {t.name for t in threading.enumerate()}
  assert "jdist-watchdog" not in {t.name for t in threading.enumerate()}


_IS_STOPPED = """
import time
from jdist.training import _watchdog
with _watchdog.Watchdog(6.0):
  print("begun", flush=True)
  for _ in range(20):  # Not one sleep, which would be over when it goes on.
    time.sleep(0.1)
"""


def test_time_in_which_the_process_is_stopped_does_not_count():
  command = [sys.executable, "-c", _IS_STOPPED]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout.readline() == "begun\n"
      process.send_signal(signal.SIGSTOP)
      time.sleep(8.0)
      process.send_signal(signal.SIGCONT)
      assert process.wait(timeout=60) == 0
    finally:
      process.kill()


_HANGS_AFTERWARDS = """
import signal, threading, time
from jdist.training import _watchdog
gone_on = threading.Event()
# Not told from the clock, which misses a stop between two looks at it.
signal.signal(signal.SIGCONT, lambda *_: gone_on.set())
with _watchdog.Watchdog(3.0) as watchdog:
  print("begun", flush=True)
  while not gone_on.is_set():
    watchdog.beat()
    time.sleep(0.1)
  watchdog.beat("goes on")
  lock = threading.Lock()
  lock.acquire()
  lock.acquire()
"""


def test_a_run_that_hangs_after_it_was_stopped_is_ended_in_time():
  with subprocess.Popen(
    [sys.executable, "-c", _HANGS_AFTERWARDS],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      assert process.stdout.readline() == "begun\n"
      process.send_signal(signal.SIGSTOP)
      time.sleep(12.0)
      process.send_signal(signal.SIGCONT)
      started_s = time.monotonic()
      _, told = process.communicate(timeout=60)
      waited_s = time.monotonic() - started_s
    finally:
      process.kill()
  assert process.returncode == 75 and "goes on" in told
  # 3 s, and what a busy machine adds; not the 12 in which it was stopped.
  assert waited_s < 10.0


def test_patience_makes_one_deadline_longer():
  with training.Watchdog(0.2) as watchdog:
    watchdog.beat("compiling", patience=100.0)
    time.sleep(0.5)


def test_without_a_limit_there_is_no_thread():
  with training.Watchdog(float("inf")):
    assert "jdist-watchdog" not in {t.name for t in threading.enumerate()}


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_time_out_that_is_none_is_refused(timeout_s):
  with pytest.raises(ValueError, match="`timeout_s` must be positive"):
    training.Watchdog(timeout_s)
