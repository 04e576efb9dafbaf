"""MSDPU beside everything it is compared with.

    python experiments/msdpu/run.py cifar10
    python experiments/msdpu/run.py mnist --seeds 0 1 2 3 4
    python experiments/msdpu/run.py cifar10 --variants "ssgd" "msdpu H0=8"

Every row is written when its run has ended, and runs whose rows are there are
not repeated: the same command goes on where it was stopped.
"""

import dataclasses
import math
import pathlib
import sys
from typing import Any

import config
import jax
import numpy as np
import optax
import tyro

from jdist import collectives, data, models, training

_RESULTS = pathlib.Path(__file__).parent / "results"
# Tuning uses no seed that is compared afterwards.
_TUNING_SEED = 10_000


class Comparison:
  """The data and the workers that all runs share."""

  def __init__(self, options: config.Config):
    self.options = options
    self.train = data.load(options.dataset)
    self.test = data.load(options.dataset, "test")
    self.workers = collectives.workers(options.workers)

  def hold_out(self) -> "Comparison":
    """The same with a tenth of the training samples in place of the test."""
    other = object.__new__(Comparison)
    other.options, other.workers = self.options, self.workers
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

  def fit(self, variant: str, peak: float, seed: int) -> dict[str, Any]:
    """Trains, and returns what was measured."""
    options, workers = self.options, self.workers
    per_epoch = len(self.train) / options.batch_size
    num_steps = round(options.epochs * per_epoch)
    warmup_steps = round(options.warmup_epochs * per_epoch)
    rate = optax.warmup_cosine_decay_schedule(
      peak / 10, peak, warmup_steps, num_steps, peak / 100
    )
    inner = optax.chain(
      optax.trace(options.momentum, nesterov=True),
      optax.add_decayed_weights(options.weight_decay),
      optax.scale_by_learning_rate(rate),
    )
    chain = config.VARIANTS[variant](
      config.Run(inner, rate, num_steps, warmup_steps, workers.axis)
    )
    model = models.build(
      options.model,
      input_shape=self.train.input_shape,
      num_classes=self.train.num_classes,
      seed=seed,
    )
    dtype = jax.numpy.dtype(options.dtype)
    loss = training.classification_loss(
      model.apply,
      normalize=self.train.normalize,
      compute_dtype=dtype,
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
    trainer = training.Trainer(
      workers, training.make_step(loss, chain, axis=workers.axis)
    )
    state = training.init_state(
      workers, chain, model.params, model.state, seed=seed
    )
    evaluate = training.Evaluator(
      workers,
      model.apply,
      data.evaluation_batches(self.test, options.workers, 128),
      normalize=self.train.normalize,
      compute_dtype=dtype,
      optimizer=chain,
    )
    _, records = trainer.fit(
      state,
      batches.iterate,
      num_steps,
      evaluate=evaluate,
      evaluate_every=max(1, num_steps // 5),
    )
    last = records[-1]
    return {
      "accuracy": last.metrics["accuracy"],
      "test_loss": last.metrics["loss"],
      "train_loss": last.train_loss,
      "steps": last.step,
      "rounds": last.rounds,
      "sent_bytes": last.sent_bytes,
      "train_s": last.train_s,
      "samples_per_s": last.samples_per_s,
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


class Rows:
  """The rows of a preset, each run once."""

  def __init__(self, name: str, options: config.Config):
    self.path = _RESULTS / f"{name}.jsonl"
    self.rows = training.read_rows(self.path) if self.path.exists() else []
    # What may differ between rows of one comparison.
    free = {"seeds", "variants", "rates"}
    self.config = {
      k: v for k, v in dataclasses.asdict(options).items() if k not in free
    }

  def get(
    self, comparison: Comparison, purpose: str, variant: str, rate: float,
    seed: int,
  ) -> dict[str, Any]:  # fmt: skip
    """A run's row, from the file or from a run."""
    named = {
      "purpose": purpose, "method": variant, "learning_rate": rate,
      "seed": seed, "config": self.config,
    }  # fmt: skip
    for row in self.rows:
      if all(row[key] == value for key, value in named.items()):
        return row
    measured = comparison.fit(variant, rate, seed)
    del named["config"], named["seed"]
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


def compare(name: str, options: config.Config) -> None:
  """Runs all variants: the rate first, then the seeds."""
  unknown = set(options.variants) - set(config.VARIANTS)
  if unknown:
    raise SystemExit(
      f"`--variants` must be of {', '.join(config.VARIANTS)}, got {unknown}."
    )
  comparison = Comparison(options)
  held_out = comparison.hold_out()
  rows = Rows(name, options)
  for variant in options.variants or config.VARIANTS:
    best = options.rates[0]
    if len(options.rates) > 1:
      tried = [
        rows.get(held_out, "tuning", variant, rate, _TUNING_SEED)
        for rate in options.rates
      ]
      best = max(tried, key=_quality)["learning_rate"]
    for seed in options.seeds:
      rows.get(comparison, "comparison", variant, best, seed)


def _quality(row: dict[str, Any]) -> tuple[float, float]:
  loss = row["test_loss"]
  return row["accuracy"], -loss if loss is not None else -math.inf


def main() -> None:
  chosen = tyro.extras.overridable_config_cli(config.PRESETS)
  name = next(word for word in sys.argv[1:] if word in config.PRESETS)
  compare(name, chosen)


if __name__ == "__main__":
  main()
