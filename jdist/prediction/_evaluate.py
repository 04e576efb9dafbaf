"""The accuracy of networks with sampled fronts and predicted rears."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, models, signatures
from jdist.prediction import _cut, _predictor
from jdist.states import PyTree

# Samples are checked in parts of this many bytes, as they may be on a disk.
_PART = 1 << 24
Normalize = Callable[[jax.Array], jax.Array]


def as_they_are(images: jax.Array) -> jax.Array:
  """Returns images as they are stored."""
  return images


def logits_of(
  predictor: _predictor.Predictor,
  model: models.Model,
  params: PyTree,
  vectors: jax.Array,
  images: jax.Array,
  *,
  train: bool,
) -> jax.Array:
  """Returns the logits of networks with flat fronts, [samples, n, classes]."""

  def one(vector: jax.Array) -> jax.Array:
    front = predictor.cut.unflatten_front(vector)
    rear = predictor.apply_vector(params, vector)
    whole = predictor.cut.join(front, rear)
    logits, _ = model.apply(whole, model.state, images, train=train)
    return logits.astype(jnp.float32)

  if jax.default_backend() != "cpu":
    return jax.vmap(one)(vectors)
  # Under `vmap` convolutions with a kernel for each sample become one grouped
  # convolution, for which XLA has no fast kernel on CPUs: the gradient of eight
  # LeNets took 16 times as long (3 times in a loop that is not unrolled).
  _, found = jax.lax.scan(
    lambda _, x: (None, one(x)), None, vectors,
    unroll=min(len(vectors), 8),
  )  # fmt: skip
  return found


@signatures.checked
def evaluate_predictor(
  predictor: _predictor.Predictor,
  params: PyTree,
  model: models.Model,
  samples: np.ndarray,
  images: Any,
  labels: Any,
  *,
  normalize: Normalize = as_they_are,
  samples_per_batch: signatures.PositiveInt = 25,
  images_per_batch: signatures.PositiveInt = 500,
) -> np.ndarray:
  """Measures the accuracy of the networks that a predictor completes.

  This is the paper's "prediction-result-based evaluation".

  Args:
    predictor: The predictor of the network's cut.
    params: The parameters of the predictor.
    model: The network, without batch statistics.
    samples: Fronts, float32 [samples, num_front], for instance
      `ParameterSet.fronts`.
    images: Images [n, ...], as stored.
    labels: The classes of the images, integers [n] from 0.
    normalize: A function from stored images to the model's inputs.
    samples_per_batch: The number of networks that run at once.
    images_per_batch: The number of images that they see at once.

  Returns:
    The accuracy of each network, float64 [samples].
  """
  check_model(predictor, model)
  check_samples("samples", samples, predictor)
  check_images(("images", "labels"), images, labels, model, normalize)
  images, labels = np.asarray(images), np.asarray(labels)
  # Samples and images are cut into parts of one size, with padding that the
  # mask removes, so that a single program is compiled.
  hits = np.zeros(len(samples))
  for first in range(0, len(samples), samples_per_batch):
    part = hits[first : first + samples_per_batch]
    vectors = _padded(
      samples[first : first + samples_per_batch],
      min(samples_per_batch, len(samples)),
    )
    for start in range(0, len(images), images_per_batch):
      stop = start + images_per_batch
      size = min(images_per_batch, len(images))
      found = _hits(
        predictor, model, normalize, params, vectors,
        _padded(images[start:stop], size), _padded(labels[start:stop], size),
        np.arange(start, start + size) < len(images),
      )  # fmt: skip
      part += np.asarray(found)[: len(part)]
  return hits / len(images)


# A program is compiled for each triple; equal predictors share it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _hits(
  predictor: _predictor.Predictor,
  model: models.Model,
  normalize: Normalize,
  params: PyTree,
  vectors: jax.Array,
  images: jax.Array,
  labels: jax.Array,
  mask: jax.Array,
) -> jax.Array:
  inputs = normalize(images).astype(jnp.float32)
  logits = logits_of(predictor, model, params, vectors, inputs, train=False)
  # `argmax` returns the place of a NaN, which must not count as a class.
  known = ~jnp.isnan(logits).any(-1)
  right = (jnp.argmax(logits, -1) == labels) & known & mask
  return jnp.sum(right, -1, dtype=jnp.float32)


def _padded(x: np.ndarray, size: int) -> np.ndarray:
  """Repeats the last row up to a size, so that one program fits all parts."""
  short = size - len(x)
  return np.concatenate([x, np.repeat(x[-1:], short, 0)]) if short else x


def check_model(predictor: _predictor.Predictor, model: models.Model) -> None:
  """Raises a ValueError unless a predictor fits a network."""
  if jax.tree.leaves(model.state):
    raise ValueError(
      "`model` must have no state, as batch statistics are neither sent nor "
      f'predicted, got {model!r} with some. Build it with norm="none" or '
      'norm="group".'
    )
  # The predictor may have been loaded: its cut must be that of this network.
  mine = _cut.cut(model, len(predictor.cut.front), name="the model")
  _cut.refuse_other_cut("model", mine, predictor.cut)


def check_samples(
  argument: str, samples: Any, predictor: _predictor.Predictor
) -> None:
  """Raises a ValueError unless samples are finite fronts."""
  num_front = predictor.cut.num_front
  shape: tuple[int, ...] = getattr(samples, "shape", ())
  dtype = getattr(samples, "dtype", np.dtype(object))
  fits = len(shape) == 2 and shape[0] and shape[1] == num_front
  if not (fits and jnp.issubdtype(dtype, jnp.floating)):
    raise ValueError(
      f"`{argument}` must be [samples, {num_front}] with at least one sample, "
      f"an array of floats, as the fronts of {predictor.cut!r}, got "
      f"{checks.show(samples)}. Take `ParameterSet.fronts` of this cut."
    )
  _check_finite(argument, samples)


def check_images(
  names: tuple[str, str],
  images: Any,
  labels: Any,
  model: models.Model,
  normalize: Normalize,
) -> None:
  """Raises a ValueError unless images, labels and model fit each other."""
  own, other = names
  checks.check_function("normalize", normalize, "images as stored", 1)
  images, labels = np.asarray(images), np.asarray(labels)
  if not images.ndim or not len(images):
    raise ValueError(
      f"`{own}` must hold at least one image, got {checks.show(images)}."
    )
  if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
    raise ValueError(
      f"`{other}` must be integers [images], the class of each, got "
      f"{checks.show(labels)}. For one-hot labels pass `labels.argmax(-1)`."
    )
  if len(labels) != len(images):
    raise ValueError(
      f"`{other}` must have one label for each of `{own}`, got {len(labels)} "
      f"for {len(images)}. Take both from the same split."
    )

  def logits(params: PyTree, images: jax.Array) -> jax.Array:
    inputs = normalize(images).astype(jnp.float32)
    return model.apply(params, model.state, inputs, train=False)[0]

  # Newer JAX warns about a shape in float64, which the device cannot hold.
  dtype = jax.dtypes.canonicalize_dtype(images.dtype)
  one = jax.ShapeDtypeStruct((1, *images.shape[1:]), dtype)
  try:
    num_classes = jax.eval_shape(logits, model.params, one).shape[-1]
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"`{own}` must be images that `normalize` makes inputs of the model, got "
      f"{checks.show(images)}: {error}"
    ) from error
  # JAX does not report an index out of range.
  low, high = int(labels.min()), int(labels.max())
  if low < 0 or high >= num_classes:
    raise ValueError(
      f"`{other}` must be from 0 to {num_classes - 1}, as the model has "
      f"{num_classes} classes, got {low} to {high}. Count classes from 0, or "
      "build the model with more."
    )
  _check_finite(own, images)


def _check_finite(name: str, array: Any) -> None:
  """Raises a ValueError that names the first row with a NaN or an infinity."""
  array = np.asarray(array)
  if not jnp.issubdtype(array.dtype, jnp.inexact) or not array.size:
    return
  rows = max(_PART // array[:1].nbytes, 1)
  for first in range(0, len(array), rows):
    good = np.isfinite(array[first : first + rows])
    good = good.reshape(len(good), -1).all(1)
    if not good.all():
      raise ValueError(
        f"`{name}` must be finite, but row {first + int(np.argmin(good))} "
        "holds a NaN or an infinity. Leave such rows out; those of parameters "
        "are of a run that has diverged."
      )
