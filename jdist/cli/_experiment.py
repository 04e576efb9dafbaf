"""Builds everything that a run needs from its options, and checks it first.

Nothing is written and nothing is trained here: what is wrong with the options
shows before there is anything half done.
"""

import dataclasses
import datetime
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from jdist import (
  collectives,
  data,
  models,
  profiling,
  training,
  transforms,
)
from jdist.cli import _methods, _options


@dataclasses.dataclass(frozen=True)
class Experiment:
  """The data and the workers that all runs of a command share.

  Attributes:
    options: of the command.
    workers: the run's workers.
    train: the training set, or the part of it that is not held out.
    test: what `evaluate` counts on.
  """

  options: _options.Common
  workers: collectives.Workers
  train: data.Dataset
  test: data.Dataset

  def batches(self, seed: int) -> data.Batches:
    """This process's part of the training batches."""
    return data.Batches(
      self.train,
      self.options.workers,
      self.options.batch_size // self.options.workers,
      seed=seed,
      alpha=self.options.alpha,
      worker_ids=self.workers.local_workers,
    )

  @property
  def steps_per_epoch(self) -> float:
    """Steps of a pass over the training set."""
    return len(self.train) / self.options.batch_size

  def every(self, epochs: float) -> int:
    """So many epochs in steps, at least one."""
    return max(1, round(epochs * self.steps_per_epoch))

  def model(self, seed: int) -> models.Model:
    """A model with initial parameters."""
    norm = self.options.norm
    chosen: dict[str, Any] = {} if norm is None else {"norm": norm}
    return models.build(
      self.options.model,
      input_shape=self.train.input_shape,
      num_classes=self.train.num_classes,
      seed=seed,
      **chosen,
    )


@dataclasses.dataclass
class Prepared:
  """One method's programs: compiled once, used for every seed."""

  experiment: Experiment
  method: str
  peak: float

  def __post_init__(self) -> None:
    experiment, options = self.experiment, self.experiment.options
    axis = experiment.workers.axis
    self.budget = _methods.make_budget(
      options, self.peak, experiment.steps_per_epoch
    )
    model = experiment.model(seed=0)
    self.optimizer = _methods.build_method(
      self.method, options, self.budget, axis, model
    )
    dtype = np.dtype(options.dtype) if options.dtype == "float32" else (
      jax.numpy.bfloat16
    )  # fmt: skip
    loss = training.classification_loss(
      model.apply,
      normalize=experiment.train.normalize,
      compute_dtype=dtype,
      augment=data.compose(data.random_crop(), data.random_flip())
      if options.augment
      else None,
    )
    self.trainer = training.Trainer(
      experiment.workers,
      training.make_step(
        loss, self.optimizer, axis=axis, accumulate=options.accumulate
      ),
      stream_steps=self._stream_steps(model),
      # None: wherever it can.
      host_rounds=None if options.host_rounds else False,
    )
    self.evaluate = training.Evaluator(
      experiment.workers,
      model.apply,
      data.evaluation_batches(
        experiment.test, options.workers, 1024 // options.workers or 1
      ),
      normalize=experiment.train.normalize,
      compute_dtype=dtype,
      optimizer=self.optimizer,
    )

  def _stream_steps(self, model: models.Model) -> tuple[int, ...]:
    """In how many steps a message is sent, where one is streamed."""
    if not self.experiment.options.stream:
      return ()
    state = profiling.abstract_state(
      self.experiment.workers, self.optimizer, model.params, model.state
    )
    streams = transforms.streams(state.opt_state)
    return _methods.STREAM_STEPS if streams else ()

  def run(
    self, seed: int, *, label: str | None = None, **fit: Any
  ) -> list[training.Record]:
    """Trains from the seed's initial parameters; see `Trainer.fit`."""
    experiment = self.experiment
    model = experiment.model(seed)
    state = training.init_state(
      experiment.workers, self.optimizer, model.params, model.state, seed=seed
    )
    _, records = self.trainer.fit(
      state,
      experiment.batches(seed).iterate,
      self.budget.num_steps,
      evaluate=self.evaluate,
      evaluate_every=experiment.every(experiment.options.evaluate_every_epochs),
      label=label,
      **fit,
    )
    return records


def build(options: _options.Common) -> Experiment:
  """Checks the options, makes the workers and loads the data.

  Raises:
    ValueError: when an option is wrong.
    ImportError: when an extra is missing.
  """
  check(options)
  train = data.load(options.dataset)
  test = data.load(options.dataset, "test")
  # Before the devices are made, of which there could be thousands.
  if options.workers > len(train):
    raise ValueError(
      f"`--workers` must not exceed the {len(train)} training samples, got "
      f"{options.workers}."
    )
  workers = collectives.workers(options.workers, substrate=options.substrate)
  experiment = Experiment(options, workers, train, test)
  experiment.batches(seed=0)  # Its checks, before anything is written.
  experiment.model(seed=0)
  return experiment


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
  _check_name("--dataset", options.dataset, data.NAMES)
  _check_name("--model", options.model, models.NAMES)
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


def _check_name(option: str, name: str, names: tuple[str, ...]) -> None:
  if name not in names:
    raise ValueError(
      f"`{option}` must be one of {', '.join(names)}, got {name!r}."
    )


def hold_out(
  experiment: Experiment, *, fraction: float = 0.1, seed: int = 0
) -> Experiment:
  """The same experiment without its test set: to tune on.

  Args:
    experiment: the whole.
    fraction: of the training samples that take the test set's place.
    seed: which ones.
  """
  train = experiment.train
  order = np.random.default_rng(seed).permutation(len(train))
  cut = max(1, int(len(train) * fraction))

  def part(rows: np.ndarray) -> data.Dataset:
    return dataclasses.replace(
      train, images=train.images[rows], labels=train.labels[rows]
    )

  return dataclasses.replace(
    experiment, train=part(np.sort(order[cut:])), test=part(order[:cut])
  )


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


def result(
  options: _options.Common,
  method: str,
  peak: float,
  seed: int,
  records: list[training.Record],
) -> dict[str, Any]:
  """A run's row."""
  last = records[-1]
  return training.make_row(
    dataclasses.asdict(options),
    seed,
    method=method,
    learning_rate=peak,
    workers=options.workers,
    accuracy=last.metrics["accuracy"],
    test_loss=last.metrics["loss"],
    train_loss=last.train_loss,
    steps=last.step,
    rounds=last.rounds,
    sent_bytes=last.sent_bytes,
    train_s=last.train_s,
    samples_per_s=last.samples_per_s,
    curve=[
      {
        "step": r.step,
        "rounds": r.rounds,
        "sent_bytes": r.sent_bytes,
        "train_s": r.train_s,
        "accuracy": r.metrics["accuracy"],
      }
      for r in records
    ],
  )
