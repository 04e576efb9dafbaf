"""A server's training run: marks, evaluations, records and checkpoints."""

import contextlib
import functools
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from jdist import checks, training
from jdist.server.run import _run_marks
from jdist.storage import sealed_json

_FORMAT = 1


class ServerRun:
  """Trains by a server's protocol up to a number of updates, samples, seconds.

  Args:
    session: A server and its workers on an engine, for one run:
      `server.ClockSession` for the virtual clock, or `server.LiveSession` for
      threads and Ray.

  Attributes:
    mark: The figures of the last mark.
    saved: Whether there is a checkpoint of this run.
  """

  def __init__(self, session: Any):
    if not callable(getattr(session, "advance", None)):
      raise ValueError(
        "`session` must be a `server.ClockSession` or a `server.LiveSession`, "
        f"got {checks.show(session)}."
      )
    self._session = session
    self.mark: _run_marks.Mark | None = None
    self.saved = False

  def fit(
    self,
    total: float,
    unit: _run_marks.Unit = "updates",
    *,
    every: float | None = None,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    on_record: Callable[[training.Record], None] = lambda record: None,
    on_resume: Callable[[int], None] = lambda update: None,
    checkpoints: str | os.PathLike[str] | None = None,
    metadata: dict[str, Any] | None = None,
    stop_on_sigterm: bool = False,
  ) -> list[training.Record]:
    """Trains, and resumes from the newest checkpoint if there is one.

    On the virtual clock a resumed run ends with the same bits. States that are
    not finite are not saved: the last finite checkpoint stays. Where no worker
    is left before the end, the run ends there with a warning.

    Args:
      total: The end, counted from the beginning of the run.
      unit: The unit of `total` and `every`.
      every: The distance of the marks; by default there is one, at the end.
      evaluate: Measures the server's model, which has `params` and
        `model_state`.
      on_record: Is called with each new record.
      on_resume: Is called with the update from which a run is resumed, unless
        all of its records are there.
      checkpoints: A directory for this run alone.
      metadata: What must be the same when a run is resumed, as JSON can hold
        it.
      stop_on_sigterm: Whether SIGTERM saves and ends the run, with a
        `training.PreemptedError`: on the virtual clock at the next mark, else
        at once.

    Returns:
      The records: `step` and `rounds` count updates, and `sent_bytes` is the
      mean of what a worker has pushed.

    Raises:
      ValueError: If `total`, `every` or `unit` is not as described; when the
        newest checkpoint belongs to another run, a `training.OtherRunError`.
      LostRunError: If workers or the server were lost for good.
    """
    # The clock's checkpoints are no use to real workers, nor theirs to it.
    given = sealed_json.check("metadata", dict(metadata or {}))
    own = {"clock": self._session.clock, **given}
    plan = _plan(total, unit, every, checkpoints, own)
    records: dict[int, training.Record] = {}
    with contextlib.ExitStack() as stack:
      stops: Callable[[], bool] = bool
      if stop_on_sigterm:
        preemption = stack.enter_context(training.Preemption())
        stops = functools.partial(preemption.asks_at, 0)
      resumed = self._session.begin(plan, stops)
      self.saved = resumed is not None
      before = _read_records(plan, resumed)
      if resumed is not None and len(before) < len(plan.marks):
        on_resume(resumed)
      for number, mark, model in self._reach(plan, stops):
        record = before.get(number)
        # Except on the clock, a mark may be reached again by other messages,
        # after the server was lost.
        at = mark.updates, mark.now_s
        if record is None or (record.step, record.train_s) != at:
          record = self._measure(mark, model, plan, evaluate)
          if record is None:
            continue
          _write_records(plan, records | {number: record})
          on_record(record)
        records[number] = record
    if self.mark is not None and self.mark.ended:
      warnings.warn(
        f"The run has ended after update {self.mark.updates} at "
        f"{self.mark.now_s:.4g} s, before {total:g} {unit}: {self.mark.ended}.",
        RuntimeWarning,
        stacklevel=2,
      )
    return list(records.values())

  def _reach(
    self, plan: _run_marks.RunPlan, stops: Callable[[], bool]
  ) -> Iterator[tuple[int, _run_marks.Mark, Any]]:
    """Yields each mark that the run reaches, until SIGTERM or the run's end."""
    for number in range(len(plan.marks)):
      reached = None if stops() else self._session.advance(number, stops)
      if reached is None:
        saved = self._session.save()
        update = self._session.updates if saved is None else saved
        raise training.PreemptedError(update, saved=saved is not None)
      last, (mark, model) = self.mark, reached
      self.mark = mark
      # A run may end where it was measured last. Only that it has diverged
      # since then is worth another record.
      at = mark.updates, mark.usable
      if not (mark.ended and last and (last.updates, last.usable) == at):
        yield number, mark, model
      if mark.ended:
        return

  def _measure(
    self,
    mark: _run_marks.Mark,
    model: Any,
    plan: _run_marks.RunPlan,
    evaluate: Callable[[Any], dict[str, float]] | None,
  ) -> training.Record | None:
    """Evaluates the model at a mark; returns None where it was lost."""
    wrong = None
    if plan.checkpoints is not None and not mark.usable:
      kept = "the last checkpoint stays" if self.saved else "there is none"
      wrong = f"or its gradients are not finite, and it was not saved: {kept}"
    elif plan.checkpoints is not None:
      self.saved = True
    lost = evaluate is not None and model is None
    if lost:
      wrong = "was lost with the process that held it, and is not evaluated"
    if wrong is not None:
      text = f"The state after update {mark.updates} {wrong}."
      warnings.warn(text, RuntimeWarning, stacklevel=3)
    if lost:
      return None
    metrics = {} if evaluate is None else evaluate(model)
    losses = [] if mark.last_loss is None else [mark.last_loss]
    return training.Record(
      step=mark.updates,
      rounds=mark.updates,
      sent_bytes=mark.pushed_bytes / self._session.num_workers,
      train_loss=mark.train_loss,
      metrics=metrics,
      train_s=mark.now_s,
      samples_per_s=mark.samples / mark.now_s if mark.now_s else 0.0,
      clock=self._session.clock,
      # The losses of refused pushes are not kept, so that the last one may be
      # finite in a run that has diverged.
      diverged=not mark.usable or training.is_diverged(metrics, losses),
    )


