"""The data, the model and the workers that all runs of a comparison share."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, collectives, data, models, signatures
from jdist.training import (
  _evaluation,
  _gradient,
  _losses,
  _step,
  _train_state,
  loop,
)

# The entries of a record that both a row and its curve have.
_FIGURES = ("rounds", "sent_bytes", "train_s", "train_loss")


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Workload:
  """A training problem, on which every variant of a comparison is run.

  Attributes:
    workers: The workers of every run.
    train: The training set, of images or a text, without the held-out part.
    test: The set on which accuracies are measured.
    model: A function that builds the model with a seed's initial parameters.
    batch_size: The samples of all workers in a step.
    accumulate: The number of micro-batches of a worker in a step.
    alpha: The label skew between workers (Dirichlet); None for i.i.d. data.
    augment: Whether images are cropped and flipped at random.
    dtype: The dtype in which the model computes.
    evaluation_batch: The samples of a worker in an evaluation batch.
  """

  workers: collectives.Workers
  train: data.Dataset | data.TextDataset
  test: data.Dataset | data.TextDataset
  model: Callable[[int], models.Model]
  batch_size: signatures.PositiveInt
  accumulate: signatures.PositiveInt = 1
  alpha: float | None = None
  augment: bool = False
  dtype: signatures.Dtype = "float32"
  evaluation_batch: signatures.PositiveInt = 128

  def __post_init__(self) -> None:
    parts = self.workers.num_workers * self.accumulate
    if self.batch_size % parts:
      raise ValueError(
        f"`batch_size` must be a multiple of {parts}, the workers times "
        f"`accumulate`, got {self.batch_size}. A rest would be left out."
      )
    if self.augment and not isinstance(self.train, data.Dataset):
      raise ValueError(
        "`augment` must be False for a text: crops and flips are of images, "
        "got True."
      )

  @classmethod
  def load(
    cls,
    dataset: str,
    build: Callable[[data.Dataset, int], models.Model],
    workers: collectives.Workers,
    batch_size: int,
    **options: Any,
  ) -> "Workload":
    """Loads images by name, and builds models for them and a seed."""
    train, test = data.load(dataset), data.load(dataset, "test")
    model = functools.partial(build, train)
    return cls(workers, train, test, model, batch_size, **options)

  @property
  def steps_per_epoch(self) -> float:
    """The steps of a pass over the training set."""
    return len(self.train) / self.batch_size

  def steps(self, epochs: signatures.PositiveFloat) -> int:
    """Converts epochs to steps, at least one."""
    checks.check_number("epochs", epochs, high=2.0**31)
    # A fraction of an epoch of a small set may round to no step at all.
    return max(1, round(epochs * self.steps_per_epoch))

  def hold_out(
    self, fraction: signatures.UnitFloat = 0.1, *, seed: signatures.Seed = 0
  ) -> "Workload":
    """Replaces the test set by a random `fraction` of the training set.

    `seed` chooses its samples, one at least.
    """
    # The training part stays sorted, so that it is split among workers like the
    # whole set.
    order = np.random.default_rng(seed).permutation(len(self.train))
    cut = max(1, int(len(order) * fraction))
    if cut >= len(order):
      raise ValueError(
        "`fraction` must leave samples for training, got "
        f"{fraction} of {len(order)}. Give a smaller one."
      )
    return dataclasses.replace(
      self,
      train=self.train.select(np.sort(order[cut:])),
      test=self.train.select(order[:cut]),
    )

  def batches(self, seed: signatures.Seed) -> data.Batches:
    """Returns this process's part of the training batches."""
    # Each process reads the samples of its own workers only.
    return data.Batches(
      self.train, self.workers.num_workers,
      self.batch_size // self.workers.num_workers, seed=seed, alpha=self.alpha,
      worker_ids=self.workers.local_workers,
    )  # fmt: skip

  def loss(self, apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loss of a model, given its `apply`."""
    return _losses.model_loss(apply, self.inputs(), jnp.dtype(self.dtype))

  def gradient(
    self, apply: Callable[..., Any]
  ) -> Callable[..., _gradient.Gradient]:
    """Returns the function that computes a worker's gradient."""
    return _gradient.make_gradient(self.loss(apply), accumulate=self.accumulate)

  def inputs(self) -> Callable[..., Any]:
    """Returns a function that turns a batch and a key into inputs."""
    augment = None
    if self.augment:
      augment = data.compose(data.random_crop(), data.random_flip())
    # The evaluator gets the same inputs, except for the augmentation.
    return _losses.model_inputs(augment=augment, **self._inputs())

  def _inputs(self) -> dict[str, Any]:
    """Returns the options of inputs that training and evaluation share."""
    found: dict[str, Any] = {"compute_dtype": jnp.dtype(self.dtype)}
    if isinstance(self.train, data.Dataset):
      found["normalize"] = self.train.normalize
    return found

  def evaluator(
    self,
    apply: Callable[..., Any],
    optimizer: optax.GradientTransformation | None = None,
  ) -> _evaluation.Evaluator:
    """Returns an evaluator of accuracy and loss on the test set."""
    return _evaluation.Evaluator(
      self.workers,
      apply,
      data.evaluation_batches(
        self.test, self.workers.num_workers, self.evaluation_batch
      ),
      optimizer=optimizer,
      **self._inputs(),
    )

  def programs(
    self,
    optimizer: optax.GradientTransformation,
    apply: Callable[..., Any],
    **trainer: Any,
  ) -> "VariantPrograms":
    """Builds the programs of a chain and a model's `apply` for all seeds.

    Further arguments are those of `Trainer`.
    """
    step = _step.step_by(
      self.gradient(apply), optimizer, axis=self.workers.axis,
      independent=trainer.get("independent", False),
    )  # fmt: skip
    # With the optimizer, the evaluator applies messages in flight.
    evaluate = self.evaluator(apply, optimizer)
    trained = loop.Trainer(self.workers, step, **trainer)
    return VariantPrograms(self, optimizer, step, trained, evaluate)


@dataclasses.dataclass(frozen=True)
class VariantPrograms:
  """A variant's step, loop and evaluation, compiled once for all seeds."""

  workload: Workload
  optimizer: optax.GradientTransformation
  step: Callable[..., Any]
  trainer: loop.Trainer
  evaluate: _evaluation.Evaluator

  def init(self, model: models.Model, seed: int) -> _train_state.TrainState:
    """Returns the initial state of a model and a seed."""
    checks.check_type("model", model, models.Model, "a `models.Model`")
    return _train_state.init_state(
      self.workload.workers, self.optimizer, model.params, model.state,
      seed=seed,
    )  # fmt: skip

  def run(
    self, seed: int, num_steps: int, **fit: Any
  ) -> tuple[_train_state.TrainState, list[loop.Record]]:
    """Trains from a seed's parameters and batches, see `Trainer.fit`."""
    return self.trainer.fit(
      self.init(self.workload.model(seed), seed),
      self.workload.batches(seed).iterate, num_steps, evaluate=self.evaluate,
      **fit,
    )  # fmt: skip


@signatures.checked
def summarize(records: list[loop.Record]) -> dict[str, Any]:
  """Returns a row's entries about a run: its results, and its curve."""
  if not records:
    raise ValueError("`records` must be one at least, got none.")
  last = records[-1]
  rate = last.samples_per_s
  # Rows name accuracy and loss in one way for every kind of run.
  metrics = dict(last.metrics)
  return {
    "accuracy": metrics.pop("accuracy"),
    "test_loss": metrics.pop("loss"),
    **metrics,
    **{name: getattr(last, name) for name in _FIGURES},
    "steps": last.step,
    # Unknown after a single step, and JSON has no NaN.
    "samples_per_s": None if math.isnan(rate) else rate,
    "clock": last.clock,
    "diverged": last.diverged,
    "skipped": last.skipped,
    "curve": [
      {x: getattr(record, x) for x in ("step", *_FIGURES)} | record.metrics
      for record in records
    ],
  }
