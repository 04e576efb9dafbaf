"""Variants that are Optax chains: their options and their training runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import optax
import studies

from jdist import collectives, data, models, training
from jdist.training import comparison
from optax_chains import _step_times


@dataclasses.dataclass(frozen=True)
class Config(studies.Options):
  """One comparison of chains, and the options of its command."""

  dataset: str = "cifar10"
  """Name of the data set, as in `jdist.data`."""

  model: str = "lenet"
  """Name of the model, as in `jdist.models`."""

  workers: int = 8
  """Number of workers that train together."""

  batch_size: int = 128
  """Samples of all workers in a step."""

  epochs: float = 5.0
  """Passes over the training set, the same for every variant."""

  warmup_epochs: float = 0.5
  """Passes in which the learning rate, and the warm-up of a method, rise."""

  optimizer: Literal["sgd", "adam"] = "sgd"
  """Optimizer of each worker, whose moments are not averaged."""

  momentum: float = 0.9
  """Nesterov momentum of each worker's SGD."""

  weight_decay: float = 0.0
  """Decoupled weight decay."""

  augment: bool = False
  """Whether images are cropped and flipped at random."""

  alpha: float | None = None
  """Label skew between workers (Dirichlet); i.i.d. if not given."""

  dtype: str = "float32"
  """Dtype in which the model computes."""

  evaluations: int = 5
  """Number of evaluations in a run, equally far apart, the last at its end."""


class ChainRun(NamedTuple):
  """The training run for which a variant builds its chain.

  Attributes:
    inner: A worker's optimizer.
    rate: The schedule of the learning rate.
    num_steps: The number of local steps of the run.
    warmup_steps: The number of local steps until the highest rate.
    axis: The workers' axis.
    workers: The number of workers.
    options: The options of the comparison.
    model: The model with its initial parameters.
  """

  inner: optax.GradientTransformation
  rate: optax.Schedule
  num_steps: int
  warmup_steps: int
  axis: collectives.Axis
  workers: int
  options: Any
  model: models.Model


Variant: TypeAlias = Callable[[ChainRun], optax.GradientTransformation]


class PreparedRun(NamedTuple):
  """All parts of a run.

  Attributes:
    programs: The variant's programs.
    model: The model with its initial parameters.
    state: The initial state.
    batches: The batches of all workers.
    num_steps: The number of local steps of the run.
  """

  programs: Any
  model: models.Model
  state: training.TrainState
  batches: data.Batches
  num_steps: int


