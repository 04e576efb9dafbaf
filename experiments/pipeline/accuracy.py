"""Measures what late gradients cost in accuracy, and which fix helps.

    python experiments/pipeline/accuracy.py cifar10
    python experiments/pipeline/accuracy.py cifar10 --seeds 0 1 2 3 4
    python experiments/pipeline/accuracy.py cifar10 --variants sync "W=S"

A pipeline of the table `ours` with a window of W iterations, not flushed,
computes what `delay_gradients(optimizer, W - 1)` does on one device: so that is
what runs here.  Every row is written when its run has ended, and runs whose
rows are there are not repeated: the same command continues where it ended.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import delay_remedies
import jax.numpy as jnp
import late_starts
import numpy as np
import optax
import studies
import tyro

from jdist import collectives, data, models, training, transforms
from jdist.training import comparison


@dataclasses.dataclass(frozen=True)
class Config(studies.Options):
  """One comparison, and the options of its command."""

  dataset: str = "cifar10"
  """A name of `jdist.data`, of images or a text."""

  model: str = "lenet"
  """A name of `jdist.models`."""

  width: int | None = None
  """Of a transformer's vectors; the model's own if not given."""

  window_length: int = 32
  """Bytes of a text that a sample predicts."""

  samples: int | None = 12_800
  """Of the training set, always the same; all if not given."""

  test_samples: int | None = 5_000
  """Of the test set, likewise."""

  batch_size: int = 64
  """Samples of an iteration, all its micro-batches together."""

  epochs: float = 5.0
  """Passes over these samples, the same for every variant."""

  warmup_epochs: float = 0.5
  """In which the learning rate rises; then it falls with a cosine."""

  rates: tuple[float, ...] = (0.01, 0.02, 0.04)
  """The grid of highest learning rates; each variant uses its own best one, by
  the loss of a run of the same length on held-out training samples."""

  extensions: int = 3

  optimizer: Literal["sgd", "adam"] = "sgd"
  """With momentum, which is not Nesterov's."""

  momentum: float = 0.9
  """Of SGD, and Adam's b1."""

  stages: int = 4
  """S: of the pipeline that is stood for."""

  evaluations: int = 5
  """In a run, equally far apart, the last one at its end."""

  def ignores(self, variant: str) -> tuple[str, ...]:
    """Returns what runs do not depend on: of images the length of a text."""
    return () if self.dataset in TEXTS else ("window_length",)


# Adam's.
_B2 = 0.999
TEXTS = ("tiny_shakespeare",)


class Run(NamedTuple):
  """A training run, as variants are built for it.

  Attributes:
    rate: the learning rate's schedule.
    num_steps: updates of the run.
    layers: names of the model's layers, first to last.
    options: of the comparison.
  """

  rate: optax.Schedule
  num_steps: int
  layers: tuple[str, ...]
  options: Config

  def inner(
    self, momentum: float | None = None
  ) -> optax.GradientTransformation:
    """The optimizer of every variant that names no other.

    Args:
      momentum: another than the options'; steps are as long in all.
    """
    own = self.options.momentum
    b1 = own if momentum is None else momentum
    if self.options.optimizer == "adam":
      first = [optax.scale_by_adam(b1=b1, b2=_B2)]
    elif b1 == own:
      first = [optax.trace(b1)]
    else:
      first = [optax.trace(b1), optax.scale((1 - b1) / (1 - own))]
    return optax.chain(*first, optax.scale_by_learning_rate(self.rate))


Variant: TypeAlias = Callable[[Run], optax.GradientTransformation]
Fix: TypeAlias = Callable[[Run, Any], optax.GradientTransformation]


def _none(run: Run, delay: Any) -> optax.GradientTransformation:
  del delay
  return run.inner()


def _longer(
  run: Run, delay: Any, momentum: float
) -> optax.GradientTransformation:
  del delay
  return run.inner(momentum)


def _predicted(
  run: Run, delay: Any, momentum: float | None = None
) -> optax.GradientTransformation:
  adam = run.options.optimizer == "adam"
  return transforms.predict_weights(
    run.inner(momentum), delay, b2=_B2 if adam else None
  )


def _repeated(run: Run, delay: Any) -> optax.GradientTransformation:
  return delay_remedies.predict_by_repeating(run.inner(), delay)


