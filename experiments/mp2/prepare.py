"""Makes predictors and nowcasters, from runs that are compared with nothing.

    python experiments/mp2/prepare.py mnist
    python experiments/mp2/prepare.py mnist --cache mp2-cache

An ordinary synchronous run leaves fronts at random steps, for several cuts,
and the tracks of some weights; a second one, with another seed, is held out.
Predictors and nowcasters are trained on the first and measured on the second.
Also measured, and not used by any variant: how well each depth of the cut can
be predicted, and what fronts of further runs are good for.
Images that the comparison tunes on are held out here, too, and no test image
is looked at.  What is there is not made again.
"""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import numpy as np
import tyro

from jdist import data, prediction, training

# No seed that is compared, or tuned with.
_TRAINED, _HELD_OUT = 20_000, 20_001
_MORE = 20_002
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

  def cuts(self) -> tuple[prediction.Cut, ...]:
    """All that are collected for."""
    found = {cut.fingerprint: cut for cut in map(self.cut, _KINDS)}
    for depth in self.options.depths:
      cut = prediction.cut(self.model, depth, name=self.options.model)
      found.setdefault(cut.fingerprint, cut)
    return tuple(found.values())

  def parameters(self, seed: int) -> prediction.ParameterSet:
    """What a run has left."""
    return prediction.ParameterSet(self.folder / f"fronts-{seed}")

  def collect(self, seed: int) -> None:
    """An ordinary run: its fronts and its tracks."""
    tracks = self.folder / f"tracks-{seed}"
    if tracks.exists():
      return
    run = self.comparison.prepare("baseline", self.options.collect_rate, seed)
    workers = self.comparison.workers
    per_epoch = int(run.num_steps / self.options.epochs)
    steps = prediction.choose_steps(
      max(1, int(self.options.epochs)),
      per_epoch,
      min(per_epoch, self.options.samples_per_epoch),
      seed=seed,
    )
    collector = prediction.Collector(
      self.folder / f"fronts-{seed}",
      workers,
      self.cuts(),
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

  def fit(self) -> prediction.PredictorFit:
    """How predictors are trained."""
    return prediction.PredictorFit(
      num_epochs=self.options.fit_epochs,
      samples_per_batch=self.options.fit_samples,
      images_per_batch=self.options.fit_images,
      image_batches=self.options.fit_updates,
    )

  def images(self) -> dict[str, Any]:
    """What predictors are trained on and measured on."""
    train, test = self.comparison.train, self.comparison.test
    return {
      "images": train.images,
      "labels": train.labels,
      "test_images": test.images[:_TEST_IMAGES],
      "test_labels": test.labels[:_TEST_IMAGES],
      "normalize": train.normalize,
    }

  def fit_predictor(
    self, kind: config.Kind, seeds: Sequence[int] = (_TRAINED,)
  ) -> None:
    """A predictor, and how well it does with fronts of another run.

    Args:
      kind: which cut and which decoders.
      seeds: of the runs whose fronts it learns from; with more of them the
        updates are as many.
    """
    alone = len(seeds) == 1
    target = self.folder / (
      f"predictor-{kind}" if alone else f"predictor-{kind}-{len(seeds)}-runs"
    )
    if target.exists():
      return
    options, cut = self.options, self.cut(kind)
    predictor = prediction.predictor(
      cut, 1 if kind == "published" else options.rich_rank
    )
    own = np.concatenate([self.parameters(seed).fronts(cut) for seed in seeds])
    fit = dataclasses.replace(
      self.fit(),
      sample_batches=len(own) // len(seeds) // options.fit_samples,
    )
    # Of the last half of a run, as most of it is spent there.
    late = self.late_fronts(_HELD_OUT, cut)
    started_s = time.perf_counter()
    images = self.images()
    fitted = prediction.fit_predictor(
      predictor,
      self.model,
      own,
      held_out=late,
      fit=fit,
      on_epoch=lambda epoch: print(kind, epoch, flush=True),
      **images,
    )
    seconds = time.perf_counter() - started_s

    def accuracy(vectors: np.ndarray) -> float:
      found = prediction.evaluate_predictor(
        predictor,
        fitted.params,
        self.model,
        vectors,
        images["test_images"],
        images["test_labels"],
        normalize=images["normalize"],
        samples_per_batch=options.fit_samples,
      )
      return float(found.mean())

    first = np.stack(
      [
        cut.flatten_front(self.comparison.build(seed).params)
        for seed in range(len(late))
      ]
    )
    self.note(
      "predictor",
      _TRAINED,
      kind=kind,
      runs=len(seeds),
      cut=repr(cut),
      rank=predictor.rank,
      parameters=predictor.num_params,
      samples=len(own),
      fit_s=seconds,
      accuracy_own_run=accuracy(self.late_fronts(_TRAINED, cut)),
      accuracy_other_seed=accuracy(late),
      accuracy_untrained_fronts=accuracy(first),
      best_epoch=fitted.best.epoch,
      curve=[epoch._asdict() for epoch in fitted.curve],
    )
    prediction.save_predictor(target, predictor, fitted.params)

  def late_fronts(self, seed: int, cut: prediction.Cut) -> np.ndarray:
    """Some of the last half of a run, equally far apart."""
    fronts = self.parameters(seed).fronts(cut)
    fronts = fronts[len(fronts) // 2 :]
    size = min(len(fronts), self.options.fit_samples)
    rows = np.linspace(0, len(fronts) - 1, size).astype(int)
    return np.asarray(fronts[rows])

  def score_cuts(self) -> None:
    """How well each depth is predicted, in the run that was learned from.

    Every second front is learned from, the others measure: nothing moves to
    another seed, and no cut could be told from another there.
    """
    target = self.folder / "cuts.json"
    if target.exists() or not self.options.depths:
      return
    own = self.parameters(_TRAINED)
    scores = prediction.score_cuts(
      [
        prediction.predictor(
          prediction.cut(self.model, depth, name=self.options.model)
        )
        for depth in self.options.depths
      ],
      self.model,
      lambda cut: own.fronts(cut)[::2],
      held_out=lambda cut: own.fronts(cut)[1::2],
      fit=self.fit(),
      **self.images(),
    )
    learned = any(score.accuracy > score.untrained for score in scores)
    best = prediction.choose_cut(scores) if learned else None
    for score in scores:
      self.note(
        "cut",
        _TRAINED,
        cut=repr(score.predictor.cut),
        accuracy=score.accuracy,
        pushed_bytes=score.pushed_bytes,
        chosen=score is best,
      )
    target.write_text(json.dumps(repr(best and best.predictor.cut)))

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
  preparation.score_cuts()
  more = range(_MORE, _MORE + chosen.more_runs)
  for seed in more:
    preparation.collect(seed)
  if more:
    preparation.fit_predictor("published", (_TRAINED, *more))


if __name__ == "__main__":
  main()
