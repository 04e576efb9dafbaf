"""Training the predictor by the accuracy of the networks it completes."""

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

from jdist import checks, models
from jdist.prediction.mp2 import (
  _evaluate,
  _permutation,
  _predictor,
  _saved_predictor,
)
from jdist.storage import array_files, hashes

PyTree = Any
_SAMPLES_KEY = 5
_FIT = "predictor fit"


@dataclasses.dataclass(frozen=True)
class PredictorFit:
  """How a predictor is trained; the defaults are the paper's for VGG-15.

  Attributes:
    num_epochs: passes over the samples, after each of which the predictor is
      evaluated.
    samples_per_batch: how many networks are put together at once.
    sample_batches: batches of samples in an epoch; default as many as there
      are samples for, the paper's 180 of 25.
    images_per_batch: images of one update.
    image_batches: updates with the same batch of samples, each on other
      images; 100 of 125 are 25 % of CIFAR-10's. Of each class the same share
      is drawn.
    learning_rate: of Adam.
    mixup: alpha of mixup, 0 for none.
    seed: of the first parameters, the order of samples and images, and mixup.
  """

  num_epochs: int = 30
  samples_per_batch: int = 25
  sample_batches: int | None = None
  images_per_batch: int = 125
  image_batches: int = 100
  learning_rate: float = 1e-3
  mixup: float = 1.0
  seed: int = 0

  def __post_init__(self) -> None:
    for name in (
      "num_epochs",
      "samples_per_batch",
      "sample_batches",
      "images_per_batch",
      "image_batches",
    ):
      value = getattr(self, name)
      if name != "sample_batches" or value is not None:
        # As JSON can hold it, and not NumPy's.
        object.__setattr__(self, name, checks.check_int(name, value, 1))
    rate = checks.check_number(
      "learning_rate", self.learning_rate, open_low=True
    )
    object.__setattr__(self, "learning_rate", rate)
    mixup = checks.check_number("mixup", self.mixup)
    object.__setattr__(self, "mixup", mixup)
    object.__setattr__(self, "seed", checks.check_seed(self.seed))


class Epoch(NamedTuple):
  """One evaluation.

  Attributes:
    epoch: epochs trained; 0 is the beginning.
    accuracy: mean over the held-out samples, each with its predicted rear, on
      the test images.
    loss: mean training loss of the epoch; None at the beginning.
  """

  epoch: int
  accuracy: float
  loss: float | None


