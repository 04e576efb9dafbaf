"""The training loop: it never makes the device wait for the host.

The metrics of step t-1 are read after step t has been dispatched: at most two
steps are in flight.  More gain nothing, and on virtual CPU devices many steps
in flight deadlock (see `collectives.make_cpu_devices`).
"""

import contextlib
import functools
import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import collectives, transforms
from jdist.training import (
  _checkpoints,
  _programs,
  _progress,
  _step,
  _train_state,
  _watchdog,
)

PyTree = Any
# From the step to begin with, an endless iterator of host batches
# `[local workers, ...]`.
Batches = Callable[[int], Iterator[PyTree]]

# In the metadata of checkpoints.
_SENT_BYTES = "sent_bytes"


class Record(NamedTuple):
  """A run's position and results at an evaluation.

  Attributes:
    step: updates so far.
    rounds: how often the workers have come together.
    sent_bytes: bytes one worker has sent, see `collectives.Traffic`.
    train_loss: mean over the steps since the last record and over the workers
      of this process; NaN when there was none.
    metrics: what `evaluate` returned.
    train_s: seconds of training so far in this call, without its first step,
      which compiles, and without evaluating and saving.
    samples_per_s: training samples of all workers per second, likewise.
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
    self.workers = workers
    self._step = step
    self._independent = independent
    self._timeout_s = timeout_s
    if host_rounds is None and not _takes_control(step):
      host_rounds = False
    self._choices = _programs.Programs(stream_steps, host_rounds)
    self._all_finite = workers.jit(
      functools.partial(_train_state.all_finite, axis=workers.axis)
    )
    self._names: tuple[str, ...] = ()
    self._places: tuple[str, ...] = ()
    self._programs: dict[Any, Any] = {}
    self._traffic: dict[Any, collectives.Traffic] = {}

  def _packed(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control,
  ) -> tuple[_train_state.TrainState, jax.Array]:
    """Runs the step; its metrics are one array, as each would be a transfer."""
    state, metrics = self._step(state, batch, **_given(control))
    if missing := {"loss", "rounds"} - metrics.keys():
      raise ValueError(
        f"`step` must return the metrics `loss` and `rounds`, but {missing} "
        f"are missing; got {sorted(metrics)}."
      )
    self._names = tuple(sorted(metrics))
    count = sum(name.startswith("ahead_") for name in metrics)
    self._places = tuple(f"ahead_{i}" for i in range(count))
    values = [jnp.asarray(metrics[n], jnp.float32) for n in self._names]
    return state, jnp.stack(values)

  def _program(
    self, state: _train_state.TrainState, control: transforms.Control
  ) -> Any:
    """The compiled step for states that live where this one does."""
    specs = self.workers.specs(state)
    leaves, structure = jax.tree.flatten(specs)
    key = (control, structure, tuple(leaves))
    if key not in self._programs:
      # A state comes out as it went in; else the compiler may split it
      # otherwise over the mesh's other axes, and the next call is another.
      self._programs[key] = self.workers.jit(
        functools.partial(self._packed, control=control),
        donate_argnums=0,
        out_specs=(specs, None),
      )
    return self._programs[key]

  def _is_finite(self, state: _train_state.TrainState) -> bool:
    return bool(self.workers.view(self._all_finite(state)))

  def traffic(
    self,
    state: _train_state.TrainState,
    batch: PyTree,
    control: transforms.Control = _programs.DEVICE,
  ) -> collectives.Traffic:
    """Returns what one worker sends in a step and in a round."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)

    args = jax.tree.map(one, (state, batch))
    leaves, structure = jax.tree.flatten(args)
    key = (control, structure, tuple((x.shape, str(x.dtype)) for x in leaves))
    if key not in self._traffic:  # It costs as much as tracing the step.
      self._traffic[key] = collectives.traffic(
        functools.partial(self._step, **_given(control)),
        *args,
        axis=self.workers.axis,
        num_workers=self.workers.num_workers,
        inner_axes=self.workers.inner_axes,
      )
    return self._traffic[key]

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
    on_record: Callable[[Record], None] | None = None,
  ) -> tuple[_train_state.TrainState, list[Record]]:
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
      state, sent_bytes = _resumed(checkpoints, state, metadata or {})
    start = int(self.workers.view(state.step))
    if start > num_steps:
      raise ValueError(
        f"`num_steps` must be at least {start}, the step of the state, got "
        f"{num_steps}."
      )
    run = _Run(self, state, start, num_steps, label, on_record, evaluate)
    run.sent_before = sent_bytes
    with contextlib.ExitStack() as stack:
      data = batches(start)
      if close := getattr(data, "close", None):
        stack.callback(close)
      stack.enter_context(run.watchdog)
      if run.progress is not None:
        stack.enter_context(run.progress)
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


