"""DBS-SGD beside other protocols, on machines of unlike speeds.

    python experiments/dbs_sgd/run.py mnist
    python experiments/dbs_sgd/run.py mnist --speeds 8 --data shared
    python experiments/dbs_sgd/run.py mnist --variants asgd dbs --seeds 0 1

Gradients are real, time is computed: every variant has the same virtual
seconds.  Every row is written when its run has ended, and runs whose rows are
there are not repeated: the same command goes on where it was stopped.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import studies
import tyro

from jdist import data, server
from jdist.training import comparison


class Fit:
  """Runs trials of one speed and one sharing.

  Programs are compiled once.
  """

  def __init__(self, options: config.Config):
    self.options = options
    self.problem = studies.Problem(
      options.dataset, options.model, options.batch_size,
      momentum=options.momentum,
    )  # fmt: skip

  def __call__(
    self, setting: config.Setting, trial: comparison.Trial
  ) -> dict[str, Any]:
    """Trains a variant on the virtual clock, and returns its measurements."""
    options, problem = self.options, self.problem
    train = problem.train_set(trial)
    machines = config.machines(options, setting.speed)
    samples = data.SampleStream(
      train,
      options.workers,
      seed=trial.seed,
      owned=setting.sharing != "shared",
      alpha=options.alpha if setting.sharing == "skewed" else None,
    )
    model = problem.model(trial.seed)
    learner = server.GradientLearner(
      problem.loss,
      problem.optimizer,
      model.params,
      samples,
      workers=machines.names,
      model_state=model.state,
      seed=trial.seed,
    )
    learner.server.model = learner.model._replace(
      opt_state=studies.set_rate(learner.model.opt_state, trial.learning_rate)
    )
    run = server.Simulation(
      machines,
      config.VARIANTS[trial.variant](options),
      config.COSTS,
      seed=trial.seed,
      learner=learner,
    )
    speed = sum(node.speed for node in machines.nodes)
    seconds_per_sample = config.COSTS.seconds_per_sample / speed
    seconds = options.epochs * len(train) * seconds_per_sample
    records = server.ServerRun(server.ClockSession(run)).fit(
      seconds,
      "seconds",
      every=seconds / options.evaluations,
      evaluate=problem.evaluate(trial),
    )
    nodes = [node for node in run.nodes.values() if node.updates]
    iterations = [node.iteration_s for node in nodes]
    row = comparison.summarize(records)
    for point, record in zip(row["curve"], records, strict=True):
      point["train_loss"] = record.train_loss
    return row | {
      "workers": options.workers,
      "samples": run.applied_samples,
      "discarded": sum(run.state.discarded.values()),
      "iteration_spread": max(iterations) / min(iterations),
      "staleness": {
        "mean_over_updates": sum(n.staleness for n in nodes)
        / sum(n.updates for n in nodes),
        "mean_over_nodes": sum(n.staleness / n.updates for n in nodes)
        / len(nodes),
        "maximum": max(run.staleness),
        "counts": {str(k): v for k, v in sorted(run.staleness.items())},
      },
    }


def compare(
  path: pathlib.Path, options: config.Config, fit: Fit, setting: config.Setting
) -> None:
  """Compares all variants at one speed, with data of one sharing."""
  study, rows = options.study(config.VARIANTS), options.rows(path, setting)

  def show(trial: comparison.Trial, row: comparison.Row) -> None:
    print(
      f"{setting.speed:g}x {setting.sharing}, {trial.purpose} {trial.variant}, "
      f"rate {trial.learning_rate:g}, seed {trial.seed}: loss "
      f"{row['test_loss']:.4f}, {100 * row['accuracy']:.2f} %, "
      f"{row['samples']} samples in {row['train_s']:.1f} virtual s",
      flush=True,
    )

  found = comparison.compare(
    study,
    rows,
    functools.partial(fit, setting),
    rank=comparison.by_loss,
    on_row=show,
    on_tuned=studies.warn_of_end,
  )
  # Once more with one rate for all: that which is best for the baseline.
  if config.BASE in found.tuned and len(options.rates) > 1:
    comparison.compare(
      dataclasses.replace(
        study, learning_rates=(found.tuned[config.BASE].best,)
      ),
      rows,
      functools.partial(fit, setting),
      on_row=show,
    )


def main(folder: pathlib.Path) -> None:
  """Runs the preset that the command line names, with changes to it."""
  options = tyro.extras.overridable_config_cli(config.PRESETS)
  preset = next(word for word in sys.argv[1:] if word in config.PRESETS)
  fit = Fit(options)
  path = folder / "results" / f"{preset}.jsonl"
  for setting in options.list_settings():
    compare(path, options, fit, setting)


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
