"""Data sets by name, decoded once and kept."""

import dataclasses
import io
import json
import os
import pathlib
import re
import tempfile
import zipfile

import numpy as np

from jdist.data import _optional
from jdist.data._dataset import Dataset


@dataclasses.dataclass(frozen=True)
class _Facts:
  """What is known of a set before it is read."""

  num_classes: int
  # Over all pixels of the train split, in raw units; a test computes them
  # again from the data.
  mean: tuple[float, ...]
  std: tuple[float, ...]


_FACTS = {
  "digits": _Facts(10, (4.882173,), (6.018521,)),
  "mnist": _Facts(10, (33.31842,), (78.56749,)),
  "cifar10": _Facts(
    10, (125.3069, 122.9504, 113.8654), (62.99322, 62.08871, 66.70490)
  ),
  "cifar100": _Facts(
    100, (129.3042, 124.0700, 112.4341), (68.17024, 65.39181, 70.41837)
  ),
}

NAMES = tuple(_FACTS)
SPLITS = ("train", "test")


def load(name: str, split: str = "train", *, download: bool = False) -> Dataset:
  """Loads one split of a data set into memory.

  "digits" comes with scikit-learn: 1,797 real handwritten digits, 8x8x1 with
  pixels 0 .. 16; of each class every fifth sample, in their order, is for
  testing. The others are read by TensorFlow Datasets, without TensorFlow,
  from a copy prepared as array_record in `TFDS_DATA_DIR` (default
  ~/tensorflow_datasets). Reading one for the first time decodes it, about
  10 s, and leaves the pixels in `JDIST_CACHE_DIR` (default
  `XDG_CACHE_HOME`/jdist, or ~/.cache/jdist), from where it takes 0.3 s.

  Args:
    name: "digits", "mnist", "cifar10" or "cifar100".
    split: "train" (default) or "test".
    download: prepare the set first if it is not there, see `prepare`; needs a
      network and TensorFlow. Default False.

  Returns:
    The split.

  Raises:
    ValueError: if there is no such set or split.
    FileNotFoundError: if the set is not prepared; says what to run.
    ImportError: if what reads it is not installed; says what to install.

  >>> from jdist import data
  >>> digits = data.load("digits")
  >>> len(digits), digits.images.shape, digits.num_classes
  (1442, (1442, 8, 8, 1), 10)
  """
  check_name(name)
  if split not in SPLITS:
    raise ValueError(
      f'`split` must be "train" or "test", got {split!r}. To validate, hold '
      "back samples of train by index."
    )
  if name == "digits":
    images, labels = _read_digits(split)
  else:
    images, labels = _read_cached(name, split, download)
  # One copy serves all who ask; nobody may write into it.
  images.setflags(write=False)
  labels.setflags(write=False)
  return Dataset(
    name=name,
    split=split,
    images=images,
    labels=labels,
    **dataclasses.asdict(_FACTS[name]),
  )


def check_name(name: str) -> None:
  """Raises a ValueError unless `name` is a data set."""
  if name not in NAMES:
    raise ValueError(
      f"`name` must be one of {', '.join(NAMES)}, got {name!r}. For data of "
      "your own make a `jdist.data.Dataset`."
    )


def tfds_dir() -> pathlib.Path:
  """The folder in which TensorFlow Datasets keeps prepared sets."""
  # As in tfds.core.constants, without its import.
  given = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  return pathlib.Path(given).expanduser()


def cache_dir() -> pathlib.Path:
  """The folder in which decoded sets are kept."""
  if given := os.environ.get("JDIST_CACHE_DIR"):
    return pathlib.Path(given).expanduser()
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  return pathlib.Path(base).expanduser() / "jdist"


def find_prepared(name: str) -> pathlib.Path | None:
  """Finds the newest array_record copy of a set, looking only at the disk.

  TensorFlow Datasets itself would try to download what it does not find, for
  minutes where there is no network.
  """
  found = []
  for info in (tfds_dir() / name).glob("*/dataset_info.json"):
    version = info.parent.name
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
      continue
    if json.loads(info.read_text()).get("fileFormat") == "array_record":
      found.append(([int(part) for part in version.split(".")], info.parent))
  return max(found)[1] if found else None


def _read_digits(split: str) -> tuple[np.ndarray, np.ndarray]:
  datasets = _optional.import_optional("sklearn.datasets", "scikit-learn")
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
  prepared = find_prepared(name)
  if prepared is None and download:
    # Imported here as preparing looks for prepared copies here.
    from jdist.data import _preparing

    _preparing.prepare(name)
    prepared = find_prepared(name)
  if prepared is None:
    raise FileNotFoundError(_how_to_prepare(name))
  path = cache_dir() / f"{name}-{prepared.name}-{split}.npz"
  try:
    with open(path, "rb") as file, np.load(file) as arrays:
      return arrays["images"], arrays["labels"]
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
    # Not there yet; or cut short or damaged, which the checksums in the file
    # tell: what it is made from is still there.
    pass
  images, labels = _decode(prepared, split)
  _write(path, images, labels)
  return images, labels


def _how_to_prepare(name: str) -> str:
  message = (
    f"`name`: the data set {name!r} is not prepared as array_record in "
    f"{tfds_dir()}. On a machine with a network, run:\n"
    '  pip install tensorflow "jdist[data]"\n'
    f"  python -m jdist.data prepare {name}\n"
    f"or copy the folder {name} from where it is prepared, or let "
    "TFDS_DATA_DIR name the folder that holds it."
  )
  if any((tfds_dir() / name).glob("*/dataset_info.json")):
    message += (
      " There is a copy in another format, which only TensorFlow can read; "
      "keep one folder per format."
    )
  return message


def _decode(
  prepared: pathlib.Path, split: str
) -> tuple[np.ndarray, np.ndarray]:
  """Decodes all records of a split, in their order."""
  tfds = _optional.import_optional("tensorflow_datasets", "tensorflow-datasets")
  pil = _optional.import_optional("PIL.Image", "pillow")
  _optional.import_optional("array_record", "array_record")
  builder = tfds.builder_from_directory(prepared)
  # Decoding here and not there saves a third of the time, and a warning about
  # OpenCV. Threads do not help with images this small: 2 took as long as 1.
  source = builder.as_data_source(
    split=split, decoders={"image": tfds.decode.SkipDecoding()}
  )
  shape = builder.info.features["image"].shape
  images = np.empty((len(source), *shape), np.uint8)
  labels = np.empty(len(source), np.int32)
  chunk = 1000
  for start in range(0, len(source), chunk):
    rows = range(start, min(start + chunk, len(source)))
    for row, record in zip(rows, source.__getitems__(rows), strict=True):
      with pil.open(io.BytesIO(record["image"])) as image:
        images[row] = np.asarray(image).reshape(shape)
      labels[row] = record["label"]
  return images, labels


def _write(path: pathlib.Path, images: np.ndarray, labels: np.ndarray) -> None:
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
      np.savez(file, images=images, labels=labels)
    # Temporary files are for their owner only; a cache may be shared.
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
  except OSError:
    if temporary is not None:
      pathlib.Path(temporary).unlink(missing_ok=True)
