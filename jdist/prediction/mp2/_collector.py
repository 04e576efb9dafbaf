"""Collects the parameters of an ordinary run."""

import json
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdist import checks, collectives, training
from jdist.prediction.mp2 import _cut, _dataset, _permutation
from jdist.storage import array_files

PyTree = Any
# What `choose_steps` draws from; other uses of a seed have other numbers.
_STEPS_KEY = 3


def choose_steps(
  num_epochs: int, steps_per_epoch: int, per_epoch: int = 15, *, seed: int = 0
) -> tuple[int, ...]:
  """Draws the steps of a run at which its parameters are sampled.

  Args:
    num_epochs: of the run.
    steps_per_epoch: updates in an epoch, a whole number:
      `int(batches.steps_per_epoch)`.
    per_epoch: how many of them are taken, without repetition; default 15 as
      in the paper, of 50.
    seed: integer >= 0.

  Returns:
    The numbers of the steps, counted from 1 as `TrainState.step` is after an
    update, in their order.

  Raises:
    ValueError: if an argument is out of range, or there are fewer steps in an
      epoch than are to be taken.

  References:
    MP², model parameter prediction: 15 random iterations of the 50 of every
    epoch. Reconstruction: the same number in each, without repetition.

  >>> choose_steps(num_epochs=2, steps_per_epoch=5, per_epoch=2)
  (2, 4, 6, 7)
  """
  num_epochs = checks.check_int("num_epochs", num_epochs, 1)
  steps_per_epoch = checks.check_int(
    "steps_per_epoch",
    steps_per_epoch,
    1,
    remedy="Of `data.Batches` take `int(batches.steps_per_epoch)`.",
  )
  per_epoch = checks.check_int("per_epoch", per_epoch, 1)
  seed = checks.check_seed(seed)
  if per_epoch > steps_per_epoch:
    raise ValueError(
      f"`per_epoch` must be at most `steps_per_epoch`, got {per_epoch} of "
      f"{steps_per_epoch}."
    )
  steps: list[int] = []
  for epoch in range(num_epochs):
    order = _permutation.permutation(steps_per_epoch, seed, _STEPS_KEY, epoch)
    chosen = np.sort(order[:per_epoch]) + 1 + epoch * steps_per_epoch
    steps += chosen.tolist()
  return tuple(steps)


