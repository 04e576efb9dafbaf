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
def raised_once(
  number: int = signal.SIGTERM, error: type[BaseException] = SigtermError
) -> Iterator[None]:
  """Raises an error upon the first signal; later ones do nothing."""

  def handle(number: int, frame: Any) -> None:
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise error

  before = signal.getsignal(number)
  main = threading.current_thread() is threading.main_thread()
  # Background processes of a shell ignore SIGINT, which must stay so.
  if not main or before is signal.SIG_IGN:
    yield  # Python allows signal handlers in the main thread only.
    return
  signal.signal(number, handle)
  try:
    yield
  finally:
    # An interrupted process ends, which a second interrupt must not cut off.
    if number != signal.SIGINT or signal.getsignal(number) is handle:
      signal.signal(number, before)


@contextlib.contextmanager
def kept() -> Iterator[None]:
  """Raises the first interrupt, also one that Python has dropped."""
  before = sys.unraisablehook

  def hook(lost: Any) -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      before(lost)
      return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Another thread raises it later: raised here, it would be lost, too.
    timer = threading.Timer(_AGAIN_S, _thread.interrupt_main)
    timer.daemon = True
    stack.callback(timer.cancel)
    timer.start()

  with contextlib.ExitStack() as stack:
    stack.callback(setattr, sys, "unraisablehook", before)
    stack.enter_context(raised_once(signal.SIGINT, KeyboardInterrupt))
    sys.unraisablehook = hook
    yield
