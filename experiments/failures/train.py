"""Protocols on machines that fail at random, with gradients.

    python experiments/failures/train.py mnist

Every variant takes as many samples, and is tuned without failures.  Every row
is written when its run has ended, and runs with rows are not repeated: the same
command continues where it was stopped.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import optax
import run as clock
import studies
import tyro

from jdist import data, server
from jdist.training import comparison


class Fit:
  """Runs trials, and compiles programs once for each rate."""

  def __init__(self, options: config.Config):
    self.options = options
    self.problem = studies.Problem(
      options.dataset, options.model, options.workers * config.BATCH
    )
    self.outer = optax.sgd(
      options.outer_rate, options.outer_momentum, nesterov=True
    )
    self.sgd = functools.lru_cache(optax.sgd)

  def learner(
    self, trial: comparison.Trial, names: tuple[str, ...]
  ) -> server.Pair:
    """Builds what computes a variant's gradients, or its local steps."""
    problem, model = self.problem, self.problem.model(trial.seed)
    samples = data.SampleStream(
      problem.train_set(trial), len(names), seed=trial.seed
    )
    optimizer = self.sgd(trial.learning_rate)
    if trial.variant == "decoupled_diloco":
      return problem.fragment_pair(
        trial, samples, names, inner=optimizer, outer=self.outer
      )
    step = None
    if trial.variant == "h_ps, local step":
      step = server.LocalStep(trial.learning_rate)
    return server.GradientLearner(
      problem.loss, optimizer, model.params, samples, workers=names,
      model_state=model.state, seed=trial.seed, local_step=step,
    )  # fmt: skip

  def __call__(
    self, setting: config.Setting, trial: comparison.Trial
  ) -> dict[str, Any]:
    """Trains a variant on the virtual clock, and returns its measurements."""
    train = self.problem.train_set(trial)
    samples = round(self.options.epochs * len(train))
    # Long enough for any of the variants.
    until_s = 20 * samples * config.TASK_S / config.BATCH / setting.workers
    machines = setting.machines(trial.seed, until_s)
    learner = self.learner(trial, machines.names)
    run = server.Simulation(
      machines,
      config.build(trial.variant, setting),
      setting.costs,
      seed=trial.seed,
      learner=learner,
      detection_s=setting.detection_s,
    )
    records = server.ServerRun(server.ClockSession(run)).fit(
      samples,
      "samples",
      every=samples / self.options.evaluations,
      evaluate=self.problem.evaluate(trial),
    )
    possible = setting.possible(trial.seed, run.now_s)
    row = comparison.summarize(records)
    return (
      row
      | self.options.last(row["curve"])
      | {
        "workers": setting.workers,
        "possible_samples": possible,
        "merged_samples": clock.merged(run),
        "goodput": clock.merged(run) / possible,
        "failures": sum(
          0 < outage.start_s < run.now_s
          for node in machines.nodes
          for outage in node.outages
        ),
        **run.summary(),
      }
    )


def main(folder: pathlib.Path) -> None:
  """Runs the preset that the command line names, with changes to it."""
  options = tyro.extras.overridable_config_cli(config.PRESETS)
  preset = next(word for word in sys.argv[1:] if word in config.PRESETS)
  fit = Fit(options)
  path = folder / "results" / f"{preset}.jsonl"

  def show(
    setting: config.Setting, trial: comparison.Trial, row: comparison.Row
  ) -> None:
    print(
      f"{setting.fraction:.0%} down, {trial.purpose} {trial.variant}, rate "
      f"{trial.learning_rate:g}, seed {trial.seed}: loss "
      f"{row['test_loss']:.4f}, {100 * row['accuracy']:.2f} %, goodput "
      f"{row['goodput']:.1%}, {row['failures']} failures",
      flush=True,
    )

  def compare(
    fraction: float, variant: str, rates: tuple[float, ...]
  ) -> comparison.Compared:
    setting = config.Setting(fraction, options.workers)
    study = dataclasses.replace(
      options.study(config.TRAINED), variants=(variant,), learning_rates=rates
    )
    return comparison.compare(
      study,
      options.rows(path, setting),
      functools.partial(fit, setting),
      rank=comparison.by_loss,
      on_row=functools.partial(show, setting),
      on_tuned=studies.warn_of_end,
    )

  first, *others = options.fractions
  for variant in options.variants or config.TRAINED:
    found = compare(first, variant, options.rates)
    for fraction in others:
      compare(fraction, variant, (found.tuned[variant].best,))


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