# The server's checkpoints cannot hold the records: a model is evaluated where
# the run is watched, which is another process on Ray, after it was saved.


def _read_records(
  plan: _run_marks.RunPlan, resumed: int | None
) -> dict[int, training.Record]:
  """Returns the records up to the update that a run resumes from, by mark."""
  if plan.checkpoints is None:
    return {}
  path = pathlib.Path(plan.checkpoints) / "records.json"
  if resumed is None:
    path.unlink(missing_ok=True)  # Left by a run without checkpoints.
    return {}
  # A file that is missing or damaged costs evaluations, and no training.
  with contextlib.suppress(OSError, ValueError, TypeError):
    found = {
      at: training.Record(*record)
      for at, record in sealed_json.read(path, form=_FORMAT)
    }
    return {
      number: found[at]
      for number, at in enumerate(plan.marks)
      if at in found and found[at].step <= resumed
    }
  return {}


def _write_records(
  plan: _run_marks.RunPlan, records: dict[int, training.Record]
) -> None:
  if plan.checkpoints is not None:
    path = pathlib.Path(plan.checkpoints) / "records.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # By positions, as a longer run has another mark where this one ends.
    found = [[plan.marks[x], list(record)] for x, record in records.items()]
    sealed_json.write(path, found, form=_FORMAT)


def _plan(
  total: float,
  unit: _run_marks.Unit,
  every: float | None,
  checkpoints: str | os.PathLike[str] | None,
  metadata: dict[str, Any],
) -> _run_marks.RunPlan:
  checks.check_choice("unit", unit, ("updates", "samples", "seconds"))
  checks.check_number("total", total, open_low=True)
  every = total if every is None else every
  checks.check_number("every", every, low=total / 1e6)
  # The tolerance keeps a rounding error from adding a mark just before the end.
  marks = [every * (i + 1) for i in range(math.ceil(total / every - 1e-9))]
  marks[-1] = total
  if unit != "seconds":
    # A whole number of updates or samples, so that every engine stops alike.
    marks = sorted({max(1, round(mark)) for mark in marks})
  return _run_marks.RunPlan(
    unit=unit,
    marks=tuple(marks),
    checkpoints=None if checkpoints is None else os.fspath(checkpoints),
    identity={"every": every, "unit": unit, **metadata},
  )