class _Run:
  """One call of `fit`: the state, the step in flight, clocks and sums."""

  def __init__(
    self,
    trainer: Trainer,
    state: _train_state.TrainState,
    start: int,
    num_steps: int,
    label: str | None,
    on_record: Callable[[Record], None] | None,
    evaluate: Callable[[_train_state.TrainState], dict[str, float]] | None,
  ):
    self.state = state
    self.records: list[Record] = []
    self.watchdog = _watchdog.Watchdog(trainer._timeout_s)
    self.progress = (
      None
      if label is None
      else _progress.Progress(num_steps, label, start_step=start)
    )
    self._trainer = trainer
    self._on_record = on_record
    self._evaluate = evaluate
    self._traffic: dict[transforms.Control, collectives.Traffic] = {}
    self._sent_bytes = 0.0
    # Of the checkpoint that this call goes on from, if there is one.
    self.sent_before: float | None = None
    # Metrics of two steps at the most, and what was run.
    self._flying: list[tuple[_programs.Choice, jax.Array]] = []
    self._start = self._read = start
    view = trainer.workers.view
    self._rounds = int(view(transforms.rounds(state.opt_state, state.step)))
    self._choices = trainer._choices.for_state(state.opt_state)
    # The places in their rounds of the next step and of the one after it.
    ahead = transforms.rounds_ahead(state.opt_state)
    self._ahead: list[Any] = [None, None]
    if ahead is not None:
      places = np.asarray(view(ahead))
      self._ahead = [places[..., 0, :], places[..., 1, :]]
      self._place_shape = self._ahead[0].shape
    self._losses: list[float] = []
    found = transforms.skipped(state.opt_state)
    self._skipped = 0 if found is None else int(view(found))
    self._samples = 0
    self._samples_per_step = 0
    self._train_s = 0.0
    # Up to when training time is counted; None in the first step, which
    # compiles.
    self._since_s: float | None = None

  def place(self, batch: PyTree) -> PyTree:
    """Puts a batch onto the devices; reads off the first what is sent."""
    placed = self._trainer.workers.place(batch)
    if not self._traffic:
      first = jax.tree.leaves(placed)[0]
      self._samples_per_step = first.shape[0] * first.shape[1]
      self._prepare(placed)
    return placed

  def _prepare(self, placed: PyTree) -> None:
    """Makes all programs, and counts what each sends."""
    self.watchdog.beat("compiling", patience=4.0)
    choices = self._choices.all
    self._programs: dict[transforms.Control, Any] = {}
    if self._ahead[0] is not None and self._ahead[0].ndim > 1:
      # To count; those of fragments are compiled when they are needed.
      choices = (self._choices.at_once(len(self._ahead[0])),)
    for choice in choices:
      self._compile(choice.control, placed, now=len(choices) > 1)
    self._check_communicates()
    if self.sent_before is not None:
      self._sent_bytes = self.sent_before
      return
    # Up to here, as far as the counters know: all that was sent at once.
    steps, rounds = self._start, self._rounds
    at_once = {
      choice.control.round_ends: self._traffic[choice.control]
      for choice in reversed(choices)
    }
    if None in at_once:
      self._sent_bytes = at_once[None].sent_bytes(steps, rounds)
    else:
      self._sent_bytes = at_once[True].sent_bytes(rounds, 0)
      self._sent_bytes += at_once[False].sent_bytes(steps - rounds, 0)

  def _check_communicates(self) -> None:
    """Raises a ValueError for several workers that never send a thing."""
    num = self._trainer.workers.num_workers
    if num == 1 or self._trainer._independent:
      return
    # All that plain Optax lets a step send.
    statistics = sum(
      x.nbytes // x.shape[0]
      for x in jax.tree.leaves(self.state.model_state)
      if jnp.issubdtype(x.dtype, jnp.floating)
    )
    sent = max(
      sum(c.payload_bytes * c.count for c in traffic.collectives)
      for traffic in self._traffic.values()
    )
    if sent <= statistics:
      raise ValueError(
        f"`step` must bring the workers together, but of {num} workers "
        f"{_step.SILENT}"
      )

  def _compile(
    self, control: transforms.Control, placed: PyTree, *, now: bool
  ) -> None:
    """Makes a program, and counts what it sends."""
    self._traffic[control] = self._trainer.traffic(self.state, placed, control)
    program = self._trainer._program(self.state, control)
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
    columns = dict(zip(self._trainer._names, rows.T, strict=True))
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
    ahead = [columns[name][0] for name in self._trainer._places]
    last = np.asarray(ahead).reshape(self._place_shape) if ahead else None
    self._ahead = [*self._ahead, last]
    if "skipped" in columns:
      self._skipped = int(columns["skipped"][0])
    self._losses.append(float(columns["loss"].mean()))
    if self.progress is not None:
      self.progress.update(
        self._read,
        f"loss {self._losses[-1]:.3f}  {self._rate():,.0f} samples/s  "
        f"{_progress.format_bytes(self._sent_bytes)} sent",
      )

  def _rate(self) -> float:
    return self._samples / self._train_s if self._train_s else 0.0

  def record(self) -> None:
    """Evaluates, and notes where the run stands."""
    self.read()
    self.watchdog.beat(f"evaluating after step {self._read}", patience=4.0)
    metrics = {} if self._evaluate is None else self._evaluate(self.state)
    self.watchdog.beat(f"evaluated after step {self._read}")
    record = Record(
      step=self._read,
      rounds=self._rounds,
      sent_bytes=self._sent_bytes,
      train_loss=float(np.mean(self._losses)) if self._losses else math.nan,
      metrics=metrics,
      train_s=self._train_s,
      samples_per_s=self._rate(),
      diverged=is_diverged(metrics, self._losses),
      skipped=self._skipped,
    )
    self._losses.clear()
    self.records.append(record)
    if self._on_record is not None:
      self._on_record(record)

  def save(
    self, checkpoints: _checkpoints.Checkpoints, metadata: dict[str, Any] | None
  ) -> None:
    """Starts to write a checkpoint, unless the state has diverged."""
    self.read()
    if not self._trainer._is_finite(self.state):
      if jax.process_index() == 0:
        warnings.warn(
          f"The state after step {self._read} is not finite and was not saved: "
          "the checkpoints before it stay.",
          RuntimeWarning,
          stacklevel=3,
        )
      return
    self.watchdog.beat(f"saving after step {self._read}", patience=4.0)
    shared = _train_state.shared_leaves(self.state)
    kept = {**(metadata or {}), _SENT_BYTES: self._sent_bytes}
    checkpoints.save(self._read, self.state, shared, kept)
    self.watchdog.beat(f"saved after step {self._read}")


