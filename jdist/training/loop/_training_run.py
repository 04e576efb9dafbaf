"""One call of the training loop: steps in flight, clocks, sums and records."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jdist import checks, collectives, transforms
from jdist.training import _checkpoints, _run_metadata, _train_state
from jdist.training.loop import (
  _compiled_step,
  _programs,
  _progress,
  _watchdog,
)

PyTree = Any

# In the metadata of checkpoints, beside the caller's.
_SENT_BYTES, _HISTORY = "sent_bytes", "jdist.history"


class Record(NamedTuple):
  """A run's position and results at an evaluation.

  Attributes:
    step: updates so far.
    rounds: how often the workers have come together.
    sent_bytes: bytes one worker has sent, see `collectives.Traffic`.
    train_loss: mean over the steps since the last record and over the workers
      of this process; NaN when there was none.
    metrics: what `evaluate` returned.
    train_s: seconds of training so far, those before a resume too, without the
      first step of each call, which compiles, and without evaluating and
      saving.
    samples_per_s: training samples of all workers per second, likewise; NaN
      after first steps alone.
    clock: of the seconds, "wall", or "virtual" in a simulation.
    diverged: whether the loss is not a finite number: the evaluated one, or
      without it that of the last training step.
    skipped: steps of `transforms.skip_nonfinite` without a gradient so far.
  """

  step: int
  rounds: int
  sent_bytes: float
  train_loss: float
  metrics: dict[str, float]
  train_s: float
  samples_per_s: float
  clock: Literal["wall", "virtual"] = "wall"
  diverged: bool = False
  skipped: int = 0


class History(NamedTuple):
  """The past of a run, before this call.

  Attributes:
    records: its records.
    sent_bytes: bytes one worker has sent; None where that is not known.
    train_s: seconds of training, as in a record.
    samples: trained on in these seconds.
    losses: sum and number of the training losses since the last record.
  """

  records: Sequence[Record] = ()
  sent_bytes: float | None = None
  train_s: float = 0.0
  samples: int = 0
  losses: tuple[float, int] = (0.0, 0)


class TrainingRun:
  """One call of `fit`: the state, the step in flight, clocks and sums."""

  def __init__(
    self,
    step: _compiled_step.CompiledStep,
    choices: _programs.Programs,
    state: _train_state.TrainState,
    start: int,
    *,
    independent: bool,
    timeout_s: float,
    history: History,
    evaluate: Callable[[_train_state.TrainState], dict[str, float]] | None,
    on_record: Callable[[Record], None] | None,
  ):
    """Reads where a state stands; `history` is how it came there."""
    self.state = state
    self.records: list[Record] = list(history.records)
    self.watchdog = _watchdog.Watchdog(timeout_s)
    self.progress: Callable[[int, str], None] | None = None
    self._step = step
    self._independent = independent
    self._sent_before = history.sent_bytes
    self._sent_bytes = history.sent_bytes or 0.0
    self._evaluate = evaluate
    self._on_record = on_record
    self._programs: dict[transforms.Control, Any] = {}
    self._traffic: dict[transforms.Control, collectives.Traffic] = {}
    # Metrics of two steps at the most, and what was run.
    self._flying: list[tuple[_programs.Choice, jax.Array]] = []
    self._start = self._read = start
    view = step.workers.view
    self._rounds = int(view(transforms.rounds(state.opt_state, state.step)))
    self._choices = choices.for_state(state.opt_state)
    # The places in their rounds of the next step and of the one after it.
    ahead = transforms.rounds_ahead(state.opt_state)
    self._ahead: list[Any] = [None, None]
    if ahead is not None:
      self._ahead = list(np.moveaxis(np.asarray(view(ahead)), -2, 0))
      self._place_shape = self._ahead[0].shape
    due_after = transforms.arrives_after(state.opt_state)
    self._due_after = int(view(due_after)) if np.ndim(due_after) else 0
    self._losses: list[float] = []
    self._losses_before = history.losses
    found = transforms.skipped(state.opt_state)
    self._skipped = 0 if found is None else int(view(found))
    self._samples = history.samples
    self._samples_per_step = 0
    self._train_s = history.train_s
    # Up to when training time is counted; None in the first step, which
    # compiles.
    self._since_s: float | None = None

  def place(self, batch: PyTree) -> PyTree:
    """Puts a batch onto the devices; reads off the first what is sent."""
    placed = self._step.workers.place(batch)
    if not self._traffic:
      first = jax.tree.leaves(placed)[0]
      self._samples_per_step = first.shape[0] * first.shape[1]
      self._prepare(placed)
    return placed

  def _prepare(self, placed: PyTree) -> None:
    """Makes all programs, and counts what each sends."""
    self.watchdog.beat("compiling", patience=4.0)
    ahead = self._ahead[0]
    needed: tuple[_programs.Choice, ...] = (_programs.Choice(),)
    if ahead is not None and ahead.ndim > 1:
      # To count; those of fragments are compiled when they are needed.
      needed = (self._choices.fragments_at_once(len(ahead)),)
    at_once = needed
    if ahead is not None and ahead.ndim == 1:
      needed = self._choices.needed(self._due_after, ahead[0] < 0)
      at_once = self._choices.at_once
    for choice in needed:
      self._compile(choice.control, placed, now=len(needed) > 1)
    if not self._independent:
      self._step.check_communicates(self.state, self._traffic.values())
    if self._sent_before is None and self._start:
      self._sent_bytes = self._sent_at_once(placed, at_once)

  def _sent_at_once(
    self, placed: PyTree, choices: tuple[_programs.Choice, ...]
  ) -> float:
    """Returns what the state's steps have sent, if all was sent when due."""
    steps, rounds = self._start, self._rounds
    sent = [
      self._step.traffic(self.state, placed, choice.control)
      for choice in choices
    ]
    if len(sent) == 1:
      return sent[0].sent_bytes(steps, rounds)
    ends, goes_on = sent
    return ends.sent_bytes(rounds, 0) + goes_on.sent_bytes(steps - rounds, 0)

  def _compile(
    self, control: transforms.Control, placed: PyTree, *, now: bool
  ) -> None:
    """Makes a program, and counts what it sends."""
    self._traffic[control] = self._step.traffic(self.state, placed, control)
    program = self._step.program(self.state, control)
    if now:  # Not when it is needed, with the device waiting.
      program = program.lower(self.state, placed).compile()
      self.watchdog.beat("compiling", patience=4.0)
    self._programs[control] = program

  def dispatch(self, placed: PyTree) -> None:
    """Starts a step on a batch."""
    if not self._flying and self._read > self._start:
      self._since_s = time.perf_counter()  # After an interruption.
    place, choice = self._ahead[0], _programs.Choice()
    if place is not None:
      choice = self._choices.choose(place)
    if choice.control not in self._programs:
      self._compile(choice.control, placed, now=False)
    self.state, metrics = self._programs[choice.control](self.state, placed)
    self._flying.append((choice, metrics))
    # The metrics of this step hold the place of the one after next.
    self._ahead = self._ahead[1:]

  def read(self, *, leave: int = 0) -> None:
    """Reads the steps in flight but the last ones, by default all."""
    while len(self._flying) > leave:
      self._take(*self._flying.pop(0))

  def _take(self, choice: _programs.Choice, metrics: jax.Array) -> None:
    rows = _local_rows(metrics)
    now_s = time.perf_counter()
    before = self._read
    self._read += 1
    self.watchdog.beat(f"the last was step {self._read}")
    if self._since_s is not None:
      self._train_s += now_s - self._since_s
      self._samples += self._samples_per_step
    self._since_s = now_s
    columns = dict(zip(self._step.names, rows.T, strict=True))
    traffic = self._traffic[choice.control]
    rounds = int(columns["rounds"][0])
    # What was streamed before has not been sent again at the round's end.
    ended = 0 if choice.idle else rounds - self._rounds
    # A program that always ends a round counts rounds as its steps.
    before = self._rounds if choice.control.round_ends else before
    self._sent_bytes += traffic.sent_bytes(
      1, ended, after_steps=before, after_rounds=self._rounds
    )
    self._rounds = rounds
    places = [columns[n][0] for n in self._step.names if n.startswith("ahead_")]
    self._ahead.append(
      np.reshape(places, self._place_shape) if places else None
    )
    if "skipped" in columns:
      self._skipped = int(columns["skipped"][0])
    self._losses.append(float(columns["loss"].mean()))
    if self.progress is not None:
      self.progress(
        self._read,
        f"loss {self._losses[-1]:.3f}  "
        f"{_progress.format_rate(self._rate())} samples/s  "
        f"{_progress.format_bytes(self._sent_bytes)} sent",
      )

  def _rate(self) -> float:
    return self._samples / self._train_s if self._train_s else math.nan

  def record(self) -> None:
    """Evaluates, and notes where the run stands."""
    self.read()
    self.watchdog.beat(f"evaluating after step {self._read}", patience=4.0)
    metrics = {} if self._evaluate is None else self._evaluate(self.state)
    checks.check_type(
      "evaluate(state)", metrics, Mapping, "a dict of numbers by name"
    )
    self.watchdog.beat(f"evaluated after step {self._read}")
    total, number = self._sum_of_losses()
    train_loss = total / number if number else math.nan
    if self.records and self.records[-1].step == self._read:
      # Resumed after its last step, it has been trained as that record says.
      train_loss = self.records.pop().train_loss
    record = Record(
      step=self._read,
      rounds=self._rounds,
      sent_bytes=self._sent_bytes,
      train_loss=train_loss,
      metrics=metrics,
      train_s=self._train_s,
      samples_per_s=self._rate(),
      diverged=is_diverged(metrics, self._losses),
      skipped=self._skipped,
    )
    self._losses.clear()
    self._losses_before = (0.0, 0)
    self.records.append(record)
    if self._on_record is not None:
      self._on_record(record)

  def _sum_of_losses(self) -> tuple[float, int]:
    """Returns sum and number of the losses since the last record."""
    total, number = self._losses_before
    return sum(self._losses, total), number + len(self._losses)

  def save(
    self, checkpoints: _checkpoints.Checkpoints, metadata: dict[str, Any] | None
  ) -> bool:
    """Starts to write a checkpoint, unless the state has diverged."""
    self.read()
    if not self._step.is_finite(self.state):
      if jax.process_index() == 0:
        last = checkpoints.latest_step()
        stays = "there is no checkpoint"
        if last is not None:
          stays = f"the checkpoint of step {last} stays"
        warnings.warn(
          f"The state after step {self._read} is not finite and was not saved: "
          f"{stays}.",
          RuntimeWarning,
          stacklevel=3,
        )
      return False
    self.watchdog.beat(f"saving after step {self._read}", patience=4.0)
    shared = _train_state.shared_leaves(self.state)
    history = {
      "records": [_plain(record) for record in self.records],
      "train_s": self._train_s,
      "samples": self._samples,
      "losses": self._sum_of_losses(),
    }
    kept = {
      **(metadata or {}), _SENT_BYTES: self._sent_bytes, _HISTORY: history
    }  # fmt: skip
    checkpoints.save(self._read, self.state, shared, kept)
    self.watchdog.beat(f"saved after step {self._read}")
    return True


