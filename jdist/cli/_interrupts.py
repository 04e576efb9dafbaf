"""Interrupts that are not lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In a
callback of the garbage collector, of which JAX has one, or in a destructor
it cannot be caught: Python reports it on stderr and continues, and so would
the run, with its other processes.
"""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Time in which the callback ends, so that the repeated interrupt is not lost.
_AGAIN_S = 0.05


class SigtermError(BaseException):
  """SIGTERM was received while the code was running that raises it."""


@contextlib.contextmanager
def raised_by_sigterm() -> Iterator[None]:
  """Raises a SigtermError upon the first SIGTERM; later ones do nothing."""

  def handle(number: int, frame: Any) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SigtermError

  if threading.current_thread() is not threading.main_thread():
    yield  # Python allows signal handlers in the main thread only.
    return
  before = signal.signal(signal.SIGTERM, handle)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """Repeats an interrupt that Python has caught and dropped."""
  before = sys.unraisablehook
  timers: list[threading.Timer] = []

  def hook(lost: Any) -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      before(lost)
      return
    # Another thread raises it later: raised here, it would be lost, too.
    timer = threading.Timer(_AGAIN_S, _thread.interrupt_main)
    timer.daemon = True
    timers.append(timer)
    timer.start()

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before
    for timer in timers:
      timer.cancel()
