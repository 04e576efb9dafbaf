"""Makes predictors and nowcasters, from runs that are compared with nothing.

    python experiments/mp2/prepare.py mnist
    python experiments/mp2/prepare.py mnist --cache mp2-cache

An ordinary synchronous run leaves fronts at random steps, for several cuts,
and the tracks of some weights; a second one, with another seed, is held out.
Predictors and nowcasters are trained on the first and measured on the second.
Also measured, and not used by any variant: how well each depth of the cut can
be predicted, what fronts of further runs are good for, and what the predictors
make of runs on another data set and with another number of workers.
Images that the comparison tunes on are held out here, too, and no test image
is looked at.  What is there is not made again.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import cut_choice
import moving
import nowcaster_fit
import numpy as np
import optax_chains
import tyro

from jdist import prediction, training
from jdist.storage import array_files, sealed_json
from jdist.training import comparison

# No seed that is compared, or tuned with.
_TRAINED, _HELD_OUT = 20_000, 20_001
_MORE = 20_002
_KINDS: tuple[config.Kind, ...] = ("published", "rich")
_TEST_IMAGES = 2000


@dataclasses.dataclass(frozen=True)
class Ordinary:
  """A run whose fronts are collected.

  Attributes:
    name: in names of files.
    seed: of all of it.
    chains: its data and workers, with held-out images in the test's place.
  """

  name: str
  seed: int
  chains: config.Chains


class Preparation:
  """The folder of what is made, and the rows that tell of it."""

  def __init__(self, options: config.Config, rows: pathlib.Path):
    # The runs here have weights of their own, however those compared begin.
    options = dataclasses.replace(options, start_seed=None)
    self.options, self.rows = options, rows
    self.folder = config.folder(options)
    chains = optax_chains.on_one_core(config.Chains)
    self.whole = chains(options, config.VARIANTS)
    self.chains = self.whole.hold_out()
    self.model = self.whole.workload.model(0)

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

  def parameters(self, name: int | str) -> prediction.ParameterSet:
    """What a run has left, by its seed or name."""
    return prediction.ParameterSet(self.folder / f"fronts-{name}")

  def ordinary(self, seed: int) -> Ordinary:
    """A run on the data, and with the workers, of the comparison."""
    return Ordinary(str(seed), seed, self.chains)

  def moves(self) -> Iterator[Ordinary]:
    """Runs elsewhere, each unlike what is learned from in one thing."""
    options = self.options
    elsewhere = {}
    if options.other_dataset is not None:
      elsewhere[options.other_dataset] = functools.partial(
        moving.to_data, self.whole, options.other_dataset
      )
    if options.other_workers is not None:
      elsewhere[f"{options.other_workers}-workers"] = functools.partial(
        moving.to_workers, self.whole, options.other_workers
      )
    for name, make in elsewhere.items():
      if not self.moved(name).exists():
        yield Ordinary(name, _TRAINED, make().hold_out())

  def moved(self, name: str) -> pathlib.Path:
    """What is there when predictors have been moved to a run."""
    return self.folder / f"moved-{name}.json"

  def collect(self, source: Ordinary) -> None:
    """An ordinary run: its fronts and its tracks."""
    tracks = self.folder / f"tracks-{source.name}"
    if tracks.exists():
      return
    chains, seed = source.chains, source.seed
    run = chains.prepare("baseline", self.options.collect_rate, seed)
    workers = chains.workload.workers
    per_epoch = int(run.num_steps / self.options.epochs)
    steps = prediction.choose_steps(
      max(1, int(self.options.epochs)),
      per_epoch,
      min(per_epoch, self.options.samples_per_epoch),
      seed=seed,
    )
    collector = prediction.Collector(
      self.folder / f"fronts-{source.name}",
      workers,
      self.cuts(),
      [step for step in steps if step <= run.num_steps],
      metadata={"seed": seed},
    )
    tracker = nowcaster_fit.Tracker(run.model.params)
    share = self.options.nowcast_epochs / self.options.epochs
    every = max(1, int(run.num_steps * share))

    def look(state: training.TrainState) -> dict[str, float]:
      if int(workers.view(state.step)) % every == 0:
        tracker.record(workers.view(state.params))
      return collector(state)

    trained, records = run.programs.trainer.fit(
      run.state,
      run.batches.iterate,
      run.num_steps,
      evaluate=look,
      evaluate_every=1,
    )
    accuracy = run.programs.evaluate(trained)["accuracy"]
    _write(self.reached(source), accuracy)
    if source.name == str(_TRAINED):
      array_files.save_arrays(
        config.source(self.options),
        workers.view(trained.params),
        {"what": config.PARAMETERS},
      )
    # What says that all is there comes last: a stop before it makes a row
    # twice, and loses none.
    self.note(
      "samples",
      seed,
      run=source.name,
      workers=chains.options.workers,
      batch_size=chains.options.batch_size,
      samples=collector.done,
      recorded=tracker.tracks()["bias"].shape[1],
      steps=run.num_steps,
      train_s=records[-1].train_s,
      validation_accuracy=accuracy,
    )
    array_files.save_arrays(
      tracks, tracker.tracks(), {"what": "tracks", "seed": seed}
    )

  def reached(self, source: Ordinary) -> pathlib.Path:
    """Where it stands what a run reached itself, on held-out images."""
    return self.folder / f"reached-{source.name}.json"

  def fit(self, num_epochs: int) -> prediction.PredictorFit:
    """How predictors are trained."""
    return prediction.PredictorFit(
      num_epochs=num_epochs,
      samples_per_batch=self.options.fit_samples,
      images_per_batch=self.options.fit_images,
      image_batches=self.options.fit_updates,
    )

  def images(self) -> dict[str, Any]:
    """What predictors are trained on and measured on."""
    workload = self.chains.workload
    train, test = workload.train, workload.test
    return {
      "images": train.images,
      "labels": train.labels,
      "test_images": test.images[:_TEST_IMAGES],
      "test_labels": test.labels[:_TEST_IMAGES],
      "normalize": train.normalize,
    }

  def accuracy(
    self,
    predictor: prediction.Predictor,
    params: Any,
    vectors: np.ndarray,
    workload: comparison.Workload,
  ) -> float:
    """The mean of the networks with these fronts, on held-out images."""
    found = prediction.evaluate_predictor(
      predictor,
      params,
      self.model,
      vectors,
      workload.test.images[:_TEST_IMAGES],
      workload.test.labels[:_TEST_IMAGES],
      normalize=workload.train.normalize,
      samples_per_batch=self.options.fit_samples,
    )
    return float(found.mean())

  def target(self, kind: config.Kind, num_runs: int) -> pathlib.Path:
    """Where a predictor lies."""
    more = "" if num_runs == 1 else f"-{num_runs}-runs"
    return self.folder / f"predictor-{kind}{more}"

  def fit_predictor(
    self, kind: config.Kind, seeds: Sequence[int] = (_TRAINED,)
  ) -> None:
    """A predictor, and how well it does with fronts of another run.

    Args:
      kind: which cut and which decoders.
      seeds: of the runs whose fronts it learns from; with more of them the
        updates are as many.
    """
    target = self.target(kind, len(seeds))
    if target.exists():
      return
    options, cut = self.options, self.cut(kind)
    predictor = prediction.predictor(
      cut, 1 if kind == "published" else options.rich_rank
    )
    # The best epoch is that of fronts of the same runs that are not learned
    # from: with those of another seed all epochs may be at chance, and which of
    # them is best says nothing.
    parts = [self.parted(seed, cut) for seed in seeds]
    own = np.concatenate([learned for learned, _ in parts])
    near = np.concatenate([held_out for _, held_out in parts])
    fit = dataclasses.replace(
      self.fit(options.fit_epochs),
      sample_batches=len(own) // len(seeds) // options.fit_samples,
    )
    late = self.late_fronts(_HELD_OUT, cut)
    started_s = time.perf_counter()
    fitted = prediction.fit_predictor(
      predictor,
      self.model,
      own,
      held_out=near,
      fit=fit,
      directory=self.unfinished(target),
      on_epoch=lambda epoch: print(kind, epoch, flush=True),
      **self.images(),
    )
    seconds = time.perf_counter() - started_s

    def accuracy(vectors: np.ndarray) -> float:
      return self.accuracy(
        predictor, fitted.params, vectors, self.chains.workload
      )

    first = np.stack(
      [
        cut.flatten_front(self.chains.workload.model(seed).params)
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
      chosen_by="own runs, held out",
      fit_s=seconds,
      accuracy_own_run=accuracy(near),
      accuracy_other_seed=accuracy(late),
      accuracy_untrained_fronts=accuracy(first),
      best_epoch=fitted.best.epoch,
      curve=[epoch._asdict() for epoch in fitted.curve],
    )
    prediction.save_predictor(target, predictor, fitted.params)

  def move(self, source: Ordinary) -> None:
    """What the predictors make of a run elsewhere, beside the run itself."""
    own = json.loads(self.reached(source).read_text())
    more = 1 + self.options.more_runs
    found = dict.fromkeys([*((kind, 1) for kind in _KINDS), (_KINDS[0], more)])
    for kind, num_runs in found:
      target = self.target(kind, num_runs)
      cut = self.cut(kind)
      predictor, params = prediction.load_predictor(target, cut)
      late = self.late_fronts(source.name, cut)
      self.note(
        "moved",
        source.seed,
        to=source.name,
        workers=source.chains.options.workers,
        batch_size=source.chains.options.batch_size,
        kind=kind,
        runs=num_runs,
        cut=repr(cut),
        rank=predictor.rank,
        accuracy=self.accuracy(predictor, params, late, source.chains.workload),
        ordinary_accuracy=own,
      )
    _write(self.moved(source.name), own)

  def unfinished(self, target: pathlib.Path) -> pathlib.Path:
    """Where a training keeps what it needs to go on after it was stopped."""
    return target.with_name(f"unfinished-{target.stem}")

  def parted(
    self, seed: int, cut: prediction.Cut
  ) -> tuple[np.ndarray, np.ndarray]:
    """A run's fronts: those to learn from, and some that are held out.

    Held out are some of its last half, as most of a run is spent there.
    """
    fronts = np.asarray(self.parameters(seed).fronts(cut))
    half = len(fronts) // 2
    size = max(1, min((len(fronts) - half) // 2, self.options.fit_samples))
    rows = np.linspace(half, len(fronts) - 1, size).astype(int)
    return np.delete(fronts, rows, axis=0), fronts[rows]

  def late_fronts(self, name: int | str, cut: prediction.Cut) -> np.ndarray:
    """Some of the last half of a run, equally far apart."""
    fronts = self.parameters(name).fronts(cut)
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
    scores = cut_choice.score_cuts(
      [
        prediction.predictor(
          prediction.cut(self.model, depth, name=self.options.model)
        )
        for depth in self.options.depths
      ],
      self.model,
      lambda cut: own.fronts(cut)[::2],
      held_out=lambda cut: own.fronts(cut)[1::2],
      fit=self.fit(self.options.study_epochs),
      directory=self.unfinished(target),
      **self.images(),
    )
    learned = any(score.accuracy > score.untrained for score in scores)
    best = cut_choice.choose_cut(scores) if learned else None
    for score in scores:
      self.note(
        "cut",
        _TRAINED,
        cut=repr(score.predictor.cut),
        accuracy=score.accuracy,
        pushed_bytes=score.pushed_bytes,
        chosen=score is best,
      )
    _write(target, repr(best and best.predictor.cut))

  def fit_nowcasters(self) -> None:
    """Nowcasters, beside the repetition of the last value."""
    target = self.folder / "nowcasters"
    if target.exists():
      return
    run, held_out = (
      array_files.load_arrays(self.folder / f"tracks-{seed}", what="tracks")[0]
      for seed in (_TRAINED, _HELD_OUT)
    )
    fitted = nowcaster_fit.fit_nowcasters(
      run,
      held_out,
      nowcaster_fit.NowcastFit(num_steps=self.options.nowcast_steps),
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
    nowcaster_fit.save_nowcasters(
      target, {kind: found.params for kind, found in fitted.items()}
    )


def _write(path: pathlib.Path, value: Any) -> None:
  """Writes what says that something is made; a stop leaves no part of it."""
  sealed_json.write_whole(path, json.dumps(value).encode())


def main() -> None:
  """Makes all that is missing."""
  chosen = tyro.extras.overridable_config_cli(config.PRESETS)
  assert isinstance(chosen, config.Config)
  name = next(word for word in sys.argv[1:] if word in config.PRESETS)
  results = pathlib.Path(__file__).resolve().parent / "results"
  preparation = Preparation(chosen, results / f"{name}-prepare.jsonl")
  for seed in (_TRAINED, _HELD_OUT):
    preparation.collect(preparation.ordinary(seed))
  preparation.fit_nowcasters()
  for kind in _KINDS:
    preparation.fit_predictor(kind)
  preparation.score_cuts()
  more = range(_MORE, _MORE + chosen.more_runs)
  for seed in more:
    preparation.collect(preparation.ordinary(seed))
  if more:
    preparation.fit_predictor("published", (_TRAINED, *more))
  for source in preparation.moves():
    preparation.collect(source)
    preparation.move(source)


if __name__ == "__main__":
  main()