def is_diverged(metrics: Mapping[str, float], losses: Sequence[float]) -> bool:
  """Returns whether a run stands at a loss that is not a finite number.

  Args:
    metrics: of its evaluation, which may have a `loss`.
    losses: of its training steps since the last record, for want of one.
  """
  loss = metrics.get("loss", losses[-1] if losses else 0.0)
  return not math.isfinite(loss)


def _takes_control(step: _step.Step) -> bool:
  """Returns whether a user's own step passes a control on."""
  try:
    parameters = inspect.signature(step).parameters
  except (TypeError, ValueError):
    return False
  kinds = {p.kind for p in parameters.values()}
  return "control" in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _given(control: transforms.Control) -> dict[str, Any]:
  """A step of a user's own may know nothing of a control."""
  return {} if control == transforms.Control() else {"control": control}


def _local_rows(metrics: jax.Array) -> np.ndarray:
  """This process's workers' metrics, [local workers, metrics]."""
  if metrics.is_fully_addressable:
    return np.asarray(metrics)
  return np.concatenate(
    [np.asarray(s.data) for s in metrics.addressable_shards]
  )


def _due(done: int, every: int | None, last: int) -> bool:
  return done == last or (every is not None and done % every == 0)


def _resumed(
  checkpoints: _checkpoints.Checkpoints,
  state: _train_state.TrainState,
  metadata: dict[str, Any],
) -> tuple[_train_state.TrainState, float | None]:
  """Returns the newest saved state, if there is one, and the bytes sent."""
  found = checkpoints.restore(state)
  if found is None:
    return state, None
  sent_bytes = found.metadata.pop(_SENT_BYTES, None)
  metadata = json.loads(json.dumps(metadata))  # Tuples become lists there.
  different = sorted(
    name
    for name in found.metadata.keys() | metadata.keys()
    if found.metadata.get(name) != metadata.get(name)
  )
  if different:
    name = different[0]
    raise ValueError(
      f"`metadata` must be that of the checkpoint, but {', '.join(different)} "
      f"differ: `{name}` is {found.metadata.get(name)!r} there and "
      f"{metadata.get(name)!r} here. Resume with the same options, or start "
      "anew in another directory."
    )
  return found.state, sent_bytes
