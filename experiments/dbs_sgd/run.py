"""DBS-SGD beside other protocols, on machines of unlike speeds.

    python experiments/dbs_sgd/run.py mnist
    python experiments/dbs_sgd/run.py mnist --speeds 8 --data shared
    python experiments/dbs_sgd/run.py mnist --variants asgd dbs --seeds 0 1
    python experiments/dbs_sgd/run.py protocols
    python experiments/dbs_sgd/run.py owned

Gradients are real, time is computed: every variant has the same virtual
seconds.  Every row is written when its run has ended, and runs whose rows are
there are not repeated: the same command continues where it was stopped.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import jax
import optax
import studies
import tyro

from jdist import data, server, training
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
    # Programs are compiled once for equal optimizers.
    self.sgd = functools.lru_cache(functools.partial(optax.sgd, nesterov=True))

  @functools.cached_property
  def message_bytes(self) -> float:
    """Bytes of all parameters in 32 bits."""
    return 4.0 * sum(
      x.size for x in jax.tree.leaves(self.problem.model(0).params)
    )

  @functools.cached_property
  def plans(self) -> server.BitPlans:
    """Plans of H-PS's bits: one set for all runs, of the first gradient."""
    problem, model = self.problem, self.problem.model(0)
    train = problem.workloads["comparison"].train
    batch = data.SampleStream(train, 1, seed=0).batch(0, 0, 64)
    gradient = jax.jit(training.make_gradient(problem.loss))(
      model.params, model.state, batch, jax.random.key(0)
    )
    return server.fit_bit_plans(gradient.grads, error_limit=0.02)

  def protocol(self, variant: str) -> server.Protocol:
    """Builds a variant's protocol, with the model's own plans of bits."""
    found = config.VARIANTS[variant](self.options)
    if isinstance(found, server.HPS) and found.plans is not None:
      return dataclasses.replace(found, plans=self.plans)
    return found

  def learner(
    self, trial: comparison.Trial, protocol: server.Protocol,
    names: tuple[str, ...], samples: data.SampleStream,
  ) -> server.Pair:  # fmt: skip
    """Builds what computes a variant's gradients, or its local steps."""
    problem, model = self.problem, self.problem.model(trial.seed)
    if isinstance(protocol, server.DecoupledDiLoCo):
      outer = self.sgd(config.OUTER_RATE, config.OUTER_MOMENTUM[trial.variant])
      inner = self.sgd(trial.learning_rate, self.options.momentum)
      return problem.fragment_pair(
        trial, samples, names, inner=inner, outer=outer
      )
    few = isinstance(protocol, server.HPS) and protocol.plans is not None
    learner = server.GradientLearner(
      problem.loss,
      problem.optimizer,
      model.params,
      samples,
      workers=names,
      model_state=model.state,
      seed=trial.seed,
      plans=self.plans if few else None,
    )
    learner.server.model = learner.model._replace(
      opt_state=studies.set_rate(learner.model.opt_state, trial.learning_rate)
    )
    return learner

  def __call__(
    self, setting: config.Setting, trial: comparison.Trial
  ) -> dict[str, Any]:
    """Trains a variant on the virtual clock, and returns its measurements."""
    options, problem = self.options, self.problem
    train = problem.train_set(trial)
    size = self.message_bytes
    machines = config.machines(options, setting.speed, size)
    samples = data.SampleStream(
      train,
      options.workers,
      seed=trial.seed,
      owned=setting.sharing != "shared",
      alpha=options.alpha if setting.sharing == "skewed" else None,
    )
    protocol = self.protocol(trial.variant)
    run = server.Simulation(
      machines,
      protocol,
      config.costs(options, size),
      seed=trial.seed,
      learner=self.learner(trial, protocol, machines.names, samples),
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
    # The pages read no more of curves, and rows stay in the repository.
    tuning = trial.purpose == "tuning"
    marks = options.last_marks if tuning else options.evaluations
    row["curve"] = [
      {name: point[name] for name in ("train_s", "accuracy", "loss")}
      for point in row["curve"][-marks:]
    ]
    return row | {
      "workers": options.workers,
      "samples": run.applied_samples,
      "discarded": sum(run.state.discarded.values()),
      "message_bytes": run.pulled_bytes + run.pushed_bytes,
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
    rank=options.rank,
    on_row=show,
    on_tuned=studies.warn_of_end,
  )
  # Once more with one rate for all: that which is best for the baseline.
  tuned = config.BASE in found.tuned and len(options.rates) > 1
  if options.one_rate and tuned:
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