def is_diverged(metrics: Mapping[str, float], losses: Sequence[float]) -> bool:
  """Returns whether a run stands at a loss that is not a finite number.

  Args:
    metrics: of its evaluation, which may have a `loss`.
    losses: of its training steps since the last record, for want of one.
  """
  loss = metrics.get("loss", losses[-1] if losses else 0.0)
  return not math.isfinite(loss)


def _plain(record: Record) -> list[Any]:
  """Returns a record in a form that JSON can hold."""
  metrics = {name: np.asarray(x).tolist() for name, x in record.metrics.items()}
  return list(record._replace(metrics=metrics))


def history_of(records: Sequence[Record]) -> History:
  """Returns the history of a run that goes on from its last record."""
  if not records:
    return History()
  last = records[-1]
  samples = round(last.samples_per_s * last.train_s) if last.train_s else 0
  return History(records, last.sent_bytes, last.train_s, samples)


def _local_rows(metrics: jax.Array) -> np.ndarray:
  """This process's workers' metrics, [local workers, metrics]."""
  if metrics.is_fully_addressable:
    return np.asarray(metrics)
  return np.concatenate(
    [np.asarray(s.data) for s in metrics.addressable_shards]
  )


def check_own_metadata(metadata: Any) -> None:
  """Raises a ValueError unless checkpoints can keep metadata of a caller."""
  _run_metadata.check_is_json(metadata)
  for name in (_SENT_BYTES, _HISTORY):
    if name in (metadata or {}):
      raise ValueError(
        f"`metadata` must not have {name!r}, which the run itself keeps there. "
        "Give it another name."
      )


