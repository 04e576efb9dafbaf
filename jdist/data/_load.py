"""Data sets by name, decoded once and kept."""

import os
import pathlib
import tempfile
import zipfile
from typing import Any

import numpy as np

from jdist import checks
from jdist.data import _catalog, _prepare, _records
from jdist.data._dataset import Dataset


def load(name: str, split: str = "train", *, download: bool = False) -> Dataset:
  """Loads one split of a data set into memory.

  "digits" comes with scikit-learn: 1,797 real handwritten digits; of each class
  every fifth sample is for testing. The others are read by TensorFlow Datasets,
  without TensorFlow, from a copy prepared as array_record in `TFDS_DATA_DIR`
  (default ~/tensorflow_datasets). Reading one for the first time decodes it,
  about 10 s per 50,000 small images, and leaves the pixels in `JDIST_CACHE_DIR`
  (default `XDG_CACHE_HOME`/jdist, or ~/.cache/jdist).

  | name                   | images    | train     | test   | classes | memory |
  |------------------------|-----------|-----------|--------|---------|--------|
  | digits                 | 8x8x1     | 1,442     | 355    | 10      | 0.1 MB |
  | mnist, fashion_mnist   | 28x28x1   | 60,000    | 10,000 | 10      | 55 MB  |
  | cifar10, cifar100      | 32x32x3   | 50,000    | 10,000 | 10, 100 | 184 MB |
  | imagenette             | 160x160x3 | 9,469     | 3,925  | 10      | 1.0 GB |
  | imagenet_resized/8x8   | 8x8x3     | 1,281,167 | 50,000 | 1,000   | 0.3 GB |
  | imagenet_resized/16x16 | 16x16x3   | 1,281,167 | 50,000 | 1,000   | 1.0 GB |
  | imagenet_resized/32x32 | 32x32x3   | 1,281,167 | 50,000 | 1,000   | 4.1 GB |
  | imagenet_resized/64x64 | 64x64x3   | 1,281,167 | 50,000 | 1,000   | 16 GB  |

  Memory is that of both splits. Of Imagenette, scaled to a shorter side of 160
  pixels, the middle is taken. Where TensorFlow Datasets has a validation split
  instead of a test split, that is "test".

  Args:
    name: of the table.
    split: "train" (default) or "test".
    download: prepare the set first if it is not there, see `prepare`; needs a
      network and TensorFlow. Default False.

  Raises:
    ValueError: if there is no such set or split.
    FileNotFoundError: if the set is not prepared; says what to run.
    ImportError: if what reads it is not installed; says what to install.

  >>> from jdist import data
  >>> digits = data.load("digits")
  >>> len(digits), digits.images.shape, digits.num_classes
  (1442, (1442, 8, 8, 1), 10)
  """
  source = _catalog.find(name)
  if split not in _catalog.SPLITS:
    raise ValueError(
      f'`split` must be "train" or "test", got {split!r}. To validate, hold '
      "back samples of train by index."
    )
  if name == "digits":
    images, labels = _read_digits(split)
  else:
    images, labels = _read_cached(name, split, download)
  mean, std = source.mean, source.std
  if mean is None or std is None:
    mean, std = _read_statistics(name)
  # One copy serves all who ask; nobody may write into it.
  images.setflags(write=False)
  labels.setflags(write=False)
  return Dataset(
    name=name,
    split=split,
    images=images,
    labels=labels,
    num_classes=source.num_classes,
    mean=mean,
    std=std,
  )


def cache_dir() -> pathlib.Path:
  """Returns the folder in which decoded sets are kept."""
  if given := os.environ.get("JDIST_CACHE_DIR"):
    return pathlib.Path(given).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(base).expanduser() / "jdist"


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
  """Reads a set from the decoded copy, which is made where it is missing."""
  prepared = _prepared(name, download)
  path = _cache_path(name, prepared, split)
  if (found := _read(path, "images", "labels")) is not None:
    return found
  source = _catalog.find(name)
  images, labels = _records.decode(
    prepared, source.test_split if split == "test" else split, source.size
  )
  _write(path, images=images, labels=labels)
  return images, labels


def _read_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Returns mean and deviation of the train split, measured if missing."""
  path = _cache_path(name, _prepared(name), "statistics")
  found = _read(path, "mean", "std")
  if found is None:
    images, _ = _read_cached(name, "train", download=False)
    found = _records.measure(images)
    _write(path, mean=found[0], std=found[1])
  return tuple(found[0].tolist()), tuple(found[1].tolist())


def _read(
  path: pathlib.Path, one: str, other: str
) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns two arrays of the cache; None where it is missing or damaged."""
  try:
    with open(path, "rb") as file, np.load(file) as arrays:
      return arrays[one], arrays[other]
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    return None


def _prepared(name: str, download: bool = False) -> pathlib.Path:
  """Returns the prepared copy of a set, made first if `download`."""
  tfds_name = _catalog.find(name).tfds_name
  prepared = _prepare.find_prepared(tfds_name)
  if prepared is None and download:
    _prepare.prepare(name)
    prepared = _prepare.find_prepared(tfds_name)
  if prepared is None:
    raise FileNotFoundError(_how_to_prepare(name))
  return prepared


def _cache_path(name: str, prepared: pathlib.Path, what: str) -> pathlib.Path:
  flat = name.replace("/", "-")
  return cache_dir() / f"{flat}-{prepared.name}-{what}.npz"


def _how_to_prepare(name: str) -> str:
  folder = _catalog.find(name).tfds_name
  message = (
    f"`name`: the data set {name!r} is not prepared as array_record in "
    f"{_prepare.tfds_dir()}. On a machine with a network, run:\n"
    '  pip install tensorflow "jdist[data]"\n'
    f"  python -m jdist.data prepare {name}\n"
    f"or copy the folder {folder} from where it is prepared, or let "
    "TFDS_DATA_DIR name the folder that holds it."
  )
  if any((_prepare.tfds_dir() / folder).glob("*/dataset_info.json")):
    message += (
      " There is a copy in another format, which only TensorFlow can read; "
      "keep one folder per format."
    )
  return message


def _write(path: pathlib.Path, **arrays: Any) -> None:
  """Writes the cache in one move, so that no reader sees half of it.

  A cache that cannot be written (a full disk, a read-only home) costs the
  next run some seconds; it must not end this one.
  """
  temporary = None
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
      dir=path.parent, prefix=path.name, suffix=".partial", delete=False
    ) as file:
      temporary = file.name
      np.savez(file, **arrays)
    # Temporary files are for their owner only; a cache may be shared.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
  except OSError:
    if temporary is not None:
      pathlib.Path(temporary).unlink(missing_ok=True)
