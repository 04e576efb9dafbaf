"""Interrupts that are not lost.

Python raises `KeyboardInterrupt` wherever the main thread happens to be. In a
callback of the garbage collector, of which JAX has one, or in a destructor
nobody can catch it: Python reports it on stderr and goes on, and so would the
run, with its other processes.
"""

import _thread
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

# Long enough to have left the callback.
_AGAIN_S = 0.05


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
