"""A run that hangs ends with a message instead of forever."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from jdist.training.loop import _watchdog

_HANGS = """
import io, sys, threading
from jdist.training.loop import _watchdog
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
def test_hanging_step_ends_the_process_with_a_message(notebook):
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
  # The watchdog runs in another thread, and shows where the main one hangs.
  assert 'File "<string>", line 11 in <module>' in done.stderr


class _Clock:
  """A clock that stands still until it is told, and notes who has looked."""

  def __init__(self):
    self.now_s, self._seen = 0.0, threading.Condition()
    self._seen_s = 0.0

  def monotonic(self):
    if threading.current_thread().name == "jdist-watchdog":
      with self._seen:
        self._seen_s = self.now_s
        self._seen.notify()
    return self.now_s

  def go_on(self, seconds):
    """Returns once the watchdog has looked at the new time."""
    with self._seen:
      self.now_s += seconds
      assert self._seen.wait_for(lambda: self._seen_s == self.now_s, 60)


@pytest.fixture
def clock(monkeypatch):
  """A clock on which no process is ended, as it would be this one."""
  ended, found = [], _Clock()
  monkeypatch.setattr(_watchdog, "time", found)
  monkeypatch.setattr(_watchdog.Watchdog, "_end", lambda self: ended.append(1))
  yield found
  assert not ended


def test_beats_keep_the_process_alive_and_leaving_ends_the_thread(clock):
  with _watchdog.Watchdog(0.4) as watchdog:
    for _ in range(8):
      clock.go_on(0.15)
      watchdog.beat()
    assert "jdist-watchdog" in {t.name for t in threading.enumerate()}
  assert "jdist-watchdog" not in {t.name for t in threading.enumerate()}


_IS_STOPPED = """
import time
from jdist.training.loop import _watchdog
with _watchdog.Watchdog(4.0):
  print("begun", flush=True)
  for _ in range(10):  # One sleep would be over when it continues.
    time.sleep(0.1)
"""


def test_time_of_a_suspended_process_does_not_count():
  command = [sys.executable, "-c", _IS_STOPPED]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout.readline() == "begun\n"
      process.send_signal(signal.SIGSTOP)
      time.sleep(5.0)
      process.send_signal(signal.SIGCONT)
      assert process.wait(timeout=60) == 0
    finally:
      process.kill()


_HANGS_AFTERWARDS = """
import signal, threading, time
from jdist.training.loop import _watchdog
gone_on = threading.Event()
# The clock would miss a stop between two reads of it.
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


@pytest.mark.slow  # Sleeps; `_ended_at_s` says the same without a clock.
def test_run_that_hangs_after_a_suspension_is_ended_in_time():
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


def _ended_at_s(
  beats_s: list[float], looks_s: list[float], patience_s: float = 3.0
) -> float | None:
  """When a run is ended that beats, and is looked at, at those times."""
  beats = [_watchdog._Beat(at_s, patience_s) for at_s in beats_s]
  looks = _watchdog._Looks(1.0, 0.0)
  for now_s in looks_s:
    last = [beat for beat in beats if beat.at_s <= now_s][-1]
    if looks.find_late(last, now_s):
      return now_s
  return None


def test_hanging_run_ends_at_the_first_look_after_its_patience():
  assert _ended_at_s([0.0, 1.5], [1.0, 2.0, 3.0, 4.0, 5.0]) == 5.0


def test_suspension_extends_the_deadline_by_its_length():
  # Stopped from 2.0 to 13.5: at 14.5 it ran for 3.0 s and not for more.
  looks_s = [1.0, 13.5, 14.5, 15.5, 16.5, 17.5]
  assert _ended_at_s([0.0], looks_s) == 15.5
  # And none to who beat since.
  assert _ended_at_s([0.0, 14.0], looks_s) == 17.5


def test_suspension_before_the_last_beat_extends_nothing():
  # It continued at 13.5, beat before the next look, and hangs since.
  looks_s = [1.0, 13.5, 14.5, 15.5, 16.5, 17.5]
  assert _ended_at_s([0.0, 13.5], looks_s) == 17.5


def test_two_suspensions_after_one_beat_add_up():
  # Stopped from 2.0 to 11.0 and from 12.0 to 21.0.
  assert _ended_at_s([0.0], [1.0, 11.0, 21.0, 22.0, 23.0]) == 22.0


def test_patience_makes_one_deadline_longer(clock):
  with _watchdog.Watchdog(0.2) as watchdog:
    watchdog.beat("compiling", patience=100.0)
    for _ in range(10):
      clock.go_on(0.05)


def test_without_a_limit_there_is_no_thread():
  with _watchdog.Watchdog(float("inf")):
    assert "jdist-watchdog" not in {t.name for t in threading.enumerate()}


def test_suspension_before_a_beat_does_not_extend_its_deadline():
  # The beat came at 13.25, after the stop and before the look at 13.5.
  looks_s = [1.0, 13.5, 14.5, 15.5, 16.5, 17.5]
  assert _ended_at_s([0.0, 13.25], looks_s) == 17.5
