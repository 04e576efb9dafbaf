"""Ends a run that hangs, with a message, instead of waiting forever.

A process that is alive but stuck in a collective hangs all others without an
error, and the main thread cannot be interrupted there: it waits inside the
runtime.  So a second thread looks at the clock.
"""

import faulthandler
import os
import sys
import threading
import time
from typing import NamedTuple

# What the shell sees; EX_TEMPFAIL: run it again, it resumes.
EXIT_STATUS = 75


class _Beat(NamedTuple):
  at_s: float
  patience_s: float


class _Looks:
  """An observer of beats that knows when it overslept itself."""

  def __init__(self, interval_s: float, now_s: float):
    """`interval_s` is the time between looks, the first of which was now."""
    self._interval_s = interval_s
    self._looked_s = now_s
    self._last: _Beat | None = None
    self._stopped_s = 0.0

  def find_late(self, last: _Beat, now_s: float) -> bool:
    """Returns whether the next beat is late, in time that the process ran."""
    if last is not self._last:
      self._last, self._stopped_s = last, 0.0
    overslept_s = now_s - self._looked_s - self._interval_s
    if overslept_s > self._interval_s:  # So did whoever was to call `beat`.
      # Of it what was after the last beat: who was stopped may have called
      # before this thread came to look.
      self._stopped_s += min(overslept_s, max(0.0, now_s - last.at_s))
    self._looked_s = now_s
    return now_s - last.at_s > last.patience_s + self._stopped_s


class Watchdog:
  """Ends the process if nobody calls `beat` for too long.

  Used as a context manager around a training loop.  Time in which the process
  itself was suspended, by a scheduler for instance, does not count.
  """

  def __init__(self, timeout_s: float):
    """Sets the clock; it starts on entering the context.

    Args:
      timeout_s: seconds without a beat before the process ends; infinity
        means never.
    """
    if not timeout_s > 0:
      raise ValueError(f"`timeout_s` must be positive, got {timeout_s}.")
    self._timeout_s = timeout_s
    self._last = _Beat(time.monotonic(), float("inf"))
    self._note = ""
    self._done = threading.Event()
    self._thread = threading.Thread(
      target=self._watch, name="jdist-watchdog", daemon=True
    )

  def beat(self, note: str = "", *, patience: float = 1.0) -> None:
    """Says that all is well.

    Args:
      note: where the run is, for the message.
      patience: this time, wait so many times longer: compiling takes time.
    """
    self._note = note
    # In one assignment, as another thread reads it.
    self._last = _Beat(time.monotonic(), self._timeout_s * patience)

  def _watch(self) -> None:
    interval_s = min(1.0, self._timeout_s / 4)
    looks = _Looks(interval_s, time.monotonic())
    while not self._done.wait(interval_s):
      # The beat first: it lies before the look at it, whoever is interrupted.
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
      f"with status {EXIT_STATUS}; start the run again to go on from its last "
      "checkpoint. Where each thread stands:\n"
    )
    try:
      sys.stderr.write("\n" + message)
      sys.stderr.flush()
      # Below Python: `sys.stderr` may be a notebook's, which has no file.
      faulthandler.dump_traceback(file=2, all_threads=True)
    finally:
      # Not sys.exit: no other thread will ever come back for its handlers.
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
