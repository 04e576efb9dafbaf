"""The marks of a live run: records, snapshots and checkpoints."""

import concurrent.futures
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np

from jdist.server.gradients import _learner
from jdist.server.run import _run_checkpoints, _run_marks
from jdist.storage import plain_data


class _LiveState(TypedDict):
  learner: Any
  driver: Any
  pushed_bytes: int
  pulled_bytes: int


class LiveMarks:
  """Measures a live run at its marks, and saves it there."""

  # `delivery` is the run's `Delivery`: only the core has to import it.

  def __init__(
    self, learner: _learner.ServerLearner, plan: _run_marks.LivePlan
  ):
    self._learner, self._plan = learner, plan
    self.checkpoints = _run_checkpoints.RunCheckpoints(
      plan.checkpoints, plan.identity
    )
    self.records: list[_run_marks.Mark] = []
    # Snapshots of the model that have not been fetched, by the mark's number.
    self.snapshots: dict[int, np.ndarray] = {}
    self.pulled_bytes = self.pushed_bytes = 0

  @property
  def left(self) -> tuple[float, ...]:
    """The marks that have not been reached."""
    return self._plan.marks[len(self.records) :]

  @property
  def all_reached(self) -> bool:
    """Whether the run has marks, and has reached the last one."""
    return bool(self._plan.marks) and not self.left

  def is_due(self, delivery: Any, now_s: float) -> bool:
    """Returns whether the run has reached its next mark."""
    position = {
      "updates": delivery.state.version,
      "samples": delivery.applied_samples,
      # A timer's sum of seconds may fall short of its mark by rounding.
      "seconds": now_s + 1e-6,
    }[self._plan.unit]
    return bool(self.left) and position >= self.left[0]

  def add(self, delivery: Any, now_s: float, ended: str | None) -> bool:
    """Measures the run, and returns whether it is to be saved."""
    snapshot = getattr(self._learner, "snapshot", None)
    if snapshot is not None:
      self.snapshots[len(self.records)] = snapshot()
    mark = _run_marks.measure(
      delivery,
      self._learner,
      self.records[-1] if self.records else None,
      now_s=now_s,
      pushed_bytes=self.pushed_bytes,
      ended=ended,
    )
    self.records.append(mark)
    return self.checkpoints.on and mark.usable and ended is None

  def may_save(self) -> bool:
    """Returns whether checkpoints are written, and the model is finite."""
    return self.checkpoints.on and _run_marks.is_finite(self._learner)

  def begin_checkpoint(
    self,
    delivery: Any,
    now_s: float,
    owing: set[str],
    done: concurrent.futures.Future[int] | None,
  ) -> Callable[[], None]:
    """Writes a checkpoint, as `RunCheckpoints.begin` does."""
    notes, learner = self._learner.save()
    header = _run_checkpoints.Header(
      updates=delivery.state.version,
      now_s=now_s,
      marks=list(self.records),
      limits=list(self._plan.marks[: len(self.records)]),
      state=_LiveState(
        learner=notes,
        driver=delivery.save(),
        pushed_bytes=self.pushed_bytes,
        pulled_bytes=self.pulled_bytes,
      ),
    )
    return self.checkpoints.begin(header, {"learner": learner}, owing, done)

  def load(self, delivery: Any) -> None:
    """Restores the run from the checkpoint that was found."""
    assert self.checkpoints.found is not None
    header, parts = self.checkpoints.found
    # The file may hold anything, and must do nothing but be read.
    state = plain_data.from_plain(header["state"], _LiveState, "state")
    delivery.load(state["driver"])
    self._learner.load(state["learner"], parts["learner"])
    self.records = self._plan.kept(header)
    if hasattr(self._learner, "snapshot"):
      # The watcher may not have fetched the snapshots of the marks at which
      # this checkpoint was made.
      for number, mark in enumerate(self.records):
        if mark.updates == header["updates"]:
          self.snapshots[number] = self._learner.snapshot()
    self.pushed_bytes = state["pushed_bytes"]
    self.pulled_bytes = state["pulled_bytes"]
