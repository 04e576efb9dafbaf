"""The training loop: it never makes the device wait for the host.

The metrics of step t-1 are read after step t has been dispatched: at most two
steps are in flight.  More gain nothing, and on virtual CPU devices many steps
in flight deadlock (see `collectives.make_cpu_devices`).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jdist import checks, collectives, signatures, transforms
from jdist.states import PyTree
from jdist.storage import sealed_json
from jdist.training import (
  _checkpoint_directory,
  _checkpoints,
  _step,
  _train_state,
)
from jdist.training.loop import _preemption, _programs, _record, _training_run

# From the step to begin with, an endless iterator of host batches
# `[local workers, ...]`.
Batches = Callable[[int], Iterator[PyTree]]
_Found = tuple[_train_state.TrainState, list[_record.Record]]
# The run keeps these in the metadata of its checkpoints, with the caller's.
_SENT_BYTES, _HISTORY = "sent_bytes", "jdist.history"
_END: Any = object()  # Of batches, one of which may be None, without arrays.


@signatures.checked
class Trainer:
  """Runs a step over batches; compiles once, for any number of `fit` calls.

  Attributes:
    interrupted: The state and the records of a `fit` that an error has ended,
      after the last step that it started, or None. The next `fit` forgets it.
  """

  def __init__(
    self,
    workers: collectives.Workers,
    step: _step.Step,
    *,
    stream_steps: Sequence[int] = (),
    host_rounds: bool | None = None,
    independent: bool = False,
    max_shapes: signatures.PositiveInt = 8,
    timeout_s: signatures.PositiveFloat = 900.0,
  ):
    """Prepares the program.

    Args:
      workers: The run's workers.
      step: One worker's step, from `make_step` or a user's own: `(state,
        batch) -> state, metrics` with the metrics `loss` and `rounds`.
      stream_steps: For a streamed method whose rounds differ in length, the
        numbers of steps in which a message may be sent, for instance `(1, 2, 4,
        8, 16)`. Each is a program; a round takes the largest that fits into
        it. By default there is one program, which only a fixed interval allows.
      host_rounds: Whether the loop decides which step ends a round. There are
        two programs then, in place of one with a conditional, around which
        compilers copy and in which nothing overlaps. By default (None) the
        loop decides wherever the method allows it, and a user's own step by a
        parameter `control`.
      independent: Whether several workers are meant never to communicate, each
        with a model of its own; otherwise that is an error.
      max_shapes: The most shapes that batches may have, for instance of the
        last batch of an epoch, or of texts in buckets of lengths. Each compiles
        programs of its own, and a warning counts them.
      timeout_s: Seconds after which an unfinished step ends the process with a
        message. Compiling, evaluating and saving may take four times as long.
    """
    self.workers = workers
    self._step = _programs.CompiledStep(workers, step, max_shapes)
    self.interrupted: _Found | None = None
    self._independent = independent
    self._timeout_s = timeout_s
    # A user's own step without a parameter `control` ends its rounds by a
    # conditional on the device.
    if host_rounds is None and not self._step.takes_control:
      host_rounds = False
    self._choices = _programs.Programs(stream_steps, host_rounds)

  def traffic(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control = _programs.DEVICE,
  ) -> collectives.Traffic:
    """Returns the collectives of one worker's step and of its rounds."""
    return self._step.traffic(state, batch, control)

  @signatures.checked
  def fit(
    self,
    state: _train_state.TrainState,
    batches: Batches,
    num_steps: signatures.PositiveInt,
    *,
    evaluate: Callable[[_train_state.TrainState], dict[str, float]]
    | None = None,
    evaluate_every: signatures.PositiveInt | None = None,
    checkpoints: _checkpoints.Checkpoints | None = None,
    checkpoint_every: signatures.PositiveInt | None = None,
    metadata: dict[str, Any] | None = None,
    label: str | Callable[[_record.Record, str], None] | None = None,
    on_record: Callable[[_record.Record], None] | None = None,
    on_resume: Callable[[_checkpoints.Restored], None] | None = None,
    free: Sequence[str] = (),
    stop_on_sigterm: bool = False,
    continues: Sequence[_record.Record] = (),
  ) -> _Found:
    """Trains from the last checkpoint, or `state.step`, to step `num_steps`.

    Args:
      state: The result of `init_state` or `fit`, donated to the first step.
      batches: A function from the first step to an iterator of host batches
        `[local workers, n, ...]`, for instance `Batches.iterate`. If the
        iterator ends before `num_steps`, the run ends too, with a warning.
      num_steps: The step at which to stop.
      evaluate: A function of the state that returns metrics, for instance an
        `Evaluator`. It is also called at the end.
      evaluate_every: Steps between evaluations; by default there is only the
        one at the end.
      checkpoints: Where to resume from and save to.
      checkpoint_every: Steps between checkpoints; by default there is only the
        one at the end.
      metadata: A dict of JSON values that is saved with each checkpoint. A
        checkpoint with other metadata is refused.
      label: The name under which progress is shown in the terminal, or a
        function that shows it elsewhere: of a record of the last step, without
        metrics, and of the activity, such as "compiling", or "" in steps.
      on_record: Called with each new record.
      on_resume: Called with the checkpoint from which the run resumes.
      free: Names in `metadata` whose values a checkpoint may contradict.
      stop_on_sigterm: Whether SIGTERM, which schedulers send before they take
        a machine away, makes the run save after the next step and end with a
        `PreemptedError`. All processes of a run stop after the same step.
      continues: The records of another trainer's call that has led to `state`.
        Its records, bytes and seconds are continued, and no checkpoint is read.

    Returns:
      The state, and the records of the run, including those before a resume.
      If no step was left, the last record is an evaluation of the given state.

    Raises:
      ValueError: If a checkpoint is of another run (an `OtherRunError` if its
        metadata differ) or is beyond `num_steps`; if the optimizer does not
        take `stream_steps` or `host_rounds`; if there is no batch; or if
        batches have more than `max_shapes` shapes. After this and any other
        error `interrupted` has the state and records.
      PreemptedError: Upon SIGTERM. It is a `SystemExit`, which ends the
        process with status 143 unless it is caught.
    """
    sealed_json.check("metadata", metadata)
    for name in {_SENT_BYTES, _HISTORY} & {*(metadata or {})}:
      raise ValueError(
        f"`metadata` must not have {name!r}, which the run itself keeps "
        "there. Give it another name."
      )
    if checkpoint_every is not None and checkpoints is None:
      raise ValueError(
        "`checkpoint_every` must be left out without `checkpoints`, got "
        f"{checkpoint_every}. Give `training.Checkpoints(directory, workers)`."
      )
    # The first step donates the state. JAX's own error would name neither the
    # argument nor the remedy.
    if _is_deleted(state):
      raise ValueError(
        "`state` must still be there, got one whose memory an earlier `fit` or "
        "step has used up. Continue from the state that it returned."
      )
    history = _record.History.after(continues)
    if checkpoints is not None:
      checkpoints.claim()
    if checkpoints is not None and not continues:
      state, history = _restore(
        checkpoints, state, metadata or {}, free, on_resume
      )
    run = _training_run.TrainingRun(
      self._step, self._choices, state, independent=self._independent,
      timeout_s=self._timeout_s, history=history, evaluate=evaluate,
      on_record=on_record,
    )  # fmt: skip
    self.interrupted = None
    start = run.start
    if continues:
      remedy = "Give the records that have led to `state`, or none."
      last = continues[-1].step
      checks.check_int("continues[-1].step", last, 0, start, remedy)
    remedy = "The state has made so many."
    checks.check_int("num_steps", num_steps, start, remedy=remedy)
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._keeps(run))
      # A generator is closed even after an error, since it may own threads that
      # read ahead.
      data = batches(start)
      checks.check_type(
        "batches(step)", data, Iterator, "an iterator of batches"
      )
      if close := getattr(data, "close", None):
        stack.callback(close)
      stack.enter_context(run.watchdog)
      if isinstance(label, str):
        bar = _record.Progress(num_steps, label, start_step=start)
        run.progress = stack.enter_context(bar).show
      else:
        run.progress = label
      sigterm = None
      if stop_on_sigterm:
        sigterm = stack.enter_context(_preemption.Preemption())
      save = None
      if checkpoints is not None:
        save = functools.partial(_save, run, checkpoints, metadata)
        # Leaving must wait for the last write, or a preempted run would lose
        # it.
        stack.callback(checkpoints.wait)
      _train(
        run, data, range(start, num_steps), evaluate_every, checkpoint_every,
        save, sigterm,
      )  # fmt: skip
    return run.state, run.records

  @contextlib.contextmanager
  def _keeps(self, run: _training_run.TrainingRun) -> Iterator[None]:
    """Keeps the state when an error ends a run: the caller has donated its."""
    try:
      yield
    except BaseException as error:
      # A step that fails while it runs has used up the memory of its state.
      if not _is_deleted(run.state):
        self.interrupted = run.state, run.records
        error.add_note(
          f"The state after step {run.dispatched} is kept: continue from "
          "`state, records = trainer.interrupted`."
        )
      raise


