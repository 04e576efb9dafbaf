"""The collector of a run's parameters, and the steps that it samples."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist import checks, collectives, signatures, training
from jdist.prediction import _cut, _parameter_set, _permutation
from jdist.states import PyTree
from jdist.storage import array_files, hashes, sealed_json

# The stream of `choose_steps`; other uses of a seed have other numbers.
_STEPS_KEY = 3


def choose_steps(
  num_epochs: int, steps_per_epoch: int, per_epoch: int = 15, *, seed: int = 0
) -> tuple[int, ...]:
  """Draws the steps of a run at which its parameters are sampled.

  Args:
    num_epochs: The number of epochs of the run.
    steps_per_epoch: The number of updates in an epoch, a whole number:
      `int(batches.steps_per_epoch)`.
    per_epoch: The number of samples in an epoch; default 15 as in the paper,
      among 50.
    seed: An integer >= 0.

  Returns:
    The numbers of the steps in order, counted from 1 as `TrainState.step`.

  References:
    MP², model parameter prediction: 15 random iterations of the 50 of every
    epoch.  Reconstruction: the same number in each, without repetition.

  >>> choose_steps(num_epochs=2, steps_per_epoch=5, per_epoch=2)
  (2, 4, 6, 7)
  """
  remedy = "For `data.Batches` pass `int(batches.steps_per_epoch)`."
  num_epochs = checks.check_int("num_epochs", num_epochs, 1, 10**6)
  steps_per_epoch = checks.check_int(
    "steps_per_epoch", steps_per_epoch, 1, remedy=remedy
  )
  remedy = "An epoch has `steps_per_epoch` steps."
  per_epoch = checks.check_int(
    "per_epoch", per_epoch, 1, steps_per_epoch, remedy
  )
  seed = checks.check_seed(seed)
  steps: list[int] = []
  for epoch in range(num_epochs):
    # A stream for each epoch: a longer run samples the same steps at first.
    order = _permutation.permutation(steps_per_epoch, seed, _STEPS_KEY, epoch)
    chosen = np.sort(order[:per_epoch]) + 1 + epoch * steps_per_epoch
    steps += chosen.tolist()
  return tuple(steps)


@signatures.checked
class Collector:
  """Saves the averaged parameters of a run at random steps.

  Pass it to `Trainer.fit` as `evaluate`, with `evaluate_every=1`: at most steps
  it only reads the step's number.  A run that resumes from its checkpoint
  resumes its data set.  A repeated step with the same bits keeps its sample;
  with other bits its sample is replaced, and later samples are dropped.

  >>> import tempfile, optax
  >>> from jdist import models, prediction
  >>> model = models.build("mlp", input_shape=(2, 2, 1), num_classes=2)
  >>> cut, folder = prediction.cut(model, 1), tempfile.TemporaryDirectory()
  >>> workers = collectives.workers(2, substrate="vmap")
  >>> collect = Collector(folder.name, workers, [cut], steps=(0, 5))
  >>> state = training.init_state(workers, optax.sgd(0.1), model.params)
  >>> collect(state)  # `Trainer.fit` does so after every step.
  {'samples': 1.0}
  >>> prediction.ParameterSet(folder.name).fronts(cut).shape
  (1, 640)
  >>> folder.cleanup()

  References:
    MP², model parameter prediction, the hierarchical parameter data set: one
    file of flattened fronts for each depth.  Departures: all samples have
    hashes, and a stopped run can be resumed.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    workers: collectives.Workers,
    cuts: Sequence[_cut.Cut],
    steps: Sequence[signatures.NonNegativeInt],
    *,
    metadata: dict[str, Any] | None = None,
  ):
    """Opens the data set, or makes its files in their full size.

    Args:
      directory: The directory of the data set; with several processes the first
        one writes.
      workers: The workers of the run.
      cuts: One or more cuts of the network, of different depths.
      steps: The increasing steps to sample, from `choose_steps`; 0 is for a
        loop of your own that calls the collector before its first step.
      metadata: JSON values that are saved with the set.

    Raises:
      ValueError: If the cuts are of two networks, or the directory holds a set
        of another network, other cuts, steps or metadata.
    """
    folder = array_files.folder(directory)
    self._workers = workers
    cuts = _sorted_cuts(cuts)
    self._steps = _checked_steps(steps)
    body = {
      "cuts": [cut.describe() for cut in cuts],
      "steps": list(self._steps),
      "metadata": sealed_json.check("metadata", metadata or {}),
    }
    self._files: _parameter_set.Files | None = None
    # One process writes.  The others take part in the means only.
    if jax.process_index() == 0:
      try:
        self._files = _parameter_set.Files(folder)
      except FileNotFoundError:
        self._files = _parameter_set.Files.create(folder, cuts, body)
      _check_same(self._files, body, cuts)
      self._arrays = {
        x: self._files.open(x, write=True) for x in self._files.sizes
      }
    self._numbers = {step: i for i, step in enumerate(self._steps)}

    # One program for all cuts: the workers' parameters are averaged once.
    def vectors(state: training.TrainState) -> dict[str, jax.Array]:
      params = collectives.mean(state.params, workers.axis)
      return {
        _parameter_set.file_of(cut): cut.flatten_front(params) for cut in cuts
      }

    self._vectors = workers.jit(vectors)

  @property
  def done(self) -> int:
    """The number of samples so far, on the first process."""
    return 0 if self._files is None else len(self._files.rows)

  def __call__(self, state: training.TrainState) -> dict[str, float]:
    """Saves a sample if the step was chosen; returns the number of samples.

    Raises:
      ValueError: If a chosen step was missed.
    """
    step = int(self._workers.view(state.step))
    # Only the first process knows the samples.
    missing = () if self._files is None else self._steps[self.done :]
    if missing and step > missing[0]:
      raise ValueError(
        f"`steps` must be sampled in their order, but the run is at {step}, "
        f"and step {missing[0]} has not been sampled. Resume from a "
        "checkpoint before it, and call the collector after every step: "
        "`Trainer.fit(..., evaluate=collector, evaluate_every=1)`."
      )
    number = self._numbers.get(step)
    if number is not None:
      # The mean over the workers is a collective: every process must call it.
      vectors = self._vectors(state)
      if self._files is not None:
        self._save(self._files, number, step, self._workers.view(vectors))
    return {"samples": float(self.done)}

  def _save(
    self, files: _parameter_set.Files, number: int, step: int, vectors: PyTree
  ) -> None:
    rows = {name: np.asarray(vector) for name, vector in vectors.items()}
    sha256 = {name: hashes.hash_bytes(row) for name, row in rows.items()}
    # A resumed run repeats steps.  On the same machine it has the same bits;
    # otherwise later samples would belong to another trajectory.
    if number < self.done:
      if files.rows[number]["sha256"] == sha256:
        return
      files.keep(number)
    for name, row in rows.items():
      self._arrays[name][number] = row
      self._arrays[name].flush()
    # The line is written last: a sample counts when its line exists.
    files.append({"row": number, "step": step, "sha256": sha256})


