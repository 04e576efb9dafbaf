"""The workload and the programs of a run, made from its options.

Nothing is written or trained here, so that wrong options are reported before
anything is half done.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from jdist import checks, collectives, profiling, training, transforms
from jdist.cli import _datasets, _groups, _methods, _options, _output
from jdist.training import comparison


@dataclasses.dataclass
class Prepared:
  """One method's programs: compiled once, used for every seed."""

  workload: comparison.Workload
  options: _groups.Common
  method: str
  peak: float

  def __post_init__(self) -> None:
    workload, options = self.workload, self.options
    # Methods depend on the structure of the model and not on its seed.
    model = workload.model(0)
    self.budget = _methods.make_budget(
      options, self.peak, workload.steps_per_epoch
    )
    optimizer = _methods.build_method(
      self.method, options, self.budget, workload.workers.axis, model
    )
    self.programs = workload.programs(
      optimizer,
      model.apply,
      stream_steps=stream_steps(options, workload.workers, optimizer, model)
      if options.stream
      else (),
      # None means wherever a method supports it.
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
    """Trains from a seed's initial parameters; see `Trainer.fit`.

    Args:
      seed: The seed of the run.
      label: What the progress bar shows.
      on_end: Is called with the trained parameters and batch statistics.
      **fit: Arguments of `Trainer.fit`.
    """
    state, records = self.programs.run(
      seed,
      self.budget.num_steps,
      evaluate_every=self.workload.steps(self.options.evaluate_every_epochs),
      label=label,
      **fit,
    )
    # The evaluated model is the anchor, which all workers share.
    if on_end is not None:
      on_end(*self.programs.evaluate.model(state))
    return records

  def other_workers(self, seed: int) -> Callable[[int], training.OtherWorkers]:
    """Returns how to read a checkpoint of another number of workers."""

    # Under vmap any number of old workers fits on this host.
    def read(number: int) -> training.OtherWorkers:
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

    return read


def stream_steps(
  options: _groups.Common,
  workers: collectives.Workers,
  optimizer: Any,
  model: Any,
) -> tuple[int, ...]:
  """Returns the splits of a streamed message for which programs are needed."""
  # Whether a chain streams shows in the shapes of its state.
  state = profiling.abstract_state(
    workers, optimizer, model.params, model.state
  )
  streams = transforms.streams(state.opt_state)
  return _methods.STREAM_STEPS if streams else ()


def check(options: _groups.Common) -> None:
  """Raises a ValueError for options that do not match, before any data is read.

  Raises:
    ValueError: when options do not match.
    ImportError: when extras are missing, with all their names.
  """
  # Only `train` has this option and the two below.
  model = getattr(options, "final_params", None)
  if model is not None and pathlib.Path(model).suffix != ".safetensors":
    raise ValueError(
      "`--final-params` must be a file FILE.safetensors, by whose ending other "
      f"programs know the format, got {model!r}."
    )
  parts = options.workers * options.accumulate
  if options.batch_size < 1 or options.batch_size % parts:
    below = max(options.batch_size // parts, 1) * parts
    raise ValueError(
      f"`--batch-size` must divide evenly over {options.workers} workers"
      f"{f' times {options.accumulate}' if options.accumulate > 1 else ''}, "
      f"got {options.batch_size}. Take {below} or {below + parts}."
    )
  # Missing extras are reported together, before hours of downloading data.
  needed = _datasets.check(options)
  for option, module, extra in (
    ("checkpoints", "orbax.checkpoint", "checkpoints"),
    ("methods", "matplotlib", "plots"),
    ("tensorboard", "tensorboardX", "metrics"),
    ("final_params", "safetensors", "export"),
  ):
    if getattr(options, option, None) is not None:
      needed[module] = extra
  checks.check_extras(needed)


def build(
  options: _groups.Common,
  team: Callable[[], collectives.Workers] | None = None,
) -> comparison.Workload:
  """Loads the data and makes the workers, by a `team` if it is given."""
  train, test = _datasets.load(options)
  # Workers are checked before their devices are made: thousands of virtual
  # devices would take all memory.
  for name in ("batch_size", "workers"):
    number = getattr(options, name)
    if number > len(train):
      raise ValueError(
        f"`{_options.word(name)}` must not exceed the {len(train)} training "
        f"samples, got {number}."
      )
  if team is None:
    workers = collectives.workers(options.workers, substrate=options.substrate)
  else:
    workers = team()
  workload = comparison.Workload(
    workers,
    train,
    test,
    functools.partial(_datasets.build_model, options, train),
    options.batch_size,
    options.accumulate,
    options.alpha,
    options.augment,
    options.dtype,
    _datasets.evaluation_batch(options.workers, test),
  )
  workload.batches(seed=0)  # Checks `alpha` before anything is written.
  return workload


def make_directories(options: Any) -> None:
  """Makes the directories that options name, before hours of training."""
  model = options.final_params
  for option, path in (
    ("--output", options.output),
    ("--checkpoints", options.checkpoints),
    ("--tensorboard", options.tensorboard),
    ("--final-params", None if model is None else pathlib.Path(model).parent),
  ):
    if path is not None:
      _output.make_directory(option, path)


def output_directory(options: _groups.Common, command: str) -> pathlib.Path:
  """Makes the directory for a command's results."""
  label = f"{command}-{options.dataset}"
  return _output.output_directory(options.output, label)
