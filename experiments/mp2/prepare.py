"""Makes predictors and nowcasters, from runs that are compared with nothing.

    python experiments/mp2/prepare.py mnist
    python experiments/mp2/prepare.py mnist --cache mp2-cache

An ordinary synchronous run leaves fronts at random steps, for two cuts, and
the tracks of some weights; a second one, with another seed, is held out.
Predictors and nowcasters are trained on the first and measured on the second.
Images that the comparison tunes on are held out here, too, and no test image
is looked at.  What is there is not made again.
"""

import pathlib
import sys
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import numpy as np
import tyro

from jdist import data, prediction, training

# No seed that is compared, or tuned with.
_TRAINED, _HELD_OUT = 20_000, 20_001
_KINDS: tuple[config.Kind, ...] = ("published", "rich")
_TEST_IMAGES = 2000


class Preparation:
  """The folder of what is made, and the rows that tell of it."""

  def __init__(self, options: config.Config, rows: pathlib.Path):
    self.options, self.rows = options, rows
    self.folder = config.folder(options)
    comparison = config.Comparison(options, config.VARIANTS)
    held_out = comparison.hold_out()
    assert isinstance(held_out, config.Comparison)
    self.comparison = held_out
    self.model = comparison.build(0)

  def note(self, purpose: str, seed: int, **measured: Any) -> None:
    """Writes a row, and tells what is short of it."""
    row = training.make_row(
      {k: v for k, v in vars(self.options).items() if k != "cache"},
      seed,
      purpose=purpose,
      **measured,
    )
    training.append_rows(self.rows, [row])
    told = {k: v for k, v in measured.items() if k != "curve"}
    print(purpose, told, flush=True)

  def cut(self, kind: config.Kind) -> prediction.Cut:
    """One of the two."""
    return config.cut_of(self.options, self.model, kind)

  def collect(self, seed: int) -> None:
    """An ordinary run: its fronts and its tracks."""
    tracks = self.folder / f"tracks-{seed}"
    if tracks.exists():
      return
    run = self.comparison.prepare("baseline", self.options.rates[0], seed)
    workers = self.comparison.workers
    per_epoch = int(run.num_steps / self.options.epochs)
    steps = prediction.choose_steps(
      max(1, int(self.options.epochs)),
      per_epoch,
      min(per_epoch, self.options.samples_per_epoch),
      seed=seed,
    )
    cuts = {cut.fingerprint: cut for cut in map(self.cut, _KINDS)}
    collector = prediction.Collector(
      self.folder / f"fronts-{seed}",
      workers,
      tuple(cuts.values()),
      [step for step in steps if step <= run.num_steps],
      metadata={"seed": seed},
    )
    tracker = prediction.Tracker(run.model.params)
    share = self.options.nowcast_epochs / self.options.epochs
    every = max(1, int(run.num_steps * share))

    def look(state: training.TrainState) -> dict[str, float]:
      if int(workers.view(state.step)) % every == 0:
        tracker.record(workers.view(state.params))
      return collector(state)

    trainer = training.Trainer(workers, run.step)
    trained, records = trainer.fit(
      run.state,
      run.batches.iterate,
      run.num_steps,
      evaluate=look,
      evaluate_every=1,
    )
    evaluate = training.Evaluator(
      workers,
      run.model.apply,
      self.test_batches(),
      normalize=self.comparison.train.normalize,
    )
    prediction.save_tracks(tracks, [tracker.tracks()], {"seed": seed})
    self.note(
      "samples",
      seed,
      samples=collector.done,
      recorded=tracker.tracks()["bias"].shape[1],
      steps=run.num_steps,
      train_s=records[-1].train_s,
      validation_accuracy=evaluate(trained)["accuracy"],
    )

  def test_batches(self) -> Any:
    """Held-out images."""
    return data.evaluation_batches(
      self.comparison.test, self.options.workers, 128
    )

  def fit_predictor(self, kind: config.Kind) -> None:
    """A predictor, and how well it does with fronts of another run."""
    target = self.folder / f"predictor-{kind}"
    if target.exists():
      return
    options, cut = self.options, self.cut(kind)
    predictor = prediction.predictor(
      cut, 1 if kind == "published" else options.rich_rank
    )
    fronts = {
      seed: prediction.ParameterSet(self.folder / f"fronts-{seed}").fronts(cut)
      for seed in (_TRAINED, _HELD_OUT)
    }
    train, test = self.comparison.train, self.comparison.test
    images, labels = test.images[:_TEST_IMAGES], test.labels[:_TEST_IMAGES]
    # Of the last half, as most of a run is spent there.
    late = fronts[_HELD_OUT][len(fronts[_HELD_OUT]) // 2 :]
    size = min(len(late), options.fit_samples)
    late = np.asarray(late[np.linspace(0, len(late) - 1, size).astype(int)])
    started_s = time.perf_counter()
    fitted = prediction.fit_predictor(
      predictor,
      self.model,
      fronts[_TRAINED],
      train.images,
      train.labels,
      held_out=late,
      test_images=images,
      test_labels=labels,
      fit=prediction.PredictorFit(
        num_epochs=options.fit_epochs,
        samples_per_batch=options.fit_samples,
        images_per_batch=options.fit_images,
        image_batches=options.fit_updates,
      ),
      normalize=train.normalize,
      on_epoch=lambda epoch: print(kind, epoch, flush=True),
    )
    seconds = time.perf_counter() - started_s

    def accuracy(vectors: np.ndarray) -> float:
      found = prediction.evaluate_predictor(
        predictor,
        fitted.params,
        self.model,
        vectors,
        images,
        labels,
        normalize=train.normalize,
        samples_per_batch=options.fit_samples,
      )
      return float(found.mean())

    first = np.stack(
      [
        cut.flatten_front(self.comparison.build(seed).params)
        for seed in range(size)
      ]
    )
    own = fronts[_TRAINED]
    own = np.asarray(
      own[np.linspace(len(own) // 2, len(own) - 1, size, dtype=int)]
    )
    self.note(
      "predictor",
      _TRAINED,
      kind=kind,
      cut=repr(cut),
      rank=predictor.rank,
      parameters=predictor.num_params,
      samples=len(fronts[_TRAINED]),
      fit_s=seconds,
      accuracy_own_run=accuracy(own),
      accuracy_other_seed=accuracy(late),
      accuracy_untrained_fronts=accuracy(first),
      best_epoch=fitted.best.epoch,
      curve=[epoch._asdict() for epoch in fitted.curve],
    )
    prediction.save_predictor(target, predictor, fitted.params)

  def fit_nowcasters(self) -> None:
    """Nowcasters, beside the repetition of the last value."""
    target = self.folder / "nowcasters"
    if target.exists():
      return
    runs, held_out = (
      prediction.load_tracks(self.folder / f"tracks-{seed}")
      for seed in (_TRAINED, _HELD_OUT)
    )
    fitted = prediction.fit_nowcasters(
      runs,
      held_out,
      prediction.NowcastFit(num_steps=self.options.nowcast_steps),
    )
    for kind, found in fitted.items():
      self.note(
        "nowcaster",
        _TRAINED,
        kind=kind,
        error=found.error,
        repeat_error=found.repeat_error,
        best_step=found.step,
        curve=found.curve,
      )
    prediction.save_nowcasters(
      target, {kind: found.params for kind, found in fitted.items()}
    )


def main() -> None:
  """Makes all that is missing."""
  chosen = tyro.extras.overridable_config_cli(config.PRESETS)
  assert isinstance(chosen, config.Config)
  name = next(word for word in sys.argv[1:] if word in config.PRESETS)
  results = pathlib.Path(__file__).resolve().parent / "results"
  preparation = Preparation(chosen, results / f"{name}-prepare.jsonl")
  for seed in (_TRAINED, _HELD_OUT):
    preparation.collect(seed)
  preparation.fit_nowcasters()
  for kind in _KINDS:
    preparation.fit_predictor(kind)


if __name__ == "__main__":
  main()