def _look_ahead(
  run: Run, delay: Any, momentum: float
) -> optax.GradientTransformation:
  """Nesterov's steps, as long in all as those of `Run.inner` at the same rate.

  With its momentum they are `optax.sgd(..., nesterov=True)`.  Adam has them
  built in.
  """
  del delay
  if run.options.optimizer == "adam":
    return optax.chain(
      optax.scale_by_adam(b1=momentum, b2=_B2, nesterov=True),
      optax.scale_by_learning_rate(run.rate),
    )
  return optax.chain(
    delay_remedies.scale_by_look_ahead(momentum),
    optax.scale(1 / (1 - run.options.momentum)),
    optax.scale_by_learning_rate(run.rate),
  )


def _both(run: Run, delay: Any) -> optax.GradientTransformation:
  """Nesterov's steps, at the parameters where they lead."""
  coasts = run.options.optimizer == "adam"
  return transforms.predict_weights(
    _nesterov(run, delay), delay, b2=_B2 if coasts else None
  )


def _slower(run: Run, delay: Any) -> optax.GradientTransformation:
  """The rate over 1 + delay at first, whole after a quarter of the run.

  Divided to the end it would be the same optimizer with another grid.
  """
  return optax.chain(
    run.inner(),
    delay_remedies.scale_by_delay(delay, float(max(1, run.num_steps // 4))),
  )


def _compensated(
  run: Run, delay: Any, strength: float
) -> optax.GradientTransformation:
  return optax.chain(
    delay_remedies.compensate_delay(strength, delay), run.inner()
  )


def _windowed(fix: Fix, window: int | None, run: Run) -> Any:
  """A window of iterations in flight; None for as many as stages."""
  delay = (run.options.stages if window is None else window) - 1
  return transforms.delay_gradients(fix(run, delay), delay)


def _in_the_end(
  fix: Fix,
  window: int | None,
  run: Run,
  share: float = 0.5,
  slower: bool = False,
) -> Any:
  """A table with a flush first, a window for the last `share` of the run.

  Args:
    fix: of the late gradients.
    window: as of `_windowed`.
    run: as it is without delays.
    share: of the updates.
    slower: whether the rate is over 1 + delay as soon as gradients are late.
  """
  delay = (run.options.stages if window is None else window) - 1
  start = run.num_steps - round(share * run.num_steps)
  if slower:
    factor = optax.piecewise_constant_schedule(1.0, {start: 1 / (1 + delay)})
    rate = run.rate
    run = run._replace(rate=lambda step: rate(step) * factor(step))
  return late_starts.delay_from(start, fix(run, delay), delay)


def _stagewise(fix: Fix, run: Run) -> Any:
  """PipeDream's delays: S - 1 - s of stage s, as many layers in each."""
  stages, layers = run.options.stages, run.layers
  delays = {
    layer: stages - 1 - i * stages // len(layers)
    for i, layer in enumerate(layers)
  }
  return transforms.delay_gradients(fix(run, delays), delays)


_nesterov = functools.partial(_look_ahead, momentum=0.9)
_long = functools.partial(_look_ahead, momentum=0.99)
_weakly = functools.partial(_compensated, strength=0.04)
_strongly = functools.partial(_compensated, strength=4.0)
_slow = functools.partial(_longer, momentum=0.98)
_slow_predicted = functools.partial(_predicted, momentum=0.98)

# In the order in which they run: what matters most comes first.
VARIANTS: dict[str, Variant] = {
  "sync": Run.inner,
  "W=2": functools.partial(_windowed, _none, 2),
  "W=S": functools.partial(_windowed, _none, None),
  "W=S, prediction": functools.partial(_windowed, _predicted, None),
  "W=2, prediction": functools.partial(_windowed, _predicted, 2),
  "W=S, look-ahead": functools.partial(_windowed, _nesterov, None),
  "W=2, look-ahead": functools.partial(_windowed, _nesterov, 2),
  # What the look-ahead is worth where nothing is late.
  "sync, look-ahead": functools.partial(_windowed, _nesterov, 1),
  "W=S, rate by delay": functools.partial(_windowed, _slower, None),
  "W=S, DC-ASGD": functools.partial(_windowed, _weakly, None),
  "W=2, rate by delay": functools.partial(_windowed, _slower, 2),
  "W=2, DC-ASGD": functools.partial(_windowed, _weakly, 2),
  "W=S, prediction + look-ahead": functools.partial(_windowed, _both, None),
  "W=2, prediction + look-ahead": functools.partial(_windowed, _both, 2),
  "PipeDream": functools.partial(_stagewise, _none),
  "PipeDream, prediction": functools.partial(_stagewise, _predicted),
  "W=S, look-ahead 0.99": functools.partial(_windowed, _long, None),
  "W=S, prediction, repeat": functools.partial(_windowed, _repeated, None),
  "W=S, DC-ASGD 4": functools.partial(_windowed, _strongly, None),
  "W=2, DC-ASGD 4": functools.partial(_windowed, _strongly, 2),
  "W=2, look-ahead 0.99": functools.partial(_windowed, _long, 2),
  "sync, look-ahead 0.99": functools.partial(_windowed, _long, 1),
  # A longer momentum, which lets a late gradient have a higher rate.
  "sync, momentum 0.98": functools.partial(_windowed, _slow, 1),
  "W=2, prediction, momentum 0.98": functools.partial(
    _windowed, _slow_predicted, 2
  ),
  "W=S, prediction, momentum 0.98": functools.partial(
    _windowed, _slow_predicted, None
  ),
  # Late gradients in the last part of the run only.
  "half W=2": functools.partial(_in_the_end, _none, 2),
  "half W=S": functools.partial(_in_the_end, _none, None),
  "half W=2, prediction": functools.partial(_in_the_end, _predicted, 2),
  "half W=S, prediction": functools.partial(_in_the_end, _predicted, None),
  "half W=2, prediction + look-ahead": functools.partial(_in_the_end, _both, 2),
  "three quarters W=2, prediction": functools.partial(
    _in_the_end, _predicted, 2, share=0.75
  ),
  "third W=S, prediction": functools.partial(
    _in_the_end, _predicted, None, share=1 / 3
  ),
  "quarter W=S, prediction": functools.partial(
    _in_the_end, _predicted, None, share=0.25
  ),
  "half W=S, prediction, lower rate": functools.partial(
    _in_the_end, _predicted, None, slower=True
  ),
}
BASE = "sync"

# Under these names on the command line.
PRESETS: studies.Presets = {
  "cifar10": (
    "12,800 images of CIFAR-10, LeNet, 5 epochs: half a minute a run on a core",
    Config(),
  ),
  "cifar10-batch16": (
    "the same in batches of 16: four times as many updates",
    Config(batch_size=16, rates=(0.0025, 0.005, 0.01)),
  ),
  "text": (
    "a third of Shakespeare's bytes once, a transformer: half a minute a run",
    Config(
      dataset="tiny_shakespeare", model="transformer", width=48, samples=None,
      test_samples=None, batch_size=16, epochs=0.3, warmup_epochs=0.03,
      optimizer="adam", rates=(0.001, 0.002, 0.004),
      variants=(
        "sync", "W=2", "W=S", "W=S, prediction", "W=2, prediction",
        "W=S, look-ahead", "W=2, look-ahead", "sync, look-ahead",
      ),
    ),
  ),
  "cifar10-long": (
    "5 epochs of all images, four times as many updates: a minute a run",
    Config(samples=None, test_samples=None),
  ),
  "text-long": (
    "all of Shakespeare's bytes once: two minutes a run",
    Config(
      dataset="tiny_shakespeare", model="transformer", width=48, samples=None,
      test_samples=None, batch_size=16, epochs=1.0, warmup_epochs=0.05,
      optimizer="adam", rates=(0.002, 0.004, 0.008),
    ),
  ),
  "smoke": (
    "digits, a few steps: that it runs",
    Config(
      dataset="digits", model="mlp", samples=None, epochs=2.0, rates=(0.05,),
      warmup_epochs=0.5, test_samples=None, seeds=(0, 1), evaluations=2,
      variants=("sync", "W=2, prediction"),
    ),
  ),
  "cifar10-gpu": (
    "CIFAR-10, ResNet-18, on a GPU",
    Config(
      model="resnet18", samples=None, test_samples=None, batch_size=128,
      epochs=40.0, warmup_epochs=2.0, rates=(0.025, 0.05, 0.1, 0.2),
    ),
  ),
}  # fmt: skip


class Fit:
  """Runs trials; a variant's program is compiled once for all its rates."""

  def __init__(self, options: Config):
    self.options = options
    train = load(options, "train", options.samples)
    given = {} if options.width is None else {"width": options.width}
    whole = comparison.Workload(
      collectives.workers(1),
      train,
      load(options, "test", options.test_samples),
      lambda seed: models.build(
        options.model,
        input_shape=train.input_shape,
        num_classes=train.num_classes,
        seed=seed,
        **given,
      ),
      options.batch_size,
      evaluation_batch=200 if options.dataset in TEXTS else 500,
    )
    self.workloads = {"comparison": whole, "tuning": whole.hold_out()}
    self.model = whole.model(0)
    # Not of a variant: batch statistics of one worker need no mean.
    self.evaluate = {
      purpose: workload.evaluator(self.model.apply)
      for purpose, workload in self.workloads.items()
    }
    self._trainers: dict[tuple[str, str], Any] = {}

  def optimizer(
    self, variant: str, num_steps: int, warmup_steps: int
  ) -> optax.GradientTransformation:
    """Builds a variant's optimizer, whose highest rate is in its state."""
    layers = tuple(layer.name for layer in self.model.layers)

    def build(peak: Any) -> optax.GradientTransformation:
      shape = optax.warmup_cosine_decay_schedule(
        0.1, 1.0, warmup_steps, num_steps, 0.01
      )
      run = Run(
        lambda step: peak * shape(step), num_steps, layers, self.options
      )
      return VARIANTS[variant](run)

    return optax.inject_hyperparams(build)(peak=0.0)

  def __call__(self, trial: comparison.Trial) -> dict[str, Any]:
    """Trains a variant, and returns its measurements."""
    options, workload = self.options, self.workloads[trial.purpose]
    num_steps = workload.steps(options.epochs)
    key = trial.variant, trial.purpose
    if key not in self._trainers:
      optimizer = self.optimizer(
        trial.variant, num_steps, workload.steps(options.warmup_epochs)
      )
      step = training.make_step(
        workload.loss(self.model.apply), optimizer, axis=workload.workers.axis
      )
      trainer = training.Trainer(workload.workers, step)
      self._trainers[key] = optimizer, trainer
    optimizer, trainer = self._trainers[key]
    model = workload.model(trial.seed)
    state = training.init_state(
      workload.workers, optimizer, model.params, model.state, seed=trial.seed
    )
    peak = optax.tree_utils.tree_get(state.opt_state, "peak")
    state = state._replace(
      opt_state=optax.tree_utils.tree_set(
        state.opt_state, peak=jnp.full_like(peak, trial.learning_rate)
      )
    )
    _, records = trainer.fit(
      state,
      workload.batches(trial.seed).iterate,
      num_steps,
      evaluate=self.evaluate[trial.purpose],
      evaluate_every=max(1, num_steps // options.evaluations),
    )
    row = comparison.summarize(records)
    for point, record in zip(row["curve"], records, strict=True):
      point |= {"loss": record.metrics["loss"], "train_loss": record.train_loss}
    return row | {"layers": [layer.name for layer in self.model.layers]}


def load(options: Config, split: str, samples: int | None) -> Any:
  """Loads some samples of a dataset, always the same; None for all."""
  if options.dataset in TEXTS:
    length = options.window_length
    whole: Any = data.load_text(options.dataset, split, window_length=length)
  else:
    whole = data.load(options.dataset, split)
  if samples is None:
    return whole
  rows = np.random.default_rng(0).permutation(len(whole))[:samples]
  return whole.select(np.sort(rows))


def _show(trial: comparison.Trial, row: comparison.Row) -> None:
  loss = row["test_loss"]
  print(
    f"{trial.purpose} {trial.variant}, rate {trial.learning_rate:g}, seed "
    f"{trial.seed}: {100 * row['accuracy']:.2f} %, loss "
    f"{float('nan') if loss is None else loss:.4f}, {row['train_s']:.0f} s",
    flush=True,
  )


def main(folder: pathlib.Path) -> None:
  """Runs the preset that the command line names, with changes to it."""
  options = tyro.extras.overridable_config_cli(PRESETS)
  preset = next(word for word in sys.argv[1:] if word in PRESETS)
  try:
    study = options.study(VARIANTS)
  except ValueError as error:
    raise SystemExit(str(error)) from error
  comparison.compare(
    study,
    options.rows(folder / "results" / f"accuracy_{preset}.jsonl"),
    Fit(options),
    rank=comparison.by_loss,
    on_row=_show,
    on_tuned=studies.warn_of_end,
  )


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
