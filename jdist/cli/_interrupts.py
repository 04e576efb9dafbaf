"""Interrupts that are not lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In a
callback of the garbage collector, of which JAX has one, or in a destructor
nobody can catch it: Python reports it on stderr and goes on, and so would the
run, with its other processes.
"""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Long enough to have left the callback.
_AGAIN_S = 0.05


class SigtermError(BaseException):
  """SIGTERM has come, where it is raised."""


@contextlib.contextmanager
def raised_by_sigterm() -> Iterator[None]:
  """Raises a SigtermError upon the first SIGTERM; later ones do nothing."""

  def come(number: int, frame: Any) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise SigtermError

  if threading.current_thread() is not threading.main_thread():
    yield  # Signals are the main thread's.
    return
  before = signal.signal(signal.SIGTERM, come)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """Interrupts again what has lost an interrupt."""
  before = sys.unraisablehook
  timers: list[threading.Timer] = []

  def hook(lost: Any) -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      before(lost)
      return
    # Later and by another thread: raised here, it would be lost here.
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
