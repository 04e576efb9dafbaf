"""A server's training run on the virtual clock: records, evaluations."""

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, training
from jdist.server.clock import _simulation
from jdist.server.gradients import _learner

Unit = Literal["updates", "samples", "seconds"]


class VirtualTrainer:
  """Runs a simulation whose learner has real gradients.

  Args:
    simulation: at its beginning, with a learner such as a `GradientLearner`.

  Raises:
    ValueError: when the simulation has no such learner.
  """

  def __init__(self, simulation: _simulation.Simulation):
    learner = simulation.learner
    if learner is None:
      raise ValueError(
        "`simulation` must have a learner with gradients, got None. Make it "
        "with `Simulation(..., learner=GradientLearner(...))`."
      )
    self.simulation, self.learner = simulation, learner
    self._last_samples = 0

  def fit(
    self,
    total: float,
    unit: Unit = "updates",
    *,
    every: float | None = None,
    evaluate: Callable[[_learner.ServerModel], dict[str, float]] | None = None,
    on_record: Callable[[training.Record], None] = lambda record: None,
    label: str | None = None,
    checkpoints: training.Checkpoints | None = None,
    metadata: dict[str, Any] | None = None,
    on_resume: Callable[[training.Record], None] = lambda record: None,
    stop_on_sigterm: bool = False,
  ) -> list[training.Record]:
    """Trains up to a number of updates, samples or virtual seconds.

    With checkpoints a run goes on from the newest one, to the same bits: the
    simulation, which must be at its beginning, first replays time alone up to
    the event at which it was saved.  States that are not finite are not saved:
    the last finite checkpoint stays.

    Args:
      total: the end, counted from second 0.
      unit: of `total` and `every`.
      every: distance of the records; default only one, at the end.
      evaluate: measures the server's model.
      on_record: is called with each record.
      label: of the progress bar, which is shown if it is given.
      checkpoints: of one worker, `Checkpoints(directory,
        collectives.workers(1))`; saved at each record whose state is finite.
      metadata: what must be the same when a run is resumed.
      on_resume: is called with the last record of the checkpoint that the run
        goes on from, unless nothing is left.
      stop_on_sigterm: whether SIGTERM ends the run at the next record, with a
        `training.PreemptedError`.

    Where all machines are away for good before the end, so is the run, with a
    warning.

    Returns:
      Records on the virtual clock: `step` counts updates, `rounds` too, and
      `sent_bytes` is the mean of what a worker has pushed.

    Raises:
      ValueError: when `total` or `every` is not positive; when the newest
        checkpoint is of another run, a `training.OtherRunError`.
    """
    checks.check_choice("unit", unit, ("updates", "samples", "seconds"))
    for name, value in (("total", total), ("every", every)):
      if value is not None and not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be positive, got {value}.")
    every = total if every is None else every
    marks = [every * (i + 1) for i in range(math.ceil(total / every - 1e-9))]
    marks[-1] = total
    metadata = {"every": every, "unit": unit, **(metadata or {})}
    records, run = [], self.simulation
    if checkpoints is not None:
      records = self._resume(checkpoints, metadata)
    if 0 < len(records) < len(marks):
      on_resume(records[-1])
    with contextlib.ExitStack() as stack:
      bar = sigterm = None
      if stop_on_sigterm:
        sigterm = stack.enter_context(training.Preemption())
      if label is not None:
        bar = stack.enter_context(
          training.Progress(len(marks), label, start_step=len(records))
        )
      for number, mark in list(enumerate(marks, 1))[len(records) :]:
        limit = mark if unit == "seconds" else round(mark)
        run.run(**{unit: limit})  # type: ignore[arg-type]
        ended = self._ends_before(limit, unit)
        if ended and records and records[-1].step == self._updates:
          # Refused pushes make no update, but they must show in a record.
          shown = records[-1].diverged or not run.all_expelled
          if shown:
            break
        records.append(self._record(evaluate))
        on_record(records[-1])
        saved = False
        if checkpoints is not None:
          saved = self._save(checkpoints, metadata, records)
        if bar is not None:
          bar.update(number, f"loss {records[-1].train_loss:.4f}")
        if sigterm is not None and sigterm.asks_at(number) and mark < total:
          if checkpoints is not None:
            checkpoints.wait()
          raise training.PreemptedError(records[-1].step, saved)
        if ended:
          break
    if checkpoints is not None:
      checkpoints.wait()
    if self._ends_before(total, unit):
      why = "All machines are away for good"
      if run.all_expelled:
        why = "Pushes of all machines were refused again and again"
      warnings.warn(
        f"{why} after update {self._updates} at {run.now_s:.4g} s, before "
        f"{total:g} {unit}: so the run has ended.",
        RuntimeWarning,
        stacklevel=2,
      )
    return records

  @property
  def _updates(self) -> int:
    return self.simulation.state.version

  def _ends_before(self, limit: float, unit: Unit) -> bool:
    """Returns whether no machine is left that could reach a limit."""
    run = self.simulation
    done = {"updates": self._updates, "samples": run.applied_samples}
    return unit != "seconds" and run.ended and done[unit] < round(limit)

  def _save(
    self,
    checkpoints: training.Checkpoints,
    metadata: dict[str, Any],
    records: list[training.Record],
  ) -> bool:
    """Starts to write a checkpoint, unless the state has diverged."""
    params, opt_state, model_state = self.learner.model
    finite = training.is_finite((params, model_state), opt_state)
    if self.simulation.all_expelled or not finite:
      kept = checkpoints.latest_step() is not None
      stays = "the last checkpoint stays" if kept else "there is no checkpoint"
      warnings.warn(
        f"The state after update {records[-1].step} is not finite and was not "
        f"saved: {stays}.",
        RuntimeWarning,
        stacklevel=3,
      )
      return False
    notes, arrays = self.simulation.save()
    # Checkpoints know arrays of one worker, hence the leading dimension.
    state = {name: jnp.asarray(x)[None] for name, x in arrays.items()}
    saved = {
      "records": [list(record) for record in records],
      "notes": notes,
      "sizes": {name: len(x) for name, x in arrays.items()},
    }
    checkpoints.save(
      self.simulation.events,
      state,
      dict.fromkeys(state, True),
      metadata | saved,
    )
    return True

  def _resume(
    self, checkpoints: training.Checkpoints, metadata: dict[str, Any]
  ) -> list[training.Record]:
    """Replays up to the newest checkpoint, and returns its records."""
    sizes: dict[str, int] = {}

    def check(saved: dict[str, Any]) -> None:
      free = {"records", "notes", "sizes"}
      training.check_same_run(saved, metadata, free=free)
      sizes.update(saved["sizes"])

    def like(events: int) -> Any:
      del events
      return {name: jnp.zeros((1, n), jnp.uint8) for name, n in sizes.items()}

    found = checkpoints.restore(like, check=check)
    if found is None:
      return []
    arrays = {name: np.asarray(x)[0] for name, x in found.state.items()}
    self.simulation.resume(found.metadata["notes"], arrays)
    self._last_samples = self.learner.samples
    return [training.Record(*x) for x in found.metadata["records"]]

  def _record(
    self,
    evaluate: Callable[[_learner.ServerModel], dict[str, float]] | None,
  ) -> training.Record:
    run, learner = self.simulation, self.learner
    losses = [
      x for samples, x in learner.losses if samples > self._last_samples
    ]
    self._last_samples = learner.samples
    found = np.asarray(jax.device_get(losses), np.float64)
    metrics = {} if evaluate is None else evaluate(learner.model)
    return training.Record(
      step=run.state.version,
      rounds=run.state.version,
      sent_bytes=run.pushed_bytes / len(run.nodes),
      train_loss=float(found.mean()) if len(found) else math.nan,
      metrics=metrics,
      train_s=run.now_s,
      samples_per_s=learner.samples / run.now_s if run.now_s else 0.0,
      clock="virtual",
      diverged=training.is_diverged(metrics, found.tolist())
      or run.all_expelled,
    )
