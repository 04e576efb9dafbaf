"""A server and its workers on the virtual clock, from mark to mark."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from jdist import checks
from jdist.server.clock import _simulation
from jdist.server.run import _run_checkpoints, _run_marks


class ClockSession:
  """Drives a simulation with real gradients, for `ServerRun`.

  Args:
    simulation: At its beginning, with a learner.
  """

  clock: Literal["virtual", "wall"] = "virtual"

  def __init__(self, simulation: _simulation.Simulation):
    if getattr(simulation, "learner", None) is None:
      raise ValueError(
        "`simulation` must have a learner with gradients, got "
        f"{checks.show(simulation)}. Make it with `Simulation(..., "
        "learner=GradientLearner(...))`."
      )
    self.simulation = simulation
    self.num_workers = len(simulation.nodes)
    self._marks: list[_run_marks.Mark] = []
    self._saved_events: int | None = None

  def begin(
    self, plan: _run_marks.RunPlan, stops: Callable[[], bool]
  ) -> int | None:
    """Resumes from the newest checkpoint, whose update it returns, if any."""
    del stops  # Computed time has nothing to wait for.
    if self.simulation.events:
      raise ValueError(
        "`simulation` must be at its beginning, got one that has run. Make one "
        "for each `fit`, which resumes from `checkpoints`."
      )
    self._plan = plan
    self._checkpoints = _run_checkpoints.RunCheckpoints(
      plan.checkpoints, plan.identity
    )
    found = self._checkpoints.found
    if found is None:
      return None
    # Events of the clock cannot be saved, but follow from the arguments: they
    # are replayed with learners that compute nothing.
    header, arrays = found
    there = header["updates"], header["now_s"]
    cause: Exception | None = None
    try:
      self.simulation.resume(header["state"], arrays)
    except (KeyError, ValueError) as error:
      cause = error
    if cause or not np.allclose(there, (self.updates, self.simulation.now_s)):
      raise ValueError(
        "`simulation` must be that of the checkpoint, with the same protocol, "
        "machines and learner. Make it as before, or take another directory."
      ) from cause
    self._marks = plan.kept(header)
    self._saved_events = self.simulation.events
    return self.updates

  def advance(
    self, number: int, stops: Callable[[], bool]
  ) -> tuple[_run_marks.Mark, Any]:
    """Runs until a mark and saves there; returns figures and model."""
    del stops
    run, learner = self.simulation, self.simulation.learner
    assert learner is not None
    if number < len(self._marks):
      # A checkpoint holds the model of its own update alone.
      mark = self._marks[number]
      return mark, learner.model if mark.updates == self.updates else None
    unit, limit = self._plan.unit, self._plan.marks[number]
    limits: dict[str, Any] = {unit: limit}
    run.run(**limits)
    done = {"updates": self.updates, "samples": run.applied_samples}
    # Seconds pass without any machine.
    short = unit != "seconds" and run.ended and done[unit] < limit
    mark = _run_marks.measure(
      run,
      learner,
      self._marks[-1] if self._marks else None,
      now_s=run.now_s,
      pushed_bytes=run.pushed_bytes,
      ended="all machines are away for good" if short else None,
    )
    self._marks.append(mark)
    self.save()
    return mark, learner.model

  def save(self) -> int | None:
    """Saves the last mark's state if it is usable; returns its update then."""
    run, checkpoints = self.simulation, self._checkpoints
    if not checkpoints.on or not self._marks or not self._marks[-1].usable:
      return None
    # SIGTERM asks again after a mark, at which the state has been saved.
    if self._saved_events != run.events:
      notes, arrays = run.save()
      header = _run_checkpoints.Header(
        updates=self.updates,
        now_s=run.now_s,
        marks=list(self._marks),
        limits=list(self._plan.marks[: len(self._marks)]),
        state=notes,
      )
      checkpoints.begin(header, arrays, owing=set())
      self._saved_events = run.events
    return self.updates

  @property
  def updates(self) -> int:
    """The number of updates so far."""
    return self.simulation.state.version

  def summary(self) -> dict[str, Any]:
    """Returns statistics of the run; see `Simulation.summary`."""
    return self.simulation.summary()
