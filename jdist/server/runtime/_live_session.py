"""A live server and its workers on an engine, from mark to mark."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.run import _run_marks
from jdist.server.runtime import _engine

_POLL_S = 0.1
_MAX_TRIES = 3


class LiveSession:
  """Starts a server and workers on an engine, and restarts lost ones.

  A lost server resumes from its newest checkpoint, and the workers reconnect.

  Args:
    engine: Runs the server and the workers. It is not stopped here, so that
      another session can use its processes.
    make_server: Builds the `LiveServer` in the server's process, from the
      complete plan.
    works: By name, what each worker's process does with its channel.
    plan: Settings of the server; `ServerRun` adds the marks and the
      checkpoints.
    model: Parameters and batch statistics of the shapes that are trained, to
      read the server's snapshots. Needed only to evaluate.
    startup_s: The time within which all workers must be ready at the start.
    on_status: Is called with the server's status ten times a second.
    on_event: Is called with each new entry of `events`, and at the start with
      one of kind `ready` for each worker that has connected.
    survive: Whether the others continue without a worker that is lost for good,
      as long as there is one.

  Attributes:
    engine: As given.
    events: Losses and returns of workers and the server, with their times.
    payload: The bytes of the server's state, as `ServerLearner.save` returns
      them, once there is a summary.
  """

  clock: Literal["virtual", "wall"] = "wall"

  def __init__(
    self,
    engine: _engine.Engine,
    make_server: Callable[[_run_marks.LivePlan], Any],
    works: Mapping[str, Callable[[_engine.Channel], None]],
    plan: _run_marks.LivePlan,
    *,
    model: Any = None,
    startup_s: float = 900.0,
    on_status: Callable[[dict[str, Any]], None] = lambda status: None,
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    survive: bool = False,
  ):
    self.engine, self._make_server = engine, make_server
    self._works, self._plan = dict(works), plan
    self._like, self._startup_s = model, startup_s
    self._on_status, self._on_event = on_status, on_event
    self.num_workers = len(plan.workers)
    self.events: list[dict[str, Any]] = []
    self.payload = np.zeros(0, np.uint8)
    self._survive, self._gone, self._away = survive, set[str](), set[str]()
    # Losses of each worker since its last push.  A hello does not end them: it
    # may fail anew at each of its tasks.
    self._losses: dict[str, int] = {}
    self._status: dict[str, Any] = {}

  def begin(
    self, plan: _run_marks.RunPlan, stops: Callable[[], bool]
  ) -> int | None:
    """Starts server and workers; returns the update that it resumes from."""
    self._plan = dataclasses.replace(self._plan, **vars(plan))
    try:
      # Before the first worker is spawned, which may fail at once.
      self.engine.on_lost(self._on_lost)
      self._serve()
      if not self._ask_status()["finished"]:
        names = list(self._works)
        # The first worker compiles for all: the others find its programs in
        # the cache.
        for group in (names[:1], names[1:]):
          for name in group:
            self.engine.spawn(name, self._works[name])
          self._wait_for(group, stops)
        if not stops():
          self.engine.ask("start")
    except _engine.LostServerError as error:
      raise _engine.LostRunError(
        f"The server was lost before the run began: {error}"
      ) from None
    resumed: int | None = self._status["resumed"]
    return resumed

  def advance(
    self, number: int, stops: Callable[[], bool]
  ) -> tuple[_run_marks.Mark, _learner.ServerModel | None] | None:
    """Watches until the server has reached a mark, and has saved there.

    Returns its figures and model, the latter None where it was lost with the
    server's process; None once `stops` says to give up.
    """
    while not stops():
      try:
        # Lost workers first: the status then shows that they have left.
        self.engine.poll()
        status = self._ask_status()
        for name in status["pushed"]:
          self._losses.pop(name, None)
        for name in self._away.intersection(status["here"]) - self._gone:
          self._away.remove(name)
          self._add_event("back", name)
        self._on_status(status)
        if status["records"] > number:
          mark, snapshot = self.engine.ask("record_of", number)
          return mark, self._model_of(snapshot)
      except _engine.LostServerError as error:
        self._serve_again(str(error), stops)
      time.sleep(_POLL_S)
    return None

  def _model_of(self, snapshot: np.ndarray) -> _learner.ServerModel | None:
    """Returns the model of a snapshot, which is empty where it was lost."""
    if self._like is None or not len(snapshot):
      return None
    params, state = _gradient_messages.tree_of_bytes(snapshot, self._like)
    return _learner.ServerModel(params, (), state)

  def save(self) -> int | None:
    """Has the server save all states; returns the update if it has."""
    try:
      update: int = self.engine.ask("save")
    except Exception:
      # There may be no server yet, or SIGTERM has ended it as well.
      return None
    return None if update < 0 else update

  def summary(self) -> dict[str, Any]:
    """Returns statistics of the run, in wall seconds, and its events."""
    found, self.payload = self.engine.ask("final")
    return {"events": self.events} | found

  @property
  def updates(self) -> int:
    """The number of updates so far."""
    return int(self._status.get("updates", 0))

  def _serve(self) -> None:
    # The server's process gets the plan pickled, together with what builds it.
    shards = self._plan.shards
    self.engine.serve(
      *(
        functools.partial(
          _make, self._make_server, dataclasses.replace(self._plan, shard=i)
        )
        for i in range(shards + 1 if shards > 1 else 1)
      )
    )

  def _ask_status(self) -> dict[str, Any]:
    self._status = self.engine.ask("status")
    if self._status["error"] is not None:
      raise ValueError(self._status["error"])
    return self._status

  def _wait_for(self, names: list[str], stops: Callable[[], bool]) -> None:
    until, missing = time.monotonic() + self._startup_s, set(names)
    while not stops():
      self.engine.poll()
      here = missing.intersection(self._ask_status()["here"])
      for name in sorted(here):
        self._on_event(_event("ready", name))
      missing -= here | self._gone
      if not missing:
        return
      if time.monotonic() > until:
        raise _engine.LostRunError(
          f"{', '.join(sorted(missing))} did not connect within "
          f"{self._startup_s:g} s."
        )
      time.sleep(_POLL_S)

  def _on_lost(self, name: str, reason: str) -> None:
    status, returned = self._ask_status(), reason == _engine.RETURNED
    sent_home = status["finished"] or (returned and name in status["expelled"])
    if sent_home or name in self._gone:
      return
    self._away.add(name)
    losses = self._losses[name] = self._losses.get(name, 0) + 1
    # A worker whose work has returned does not want to continue.
    for_good = returned or losses > _MAX_TRIES
    if for_good:
      self._gone.add(name)
      if not self._survive or len(self._gone) == len(self._works):
        how = f" was lost {losses} times before it pushed anything"
        raise _engine.LostRunError(f"{name}{'' if returned else how}: {reason}")
    self._add_event("gone" if for_good else "lost", name, reason)
    # The server must forget the old process before the new one says hello.
    self.engine.ask("lost", name)
    if not for_good:
      self.engine.spawn(name, self._works[name])

  def _add_event(self, kind: str, worker: str, reason: str = "") -> None:
    self.events.append(_event(kind, worker, reason))
    self._on_event(self.events[-1])

  def _serve_again(self, reason: str, stops: Callable[[], bool]) -> None:
    for _ in range(_MAX_TRIES):
      self._add_event("lost", "server", reason)
      if self._plan.checkpoints is None:
        raise _engine.LostRunError(
          f"The server was lost ({reason}), and there are no checkpoints to "
          "resume from."
        )
      try:
        self._serve()
        # Workers that are lost as well join whenever they are back.
        here = [name for name in self._works if name not in self._away]
        self._wait_for(here, stops)
        if not stops():
          self.engine.ask("start")
      except _engine.LostServerError as error:
        reason = str(error)
        continue
      self._add_event("back", "server")
      return
    raise _engine.LostRunError(
      f"The server was lost {_MAX_TRIES} times before it returned: {reason}"
    )


def _event(kind: str, worker: str, reason: str = "") -> dict[str, Any]:
  at_s = time.monotonic()
  return {"kind": kind, "worker": worker, "at_s": at_s, "reason": reason}


def _make(
  make_server: Callable[[_run_marks.LivePlan], Any],
  plan: _run_marks.LivePlan,
  channel: Any,
) -> Any:
  """Builds a server in its process, to which an engine gives its channel."""
  made = make_server(dataclasses.replace(plan, channel=channel))
  return getattr(made, "shard", made)