class Chains:
  """Prepares and fits variants that are Optax chains.

  Args:
    options: The options of the comparison.
    variants: The variants by name, in the order in which they run.
    workload: The workload; by default it is loaded as the options say.
  """

  def __init__(
    self,
    options: Config,
    variants: Mapping[str, Variant],
    workload: comparison.Workload | None = None,
  ):
    self.options, self.variants = options, variants
    self.workload = self._load() if workload is None else workload

  def _load(self) -> comparison.Workload:
    options = self.options
    return comparison.Workload.load(
      options.dataset,
      self.build,
      collectives.workers(options.workers),
      options.batch_size,
      alpha=options.alpha,
      augment=options.augment,
      dtype=options.dtype,
    )

  def build(self, train: data.Dataset, seed: int) -> models.Model:
    """Builds the model with the initial parameters of a seed."""
    return models.build(
      self.options.model,
      input_shape=train.input_shape,
      num_classes=train.num_classes,
      seed=seed,
    )

  def hold_out(self) -> "Chains":
    """Returns the same chains with a part of the training set as test set."""
    return type(self)(self.options, self.variants, self.workload.hold_out())

  def describe(
    self, variant: str, traffic: collectives.Traffic, record: training.Record
  ) -> dict[str, Any]:
    """Returns further entries of a row.

    Args:
      variant: The variant's name.
      traffic: The traffic of its step.
      record: The last record of the run.
    """
    del variant, traffic, record
    return {}

  def prepare(
    self, variant: str, peak: float, seed: int, **trainer: Any
  ) -> PreparedRun:
    """Builds a variant's run.

    Args:
      variant: The variant's name.
      peak: The highest learning rate of the schedule.
      seed: The seed of the parameters and of the batches.
      **trainer: Arguments of `Trainer`.
    """
    options, workload = self.options, self.workload
    per_epoch = workload.steps_per_epoch
    num_steps = round(options.epochs * per_epoch)
    warmup_steps = round(options.warmup_epochs * per_epoch)
    # Cosine decay to a hundredth of the peak, for every variant.
    rate = optax.warmup_cosine_decay_schedule(
      peak / 10, peak, warmup_steps, num_steps, peak / 100
    )
    moments = {
      "sgd": optax.trace(options.momentum, nesterov=True),
      "adam": optax.scale_by_adam(),
    }
    # The order of AdamW: the decay is scaled by the rate, but not by moments.
    inner = optax.chain(
      moments[options.optimizer],
      optax.add_decayed_weights(options.weight_decay),
      optax.scale_by_learning_rate(rate),
    )
    model = workload.model(seed)
    run = ChainRun(
      inner,
      rate,
      num_steps,
      warmup_steps,
      workload.workers.axis,
      options.workers,
      options,
      model,
    )
    # Steps are compiled once for a variant, while each seed has its own state.
    chain = self.variants[variant](run)
    programs = workload.programs(chain, model.apply, **trainer)
    state = programs.init(model, seed)
    return PreparedRun(
      programs, model, state, workload.batches(seed), num_steps
    )

  def step_times(
    self,
    *,
    base: str = "ssgd",
    blocks: int = 9,
    links: _step_times.HostLinks | None = None,
  ) -> list[dict[str, Any]]:
    """Measures the steps of the variants in turns.

    Args:
      base: The synchronous variant, with which the others are compared.
      blocks: The number of turns of each variant.
      links: The links between the workers' hosts; None for one machine.

    Returns:
      A row for each variant on the first host, and no rows on the others.
    """
    options, alone, again = self.options, _step_times.ALONE, f"{base} again"
    # The base runs a second time, to show the noise of the machine.
    variants: dict[str, Variant] = {
      **self.variants,
      again: self.variants[base],
      alone: lambda run: run.inner,
    }
    chains = type(self)(options, variants, self.workload)
    chosen = options.variants or tuple(self.variants)
    names = [base, again, *(name for name in chosen if name != base)]
    names += [alone] * (links is not None)
    # Any rate will do, since the time of a step does not depend on it.
    rate = options.rates[len(options.rates) // 2]

    def turn(name: str) -> _step_times.Turn:
      run = chains.prepare(name, rate, 0, independent=name == alone)
      programs, batch = run.programs, next(run.batches.iterate(0))
      return _step_times.Turn(programs.trainer, programs.step, run.state, batch)

    # A row belongs to one variant, and holds no path of the machine.
    config = dataclasses.asdict(options)
    for name in {"variants", "cache"} & config.keys():
      del config[name]
    return _step_times.step_times(
      {name: turn(name) for name in names},
      config,
      base=base,
      blocks=blocks,
      links=links,
    )

  def fit(self, variant: str, peak: float, seed: int) -> dict[str, Any]:
    """Trains a variant, and returns the measurements for its row."""
    run = self.prepare(variant, peak, seed)
    trainer = run.programs.trainer
    state, records = trainer.fit(
      run.state,
      run.batches.iterate,
      run.num_steps,
      evaluate=run.programs.evaluate,
      # Rounded down, so that the last evaluation may follow closely.
      evaluate_every=max(1, run.num_steps // self.options.evaluations),
    )
    # The traffic depends on shapes alone, so that any state will do.
    traffic = trainer.traffic(state, next(run.batches.iterate(0)))
    return {
      "workers": self.options.workers,
      **comparison.summarize(records),
      **self.describe(variant, traffic, records[-1]),
    }


def compare_chains(path: Any, chains: Chains) -> comparison.Compared:
  """Runs the variants of an experiment, and prints each row.

  Args:
    path: The file of rows.
    chains: The chains that are compared.
  """
  options, held_out = chains.options, chains.hold_out()
  rows = options.rows(path)

  def fit(trial: comparison.Trial) -> dict[str, Any]:
    # Tuning never sees the test set.
    own = held_out if trial.purpose == "tuning" else chains
    return own.fit(trial.variant, trial.learning_rate, trial.seed)

  return comparison.compare(
    options.study(chains.variants),
    rows,
    fit,
    on_row=_print_row,
    on_tuned=studies.warn_of_end,
  )


def _print_row(trial: comparison.Trial, row: comparison.Row) -> None:
  print(
    f"{trial.purpose} {trial.variant}, rate {trial.learning_rate:g}, seed "
    f"{trial.seed}: {100 * row['accuracy']:.2f} %, {row['rounds']} rounds, "
    f"{row['sent_bytes'] / 1e6:.1f} MB, "
    f"{training.format_rate(row['samples_per_s'] or math.nan)} images/s",
    flush=True,
  )