class Collector:
  """Saves the averaged parameters of a run at random steps.

  Give it to `Trainer.fit` as `evaluate`, with `evaluate_every=1`: it looks at
  the step's number, and at most steps does nothing else. The data set is
  hierarchical: each sample is cut at every depth that is asked for, one file
  each.

  A run that goes on from its checkpoint goes on with its data set. A step that
  comes again and has the same bits is left as it is; where it has others, its
  sample is replaced, and those after it, which are of another run, are
  dropped.

  >>> import tempfile, optax
  >>> from jdist import models, prediction
  >>> model = models.build("mlp", input_shape=(2, 2, 1), num_classes=2)
  >>> cut, folder = prediction.cut(model, 1), tempfile.TemporaryDirectory()
  >>> workers = collectives.workers(2, substrate="vmap")
  >>> collect = Collector(folder.name, workers, [cut], steps=(0, 5))
  >>> state = training.init_state(workers, optax.sgd(0.1), model.params)
  >>> collect(state)  # As `Trainer.fit` does after every step.
  {'samples': 1.0}
  >>> prediction.ParameterSet(folder.name).fronts(cut).shape
  (1, 640)
  >>> folder.cleanup()

  References:
    MP², model parameter prediction, the hierarchical parameter data set: one
    file of flattened fronts for each depth. Ours: hashes of all samples, the
    rears, and going on after a stop.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    workers: collectives.Workers,
    cuts: Sequence[_cut.Cut],
    steps: Sequence[int],
    *,
    rears: bool = False,
    params_of: Callable[[training.TrainState], PyTree] | None = None,
    metadata: dict[str, Any] | None = None,
    on_sample: Callable[[int, int], None] | None = None,
  ):
    """Opens the data set, or makes its files in their full size.

    Args:
      directory: where it is; on several processes the first one writes.
      workers: the run's workers.
      cuts: where to cut the network, one at least, of different depths.
      steps: at which steps, increasing, from `choose_steps`. `Trainer.fit`
        calls after each, from 1 on; 0 is for a loop of your own, which calls
        before the first.
      rears: whether to save what is behind each cut, too; default False.
      params_of: which parameters of one worker's state to save; by default
        the mean over the workers. For a method with an anchor give `lambda
        state: jdist.anchor(state.opt_state, state.params)`.
      metadata: anything that JSON can hold, saved with the set: the run's
        seed and options. A set with other metadata is refused.
      on_sample: called with (samples done, samples planned) after each, for
        instance to show progress.

    Raises:
      ValueError: if an argument is out of range, the cuts are of two networks,
        or the directory holds a set of another network, other cuts, steps or
        metadata.
    """
    self._directory = array_files.folder(directory)
    self._workers = workers
    checks.check_type(
      "workers", workers, collectives.Workers, "as of `jdist.workers(4)`"
    )
    self._cuts = _sorted_cuts(cuts)
    _check_metadata(metadata)
    checks.check_type("rears", rears, bool, "True or False")
    for name, given, wanted in (
      ("params_of", params_of, "one worker's state"),
      ("on_sample", on_sample, "(samples done, samples planned)"),
    ):
      checks.check_function(name, given, wanted, optional=True)
    self._steps = _checked_steps(steps)
    self._on_sample = on_sample
    halves = ("front", "rear") if rears else ("front",)
    self._rows: list[dict[str, Any]] = []
    self._arrays: dict[str, np.ndarray] = {}
    if jax.process_index() == 0:
      self._open(_dataset.plan(self._cuts, halves, self._steps, metadata or {}))
    self._numbers = {step: i for i, step in enumerate(self._steps)}
    if params_of is None:

      def params_of(state: training.TrainState) -> PyTree:
        return collectives.mean(state.params, workers.axis)

    def vectors(state: training.TrainState) -> dict[str, jax.Array]:
      params = params_of(state)
      return {
        _dataset.file_of(half, cut): getattr(cut, f"flatten_{half}")(params)
        for cut in self._cuts
        for half in halves
      }

    self._vectors = workers.jit(vectors)

  @property
  def done(self) -> int:
    """How many samples are there, as the first process knows."""
    return len(self._rows)

  def _open(self, body: dict[str, Any]) -> None:
    found = _dataset.read_manifest(self._directory)
    if found is None:
      _dataset.create(self._directory, self._cuts, body)
    else:
      _check_same(found, body, self._cuts)
      names = _dataset.files_of(self._cuts, body["halves"])
      self._rows = _dataset.read_rows(self._directory, self._steps, names)
    for cut in self._cuts:
      for half in body["halves"]:
        name = _dataset.file_of(half, cut)
        shape = (len(self._steps), getattr(cut, f"num_{half}"))
        path = self._directory / name
        self._arrays[name] = _dataset.open_array(path, shape, "r+")

  def __call__(self, state: training.TrainState) -> dict[str, float]:
    """Saves a sample if the state's step was chosen.

    Args:
      state: arrays `[workers, ...]`.

    Returns:
      `samples`, how many there are now; the first process knows.

    Raises:
      ValueError: when a step was missed that should have been sampled.
    """
    step = int(self._workers.view(state.step))
    self._refuse_missed(step)
    number = self._numbers.get(step)
    if number is not None:
      # On every process, as the workers speak to each other here.
      vectors = self._vectors(state)
      if jax.process_index() == 0:
        self._save(number, step, self._workers.view(vectors))
    return {"samples": float(self.done)}

  def _refuse_missed(self, step: int) -> None:
    """On the first process, which knows what there is."""
    missing = self._steps[self.done :] if jax.process_index() == 0 else ()
    if missing and step > missing[0]:
      raise ValueError(
        f"`steps` must be sampled in their order, but the run is at {step}, "
        f"and step {missing[0]} has not been sampled. Go on from a checkpoint "
        "before it, and call the collector after every step: "
        "`Trainer.fit(..., evaluate=collector, evaluate_every=1)`."
      )

  def _save(self, number: int, step: int, vectors: PyTree) -> None:
    rows = {name: np.asarray(vector) for name, vector in vectors.items()}
    sha256 = {name: _dataset.digest(row) for name, row in rows.items()}
    if number < self.done:
      if self._rows[number]["sha256"] == sha256:
        return
      self._rows = self._rows[:number]
      _dataset.keep_rows(self._directory, self._rows)
    for name, row in rows.items():
      self._arrays[name][number] = row
      self._arrays[name].flush()  # type: ignore[attr-defined]
    line = {"row": number, "step": step, "sha256": sha256}
    _dataset.append_row(self._directory, line)
    self._rows.append(line)
    if self._on_sample is not None:
      self._on_sample(self.done, len(self._steps))


def _sorted_cuts(cuts: Sequence[_cut.Cut]) -> tuple[_cut.Cut, ...]:
  cuts = checks.check_list(
    "cuts", cuts, "cuts, for instance `[prediction.cut(model, num_layers)]`"
  )
  for each in cuts:
    if not isinstance(each, _cut.Cut):
      raise ValueError(
        "`cuts` must hold cuts, for instance `prediction.cut(model, "
        f"num_layers)`, got {checks.told(each)}."
      )
  cuts.sort(key=lambda cut: len(cut.front))
  depths = [len(cut.front) for cut in cuts]
  if not depths or len(set(depths)) < len(depths):
    raise ValueError(
      f"`cuts` must be of different depths, at least one, got {depths}."
    )
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


def _check_metadata(metadata: Any) -> None:
  try:
    json.dumps(metadata or {})
    told = None if metadata is None or isinstance(metadata, dict) else metadata
  except (TypeError, ValueError) as error:
    told = error
  if told is not None:
    raise ValueError(
      f"`metadata` must be a dict that JSON can hold, got {told!r}. Make lists "
      "of arrays, `x.tolist()`, and text of other things."
    )


def _checked_steps(steps: Sequence[int]) -> tuple[int, ...]:
  steps = checks.check_list("steps", steps, "numbers, as of `choose_steps`")
  whole = all(
    hasattr(step, "__index__")
    and np.ndim(step) == 0
    and not isinstance(step, bool)
    for step in steps
  )
  steps = tuple(map(operator.index, steps)) if whole else tuple(steps)
  rising = whole and list(steps) == sorted(set(steps))
  if not steps or not rising or steps[0] < 0:
    raise ValueError(
      "`steps` must be increasing numbers from 0, at least one, got "
      f"{steps[:5]}{'...' if len(steps) > 5 else ''}. Draw them with "
      "`choose_steps`."
    )
  return steps


def _check_same(
  found: dict[str, Any], body: dict[str, Any], cuts: Sequence[_cut.Cut]
) -> None:
  """Refuses to go on with the data set of another run."""
  theirs = [_cut.Cut.from_description(x) for x in found["cuts"]]
  for ours, other in zip(cuts, theirs, strict=False):
    _cut.refuse_other_cut("cuts", ours, other)
  for name in ("cuts", "halves", "steps", "metadata"):
    if name == "cuts":
      same = len(cuts) == len(theirs)
    else:
      same = found[name] == body[name]
    if not same:
      argument = "rears" if name == "halves" else name
      raise ValueError(
        f"`{argument}` must be as in the data set that is there, but they "
        "differ. Collect into another directory."
      )
