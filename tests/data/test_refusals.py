"""Refusals of data sets, their parts and batches: an argument and its rule."""

import jax
import numpy as np
import pytest

from jdist import data
from tests import _refusals

IMAGES = np.zeros((8, 3, 3, 1), np.uint8)
LABELS = np.zeros(8, np.int32)
FIELDS = {
  "name": "mine",
  "split": "train",
  "images": IMAGES,
  "labels": LABELS,
  "num_classes": 2,
  "mean": (0.0,),
  "std": (1.0,),
}
EIGHT = data.Dataset(**FIELDS)
NAN, INF = float("nan"), float("inf")


def dataset(**change):
  return data.Dataset(**(FIELDS | change))


def batches(**change):
  given = {"num_workers": 2, "batch_size": 2, "seed": 0}
  return data.Batches(EIGHT, **(given | change))


def evaluated(num_workers=2, batch_size=2):
  return data.evaluation_batches(EIGHT, num_workers, batch_size)


def stream(**options):
  return data.SampleStream(EIGHT, 4, seed=0, **options)


def parts(number=2, seed=0, labels=LABELS[:4], **options):
  return data.partition(labels, number, seed=seed, **options)


def windows(values):
  return data.TextDataset("mine", "train", np.asarray(values))


def by_label():
  text = windows(np.zeros((9, 5), int))
  return data.Batches(text, 4, 2, seed=0, alpha=0.1)


def crop(shape):
  return data.random_crop(2)(np.zeros(shape, np.uint8), jax.random.key(0))


def flip(shape):
  return data.random_flip()(np.zeros(shape, np.uint8), jax.random.key(0))


@_refusals.table(
  # Sets.
  ("name", lambda: data.load("imagenet"), "'digits', 'mnist', 'fashion_mnist'"),
  ("name", lambda: data.prepare("imagenet"), "be 'synthetic'"),
  ("split", lambda: data.load("digits", "validation"), "'train' or 'test'"),
  ("split", lambda: data.load("digits", "validation"), "hold back samples"),
  ("images", lambda: dataset(images=IMAGES[0]), "[n, height"),
  ("images", lambda: dataset(images=IMAGES[None]), "[n, height"),
  ("labels", lambda: dataset(labels=LABELS[:3]), "one class per"),
  ("labels", lambda: dataset(labels=LABELS * 1.0), "integers"),
  ("labels", lambda: dataset(labels=LABELS + 2), "0 .. 1, got 2"),
  ("labels", lambda: dataset(labels=LABELS - 1), "0 .. 1, got -1"),
  ("mean", lambda: dataset(mean=(0.0, 0.0)), "one finite number per"),
  ("mean", lambda: dataset(mean=(NAN,)), "one finite number per"),
  ("mean", lambda: dataset(mean=0.0), "a list of numbers"),
  ("std", lambda: dataset(std=(INF,)), "one finite number per"),
  ("images", lambda: dataset(images=IMAGES.tolist()), "an array, got a list"),
  ("labels", lambda: dataset(labels=[0] * 8), "an array, got [0"),
  ("num_classes", lambda: dataset(num_classes=2.5), "an int, got 2.5"),
  (
    "windows",
    lambda: data.TextDataset("mine", "train", [[0, 1]]),
    "an array, got [[0",
  ),
  ("std", lambda: dataset(std=(0.0,)), "positive"),
  (
    "std",
    lambda: dataset(images=IMAGES[..., :0], mean=(), std=()),
    "positive, got ()",
  ),
  ("windows", lambda: windows([[0], [0]]), "a length of at least 1"),
  ("windows", lambda: windows([0, 0, 0, 0]), "got shape (4,)"),
  ("windows", lambda: windows(np.zeros((2, 3))), "integers"),
  ("windows", lambda: windows(np.full((2, 3), 256)), "0 .. 255, got 256"),
  ("windows", lambda: windows(np.full((2, 3), -1)), "0 .. 255, got -1"),
  ("source", lambda: data.load_text("shakespeare"), "tiny_shakespeare, or"),
  ("source", lambda: data.load_text("."), "or a file, got '.'"),
  # Parts.
  *(
    ("alpha", lambda x=x: parts(alpha=x), rule)
    for x, rule in (
      (0, "in (0, inf]"),
      (-1.0, "in (0, inf]"),
      (NAN, "finite"),
      (INF, "finite"),
    )
  ),
  *(
    ("num_workers", lambda x=x: parts(x), "an int from 1 to 4")
    for x in (0, -1, 5)
  ),
  *(("seed", lambda x=x: parts(seed=x), "an int") for x in (-1, 0.5, "0")),
  ("labels", lambda: parts(labels=LABELS.reshape(4, 2)), "one axis"),
  # Batches.
  ("num_workers", lambda: batches(num_workers=0), "1 to 8"),
  ("num_workers", lambda: batches(num_workers=9), "1 to 8"),
  ("batch_size", lambda: batches(batch_size=0), "an int from 1"),
  ("batch_size", lambda: batches(batch_size=2**40), "to 2147483647, got"),
  ("seed", lambda: batches(seed=-1), "an int >= 0"),
  ("alpha", lambda: batches(alpha=0.0), "in (0, inf]"),
  ("alpha", by_label, "None for a text"),
  ("worker_ids", lambda: batches(worker_ids=[]), "one or more"),
  ("worker_ids", lambda: batches(worker_ids=[2]), "0 .. 1"),
  ("worker_ids", lambda: batches(worker_ids=[-1]), "0 .. 1"),
  ("worker_ids", lambda: batches(worker_ids=[1, 1]), "each once"),
  ("start_step", lambda: batches().iterate(-1), "an int >= 0"),
  ("num_workers", lambda: evaluated(0), "an int >= 1"),
  ("batch_size", lambda: evaluated(2, 0), "an int from 1"),
  ("batch_size", lambda: evaluated(2, 2**40), "to 2147483647, got"),
  ("size", lambda: stream().batch(0, 0, 4, size=3), "an int from 4"),
  ("size", lambda: stream().batch(0, 0, 4, size=2**40), "to 2147483647, got"),
  ("count", lambda: stream().indices(0, 5, 0), "to 2147483647, got 0"),
  ("count", lambda: stream().indices(0, 5, 2**40), "to 2147483647, got 1"),
  ("count", lambda: stream().indices(0, 5, -3), "to 2147483647, got -3"),
  ("count", lambda: stream().batch(0, 0, 0, size=4), "2147483647, got 0"),
  ("alpha", lambda: stream(alpha=0.0), "in (0, inf]"),
  # Augmentations.
  ("images", lambda: crop((8, 8, 1)), "[batch, height"),
  ("images", lambda: flip((2, 2, 8, 8, 1)), "[batch, height"),
  ("padding", lambda: data.random_crop(0), "an int >= 1"),
  *(
    ("probability", lambda x=x: data.random_flip(x), rule)
    for x, rule in ((-0.1, "in [0, 1]"), (1.1, "in [0, 1]"), (NAN, "finite"))
  ),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


@pytest.mark.parametrize(
  ("argument", "call"),
  [
    ("step", lambda: batches()[-1]),
    ("worker", lambda: stream().indices(4, 0, 1)),
    ("worker", lambda: stream().indices(-1, 0, 1)),
    ("start", lambda: stream().indices(0, -1, 1)),
  ],
)
def test_positions_out_of_range_raise_index_errors(argument, call):
  _refusals.check(argument, call, "must", IndexError)