def _is_deleted(state: PyTree) -> bool:
  return any(
    isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)
  )


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
  batch = next(data, _END)
  if batch is not _END:
    placed = run.place(batch)
  elif steps:
    raise ValueError(
      f"`batches` must give a batch from step {steps.start} on, but its "
      "iterator has none. Give an endless one, for instance of "
      "`Batches.iterate`."
    )
  for done in range(steps.start + 1, steps.stop + 1):
    run.dispatch(placed)
    batch = next(data, _END) if done < steps.stop else _END
    if batch is not _END:
      # The batch is copied to the devices while two steps are in flight.
      placed = run.place(batch)
    last = done if batch is _END else steps.stop
    # The previous step is read while this one runs, so that the device never
    # waits for the host.
    run.read(leave=1)
    if _due(done, evaluate_every, last):
      run.record()
    # Every process asks after every step, so that all stop at the same one.
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
  if not steps:
    # The previous process may have been killed after the final step.
    run.record()


def _due(done: int, every: int | None, last: int) -> bool:
  return done == last or (every is not None and done % every == 0)


def _save(
  run: _training_run.TrainingRun,
  checkpoints: _checkpoints.Checkpoints,
  metadata: dict[str, Any] | None,
) -> bool:
  """Starts to write a checkpoint, unless the state has diverged."""
  run.read()
  if not run.is_finite():
    # All processes come to the same result, and one of them warns.
    if jax.process_index() == 0:
      stays = "there is no checkpoint"
      if (last := checkpoints.latest_step()) is not None:
        stays = f"the checkpoint of step {last} stays"
      warnings.warn(
        f"The state after step {run.step} is not finite and was not saved: "
        f"{stays}.",
        RuntimeWarning,
        stacklevel=4,
      )
    return False
  run.enter(f"saving after step {run.step}")
  # Bytes stand outside the history, where a checkpoint without one has them.
  history = run.history()._asdict()
  sent_bytes = history.pop("sent_bytes")
  history["records"] = [
    list(x._replace(metrics=jax.tree.map(float, x.metrics)))
    for x in run.records
  ]
  checkpoints.save(
    run.step, run.state, _train_state.shared_leaves(run.state),
    {**(metadata or {}), _SENT_BYTES: sent_bytes, _HISTORY: history},
  )  # fmt: skip
  run.watchdog.beat(f"saved after step {run.step}")
  return True


def _restore(
  checkpoints: _checkpoints.Checkpoints,
  state: _train_state.TrainState,
  metadata: dict[str, Any],
  free: Sequence[str],
  on_resume: Callable[[_checkpoints.Restored], None] | None,
) -> tuple[_train_state.TrainState, _record.History]:
  """Returns the newest saved state and its history, or the given state."""
  found = checkpoints.restore(
    state, check=lambda saved: check_metadata(saved, metadata, free)
  )
  if found is None:
    return state, _record.History()
  sent_bytes = found.metadata.pop(_SENT_BYTES, None)
  # A user's own loop may have saved the checkpoint, without a history.
  saved = found.metadata.pop(_HISTORY, {})
  if on_resume is not None:
    on_resume(found)
  if saved:
    saved["records"] = [_record.Record(*record) for record in saved["records"]]
  return found.state, _record.History(sent_bytes=sent_bytes, **saved)


def check_metadata(
  found: Mapping[str, Any],
  metadata: Mapping[str, Any],
  free: Sequence[str] = (),
) -> None:
  """Raises an OtherRunError if `Trainer.fit` saved them for another run."""
  free = (_SENT_BYTES, _HISTORY, *free)
  _checkpoint_directory.check_same_run(found, metadata, free=free)
