"""SIGTERM, upon which a run saves and ends between two steps."""

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

# As a shell has it: 128 + SIGTERM.
EXIT_STATUS = 128 + signal.SIGTERM


class PreemptedError(SystemExit):
  """A run has ended early because of SIGTERM; uncaught, with status 143.

  Attributes:
    step: after which it has stopped.
    saved: whether its state was saved.
  """

  def __init__(self, step: int, saved: bool):
    """Notes where it stands."""
    super().__init__(EXIT_STATUS)
    self.step = step
    self.saved = saved


class Preemption:
  """Notes SIGTERM while it is entered, for all processes of a run alike.

  Several processes agree on a step by JAX's preemption service, whichever of
  them was sent the signal.
  """

  def __init__(self) -> None:
    """Nothing is noted yet."""
    self._asked = False
    self._before: Any = None
    self._several = jax.process_count() > 1

  def asks_at(self, step: int) -> bool:
    """Returns whether all processes should stop after this step.

    Args:
      step: that every process asks for, in order.
    """
    if self._several:
      return bool(multihost_utils.reached_preemption_sync_point(step))
    return self._asked

  def _note(self, number: int, frame: Any) -> None:
    del number, frame
    self._asked = True

  def __enter__(self) -> "Preemption":
    if self._several:
      return self
    if threading.current_thread() is not threading.main_thread():
      raise ValueError(
        "`stop_on_sigterm` must be False in a thread, got True: Python gives "
        "signals to the main thread. Train there."
      )
    self._before = signal.signal(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *error: object) -> None:
    if not self._several:
      before = signal.SIG_DFL if self._before is None else self._before
      signal.signal(signal.SIGTERM, before)
