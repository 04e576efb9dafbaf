"""H-PS beside other protocols with gradients, on a virtual clock.

    python experiments/h_ps/train.py mnist
    python experiments/h_ps/train.py mnist --settings 8x:1 --variants bsp h_ps

Every variant takes as many samples; each has its own best rate.  Every row is
written when its run has ended, and runs whose rows are there are not repeated:
the same command continues where it was stopped.
"""

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


def _constant(update: int) -> float:
  del update
  return 1.0


def _cosine(length: int) -> optax.Schedule:
  # The command line's, with a tenth of the run to rise in.
  return optax.warmup_cosine_decay_schedule(
    0.1, 1.0, length // 10, length, 0.01
  )


class Fit:
  """Runs trials of one setting.

  Programs are compiled once: the learning rate is a part of the state.
  """

  def __init__(self, options: config.Config):
    self.options = options
    self.problem = studies.Problem(
      options.dataset, options.model, options.batch_size,
      momentum=options.momentum,
    )  # fmt: skip
    train, model = data.load(options.dataset), self.problem.model(0)
    # One set of plans for all runs: those of the first model's gradient.
    batch = data.SampleStream(train, 1, seed=0).batch(0, 0, 64)
    gradient = jax.jit(training.make_gradient(self.problem.loss))(
      model.params, model.state, batch, jax.random.key(0)
    )
    self.plans = server.fit_bit_plans(
      gradient.grads, error_limit=options.error_limit
    )

    # Programs are compiled once for equal optimizers.
    self.chain = functools.lru_cache(self._chain)
    self.cosine = functools.lru_cache(_cosine)

  def schedule(
    self, setting: config.Setting, trial: comparison.Trial
  ) -> optax.Schedule:
    """Returns what a rate is multiplied by, which counts a server's updates."""
    options = self.options
    if options.schedule == "constant":
      return _constant
    # A baseline that waits for nobody makes an update of each worker's task.
    alone = config.TRAINED[trial.variant].baseline in ("asp", "ssp")
    samples = options.batch_size / (len(setting.rates) if alone else 1)
    length = len(self.problem.train_set(trial)) * options.epochs / samples
    return self.cosine(round(length))

  def _chain(self, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Returns the server's SGD with a schedule, once for each."""
    if schedule is _constant:
      return self.problem.optimizer
    return optax.chain(
      self.problem.optimizer, optax.scale_by_schedule(schedule)
    )

  def __call__(
    self, setting: config.Setting, trial: comparison.Trial
  ) -> dict[str, Any]:
    """Trains a variant on the virtual clock, and returns its measurements."""
    options, problem = self.options, self.problem
    train = problem.train_set(trial)
    machines = setting.machines()
    num = len(machines.nodes)
    model = problem.model(trial.seed)
    variant = config.TRAINED[trial.variant]
    schedule = self.schedule(setting, trial)
    step = None
    if variant.local:
      rate = variant.local * trial.learning_rate
      step = server.LocalStep(
        lambda update: rate * float(schedule(update)),
        variant.momentum * options.momentum,
        variant.nesterov,
      )
    few = variant.parts is not None and "bits" in variant.parts
    learner = server.GradientLearner(
      problem.loss,
      self.chain(schedule),
      model.params,
      data.SampleStream(train, num, seed=trial.seed),
      workers=machines.names,
      model_state=model.state,
      seed=trial.seed,
      sizes=[options.batch_size * i // 8 for i in (1, 2, 3, 5, 8)],
      plans=self.plans if few else None,
      local_step=step,
    )
    learner.server.model = learner.model._replace(
      opt_state=studies.set_rate(learner.model.opt_state, trial.learning_rate)
    )
    samples = round(options.epochs * len(train))
    protocol = config.build(
      variant, options.batch_size, num, self.plans if few else None,
      samples // options.batch_size,
    )  # fmt: skip
    run = server.Simulation(
      machines, protocol, setting.costs(), seed=trial.seed, learner=learner
    )
    records = server.ServerRun(server.ClockSession(run)).fit(
      samples,
      "samples",
      every=samples / options.evaluations,
      evaluate=problem.evaluate(trial),
    )
    row = comparison.summarize(records)
    for point, record in zip(row["curve"], records, strict=True):
      point |= {"loss": record.metrics["loss"], "train_loss": record.train_loss}
    return row | {
      "workers": num,
      "plans": [list(plan) for plan in self.plans.bits] if few else None,
      "shares": [
        self.plans.share(i) for i in range(len(self.plans.bits))
      ] if few else None,
      "plan_of": list(getattr(run.state, "plans", {}).values()),
      **run.summary(),
    }  # fmt: skip


def compare(
  path: pathlib.Path, options: config.Config, fit: Fit, setting: config.Setting
) -> None:
  """Compares all variants in one setting."""

  def show(trial: comparison.Trial, row: comparison.Row) -> None:
    print(
      f"{setting.speeds}, r = {setting.ratio:g}, {trial.purpose} "
      f"{trial.variant}, rate {trial.learning_rate:g}, seed {trial.seed}: loss "
      f"{row['test_loss']:.4f}, {100 * row['accuracy']:.2f} %, "
      f"{row['samples']} samples in {row['train_s']:.1f} virtual s",
      flush=True,
    )

  comparison.compare(
    options.study(config.TRAINED),
    options.rows(path, setting),
    functools.partial(fit, setting),
    rank=comparison.by_loss,
    on_row=show,
    on_tuned=studies.warn_of_end,
  )


def main(folder: pathlib.Path) -> None:
  """Runs the preset that the command line names, with changes to it."""
  options = tyro.extras.overridable_config_cli(config.PRESETS)
  preset = next(word for word in sys.argv[1:] if word in config.PRESETS)
  fit = Fit(options)
  for setting in options.list_settings():
    path = folder / "results" / f"{preset}.jsonl"
    compare(path, options, fit, setting)


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
