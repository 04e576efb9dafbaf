"""A run of real workers from beginning to end, watched from one process."""

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jdist.server.runtime import _engine, _live_server

_POLL_S = 0.1
_MAX_TRIES = 3


class LiveResult(NamedTuple):
  """Remains of a run.

  Attributes:
    summary: in figures, as `Simulation.summary`, of wall seconds.
    payload: the learner's bytes at the end, as its `save` returns them.
    events: who was lost and who came back, when.
  """

  summary: dict[str, Any]
  payload: np.ndarray
  events: list[dict[str, Any]]


class LiveRun:
  """Starts server and workers on an engine, and sees them through.

  A worker that is lost leaves, and another is spawned in its place.  A server
  that is lost is started anew where there are checkpoints; workers find it by
  themselves.

  Args:
    engine: on which they run.
    make_server: makes the `LiveServer`, in its process.
    works: of each worker, what its process does: `(channel) -> None`.
    startup_s: until then everybody must be there.
    can_resume: whether the server makes checkpoints.
  """

  def __init__(
    self,
    engine: _engine.Engine,
    make_server: Callable[[], _live_server.LiveServer],
    works: Mapping[str, Callable[[_engine.Channel], None]],
    *,
    startup_s: float = 300.0,
    can_resume: bool = False,
  ):
    self.engine, self._make_server = engine, make_server
    self._works, self._startup_s = dict(works), startup_s
    self._can_resume = can_resume
    self.events: list[dict[str, Any]] = []
    # How often each was lost since it was last here.
    self._away: dict[str, int] = {}
    self._finished = False

  def run(
    self,
    *,
    on_record: Callable[[dict[str, Any], np.ndarray], None] = (
      lambda record, snapshot: None
    ),
    on_status: Callable[[dict[str, Any]], None] = lambda status: None,
  ) -> LiveResult:
    """Runs until the server's plan is done.

    Args:
      on_record: is called with each mark's record and snapshot, which is empty
        where it went with a server that was lost.
      on_status: is called ten times a second.

    Raises:
      ValueError: when workers and server do not fit together.
      LostRunError: a `RuntimeError`, when it cannot go on: a worker was lost
        again and again, or the server was, and there are no checkpoints.
    """
    try:
      self._begin()
    except _engine.LostServerError as error:
      raise _engine.LostRunError(
        f"The server was lost before the run began: {error}"
      ) from None
    return self._watch(on_record, on_status)

  def _begin(self) -> None:
    """Starts server and workers."""
    engine = self.engine
    engine.on_lost(self._on_lost)
    engine.serve(self._make_server)
    names = list(self._works)
    # The first compiles for all: the others find its programs.
    engine.spawn(names[0], self._works[names[0]])
    self._wait_for(names[:1])
    for name in names[1:]:
      engine.spawn(name, self._works[name])
    self._wait_for(names)
    engine.ask("start")

  def _watch(
    self,
    on_record: Callable[[dict[str, Any], np.ndarray], None],
    on_status: Callable[[dict[str, Any]], None],
  ) -> LiveResult:
    """Watches a run that has begun to its end."""
    engine, seen = self.engine, 0
    while True:
      time.sleep(_POLL_S)
      try:
        engine.poll()
        status = engine.ask("status")
        self._check(status)
        self._note_returns(status)
        on_status(status)
        while seen < status["records"]:
          on_record(*engine.ask("record_of", seen))
          seen += 1
        if status["finished"]:
          self._finished = True
          summary, payload = engine.ask("final")
          return LiveResult(summary, payload, self.events)
      except _engine.LostServerError as error:
        self._serve_again(str(error))

  def _wait_for(self, names: list[str]) -> None:
    until = time.monotonic() + self._startup_s
    missing = set(names)
    while missing:
      self.engine.poll()
      status = self.engine.ask("status")
      self._check(status)
      missing = set(names) - set(status["here"])
      if time.monotonic() > until:
        raise _engine.LostRunError(
          f"{', '.join(sorted(missing))} did not come within "
          f"{self._startup_s:g} s."
        )
      if missing:
        time.sleep(_POLL_S)

  def _check(self, status: dict[str, Any]) -> None:
    if status["error"] is not None:
      raise ValueError(status["error"])

  def _on_lost(self, name: str, reason: str) -> None:
    if self._finished:
      return
    self._away[name] = self._away.get(name, 0) + 1
    if self._away[name] > _MAX_TRIES:
      raise _engine.LostRunError(
        f"{name} was lost {_MAX_TRIES} times before it came back: {reason}"
      )
    self._add_event("lost", name, reason)
    self.engine.ask("lost", name)
    self.engine.spawn(name, self._works[name])

  def _note_returns(self, status: dict[str, Any]) -> None:
    for name in list(self._away):
      if name in status["here"]:
        del self._away[name]
        self._add_event("back", name)

  def _add_event(self, kind: str, worker: str, reason: str = "") -> None:
    at_s = time.monotonic()
    self.events.append(
      {"kind": kind, "worker": worker, "at_s": at_s, "reason": reason}
    )

  def _serve_again(self, reason: str) -> None:
    for _ in range(_MAX_TRIES):
      self._add_event("lost", "server", reason)
      if not self._can_resume:
        raise _engine.LostRunError(
          f"The server was lost ({reason}), and there are no checkpoints to go "
          "on from."
        )
      try:
        self.engine.serve(self._make_server)
        self._wait_for([name for name in self._works if name not in self._away])
        self.engine.ask("start")
      except _engine.LostServerError as error:
        reason = str(error)
        continue
      self._add_event("back", "server")
      return
    raise _engine.LostRunError(
      f"The server was lost {_MAX_TRIES} times before it came back: {reason}"
    )
