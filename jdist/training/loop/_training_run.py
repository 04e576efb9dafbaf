"""One call of the training loop: programs, steps in flight, clocks and sums."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist import checks, collectives, transforms
from jdist.states import PyTree
from jdist.training import _train_state
from jdist.training.loop import _programs, _record, _watchdog


class _Flying(NamedTuple):
  """A step that is running, with the samples of all of its workers.

  The key is the number of its batch's shape, and its control; see `Choice`.
  """

  key: tuple[int, transforms.Control]
  idle: bool
  samples: int
  metrics: jax.Array


class TrainingRun:
  """One call of `fit`: the state, the steps in flight, clocks and sums."""

  def __init__(
    self,
    step: _programs.CompiledStep,
    choices: _programs.Programs,
    state: _train_state.TrainState,
    *,
    independent: bool,
    timeout_s: float,
    history: _record.History,
    evaluate: Callable[[_train_state.TrainState], dict[str, float]] | None,
    on_record: Callable[[_record.Record], None] | None,
  ):
    """Reads the position of a state, which `history` has led to."""
    self.state = state
    self.records: list[_record.Record] = list(history.records)
    self.watchdog = _watchdog.Watchdog(timeout_s)
    self.progress: Callable[[_record.Record, str], None] | None = None
    self._step = step
    self._independent = independent
    self._sent_before = history.sent_bytes
    self._sent_bytes = history.sent_bytes or 0.0
    self._evaluate = evaluate
    self._on_record = on_record
    # Both by the number of the batch's shape and the control.
    self._programs: dict[tuple[int, transforms.Control], Any] = {}
    self._traffic: dict[tuple[int, transforms.Control], Any] = {}
    # The steps in flight, two at most.
    self._flying: list[_Flying] = []
    view = step.workers.view
    # The step at which the call starts, and the number of updates whose metrics
    # have been read.
    self.start = self.step = int(view(state.step))
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
    self._train_s = history.train_s
    # Training time is counted from here on. None leaves out the first step of
    # a call, which compiles.
    self._since_s: float | None = None
    # Processes that JAX has found itself have no connections to agree by.
    self._agreed = collectives.lifeline() is None
    self._timeout_s = timeout_s

  def place(self, batch: PyTree) -> PyTree:
    """Puts a batch onto the devices; the first one prepares the programs."""
    placed = self._step.workers.place(batch)
    shape = self._step.shape_number(placed)
    if not any(known == shape for known, _ in self._traffic):
      # The time of compiling is not training time.
      self.read()
      self._prepare(placed, shape)
    return placed

  def _prepare(self, placed: PyTree, shape: int) -> None:
    """Compiles all programs of a shape, and counts the bytes of each."""
    first = not self._traffic
    self.enter("compiling")
    ahead = self._ahead[0]
    needed: tuple[_programs.Choice, ...] = (_programs.Choice(),)
    if ahead is not None and ahead.ndim > 1:
      # The programs of fragments are too many: this one counts the traffic,
      # and the others are compiled when they are needed.
      needed = (self._choices.fragments_at_once(len(ahead)),)
    at_once = needed
    if ahead is not None and ahead.ndim == 1:
      needed = self._choices.needed(self._due_after, ahead[0] < 0)
      at_once = self._choices.at_once
    for choice in needed:
      # A single program of the first shape compiles in its first call, of which
      # the time does not count.  Several processes may compile for different
      # times, and must have done so when they agree to begin.
      now = len(needed) > 1 or shape > 0 or not self._agreed
      self._compile(choice.control, placed, shape, now=now)
    if not self._independent:
      self._step.check_communicates(self.state, [*self._traffic.values()])
    if first and self._sent_before is None and self.start:
      self._sent_bytes = self._sent_at_once(placed, at_once)

  def _sent_at_once(
    self, placed: PyTree, choices: tuple[_programs.Choice, ...]
  ) -> float:
    """Returns the bytes of the steps so far, if each was sent when due."""
    steps, rounds = self.start, self._rounds
    sent = [
      self._step.traffic(self.state, placed, choice.control)
      for choice in choices
    ]
    if len(sent) == 1:
      return sent[0].sent_bytes(steps, rounds)
    ends, within = sent
    return ends.sent_bytes(rounds, 0) + within.sent_bytes(steps - rounds, 0)

  def _compile(
    self, control: transforms.Control, placed: PyTree, shape: int, *, now: bool
  ) -> None:
    """Makes a program, and counts its bytes."""
    self._traffic[shape, control] = self._step.traffic(
      self.state, placed, control
    )
    program = self._step.program(self.state, control)
    if now:
      # Otherwise the program would be compiled in the middle of the run, while
      # the device waits and the clock of training time runs.
      program = program.lower(self.state, placed).compile()
      self.watchdog.beat("compiling", patience=4.0)
    self._programs[shape, control] = program

  def dispatch(self, placed: PyTree) -> None:
    """Starts a step on a batch; the first one once all processes are there."""
    if not self._agreed:
      self._agreed = True
      self.enter("waiting for the other processes")
      collectives.agree("the first step", {}, self._timeout_s)
      first = self._step.fingerprints(self.state)
      collectives.agree("the first state", first, self._timeout_s)
    if not self._flying and self.step > self.start:
      # The time of an evaluation or a checkpoint is not training time.
      self._since_s = time.perf_counter()
    place, choice = self._ahead[0], _programs.Choice()
    if place is not None:
      choice = self._choices.choose(place)
    key = self._step.shape_number(placed), choice.control
    if key not in self._programs:
      self._compile(choice.control, placed, key[0], now=False)
    leaves = jax.tree.leaves(placed)
    samples = math.prod(leaves[0].shape[:2]) if leaves else 0
    self.state, metrics = self._programs[key](self.state, placed)
    self._flying.append(_Flying(key, choice.idle, samples, metrics))
    # The metrics of this step will bring the place of the one after next.
    self._ahead = self._ahead[1:]

  @property
  def dispatched(self) -> int:
    """The number of the last step that was dispatched."""
    return self.step + len(self._flying)

  def read(self, *, leave: int = 0) -> None:
    """Reads the steps in flight except the last ones, by default all."""
    while len(self._flying) > leave:
      self._take(self._flying.pop(0))

  def _take(self, step: "_Flying") -> None:
    """Waits for a step, and adds its metrics to the sums."""
    rows = _programs.local_rows(step.metrics)
    now_s = time.perf_counter()
    before = self.step
    self.step += 1
    self.watchdog.beat(f"the last was step {self.step}")
    if self._since_s is not None:
      self._train_s += now_s - self._since_s
      self._samples += step.samples
    self._since_s = now_s
    columns = dict(zip(self._step.names, rows.T, strict=True))
    traffic = self._traffic[step.key]
    rounds = int(columns["rounds"][0])
    # A message that was streamed before is not sent again at the round's end.
    ended = 0 if step.idle else rounds - self._rounds
    # In a program that always ends a round, a round's traffic is a step's.
    before = self._rounds if step.key[1].round_ends else before
    self._sent_bytes += traffic.sent_bytes(
      1, ended, after_steps=before, after_rounds=self._rounds
    )
    self._rounds = rounds
    # By number: in the order of names "ahead_10" would precede "ahead_2".
    place = None
    if "ahead_0" in columns:
      numbers = range(math.prod(self._place_shape))
      place = np.array([columns[f"ahead_{i}"][0] for i in numbers])
      place = place.reshape(self._place_shape)
    self._ahead.append(place)
    if "skipped" in columns:
      self._skipped = int(columns["skipped"][0])
    self._losses.append(float(columns["loss"].mean()))
    if self.progress is not None:
      self.progress(self._position({}, self._losses[-1]), "")

  def enter(self, doing: str) -> None:
    """Begins work longer than a step, for the watchdog and the user."""
    self.watchdog.beat(doing, patience=4.0)
    if self.progress is not None:
      self.progress(self._position({}, math.nan), doing)

  def _position(self, metrics: Any, train_loss: float) -> _record.Record:
    """Returns the run's position with results."""
    return _record.Record(
      step=self.step, rounds=self._rounds, sent_bytes=self._sent_bytes,
      train_loss=train_loss, metrics=metrics, train_s=self._train_s,
      samples_per_s=self._samples / (self._train_s or math.nan),
      diverged=_record.is_diverged(metrics, self._losses),
      skipped=self._skipped,
    )  # fmt: skip

  def record(self) -> None:
    """Evaluates the state, and appends a record."""
    self.read()
    self.enter(f"evaluating after step {self.step}")
    metrics = {} if self._evaluate is None else self._evaluate(self.state)
    named = isinstance(metrics, Mapping)  # A checkpoint holds nothing else.
    if not named or not all(map(checks.is_number, metrics.values())):
      rule = "`evaluate(state)` must be a dict of numbers by name"
      raise ValueError(f"{rule}, got {checks.show(metrics)}.")
    self.watchdog.beat(f"evaluated after step {self.step}")
    total, number = self._sum_of_losses()
    train_loss = total / number if number else math.nan
    if self.records and self.records[-1].step == self.step:
      # The run was resumed after its last step: this evaluation replaces the
      # saved one, whose training loss is the only one known.
      train_loss = self.records.pop().train_loss
    record = self._position(metrics, train_loss)
    self._losses.clear()
    self._losses_before = (0.0, 0)
    self.records.append(record)
    if self._on_record is not None:
      self._on_record(record)

  def _sum_of_losses(self) -> tuple[float, int]:
    """Returns the sum and the number of losses since the last record."""
    total, number = self._losses_before
    return sum(self._losses, total), number + len(self._losses)

  def is_finite(self) -> bool:
    """Returns whether training can continue from the state."""
    return self._step.is_finite(self.state)

  def history(self) -> _record.History:
    """Returns the history that a resumed run continues."""
    return _record.History(
      self.records, self._sent_bytes, self._train_s, self._samples,
      self._sum_of_losses(),
    )  # fmt: skip
