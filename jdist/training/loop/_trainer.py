"""The training loop: it never makes the device wait for the host.

The metrics of step t-1 are read after step t has been dispatched: at most two
steps are in flight.  More gain nothing, and on virtual CPU devices many steps
in flight deadlock (see `collectives.make_cpu_devices`).
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jdist import checks, collectives, transforms
from jdist.training import _checkpoints, _step, _train_state
from jdist.training.loop import (
  _compiled_step,
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
      independent: whether it is meant that several workers never communicate,
        each with a model of its own; else that is an error.
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
    label: str | None = None,
    on_record: Callable[[_training_run.Record], None] | None = None,
  ) -> tuple[_train_state.TrainState, list[_training_run.Record]]:
    """Trains from the last checkpoint, or `state.step`, to step `num_steps`.

    Args:
      state: from `init_state` or `fit`; given up to the first step.
      batches: from a step number to an iterator of host batches
        `[local workers, n, ...]`, for instance `Batches.iterate`.
      num_steps: the step at which to stop.
      evaluate: an `Evaluator`; called at the end, too.
      evaluate_every: steps between evaluations; by default at the end only.
      checkpoints: where to resume from and save to.
      checkpoint_every: steps between checkpoints; by default at the end only.
      metadata: saved with each checkpoint; a checkpoint with other metadata
        is refused.
      label: shows progress under this name.
      on_record: called with each new record.

    Returns:
      The state, and the records of this call; where nothing was left to
      train, one record of the state as it is.

    Raises:
      ValueError: when a checkpoint is of another run, or is beyond
        `num_steps`; when the optimizer does not take `stream_steps` or
        `host_rounds`.
    """
    for name, number in (
      ("num_steps", num_steps),
      ("evaluate_every", evaluate_every),
      ("checkpoint_every", checkpoint_every),
    ):
      if number is not None and number < 1:
        raise ValueError(f"`{name}` must be at least 1, got {number}.")
    sent_bytes = None
    if checkpoints is not None:
      state, sent_bytes = _training_run.restore(
        checkpoints, state, metadata or {}
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
      sent_bytes=sent_bytes,
      evaluate=evaluate,
      on_record=on_record,
    )
    with contextlib.ExitStack() as stack:
      data = batches(start)
      if close := getattr(data, "close", None):
        stack.callback(close)
      stack.enter_context(run.watchdog)
      if label is not None:
        run.progress = stack.enter_context(
          _progress.Progress(num_steps, label, start_step=start)
        )
      placed = run.place(next(data))
      for done in range(start + 1, num_steps + 1):
        run.dispatch(placed)
        if done < num_steps:  # Two steps are in flight meanwhile.
          placed = run.place(next(data))
        run.read(leave=1)
        if _due(done, evaluate_every, num_steps):
          run.record()
        if checkpoints is not None and _due(done, checkpoint_every, num_steps):
          run.save(checkpoints, metadata)
      if start == num_steps:  # Killed after its last step, for instance.
        run.record()
    if checkpoints is not None:
      checkpoints.wait()
    return run.state, run.records


def _due(done: int, every: int | None, last: int) -> bool:
  return done == last or (every is not None and done % every == 0)
