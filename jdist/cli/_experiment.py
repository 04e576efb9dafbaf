"""Builds everything that a run needs from its options, and checks it first.

Nothing is written and nothing is trained here: what is wrong with the options
shows before there is anything half done.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from jdist import checks, collectives, profiling, training, transforms
from jdist.cli import _datasets, _methods, _options, _output
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
    self,
    seed: int,
    *,
    label: str | Callable[[int, str], None] | None = None,
    on_end: Callable[[Any, Any], None] | None = None,
    **fit: Any,
  ) -> list[training.Record]:
    """Trains from the seed's initial parameters; see `Trainer.fit`.

    `on_end` is called with the trained parameters and batch statistics.
    """
    state, records = self.programs.run(
      seed,
      self.budget.num_steps,
      evaluate_every=self.workload.steps(self.options.evaluate_every_epochs),
      label=label,
      **fit,
    )
    if on_end is not None:
      on_end(*self.programs.evaluate.model(state))
    return records

  def other_workers(self, seed: int) -> Callable[[int], training.OtherWorkers]:
    """Returns how a checkpoint of another number of workers is taken."""

    def of(number: int) -> training.OtherWorkers:
      old = collectives.workers(number, substrate="vmap")
      model = self.workload.model(seed)
      optimizer = _methods.build_method(
        self.method, self.options, self.budget, old.axis, model
      )
      return training.OtherWorkers(
        old,
        lambda: training.init_state(
          old, optimizer, model.params, model.state, seed=seed
        ),
        lambda state: training.resize(
          state, optimizer, old, self.workload.workers, self.programs.optimizer
        ),
      )

    return of


def build(
  options: _options.Common,
  team: Callable[[], collectives.Workers] | None = None,
) -> comparison.Workload:
  """Checks the options, makes the workers, by a `team` if given, loads data."""
  check(options)
  _check_extras(options)
  train, test = _datasets.load(options)
  if options.batch_size > len(train):
    raise ValueError(
      f"`--batch-size` must not exceed the {len(train)} training samples, got "
      f"{options.batch_size}."
    )
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


def _check_extras(options: _options.Common) -> None:
  """Raises one ImportError for all that a run needs and is not installed."""
  needed = _datasets.modules(options)
  if getattr(options, "checkpoints", None) is not None:
    needed["orbax.checkpoint"] = "checkpoints"
  if isinstance(options, _options.Compare):
    needed["matplotlib"] = "plots"
  if getattr(options, "tensorboard", None) is not None:
    needed["tensorboardX"] = "metrics"
  if getattr(options, "final_params", None) is not None:
    needed["safetensors"] = "export"
  checks.check_extras(needed)


def check(options: _options.Common) -> None:
  """Raises a ValueError when an option is wrong by itself."""
  _options.check_least(
    options, workers=1, accumulate=1, interval=1, steps=1, warmup_epochs=0,
    weight_decay=0,
  )  # fmt: skip
  _options.check_positive(options, "epochs", "evaluate_every_epochs")
  model = getattr(options, "final_params", None)
  if model is not None and pathlib.Path(model).suffix != ".safetensors":
    raise ValueError(
      "`--final-params` must be a file FILE.safetensors, by which others know "
      f"how to read it, got {model!r}."
    )
  if not 0 <= options.momentum < 1:
    raise ValueError(f"`--momentum` must be in [0, 1), got {options.momentum}.")
  parts = options.workers * options.accumulate
  if options.batch_size < 1 or options.batch_size % parts:
    below = max(options.batch_size // parts, 1) * parts
    raise ValueError(
      f"`--batch-size` must divide evenly over {options.workers} workers"
      f"{f' times {options.accumulate}' if options.accumulate > 1 else ''}, "
      f"got {options.batch_size}. Take {below} or {below + parts}."
    )
  _datasets.check(options)


def make_directories(options: Any) -> None:
  """Makes the directories that options name; the default can always be made."""
  model = options.final_params
  for option, path in (
    ("--output", options.output),
    ("--checkpoints", options.checkpoints),
    ("--tensorboard", options.tensorboard),
    ("--final-params", None if model is None else pathlib.Path(model).parent),
  ):
    if path is not None:
      _output.make_directory(option, path)


def output_directory(options: _options.Common, command: str) -> pathlib.Path:
  """Makes the directory for a command's results."""
  label = f"{command}-{options.dataset}"
  return _output.output_directory(options.output, label)