class FittedPredictor(NamedTuple):
  """What training gave.

  Attributes:
    params: of the best evaluation, the first of equals.
    best: that evaluation.
    curve: all of them.
  """

  params: PyTree
  best: Epoch
  curve: tuple[Epoch, ...]


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
  save_every: int | None = None,
  on_epoch: Callable[[Epoch], None] | None = None,
) -> FittedPredictor:
  """Trains a predictor, and keeps the parameters of its best evaluation.

  It minimizes the cross-entropy of the assembled networks on real images,

    mean over samples p:  CE(network(p, predict(p)), mix(images, labels))

  with the labels of the mixed images, lambda of the one and 1 - lambda of the
  other, lambda ~ Beta(mixup, mixup) drawn for each update. No rear is ever
  compared with the rear of a sample.

  Args:
    predictor: of the network's cut.
    model: the network; without batch statistics. One that is kept, not made
      anew for each call: for another object everything compiles anew.
    samples: fronts to train with, float32 [samples, num_front], for instance
      of `ParameterSet.fronts`; may be mapped from the disk.
    images: to train with, [n, ...] as stored; all are put on the device.
    labels: integers [n], a class each, from 0.
    held_out: fronts for the evaluation, likewise. Those of a run are like
      their neighbours: take them of another run, or of epochs of their own.
    test_images: for the evaluation.
    test_labels: likewise.
    fit: how; default `PredictorFit()`.
    normalize: turns stored images into the model's inputs, a function that is
      kept (not made anew for each call, which compiles anew).
    directory: where to keep what is needed to go on, after every epoch; a run
      that was cut off goes on from there, to the bit, and one that is over
      does with more `num_epochs`, as if they had been asked for at first. All
      other settings must be the same, and all data are compared,
      by hashes; `normalize` and `model.apply` are functions and cannot be:
      give the same. On several processes, train on one.
    save_every: also keep it after every so many batches of samples.
    on_epoch: called with each evaluation, for instance to show progress.

  Returns:
    The best parameters, and every evaluation.

  Raises:
    ValueError: if an argument does not fit, or `directory` holds the state of
      another predictor, settings or data, or other arrays.
    FloatingPointError: when the loss is not finite any more. The state is not
      kept then.

  >>> from jdist import models, prediction
  >>> shape = {"input_shape": (2, 2, 1), "num_classes": 2}
  >>> model = models.build("mlp", **shape, hidden_sizes=(3,))
  >>> cut = prediction.cut(model, 1)
  >>> front = np.asarray(cut.flatten_front(model.params))
  >>> images = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 2, 2, 1)
  >>> labels = np.arange(8) % 2
  >>> fitted = fit_predictor(
  ...   prediction.predictor(cut), model, np.stack([front, 2 * front]),
  ...   images, labels, held_out=front[None],
  ...   test_images=images, test_labels=labels,
  ...   fit=PredictorFit(1, 2, images_per_batch=4, image_batches=2),
  ... )
  >>> [point.epoch for point in fitted.curve]
  [0, 1]

  References:
    MP², "prediction-result-based evaluation". Reconstruction: images are drawn
    without replacement for each batch of samples; one lambda for a mini-batch
    and all of its samples; the best epoch is that of the highest mean accuracy
    over held-out samples.
  """
  fit = PredictorFit() if fit is None else fit
  checks.check_type("fit", fit, PredictorFit, "a `PredictorFit` or None")
  checks.check_function(
    "on_epoch", on_epoch, "an evaluation, `Epoch`", optional=True
  )
  images, labels = np.asarray(images), np.asarray(labels)
  _evaluate.check_model(predictor, model)
  _evaluate.check_samples("samples", samples, predictor)
  _evaluate.check_samples("held_out", held_out, predictor)
  own, other = ("images", "labels"), ("test_images", "test_labels")
  _evaluate.check_images(own, images, labels, model, normalize)
  _evaluate.check_images(other, test_images, test_labels, model, normalize)
  num_batches = _check_sizes(fit, samples, images)
  if save_every is not None:
    checks.check_int("save_every", save_every, 1)
    if directory is None:
      raise ValueError(
        f"`save_every` must be left out without `directory`, got {save_every}. "
        "Name the directory that is to keep the state."
      )
  if directory is not None:
    array_files.refuse_others(directory, _FIT)

  def evaluate(params: PyTree) -> float:
    found = _evaluate.evaluate_predictor(
      predictor,
      params,
      model,
      held_out,
      test_images,
      test_labels,
      normalize=normalize,
      samples_per_batch=fit.samples_per_batch,
    )
    return float(found.mean())

  begin = _init(predictor, jax.random.key(fit.seed))
  state = {
    "params": begin,
    "optimizer": _optimizer(fit.learning_rate).init(begin),
  }
  about = {}
  if directory is not None:
    about = {
      "what": _FIT,
      "predictor": _saved_predictor.describe(predictor),
      "fit": dataclasses.asdict(fit),
      "data": hashes.fingerprints(
        samples=samples,
        images=images,
        labels=labels,
        held_out=held_out,
        test_images=test_images,
        test_labels=test_labels,
      ),
    }
  if directory is not None and array_files.is_there(directory):
    (state, best), body = _restored(
      directory, (state, begin), predictor, about, num_batches
    )
    done, losses = body["done"], body["losses"]
    curve = [Epoch(*point) for point in body["curve"]]
  else:
    # A copy, as updates reuse the memory of what they are given.
    best, done, losses = jax.tree.map(jnp.copy, begin), 0, []
    curve = [Epoch(0, evaluate(begin), None)]
    if on_epoch is not None:
      on_epoch(curve[0])
  train = _Training(predictor, model, fit, normalize, images, labels)
  while done < fit.num_epochs * num_batches:
    epoch, batch = divmod(done, num_batches)
    rows = _sample_rows(fit, len(samples), epoch, batch)
    state, loss = train.run(state, np.asarray(samples[rows]), done)
    if not math.isfinite(loss):
      raise FloatingPointError(
        f"The loss of epoch {epoch + 1} is {loss}. Lower `learning_rate`, now "
        f"{fit.learning_rate:g}, or leave out `samples` of a run that was "
        "about to diverge."
      )
    losses.append(loss)
    done += 1
    if batch + 1 == num_batches:
      accuracy = evaluate(state["params"])
      point = Epoch(epoch + 1, accuracy, float(np.mean(losses)))
      if accuracy > max(other.accuracy for other in curve):
        best = jax.tree.map(jnp.copy, state["params"])
      curve.append(point)
      losses = []
      if on_epoch is not None:
        on_epoch(point)
    due = save_every is not None and done % save_every == 0
    if directory is not None and (due or not losses):
      body = about | {"done": done, "losses": losses, "curve": curve}
      arrays = checks.named_leaves((state, best))
      array_files.save_arrays(directory, arrays, body)
  top = max(point.accuracy for point in curve)
  first = next(point for point in curve if point.accuracy == top)
  return FittedPredictor(best, first, tuple(curve))


@functools.partial(jax.jit, static_argnums=0)
def _init(predictor: _predictor.Predictor, key: jax.Array) -> PyTree:
  return predictor.init(key)


