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
    self,
    num_processes: int,
    process_id: int,
    send: Callable[[Note], None],
  ):
    """Prepares a process's part; `send` passes a note on by process 0."""
    self._num, self._id, self._send = num_processes, process_id, send
    self._lock = threading.Lock()
    # Process 0 handles the notes of each other process in a thread.
    self._turn = threading.RLock()
    self._step, self._stop_step, self._wanted = 0, 0, False
    # Cleared while the stop step is being negotiated.
    self._known = threading.Event()
    self._known.set()
    self._steps: dict[int, int] = {}

  def want(self) -> bool:
    """Notes that this process wants to stop; returns if `begin` must follow."""
    if self._wanted:
      return False
    self._wanted = True
    with self._lock:
      if self._stop_step:
        return False
      self._known.clear()
    return True

  def begin(self) -> None:
    """Begins the agreement."""
    if self._id == 0:
      self._ask()
    else:
      self._send({"stop": "wanted"})

  def stops_after(self, step: int) -> bool:
    """Returns whether all stop after this step, once that is known.

    Every process asks for each step, in order; a TimeoutError is raised when
    the others do not answer.
    """
    while True:
      with self._lock:
        if self._known.is_set():
          self._step = step
          return 0 < self._stop_step <= step
      # A process that does not answer has died, and its lifeline ends this one
      # before the limit.
      if not self._known.wait(_LIMIT_S):
        raise TimeoutError(
          f"The processes did not agree within {_LIMIT_S:g} s after which step "
          "to stop."
        )

  def take(self, number: int, note: Note) -> None:
    """Handles a note of another process; one out of its part has no effect."""
    if self._id:
      if note["stop"] == "asked":
        self._send({"stop": "told", "step": self._last_step()})
      elif note["stop"] == "agreed":
        self._stop_at(int(note["step"]))
    elif note["stop"] == "wanted":
      self._ask()
    elif note["stop"] == "told":
      with self._turn:
        self._steps[number] = int(note["step"])
        self._settle()

  def _ask(self) -> None:
    """Asks all processes for their steps, once; called in process 0."""
    with self._turn:
      if self._steps:
        return
      self._steps[0] = self._last_step()
      self._send({"stop": "asked"})
      self._settle()

  def _settle(self) -> None:
    if len(self._steps) == self._num:
      step = max(self._steps.values()) + 1
      self._send({"stop": "agreed", "step": step})
      self._stop_at(step)

  def _last_step(self) -> int:
    with self._lock:
      self._known.clear()
      return self._step

  def _stop_at(self, step: int) -> None:
    with self._lock:
      self._stop_step = step
      self._known.set()