def _sorted_cuts(cuts: Sequence[_cut.Cut]) -> tuple[_cut.Cut, ...]:
  cuts = sorted(cuts, key=lambda cut: len(cut.front))
  depths = [len(cut.front) for cut in cuts]
  checks.check_distinct("cuts", depths, "depths")
  # A front in one cut may be the rear of another, so that all leaves count.
  first, *others = (
    {leaf for layer in (*cut.front, *cut.rear) for leaf in layer.leaves}
    for cut in cuts
  )
  for cut, leaves in zip(cuts[1:], others, strict=True):
    if different := sorted(first ^ leaves, key=str):
      raise ValueError(
        f"`cuts` must be of one network, got {cuts[0]!r} and {cut!r}, of which "
        f"only one has {different[0]}. Collect each network by itself."
      )
  return tuple(cuts)


def _checked_steps(steps: Sequence[int]) -> tuple[int, ...]:
  found = [int(step) for step in steps]
  if not found or found != sorted(set(found)):
    raise ValueError(
      "`steps` must be increasing numbers from 0, at least one, got "
      f"{found[:5]}{'...' if len(found) > 5 else ''}. Draw them "
      "with `choose_steps`."
    )
  return tuple(found)


def _check_same(
  files: _parameter_set.Files, body: dict[str, Any], cuts: Sequence[_cut.Cut]
) -> None:
  """Refuses to continue the data set of another run."""
  for ours, other in zip(cuts, files.cuts, strict=False):
    _cut.refuse_other_cut("cuts", ours, other)
  # The names of networks may differ, so that cuts are not compared as bodies.
  same = {"cuts": len(cuts) == len(files.cuts)} | {
    name: files.body[name] == body[name] for name in ("steps", "metadata")
  }
  for argument, equal in same.items():
    if not equal:
      raise ValueError(
        f"`{argument}` must be as in the data set of the directory, but they "
        "differ. Collect into another directory."
      )
