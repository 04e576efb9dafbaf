"""Training of a predictor by the loss of the networks that it completes."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, models, signatures
from jdist.prediction import (
  _evaluate,
  _permutation,
  _predictor,
  _saved_predictor,
)
from jdist.states import PyTree

_SAMPLES_KEY = 5
_DATA = (
  "samples", "images", "labels", "held_out", "test_images", "test_labels",
)  # fmt: skip


@signatures.checked
@dataclasses.dataclass(frozen=True)
class PredictorFit:
  """Settings for the training of a predictor; the defaults are VGG-15's.

  Attributes:
    num_epochs: The number of passes over the samples, each followed by an
      evaluation.
    samples_per_batch: The number of networks in an update.
    sample_batches: The number of batches of samples in an epoch; default as
      many as there are samples for, 180 batches of 25 in the paper.
    images_per_batch: The number of images in an update.
    image_batches: The number of updates with the same samples, each on other
      images, drawn with the same share of each class.
    learning_rate: The rate of Adam.
    mixup: The parameter alpha of mixup, 0 for none.
    seed: The seed of the first parameters, the order of samples and images, and
      mixup.
  """

  num_epochs: signatures.PositiveInt = 30
  samples_per_batch: signatures.PositiveInt = 25
  sample_batches: signatures.PositiveInt | None = None
  images_per_batch: signatures.PositiveInt = 125
  image_batches: signatures.PositiveInt = 100
  learning_rate: signatures.PositiveFloat = 1e-3
  mixup: signatures.NonNegativeFloat = 1.0
  seed: signatures.Seed = 0

  def __post_init__(self) -> None:
    # JSON cannot hold NumPy's numbers, and the settings are saved.
    given = {name: x for name, x in vars(self).items() if x is not None}
    vars(self).update({name: np.asarray(x).item() for name, x in given.items()})


class Epoch(NamedTuple):
  """One evaluation.

  Attributes:
    epoch: The number of trained epochs; 0 is before the training.
    accuracy: The mean accuracy of held-out fronts with predicted rears on the
      test images.
    loss: The mean training loss of the epoch; None before the training.
  """

  epoch: int
  accuracy: float
  loss: float | None


class FittedPredictor(NamedTuple):
  """A trained predictor at its best evaluation, the first of equals."""

  params: PyTree
  best: Epoch
  curve: tuple[Epoch, ...]


@signatures.checked
def fit_predictor(
  predictor: _predictor.Predictor,
  model: models.Model,
  samples: np.ndarray,
  images: Any,
  labels: Any,
  *,
  held_out: np.ndarray,
  test_images: Any,
  test_labels: Any,
  fit: PredictorFit | None = None,
  normalize: _evaluate.Normalize = _evaluate.as_they_are,
  directory: str | os.PathLike[str] | None = None,
  on_epoch: Callable[[Epoch], None] | None = None,
) -> FittedPredictor:
  """Trains a predictor, and keeps the parameters of its best evaluation.

  It minimizes the cross-entropy of the completed networks on real images,

    mean over samples p:  CE(network(p, predict(p)), mix(images, labels))

  with the labels of both images, weighted as in the mix, lambda ~ Beta(mixup,
  mixup) drawn for each update.  Predicted rears are not compared with those of
  samples.

  Args:
    predictor: The predictor of the network's cut.
    model: The network, without batch statistics.
    samples: The training fronts, float32 [samples, num_front], for instance
      `ParameterSet.fronts`; may be mapped from the disk.
    images: The training images [n, ...], as stored; all are put on the device.
    labels: The classes of the images, integers [n] from 0.
    held_out: The fronts for the evaluation.  The fronts of a run resemble their
      neighbours: take another run, or separate epochs.
    test_images: The images for the evaluation.
    test_labels: The classes of these images.
    fit: The settings; default `PredictorFit()`.
    normalize: A function from stored images to the model's inputs.  Another
      function, or model, is compiled again.
    directory: A directory that keeps the state after every epoch; training
      resumes from there to the bit, also with more `num_epochs`.  All other
      settings and data must be the same.  With several processes, train on one.
    on_epoch: A function that is called with each evaluation.

  Returns:
    The best parameters, and every evaluation.

  Raises:
    ValueError: If an argument does not fit, or `directory` holds the state of
      another predictor, settings or data, or other arrays.
    FloatingPointError: If the loss is not finite any more; the state is not
      kept then.

  References:
    MP², "prediction-result-based evaluation".  Reconstruction: images are drawn
    without replacement for each batch of samples; a mini-batch has one lambda
    for all of its samples; the best epoch has the highest mean accuracy over
    held-out samples.
  """
  fit = PredictorFit() if fit is None else fit
  train = (np.asarray(images), np.asarray(labels))
  test = (np.asarray(test_images), np.asarray(test_labels))
  _evaluate.check_model(predictor, model)
  _evaluate.check_samples("samples", samples, predictor)
  _evaluate.check_samples("held_out", held_out, predictor)
  _evaluate.check_images(_DATA[1:3], *train, model, normalize)
  _evaluate.check_images(_DATA[4:], *test, model, normalize)
  num_batches = _count_batches(fit, len(samples), len(train[0]))
  # Their hashes are kept: a resumed training must have the same data.
  data = zip(_DATA, (samples, *train, held_out, *test), strict=True)
  kept = _saved_predictor.FitFolder(
    directory, predictor, dataclasses.asdict(fit), dict(data)
  )

  def evaluate(epoch: int, params: PyTree, loss: float | None) -> Epoch:
    found = _evaluate.evaluate_predictor(
      predictor, params, model, held_out, *test, normalize=normalize,
      samples_per_batch=fit.samples_per_batch,
    )  # fmt: skip
    point = Epoch(epoch, float(found.mean()), loss)
    if on_epoch is not None:
      on_epoch(point)
    return point

  updates = _make_updates(predictor, model, fit, normalize, *train)
  return _train(predictor, fit, samples, num_batches, updates, evaluate, kept)


def _train(
  predictor: _predictor.Predictor,
  fit: PredictorFit,
  samples: np.ndarray,
  num_batches: int,
  take_updates: Callable[[PyTree, np.ndarray, int], tuple[PyTree, float]],
  evaluate: Callable[[int, PyTree, float | None], Epoch],
  kept: _saved_predictor.FitFolder,
) -> FittedPredictor:
  """Trains from the beginning, or from the kept state."""
  state = _init(predictor, fit.learning_rate, jax.random.key(fit.seed))
  # Updates donate the memory of their state, so that the best one is a copy.
  best = jax.tree.map(jnp.copy, state["params"])
  found = kept.restore((state, best))
  if found is None:
    done, losses = 0, []
    curve = [evaluate(0, state["params"], None)]
  else:
    (state, best), body = found
    done, losses = body["done"], body["losses"]
    curve = [Epoch(*point) for point in body["curve"]]
    remedy, trained = "Or take another `directory`.", -(-done // num_batches)
    checks.check_int("num_epochs", fit.num_epochs, trained, remedy=remedy)
  while done < fit.num_epochs * num_batches:
    epoch, batch = divmod(done, num_batches)
    # Rows and images depend on the number of the update alone, which makes a
    # resumed training equal to an uninterrupted one.
    rows = _sample_rows(fit, len(samples), epoch, batch)
    state, loss = take_updates(state, np.asarray(samples[rows]), done)
    # The last kept state is finite, and training may restart from it.
    if not math.isfinite(loss):
      raise FloatingPointError(
        f"The loss of epoch {epoch + 1} is {loss}. Lower `learning_rate`, now "
        f"{fit.learning_rate:g}, or leave out `samples` of a run that was "
        "about to diverge."
      )
    losses.append(loss)
    done += 1
    if batch + 1 == num_batches:
      point = evaluate(epoch + 1, state["params"], float(np.mean(losses)))
      if point.accuracy > max(other.accuracy for other in curve):
        best = jax.tree.map(jnp.copy, state["params"])
      curve.append(point)
      losses = []
      kept.save((state, best), done=done, losses=losses, curve=curve)
  # The first one of equal accuracies has the fewest epochs.
  top = max(curve, key=lambda point: (point.accuracy, -point.epoch))
  return FittedPredictor(best, top, tuple(curve))


def _count_batches(fit: PredictorFit, num_samples: int, num_images: int) -> int:
  """Returns the number of batches of samples in an epoch."""
  size, remedy = fit.samples_per_batch, "It is at most the number of samples."
  checks.check_int("samples_per_batch", size, 1, num_samples, remedy)
  # The images of one batch of samples are drawn without replacement.
  needed = fit.images_per_batch * fit.image_batches
  if needed > num_images:
    raise ValueError(
      "`image_batches` times `images_per_batch` must be at most the number "
      f"of images, {num_images}, got {needed}."
    )
  return fit.sample_batches or num_samples // fit.samples_per_batch


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(
  predictor: _predictor.Predictor, learning_rate: float, key: jax.Array
) -> PyTree:
  params = predictor.init(key)
  return {"params": params, "optimizer": optax.adam(learning_rate).init(params)}


def _make_updates(
  predictor: _predictor.Predictor,
  model: models.Model,
  fit: PredictorFit,
  normalize: _evaluate.Normalize,
  images: np.ndarray,
  labels: np.ndarray,
) -> Callable[[PyTree, np.ndarray, int], tuple[PyTree, float]]:
  """Returns a function that takes all updates with one batch of samples."""
  on_device = jnp.asarray(images), jnp.asarray(labels)
  key = jax.random.key(fit.seed)
  update = functools.partial(
    _update, predictor, model, normalize, fit.learning_rate, fit.mixup
  )

  def take(
    state: PyTree, vectors: np.ndarray, number: int
  ) -> tuple[PyTree, float]:
    """Returns the state after all updates, and their mean loss."""
    # All images are on the device and each update gathers its own, so that one
    # program serves every batch.
    parts = (fit.image_batches, fit.images_per_batch)
    # Every class has its share in the images of one batch of samples.
    drawn = _permutation.balanced(labels, math.prod(parts), fit.seed, number)
    placed, losses = jnp.asarray(vectors), []
    for i, part in enumerate(drawn.reshape(parts).astype(np.int32)):
      step = np.uint32(number * fit.image_batches + i)
      state, loss = update(state, placed, *on_device, part, key, step)
      losses.append(loss)
    return state, float(np.mean(jax.device_get(losses), dtype=np.float64))

  return take


@functools.partial(
  jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnames="state"
)
def _update(
  predictor: _predictor.Predictor,
  model: models.Model,
  normalize: _evaluate.Normalize,
  learning_rate: float,
  mixup: float,
  state: PyTree,
  vectors: jax.Array,
  images: jax.Array,
  labels: jax.Array,
  rows: jax.Array,
  key: jax.Array,
  step: jax.Array,
) -> tuple[PyTree, jax.Array]:
  inputs, labels = normalize(images[rows]).astype(jnp.float32), labels[rows]
  order, share = _mix(mixup, jax.random.fold_in(key, step), len(rows))
  # Mixup: one partner and one share for all samples of the mini-batch.
  inputs = share * inputs + (1 - share) * inputs[order]

  def loss_of(params: PyTree) -> jax.Array:
    logits = _evaluate.logits_of(
      predictor, model, params, vectors, inputs, train=True
    )

    # The cross-entropy is linear in the labels, so that the loss of mixed
    # labels is the mix of two losses.
    def loss(labels: jax.Array) -> jax.Array:
      every = jnp.broadcast_to(labels, logits.shape[:-1])
      cross_entropy = optax.softmax_cross_entropy_with_integer_labels
      return cross_entropy(logits, every).mean()

    return share * loss(labels) + (1 - share) * loss(labels[order])

  loss, gradients = jax.value_and_grad(loss_of)(state["params"])
  # Optax's Adam mixes floats with its integer count.
  with jax.numpy_dtype_promotion("standard"):
    updates, optimizer = optax.adam(learning_rate).update(
      gradients, state["optimizer"]
    )
  params = optax.apply_updates(state["params"], updates)
  return {"params": params, "optimizer": optimizer}, loss


def _mix(
  alpha: float, key: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the partner of each image in the mix, and its own share."""
  one, other = jax.random.split(key)
  order = jax.random.permutation(one, size)
  if alpha == 0:
    return order, jnp.float32(1)
  if alpha == 1:
    # Beta(1, 1) is uniform, and `beta` compiles rejection loops.
    return order, jax.random.uniform(other)
  return order, jax.random.beta(other, alpha, alpha)


def _sample_rows(
  fit: PredictorFit, num_samples: int, epoch: int, batch: int
) -> np.ndarray:
  """Returns the samples of a batch, from one order for each epoch."""
  order = _permutation.permutation(num_samples, fit.seed, _SAMPLES_KEY, epoch)
  # With more batches than samples the order starts again.
  first = batch * fit.samples_per_batch
  return np.sort(
    order[np.arange(first, first + fit.samples_per_batch) % num_samples]
  )
