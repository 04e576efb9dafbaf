"""Agreement on the step after which all processes of a run stop."""

import threading
from collections.abc import Callable
from typing import Any

Note = dict[str, Any]

# The time in which a process must answer which step it has begun.
_LIMIT_S = 60.0


class StopAgreement:
  """One process's part in the agreement.

      any       {"stop": "wanted"}            to process 0
      process 0 {"stop": "asked"}             to all: begin no new step
      each      {"stop": "told", "step": s}   the last step that it has begun
      process 0 {"stop": "agreed", "step": n} one later than the highest

  The main thread begins steps, and other threads handle notes.
  """

  def __init__(
    self, num_processes: int, process_id: int, send: Callable[[Note], None]
  ):
    """Prepares a process's part; `send` passes a note on by process 0."""
    self._num, self._id, self._send = num_processes, process_id, send
    # While the stop step is negotiated, no step is begun.
    self._changed, self._negotiates = threading.Condition(), False
    self._step, self._stop_step = 0, 0
    self._steps: dict[int, int] = {}

  def want(self) -> None:
    """Begins the agreement, unless there is one."""
    with self._changed:
      if self._stop_step:
        return
      self._negotiates = True
      if self._id:
        self._send({"stop": "wanted"})
      else:
        self._ask()

  def stops_after(self, step: int) -> bool:
    """Returns whether all stop after this step, once that is known.

    Every process asks for each step, in order. A TimeoutError is raised when
    the others do not answer.
    """
    with self._changed:
      # A process that does not answer has died, and its lifeline ends this one
      # before the limit.
      if not self._changed.wait_for(lambda: not self._negotiates, _LIMIT_S):
        raise TimeoutError(
          f"The processes did not agree within {_LIMIT_S:g} s after which step "
          "to stop."
        )
      self._step = step
      return 0 < self._stop_step <= step

  def take(self, number: int, note: Note) -> None:
    """Handles a note of another process; one out of its part has no effect."""
    with self._changed:
      match self._id == 0, note["stop"]:
        case True, "wanted":
          self._ask()
        case True, "told":
          self._steps[number] = int(note["step"])
          self._settle()
        case False, "asked":
          self._negotiates = True
          self._send({"stop": "told", "step": self._step})
        case False, "agreed":
          self._stop_at(int(note["step"]))

  def _ask(self) -> None:
    """Asks all processes for their steps, once."""
    if not self._steps:
      self._negotiates, self._steps[0] = True, self._step
      self._send({"stop": "asked"})
      self._settle()

  def _settle(self) -> None:
    if len(self._steps) == self._num:
      step = max(self._steps.values()) + 1
      self._send({"stop": "agreed", "step": step})
      self._stop_at(step)

  def _stop_at(self, step: int) -> None:
    self._stop_step, self._negotiates = step, False
    self._changed.notify_all()
