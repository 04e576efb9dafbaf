"""Builds everything that a run needs from its options, and checks it first.

Nothing is written and nothing is trained here: what is wrong with the options
shows before there is anything half done.
"""

import dataclasses
import datetime
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jdist import collectives, profiling, training, transforms
from jdist.cli import _datasets, _methods, _options
from jdist.training import comparison


@dataclasses.dataclass
class Prepared:
  """One method's programs: compiled once, used for every seed."""

  workload: comparison.Workload
  options: _options.Common
  method: str
  peak: float

  def __post_init__(self) -> None:
    workload, options = self.workload, self.options
    self.budget = _methods.make_budget(
      options, self.peak, workload.steps_per_epoch
    )
    model = workload.model(0)
    optimizer = _methods.build_method(
      self.method, options, self.budget, workload.workers.axis, model
    )
    stream_steps: tuple[int, ...] = ()
    if options.stream:
      state = profiling.abstract_state(
        workload.workers, optimizer, model.params, model.state
      )
      if transforms.streams(state.opt_state):
        stream_steps = _methods.STREAM_STEPS
    self.programs = workload.programs(
      optimizer,
      model.apply,
      stream_steps=stream_steps,
      # None: wherever it can.
      host_rounds=None if options.host_rounds else False,
    )

  def run(
    self, seed: int, *, label: str | None = None, **fit: Any
  ) -> list[training.Record]:
    """Trains from the seed's initial parameters; see `Trainer.fit`."""
    _, records = self.programs.run(
      seed,
      self.budget.num_steps,
      evaluate_every=self.workload.steps(self.options.evaluate_every_epochs),
      label=label,
      **fit,
    )
    return records


def build(
  options: _options.Common,
  team: Callable[[], collectives.Workers] | None = None,
) -> comparison.Workload:
  """Checks the options, makes the workers and loads the data.

  Args:
    options: of the run.
    team: makes the workers; None for those that the options name.

  Raises:
    ValueError: when an option is wrong.
    ImportError: when an extra is missing.
  """
  check(options)
  train, test = _datasets.load(options)
  # Before the devices are made, of which there could be thousands.
  if options.workers > len(train):
    raise ValueError(
      f"`--workers` must not exceed the {len(train)} training samples, got "
      f"{options.workers}."
    )

  if team is None:
    workers = collectives.workers(options.workers, substrate=options.substrate)
  else:
    workers = team()
  workload = comparison.Workload(
    workers,
    train,
    test,
    lambda seed: _datasets.build_model(options, train, seed),
    options.batch_size,
    options.accumulate,
    options.alpha,
    options.augment,
    options.dtype,
    _datasets.evaluation_batch(options, test),
  )
  workload.batches(seed=0)  # Its checks, before anything is written.
  workload.model(0)
  return workload


def check(options: _options.Common) -> None:
  """Raises a ValueError when an option is wrong by itself."""
  if options.workers < 1:
    raise ValueError(f"`--workers` must be at least 1, got {options.workers}.")
  if options.accumulate < 1:
    raise ValueError(
      f"`--accumulate` must be at least 1, got {options.accumulate}."
    )
  if not options.evaluate_every_epochs > 0:
    raise ValueError(
      "`--evaluate-every-epochs` must be positive, got "
      f"{options.evaluate_every_epochs}."
    )
  parts = options.workers * options.accumulate
  if options.batch_size < 1 or options.batch_size % parts:
    below = max(options.batch_size // parts, 1) * parts
    raise ValueError(
      f"`--batch-size` must divide evenly over {options.workers} workers"
      f"{f' times {options.accumulate}' if options.accumulate > 1 else ''}, "
      f"got {options.batch_size}. Take {below} or {below + parts}."
    )
  _datasets.check(options)
  # Of which none may be infinite either.
  for name in ("epochs", "warmup_epochs", "evaluate_every_epochs"):
    if not math.isfinite(getattr(options, name)):
      raise ValueError(
        f"`--{name.replace('_', '-')}` must be a number of epochs, got "
        f"{getattr(options, name)}."
      )
  for name in ("momentum", "weight_decay"):
    if (
      not 0 <= getattr(options, name) < (1 if name == "momentum" else math.inf)
    ):
      raise ValueError(
        f"`--{name.replace('_', '-')}` must be in [0, "
        f"{'1' if name == 'momentum' else 'inf'}), got "
        f"{getattr(options, name)}."
      )
  _methods.check_budget(options)


def output_directory(options: _options.Common, command: str) -> pathlib.Path:
  """Makes the directory for a command's results."""
  if options.output is not None:
    path = pathlib.Path(options.output)
  else:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = pathlib.Path("runs") / f"{command}-{options.dataset}-{now}"
  make_directory("--output", path)
  return path


def make_directory(option: str, path: str | pathlib.Path) -> None:
  """Makes a directory that the user has named.

  Raises:
    ValueError: when it cannot be written to.
  """
  try:
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    if os.access(path, os.W_OK):
      return
    reason = "not writable"
  except OSError as error:
    reason = str(error.strerror).lower()
  raise ValueError(
    f"`{option}` {path} cannot be used: {reason}. Take another directory."
  )
