"""A predictor of a tiny network, and its training on real digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import prediction
from tests.prediction import _tiny

FIT = prediction.PredictorFit(
  num_epochs=2,
  samples_per_batch=4,
  sample_batches=2,
  images_per_batch=20,
  image_batches=3,
  learning_rate=3e-3,
)


@functools.cache
def fronts(num_samples, seed=0):
  """Fronts near one another, as those of a run are."""
  cut = _tiny.cut()
  rng = np.random.default_rng(seed)
  around = np.asarray(cut.flatten_front(_tiny.model().params))
  noise = rng.standard_normal((num_samples, cut.num_front))
  return (around + 0.01 * noise).astype(np.float32)


model = functools.cache(_tiny.model)


@functools.cache
def predictor(**kwargs):
  return prediction.predictor(_tiny.cut(), **kwargs)


def completed(params, vector):
  """Returns a network with a flat front and its predicted rear."""
  cut = predictor().cut
  rear = predictor().apply_vector(params, vector)
  return cut.join(cut.unflatten_front(vector), rear)


def normalize(images):
  return images.astype(jnp.float32) / 16


def fit_predictor(fit=FIT, of=None, **kwargs):
  train, test = _tiny.digits("train"), _tiny.digits("test")
  given = {
    "samples": fronts(8),
    "images": train.images,
    "labels": train.labels,
    "held_out": fronts(3, seed=1),
    "test_images": test.images,
    "test_labels": test.labels,
    "normalize": normalize,
    "fit": fit,
  }
  return prediction.fit_predictor(
    predictor() if of is None else of, model(), **(given | kwargs)
  )


def assert_same_bits(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
