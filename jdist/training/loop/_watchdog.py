"""Watchdog that ends a hanging run with a message.

A process that is alive but stuck in a collective makes all others hang without
an error. The main thread cannot be interrupted, as it waits inside the runtime,
so that a second thread looks at the clock.
"""

import faulthandler
import os
import sys
import threading
import time
from typing import NamedTuple

# EX_TEMPFAIL of sysexits.h: running the command again resumes.
EXIT_STATUS = 75


class _Beat(NamedTuple):
  at_s: float
  patience_s: float


class _Looks:
  """An observer of beats that knows when its own process was suspended."""

  def __init__(self, interval_s: float, now_s: float):
    """Starts at `now_s`; `interval_s` is the time between two looks."""
    self._interval_s = interval_s
    self._looked_s = now_s
    self._last: _Beat | None = None
    self._stopped_s = 0.0

  def find_late(self, last: _Beat, now_s: float) -> bool:
    """Returns whether the next beat is late, while the process was running."""
    if last is not self._last:
      self._last, self._stopped_s = last, 0.0
    overslept_s = now_s - self._looked_s - self._interval_s
    if overslept_s > self._interval_s:
      # The whole process was suspended, and could not call `beat` either. Only
      # the time after the last beat counts: the main thread may have called it
      # before this thread looked again.
      self._stopped_s += min(overslept_s, max(0.0, now_s - last.at_s))
    self._looked_s = now_s
    return now_s - last.at_s > last.patience_s + self._stopped_s


class Watchdog:
  """Context that ends the process if `beat` is not called for too long.

  Time in which the process itself was suspended, for instance by a scheduler,
  does not count.
  """

  def __init__(self, timeout_s: float):
    """Sets the clock, which starts on entering the context."""
    self._timeout_s = timeout_s
    self._last = _Beat(time.monotonic(), float("inf"))
    self._note = ""
    self._done = threading.Event()
    self._thread = threading.Thread(
      target=self._watch, name="jdist-watchdog", daemon=True
    )

  def beat(self, note: str = "", *, patience: float = 1.0) -> None:
    """Restarts the clock; the next beat may take `patience` times as long."""
    self._note = note
    # A single assignment, because another thread reads both values.
    self._last = _Beat(time.monotonic(), self._timeout_s * patience)

  def _watch(self) -> None:
    interval_s = min(1.0, self._timeout_s / 4)
    looks = _Looks(interval_s, time.monotonic())
    while not self._done.wait(interval_s):
      # The beat is read before the clock, so that a suspension between both
      # cannot put the beat after the look.
      last = self._last
      if looks.find_late(last, time.monotonic()):
        self._end()

  def _end(self) -> None:
    message = (
      f"jdist: no training step has finished for {self._timeout_s:g} s "
      f"({self._note or 'none before it'}). The run hangs, most likely in a "
      "collective that another worker never joined: another process may be "
      "dead or stuck, or the virtual CPU devices of this one are out of "
      "threads (make them with `jdist.collectives.make_cpu_devices`). Ending "
      f"with status {EXIT_STATUS}; start the run again to resume from its last "
      "checkpoint. Where each thread stands:\n"
    )
    # The message must not depend on a working stderr: the process ends anyway.
    try:
      sys.stderr.write("\n" + message)
      sys.stderr.flush()
      # File descriptor 2, because a notebook's `sys.stderr` has no file.
      faulthandler.dump_traceback(file=2, all_threads=True)
    finally:
      # `sys.exit` would wait for the main thread, which never returns.
      os._exit(EXIT_STATUS)

  def __enter__(self) -> "Watchdog":
    self.beat()
    if self._timeout_s != float("inf"):
      self._thread.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._done.set()
    if self._thread.is_alive():
      self._thread.join()
