"""Data sets by name, decoded once and cached."""

import numpy as np

from jdist import checks, signatures
from jdist.data import _cache, _catalog, _prepare, _records
from jdist.data._dataset import Dataset


@signatures.checked
def load(name: str, split: str = "train", *, download: bool = False) -> Dataset:
  """Loads one split of a data set into memory.

  "synthetic" is drawn by NumPy: ten random patterns under strong noise, equal
  on every machine. "digits" is a part of scikit-learn: 1,797 real handwritten
  digits; every fifth sample of each class is for testing. TensorFlow Datasets
  reads the others, without TensorFlow, from a copy prepared as array_record in
  `TFDS_DATA_DIR` (default ~/tensorflow_datasets). The first call decodes a set,
  which takes about 10 s per 50,000 small images, and caches the pixels in
  `JDIST_CACHE_DIR` (default `XDG_CACHE_HOME`/jdist, or ~/.cache/jdist).

  | name                   | images    | train     | test   | classes | memory |
  |------------------------|-----------|-----------|--------|---------|--------|
  | synthetic              | 8x8x1     | 2,000     | 500    | 10      | 0.2 MB |
  | digits                 | 8x8x1     | 1,442     | 355    | 10      | 0.1 MB |
  | mnist, fashion_mnist   | 28x28x1   | 60,000    | 10,000 | 10      | 55 MB  |
  | cifar10, cifar100      | 32x32x3   | 50,000    | 10,000 | 10, 100 | 184 MB |
  | imagenette             | 160x160x3 | 9,469     | 3,925  | 10      | 1.0 GB |
  | imagenet_resized/8x8   | 8x8x3     | 1,281,167 | 50,000 | 1,000   | 0.3 GB |
  | imagenet_resized/16x16 | 16x16x3   | 1,281,167 | 50,000 | 1,000   | 1.0 GB |
  | imagenet_resized/32x32 | 32x32x3   | 1,281,167 | 50,000 | 1,000   | 4.1 GB |
  | imagenet_resized/64x64 | 64x64x3   | 1,281,167 | 50,000 | 1,000   | 16 GB  |

  Memory is that of both splits. Photographs of Imagenette are scaled to a
  shorter side of 160 pixels, and their middle is taken. "test" is the
  validation split of sets that have no test split.

  Args:
    name: A name of the table; `load_text` reads texts.
    split: "train" (default) or "test".
    download: Whether to prepare a missing set first, see `prepare`, which needs
      a network and TensorFlow. Default False.

  Raises:
    ValueError: when the name or split is unknown.
    FileNotFoundError: when the set is not prepared; names the command.
    ImportError: when a package is missing; names what to install.

  >>> from jdist import data
  >>> digits = data.load("digits")
  >>> len(digits), digits.images.shape, digits.num_classes
  (1442, (1442, 8, 8, 1), 10)
  """
  source = _catalog.find(name, _catalog.NAMES)
  _catalog.check_split(split)
  if name == "digits":
    images, labels = _read_digits(split)
  elif name == "synthetic":
    images, labels = _draw(split)
  else:
    images, labels = _read_cached(name, split, download)
  mean, std = source.mean, source.std
  if mean is None or std is None:
    mean, std = _read_statistics(name)
  # Batches and selections are views of these arrays: a write would change the
  # data of all of them.
  images.setflags(write=False)
  labels.setflags(write=False)
  return Dataset(name, split, images, labels, source.num_classes, mean, std)


def _draw(split: str) -> tuple[np.ndarray, np.ndarray]:
  """Draws images: the pattern of a class under strong noise."""
  # Both splits have the patterns of one seed and noise of their own.
  patterns = np.random.default_rng(0).normal(size=(10, 8, 8))
  rng = np.random.default_rng([1, split == "test"])
  labels = rng.permutation(np.arange(2000 if split == "train" else 500) % 10)
  pixels = patterns[labels] + rng.normal(scale=2.7, size=(len(labels), 8, 8))
  images = np.clip(128 + 20 * pixels, 0, 255).astype(np.uint8)
  return images[..., None], labels.astype(np.int32)


def _read_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
  datasets = checks.import_extra("sklearn.datasets", "data")
  images, labels = datasets.load_digits(return_X_y=True)
  held_out = np.zeros(len(labels), bool)
  for k in range(10):
    held_out[np.flatnonzero(labels == k)[4::5]] = True
  chosen = held_out if split == "test" else ~held_out
  images = images[chosen].reshape(-1, 8, 8, 1).astype(np.uint8)
  return images, labels[chosen].astype(np.int32)


def _read_cached(
  name: str, split: str, download: bool
) -> tuple[np.ndarray, np.ndarray]:
  """Reads a set from the cache, or decodes it."""
  prepared = _prepare.require_prepared(name, download=download)
  source = _catalog.find(name)
  part = source.test_split if split == "test" else split
  images, labels = _cache.cached(
    _cache.path_of(name, prepared, split),
    ("images", "labels"),
    lambda: _records.decode(prepared, part, source.size),
  )
  return images, labels


def _read_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns mean and deviation of the train split, measured if missing."""
  prepared = _prepare.require_prepared(name)
  mean, std = _cache.cached(
    _cache.path_of(name, prepared, "statistics"),
    ("mean", "std"),
    lambda: _records.measure(_read_cached(name, "train", download=False)[0]),
  )
  return tuple(mean.tolist()), tuple(std.tolist())
