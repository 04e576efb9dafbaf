"""The training loop: it never makes the device wait for the host.

The metrics of step t-1 are read after step t has been dispatched: at most two
steps are in flight.  More gain nothing, and on virtual CPU devices many steps
in flight deadlock (see `collectives.make_cpu_devices`).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jdist import checks, collectives, transforms
from jdist.training import _checkpoints, _step, _train_state
from jdist.training.loop import (
  _compiled_step,
  _preemption,
  _programs,
  _progress,
  _training_run,
)

PyTree = Any
# From the step to begin with, an endless iterator of host batches
# `[local workers, ...]`.
Batches = Callable[[int], Iterator[PyTree]]


class Trainer:
  """Runs a step over batches; compiles once, however often it is used."""

  def __init__(
    self,
    workers: collectives.Workers,
    step: _step.Step,
    *,
    stream_steps: Sequence[int] = (),
    host_rounds: bool | None = None,
    independent: bool = False,
    timeout_s: float = 900.0,
  ):
    """Prepares the program.

    Args:
      workers: the run's workers.
      step: one worker's step, from `make_step` or a user's own: `(state,
        batch) -> state, metrics` with the metrics `loss` and `rounds`.
      stream_steps: for a streamed method whose rounds differ in length, the
        numbers of steps in which a message may be sent, for instance `(1, 2, 4,
        8, 16)`.  Each is a program; a round takes the largest that fits into
        it. By default there is one program, which only a fixed interval allows.
      host_rounds: whether the loop says which step ends a round: two programs
        in place of one with a conditional, around which compilers copy and in
        which nothing overlaps.  None (default): wherever the method, and a step
        of one's own by a parameter `control`, allow it.
      independent: whether several workers are meant never to communicate, each
        with a model of its own; else that is an error.
      timeout_s: a step that takes longer ends the process with a message;
        compiling, evaluating and saving may take four times as long.
    """
    collectives.check_workers(workers)
    checks.check_function("step", step, "a state and a batch")
    checks.check_choice("host_rounds", host_rounds, (None, True, False))
    checks.check_choice("independent", independent, (True, False))
    timeout_s = checks.check_number("timeout_s", timeout_s, open_low=True)
    self.workers = workers
    self._step = _compiled_step.CompiledStep(workers, step)
    self._independent = independent
    self._timeout_s = timeout_s
    if host_rounds is None and not self._step.takes_control:
      host_rounds = False
    self._choices = _programs.Programs(stream_steps, host_rounds)

  def traffic(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control = _programs.DEVICE,
  ) -> collectives.Traffic:
    """Returns what one worker sends in a step and in a round."""
    return self._step.traffic(state, batch, control)

  def fit(
    self,
    state: _train_state.TrainState,
    batches: Batches,
    num_steps: int,
    *,
    evaluate: Callable[[_train_state.TrainState], dict[str, float]]
    | None = None,
    evaluate_every: int | None = None,
    checkpoints: _checkpoints.Checkpoints | None = None,
    checkpoint_every: int | None = None,
    metadata: dict[str, Any] | None = None,
    label: str | Callable[[int, str], None] | None = None,
    on_record: Callable[[_training_run.Record], None] | None = None,
    on_resume: Callable[[_checkpoints.Restored], None] | None = None,
    free: Sequence[str] = (),
    stop_on_sigterm: bool = False,
    continues: Sequence[_training_run.Record] = (),
  ) -> tuple[_train_state.TrainState, list[_training_run.Record]]:
    """Trains from the last checkpoint, or `state.step`, to step `num_steps`.

    Args:
      state: from `init_state` or `fit`; given up to the first step.
      batches: from a step number to an iterator of host batches
        `[local workers, n, ...]`, for instance `Batches.iterate`.  Where it
        ends before `num_steps`, so does the run, with a warning.
      num_steps: the step at which to stop.
      evaluate: an `Evaluator`; called at the end, too.
      evaluate_every: steps between evaluations; by default at the end only.
      checkpoints: where to resume from and save to.
      checkpoint_every: steps between checkpoints; by default at the end only.
      metadata: a dict that JSON can hold, saved with each checkpoint; a
        checkpoint with other metadata is refused.
      label: shows progress under this name; or what is called with each step
        and a few figures, to show them elsewhere.
      on_record: called with each new record.
      on_resume: called with the checkpoint that the run goes on from.
      free: names in `metadata` that a checkpoint may have other values of.
      stop_on_sigterm: whether SIGTERM, as schedulers send it before they take
        a machine away, makes the run save after the next step and end with a
        `PreemptedError`; of several processes all do, after the same step.
      continues: the records of another trainer's call, whose run goes on here
        from `state`: no checkpoint is read; records, bytes and seconds go on.

    Returns:
      The state, and the records of the run, before a resume too; where nothing
      was left to train, the last one is of the state as it is.

    Raises:
      ValueError: when a checkpoint is of another run, an `OtherRunError` where
        its metadata say so, or is beyond `num_steps`; when the optimizer does
        not take `stream_steps` or `host_rounds`; when there is no batch.
      PreemptedError: upon SIGTERM; a `SystemExit`, which uncaught ends the
        process with status 143.
    """
    for name, number in (
      ("num_steps", num_steps),
      ("evaluate_every", evaluate_every),
      ("checkpoint_every", checkpoint_every),
    ):
      if number is not None:
        checks.check_int(name, number, 1)
    checks.check_function("batches", batches, "the step to begin with")
    for name, function, of in (
      ("evaluate", evaluate, "a state"),
      ("on_record", on_record, "a record"),
      ("on_resume", on_resume, "a checkpoint"),
    ):
      checks.check_function(name, function, of, optional=True)
    if not isinstance(label, str):
      checks.check_function("label", label, "a step and text", optional=True)
    _training_run.check_own_metadata(metadata)
    if any(
      isinstance(x, jax.Array) and x.is_deleted()
      for x in jax.tree.leaves(state)
    ):
      raise ValueError(
        "`state` must still be there, got one whose memory an earlier `fit` or "
        "step has used up. Go on from the state that it returned."
      )
    history = _training_run.history_of(continues)
    if checkpoints is not None and not continues:
      state, history = _training_run.restore(
        checkpoints, state, metadata or {}, free, on_resume
      )
    start = int(self.workers.view(state.step))
    if start > num_steps:
      raise ValueError(
        f"`num_steps` must be at least {start}, the step of the state, got "
        f"{num_steps}."
      )
    run = _training_run.TrainingRun(
      self._step,
      self._choices,
      state,
      start,
      independent=self._independent,
      timeout_s=self._timeout_s,
      history=history,
      evaluate=evaluate,
      on_record=on_record,
    )
    with contextlib.ExitStack() as stack:
      data = batches(start)
      checks.check_type(
        "batches(step)", data, Iterator, "an iterator of batches"
      )
      if close := getattr(data, "close", None):
        stack.callback(close)
      stack.enter_context(run.watchdog)
      if isinstance(label, str):
        bar = _progress.Progress(num_steps, label, start_step=start)
        run.progress = stack.enter_context(bar).update
      else:
        run.progress = label
      sigterm = None
      if stop_on_sigterm:
        sigterm = stack.enter_context(_preemption.Preemption())
      save = None
      if checkpoints is not None:
        save = functools.partial(run.save, checkpoints, metadata)
        stack.callback(checkpoints.wait)
      _train(
        run, data, range(start, num_steps), evaluate_every, checkpoint_every,
        save, sigterm,
      )  # fmt: skip
    return run.state, run.records


def _train(
  run: _training_run.TrainingRun,
  data: Iterator[PyTree],
  steps: range,
  evaluate_every: int | None,
  checkpoint_every: int | None,
  save: Callable[[], bool] | None,
  sigterm: _preemption.Preemption | None,
) -> None:
  """Runs the steps, with records and checkpoints between them."""
  batch = next(data, None)
  if batch is not None:
    placed = run.place(batch)
  elif steps:
    raise ValueError(
      f"`batches` must give a batch from step {steps.start} on, but its "
      "iterator has none. Give an endless one, for instance of "
      "`Batches.iterate`."
    )
  for done in range(steps.start + 1, steps.stop + 1):
    run.dispatch(placed)
    batch = next(data, None) if done < steps.stop else None
    if batch is not None:  # Two steps are in flight meanwhile.
      placed = run.place(batch)
    last = done if batch is None else steps.stop
    run.read(leave=1)
    if _due(done, evaluate_every, last):
      run.record()
    stops = sigterm is not None and sigterm.asks_at(done) and done < last
    saved = False
    if save is not None and (stops or _due(done, checkpoint_every, last)):
      saved = save()
    if stops:
      raise _preemption.PreemptedError(done, saved)
    if last < steps.stop:
      warnings.warn(
        f"The batches have ended after step {done} of {steps.stop}: so has the "
        "run. Its state is given back, and saved if there are checkpoints.",
        RuntimeWarning,
        stacklevel=2,
      )
      break
  if not steps:  # Killed after its last step, perhaps.
    run.record()


def _due(done: int, every: int | None, last: int) -> bool:
  return done == last or (every is not None and done % every == 0)
