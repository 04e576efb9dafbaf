"""Compares training methods: each tuned alike, then run with several seeds.

An experiment names its variants and sizes, and calls `main`.  Every row is
written when its run has ended, and runs whose rows are there are not repeated:
the same command goes on where it was stopped.
"""

import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
import tyro

from jdist import collectives, data, models, training


@dataclasses.dataclass(frozen=True)
class Config:
  """One comparison."""

  dataset: str = "cifar10"
  """A name of `jdist.data`."""

  model: str = "lenet"
  """A name of `jdist.models`."""

  workers: int = 8
  """Workers that train together."""

  batch_size: int = 128
  """Samples of all workers in a step."""

  epochs: float = 5.0
  """Passes over the training set, the same for every variant."""

  warmup_epochs: float = 0.5
  """In which the learning rate rises; methods with a warm-up have it then."""

  rates: tuple[float, ...] = (0.0125, 0.025, 0.05)
  """The grid of highest learning rates; each variant uses its own best one, by
  a run of the same length on held-out training samples."""

  optimizer: Literal["sgd", "adam"] = "sgd"
  """Of each worker; its moments stay its own."""

  momentum: float = 0.9
  """Nesterov momentum of each worker's SGD."""

  weight_decay: float = 0.0
  """Decoupled."""

  augment: bool = False
  """Random crops and flips."""

  alpha: float | None = None
  """Label skew between workers (Dirichlet); i.i.d. if not given."""

  dtype: str = "float32"
  """In which the model computes."""

  evaluations: int = 5
  """In a run, equally far apart, the last one at its end."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """One run each at a variant's best rate."""

  variants: tuple[str, ...] = ()
  """Of the experiment's, in this order; all if none are named."""


class Run(NamedTuple):
  """What a variant is told.

  Attributes:
    inner: a worker's optimizer.
    rate: the learning rate's schedule.
    num_steps: local steps of the run.
    warmup_steps: local steps until the rate is at its highest.
    axis: the workers' axis.
    workers: how many there are.
    options: of the comparison.
    model: what is trained, as it is in the beginning.
  """

  inner: optax.GradientTransformation
  rate: optax.Schedule
  num_steps: int
  warmup_steps: int
  axis: collectives.Axis
  workers: int
  options: Config
  model: models.Model


Variant: TypeAlias = Callable[[Run], optax.GradientTransformation]
Presets: TypeAlias = dict[str, tuple[str, Config]]
# Tuning uses no seed that is compared afterwards.
_TUNING_SEED = 10_000