class _Training:
  """The updates with one batch of samples; compiled once."""

  def __init__(
    self,
    predictor: _predictor.Predictor,
    model: models.Model,
    fit: PredictorFit,
    normalize: _evaluate.Normalize,
    images: np.ndarray,
    labels: np.ndarray,
  ):
    self._fit = fit
    self._labels = labels
    self._on_device = jnp.asarray(images), jnp.asarray(labels)
    self._key = jax.random.key(fit.seed)
    self._update = functools.partial(
      _update, predictor, model, normalize, fit.learning_rate, fit.mixup
    )

  def run(
    self, state: PyTree, vectors: np.ndarray, number: int
  ) -> tuple[PyTree, float]:
    """The state after all updates, and their mean loss."""
    fit = self._fit
    size = fit.images_per_batch * fit.image_batches
    drawn = _permutation.balanced(self._labels, size, fit.seed, number)
    # Whatever the number of images, the program has the same inputs.
    parts = drawn.reshape(fit.image_batches, fit.images_per_batch)
    placed = jnp.asarray(vectors)
    losses = []
    for i, part in enumerate(parts):
      step = np.uint32(number * fit.image_batches + i)
      state, loss = self._update(
        state, placed, *self._on_device, part.astype(np.int32), self._key, step
      )
      losses.append(loss)
    return state, float(np.mean(jax.device_get(losses), dtype=np.float64))


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
  inputs = normalize(images[rows]).astype(jnp.float32)
  order, share = _mix(mixup, jax.random.fold_in(key, step), len(rows))
  inputs = share * inputs + (1 - share) * inputs[order]
  labels = labels[rows]

  def loss_of(params: PyTree) -> jax.Array:
    logits = _evaluate.logits_of(
      predictor, model, params, vectors, inputs, train=True
    )

    def loss(labels: jax.Array) -> jax.Array:
      every = jnp.broadcast_to(labels, logits.shape[:-1])
      cross_entropy = optax.softmax_cross_entropy_with_integer_labels
      return cross_entropy(logits, every).mean()

    return share * loss(labels) + (1 - share) * loss(labels[order])

  loss, gradients = jax.value_and_grad(loss_of)(state["params"])
  # Optax's Adam mixes floats with its integer count.
  with jax.numpy_dtype_promotion("standard"):
    updates, optimizer = _optimizer(learning_rate).update(
      gradients, state["optimizer"]
    )
  params = optax.apply_updates(state["params"], updates)
  return {"params": params, "optimizer": optimizer}, loss


def _mix(
  alpha: float, key: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
  """With which other image each is mixed, and its own share."""
  one, other = jax.random.split(key)
  order = jax.random.permutation(one, size)
  if alpha == 0:
    return order, jnp.float32(1)
  if alpha == 1:  # The same distribution, without its loops.
    return order, jax.random.uniform(other)
  return order, jax.random.beta(other, alpha, alpha)


def _optimizer(learning_rate: float) -> optax.GradientTransformation:
  return optax.adam(learning_rate)


def _sample_rows(
  fit: PredictorFit, num_samples: int, epoch: int, batch: int
) -> np.ndarray:
  """Which samples a batch has: one order of all for each epoch."""
  order = _permutation.permutation(num_samples, fit.seed, _SAMPLES_KEY, epoch)
  first = batch * fit.samples_per_batch
  return np.sort(
    order[np.arange(first, first + fit.samples_per_batch) % num_samples]
  )


def _check_sizes(
  fit: PredictorFit, samples: np.ndarray, images: np.ndarray
) -> int:
  """The number of sample batches in an epoch."""
  if fit.samples_per_batch > len(samples):
    raise ValueError(
      f"`samples_per_batch` must be at most {len(samples)}, the number of "
      f"samples, got {fit.samples_per_batch}."
    )
  needed = fit.images_per_batch * fit.image_batches
  if needed > len(images):
    raise ValueError(
      "`image_batches` times `images_per_batch` must be at most the number "
      f"of images, {len(images)}, got {needed}."
    )
  return fit.sample_batches or len(samples) // fit.samples_per_batch


def _restored(
  directory: str | os.PathLike[str],
  like: PyTree,
  predictor: _predictor.Predictor,
  about: dict[str, Any],
  num_batches: int,
) -> tuple[PyTree, dict[str, Any]]:
  arrays, body = array_files.load_arrays(directory, what=_FIT)
  _saved_predictor.refuse_other_predictor(body["predictor"], predictor)
  # How long it goes on changes nothing of what has been: neither the order of
  # anything nor the rate depends on the number of epochs.
  num_epochs = about["fit"]["num_epochs"]
  if body["fit"] | {"num_epochs": num_epochs} != about["fit"]:
    raise ValueError(
      "`directory` holds the state of a training with other fit, "
      f"{body['fit']}, got {about['fit']}. Take another directory, or the same "
      "settings."
    )
  hashes.refuse_other_data(body.get("data"), about["data"])
  if body["done"] > num_epochs * num_batches:
    raise ValueError(
      "`num_epochs` must be at least what `directory` has been trained for, "
      f"{body['done'] / num_batches:g}, got {num_epochs}. Take another "
      "directory, or as many epochs."
    )
  return array_files.tree_of(arrays, like), body
