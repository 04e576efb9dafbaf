"""SIGTERM, upon which a run saves and ends between two steps."""

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from jdist import collectives

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

  Several processes agree on a step, whichever of them was sent the signal: by
  messages where they watch each other, else by JAX's preemption service.
  """

  def __init__(self) -> None:
    """Nothing is noted yet."""
    self._asked = False
    self._before: Any = None
    several = jax.process_count() > 1
    self._watched = several and collectives.watches_processes()
    # JAX's service has the signal then.
    self._by_jax = several and not self._watched

  def asks_at(self, step: int) -> bool:
    """Returns whether all processes should stop after this step.

    Args:
      step: that every process asks for, in order.
    """
    if self._by_jax:
      return bool(multihost_utils.reached_preemption_sync_point(step))
    if self._watched:
      return collectives.processes_stop(step, self._asked)
    return self._asked

  def _note(self, number: int, frame: Any) -> None:
    del number, frame
    self._asked = True

  def __enter__(self) -> "Preemption":
    if self._by_jax:
      return self
    if threading.current_thread() is not threading.main_thread():
      raise ValueError(
        "`stop_on_sigterm` must be False in a thread, got True: Python gives "
        "signals to the main thread. Train there."
      )
    self._before = signal.signal(signal.SIGTERM, self._note)
    return self

  def __exit__(self, *error: object) -> None:
    if not self._by_jax:
      before = signal.SIG_DFL if self._before is None else self._before
      signal.signal(signal.SIGTERM, before)