class Comparison:
  """The data and the workers that all runs share."""

  def __init__(self, options: Config, variants: dict[str, Variant]):
    self.options, self.variants = options, variants
    self.train = data.load(options.dataset)
    self.test = data.load(options.dataset, "test")
    self.workers = collectives.workers(options.workers)

  def hold_out(self) -> "Comparison":
    """The same with a tenth of the training samples in place of the test."""
    other = object.__new__(type(self))
    other.options, other.workers = self.options, self.workers
    other.variants = self.variants
    order = np.random.default_rng(0).permutation(len(self.train))
    cut = len(order) // 10

    def part(rows: np.ndarray) -> data.Dataset:
      return dataclasses.replace(
        self.train,
        images=self.train.images[rows],
        labels=self.train.labels[rows],
      )

    other.train, other.test = part(np.sort(order[cut:])), part(order[:cut])
    return other

  def build(self, seed: int) -> models.Model:
    """What is trained."""
    return models.build(
      self.options.model,
      input_shape=self.train.input_shape,
      num_classes=self.train.num_classes,
      seed=seed,
    )

  def tell(
    self, variant: str, traffic: collectives.Traffic, record: training.Record
  ) -> dict[str, Any]:
    """What an experiment adds to a row.

    Args:
      variant: its name.
      traffic: of its step.
      record: the run's last.
    """
    del variant, traffic, record
    return {}

  def ignores(self, variant: str) -> Collection[str]:
    """Options that a variant's runs do not depend on.

    Its rows hold whatever these are.

    Args:
      variant: its name.
    """
    del variant
    return ()

  def prepare(self, variant: str, peak: float, seed: int) -> "Prepared":
    """All that a run consists of."""
    options, workers = self.options, self.workers
    per_epoch = len(self.train) / options.batch_size
    num_steps = round(options.epochs * per_epoch)
    warmup_steps = round(options.warmup_epochs * per_epoch)
    rate = optax.warmup_cosine_decay_schedule(
      peak / 10, peak, warmup_steps, num_steps, peak / 100
    )
    moments = {
      "sgd": optax.trace(options.momentum, nesterov=True),
      "adam": optax.scale_by_adam(),
    }
    inner = optax.chain(
      moments[options.optimizer],
      optax.add_decayed_weights(options.weight_decay),
      optax.scale_by_learning_rate(rate),
    )
    model = self.build(seed)
    chain = self.variants[variant](
      Run(
        inner,
        rate,
        num_steps,
        warmup_steps,
        workers.axis,
        options.workers,
        options,
        model,
      )
    )
    loss = training.classification_loss(
      model.apply,
      normalize=self.train.normalize,
      compute_dtype=jax.numpy.dtype(options.dtype),
      augment=data.compose(data.random_crop(), data.random_flip())
      if options.augment
      else None,
    )
    batches = data.Batches(
      self.train,
      options.workers,
      options.batch_size // options.workers,
      seed=seed,
      alpha=options.alpha,
      worker_ids=workers.local_workers,
    )
    return Prepared(
      chain,
      model,
      training.make_step(loss, chain, axis=workers.axis),
      training.init_state(workers, chain, model.params, model.state, seed=seed),
      batches,
      num_steps,
    )

  def fit(self, variant: str, peak: float, seed: int) -> dict[str, Any]:
    """Trains, and returns what was measured."""
    run = self.prepare(variant, peak, seed)
    trainer = training.Trainer(self.workers, run.step)
    evaluate = training.Evaluator(
      self.workers,
      run.model.apply,
      data.evaluation_batches(self.test, self.options.workers, 128),
      normalize=self.train.normalize,
      compute_dtype=jax.numpy.dtype(self.options.dtype),
      optimizer=run.chain,
    )
    state, records = trainer.fit(
      run.state,
      run.batches.iterate,
      run.num_steps,
      evaluate=evaluate,
      evaluate_every=max(1, run.num_steps // self.options.evaluations),
    )
    last = records[-1]
    # Of shapes alone, which have not changed.
    traffic = trainer.traffic(state, next(run.batches.iterate(0)))
    return {
      "accuracy": last.metrics["accuracy"],
      "test_loss": last.metrics["loss"],
      "train_loss": last.train_loss,
      "steps": last.step,
      "rounds": last.rounds,
      "sent_bytes": last.sent_bytes,
      "train_s": last.train_s,
      "samples_per_s": last.samples_per_s,
      **self.tell(variant, traffic, last),
      "curve": [
        {
          "step": r.step,
          "rounds": r.rounds,
          "sent_bytes": r.sent_bytes,
          "train_s": r.train_s,
          "accuracy": r.metrics["accuracy"],
        }
        for r in records
      ],
    }


class Prepared(NamedTuple):
  """What a run consists of.

  Attributes:
    chain: the method.
    model: what is trained.
    step: one worker's.
    state: the first one.
    batches: of all workers.
    num_steps: how many local steps it takes.
  """

  chain: optax.GradientTransformation
  model: models.Model
  step: Callable[..., Any]
  state: training.TrainState
  batches: data.Batches
  num_steps: int


class Rows:
  """The rows of a preset, each run once."""

  def __init__(
    self,
    path: pathlib.Path,
    options: Config,
    ignores: Callable[[str], Collection[str]] = lambda variant: (),
  ):
    self.path, self.ignores = path, ignores
    self.rows = training.read_rows(self.path) if self.path.exists() else []
    # What may differ between rows of one comparison.
    free = {"seeds", "variants", "rates", "cache"}

    def fixed(options: Config) -> dict[str, Any]:
      config = dataclasses.asdict(options)
      told = {k: v for k, v in config.items() if k not in free}
      return json.loads(json.dumps(told))  # As rows have it: lists.

    self.config = fixed(options)
    # Rows are older than some options, which they had as they are by default.
    self.defaults = fixed(type(options)())

  def get(
    self, comparison: Comparison, purpose: str, variant: str, rate: float,
    seed: int,
  ) -> dict[str, Any]:  # fmt: skip
    """A run's row, from the file or from a run."""
    named = {
      "purpose": purpose, "method": variant, "learning_rate": rate,
      "seed": seed,
    }  # fmt: skip
    ignored = self.ignores(variant)
    for row in self.rows:
      theirs = self.defaults | row["config"]
      other = {k for k, v in self.config.items() if theirs.get(k) != v}
      other |= theirs.keys() - self.config.keys()
      if not other.difference(ignored) and all(
        row[key] == value for key, value in named.items()
      ):
        return row
    measured = comparison.fit(variant, rate, seed)
    del named["seed"]
    row = training.make_row(
      self.config,
      seed,
      workers=comparison.options.workers,
      **named,
      **measured,
    )
    training.append_rows(self.path, [row])
    self.rows.append(row)
    print(
      f"{purpose} {variant}, rate {rate:g}, seed {seed}: "
      f"{100 * row['accuracy']:.2f} %, {row['rounds']} rounds, "
      f"{row['sent_bytes'] / 1e6:.1f} MB, {row['samples_per_s']:,.0f} images/s",
      flush=True,
    )
    return row


def compare(
  path: pathlib.Path,
  options: Config,
  variants: dict[str, Variant],
  comparison_type: type[Comparison] = Comparison,
) -> None:
  """Runs all variants: the rate first, then the seeds.

  Args:
    path: the file of rows.
    options: the comparison.
    variants: by name, in the order in which they run.
    comparison_type: what runs them.
  """
  unknown = set(options.variants) - set(variants)
  if unknown:
    raise SystemExit(
      f"`--variants` must be of {', '.join(variants)}, got {unknown}."
    )
  comparison = comparison_type(options, variants)
  held_out = comparison.hold_out()
  rows = Rows(path, options, comparison.ignores)
  for variant in options.variants or variants:
    best = options.rates[0]
    if len(options.rates) > 1:
      tried = [
        rows.get(held_out, "tuning", variant, rate, _TUNING_SEED)
        for rate in options.rates
      ]
      best = max(tried, key=quality)["learning_rate"]
    for seed in options.seeds:
      rows.get(comparison, "comparison", variant, best, seed)


def quality(row: dict[str, Any]) -> tuple[float, float]:
  """By what the best rate is chosen: accuracy, and of equal ones the loss."""
  loss = row["test_loss"]
  return row["accuracy"], -loss if loss is not None else -math.inf


def main(
  folder: pathlib.Path,
  presets: Presets,
  variants: dict[str, Variant],
  comparison_type: type[Comparison] = Comparison,
) -> None:
  """Reads a preset's name and changes to it from the command line, and runs.

  Args:
    folder: the experiment's; rows go to `results/` in it.
    presets: by name, each with a line of help.
    variants: by name, in the order in which they run.
    comparison_type: what runs them.
  """
  chosen = tyro.extras.overridable_config_cli(presets)
  name = next(word for word in sys.argv[1:] if word in presets)
  path = folder / "results" / f"{name}.jsonl"
  compare(path, chosen, variants, comparison_type)
