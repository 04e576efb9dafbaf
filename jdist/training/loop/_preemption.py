"""Preemption by SIGTERM, upon which a run saves and ends between two steps."""

import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

from jdist import collectives

# A shell reports 128 plus the signal's number.
EXIT_STATUS = 128 + signal.SIGTERM


class PreemptedError(SystemExit):
  """The exit of a run that SIGTERM has ended early, with status 143.

  Attributes:
    step: The step after which the run has stopped.
    saved: Whether the run's state was saved.
  """

  def __init__(self, step: int, saved: bool):
    """Keeps the position of the run."""
    super().__init__(EXIT_STATUS)
    self.step = step
    self.saved = saved


class Preemption:
  """Context in which SIGTERM is noted, for all processes of a run together.

  Several processes agree on a step, no matter which of them got the signal. If
  they watch each other they exchange messages; otherwise JAX's preemption
  service is used.
  """

  def __init__(self) -> None:
    """Chooses how the processes agree."""
    self._asked = False
    self._before: Any = None
    several = jax.process_count() > 1
    self._lifeline = collectives.lifeline() if several else None
    # JAX's service installs its own handler, which must stay in place.
    self._by_jax = several and self._lifeline is None

  def asks_at(self, step: int) -> bool:
    """Returns whether all processes, which ask in order, stop after a step."""
    # JAX's service must be asked in the same order by all processes.
    if self._by_jax:
      return bool(multihost_utils.reached_preemption_sync_point(step))
    if self._lifeline is not None:
      return self._lifeline.stops_after(step, self._asked)
    return self._asked

  def _note(self, number: int, frame: Any) -> None:
    del number, frame
    # A handler runs between any two bytecodes: anything more could deadlock.
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