def check_metadata(
  found: Mapping[str, Any],
  metadata: Mapping[str, Any],
  free: Sequence[str] = (),
) -> None:
  """Raises an OtherRunError if a checkpoint's metadata are of another run.

  Args:
    found: in the checkpoint, saved by `fit`.
    metadata: of this run.
    free: names in them that may have other values.
  """
  free = (_SENT_BYTES, _HISTORY, *free)
  _run_metadata.check_same_run(found, metadata, free=free)


def restore(
  checkpoints: _checkpoints.Checkpoints,
  state: _train_state.TrainState,
  metadata: dict[str, Any],
  free: Sequence[str] = (),
  on_resume: Callable[[_checkpoints.Restored], None] | None = None,
) -> tuple[_train_state.TrainState, History]:
  """Returns the newest saved state, if there is one, and how it came there."""
  found = checkpoints.restore(
    state, check=lambda saved: check_metadata(saved, metadata, free)
  )
  if found is None:
    return state, History()
  sent_bytes = found.metadata.pop(_SENT_BYTES, None)
  # Checkpoints that are older than it have none.
  saved = found.metadata.pop(_HISTORY, {})
  if on_resume is not None:
    on_resume(found)
  if saved:
    saved["records"] = [Record(*record) for record in saved["records"]]
  return found.state, History(sent_bytes=sent_bytes, **saved)
