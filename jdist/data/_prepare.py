"""The known data sets, as TensorFlow Datasets has prepared them on a disk."""

import dataclasses
import functools
import importlib.util
import io
import json
import os
import pathlib
import re
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from jdist import checks

SPLITS = ("train", "test")
_REMEDY = "To validate, hold back samples of train by index."
Split = Annotated[
  str, functools.partial(checks.check_choice, choices=SPLITS, remedy=_REMEDY)
]
_CHUNK = 1000


@dataclasses.dataclass(frozen=True)
class Source:
  """A data set, and its place in TensorFlow Datasets.

  Mean and deviation of each channel are measured when the set is decoded, and
  cached with it, if they are None.
  """

  num_classes: int
  tfds_name: str = ""
  # One file of the download, which shows whether the server answers.
  url: str = ""
  test_split: str = "test"
  mean: Sequence[float] | None = None
  std: Sequence[float] | None = None
  # Images of different sizes are cropped to this one.
  size: int | None = None


# Every data set by its name: a `Source`, or a function of the split.
DATASETS: dict[str, Any] = {
  name: Source(**table)
  for name, table in tomllib.loads(
    (pathlib.Path(__file__).parent / "sources.toml").read_text()
  ).items()
}
TEXT_NAMES = ("tiny_shakespeare",)  # The texts among them.


def find(name: str, *, images: bool = False) -> Any:
  """Returns the entry of a set; raises a ValueError for an unknown name."""
  names = (x for x in DATASETS if not images or x not in TEXT_NAMES)
  remedy = "Or a folder of images, or a file .npz, .npy or .parquet."
  if name in TEXT_NAMES:
    remedy = "It is a text, which `jdist.data.load_text` reads."
  checks.check_choice("name", name, tuple(names), remedy)
  return DATASETS[name]


def tfds_dir() -> pathlib.Path:
  """Returns the folder in which TensorFlow Datasets keeps prepared sets."""
  # The rule of tfds.core.constants; importing it takes seconds.
  given = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
  return pathlib.Path(given).expanduser()


def find_prepared(name: str) -> pathlib.Path | None:
  """Finds the newest array_record copy of a set by its TFDS name."""
  # TensorFlow Datasets itself would try for minutes to reach a server.
  found = []
  for info in (tfds_dir() / name).glob("*/dataset_info.json"):
    version = info.parent.name
    # An interrupted preparation leaves a folder called "3.0.1.incompleteABC".
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
      continue
    # Only TensorFlow reads the other formats.
    if json.loads(info.read_text()).get("fileFormat") == "array_record":
      found.append(([int(part) for part in version.split(".")], info.parent))
  return max(found)[1] if found else None


def prepare(name: str) -> None:
  """Downloads a data set and prepares it as array_record.

  A set that is prepared, or that needs no preparation (digits), is left as it
  is.  Preparation needs TensorFlow (about 1.3 GB), and reading does not. The
  command is `python -m jdist.data prepare NAME`.

  Args:
    name: A name of `load` or `load_text`.

  Raises:
    ConnectionError: If the server does not answer within seconds.
  """
  source = find(name)
  if not source.tfds_name or find_prepared(source.tfds_name):
    return
  tfds = checks.import_extra("tensorflow_datasets", "data")
  if importlib.util.find_spec("tensorflow") is None:
    raise ImportError(
      f"Preparing {name!r} needs TensorFlow (reading it afterwards does not), "
      "which is not installed. Install it with: "
      'pip install tensorflow ".[data]" in the clone of jdist'
    )
  _check_reachable(name, source)
  builder = tfds.builder(
    source.tfds_name, data_dir=tfds_dir(), file_format="array_record"
  )
  builder.download_and_prepare(file_format="array_record")


def require_prepared(name: str, *, download: bool = False) -> pathlib.Path:
  """Returns the prepared copy of a set; with `download` it is made first."""
  tfds_name = find(name).tfds_name
  prepared = find_prepared(tfds_name)
  if prepared is None and download:
    prepare(name)
    prepared = find_prepared(tfds_name)
  if prepared is None:
    raise FileNotFoundError(_how_to_prepare(name))
  return prepared


def _how_to_prepare(name: str) -> str:
  folder = find(name).tfds_name
  message = (
    f"`name`: the data set {name!r} is not prepared as array_record in "
    f"{tfds_dir()}. On a machine with a network, in the clone of "
    'jdist, run:\n  pip install tensorflow ".[data]" &&\n'
    f"  python -m jdist.data prepare {name}\n"
    f"or copy the folder {folder} from where it is prepared, or let "
    "TFDS_DATA_DIR name the folder that holds it."
  )
  if any((tfds_dir() / folder).glob("*/dataset_info.json")):
    message += (
      " There is a copy in another format, which only TensorFlow can read; "
      "keep one folder per format."
    )
  return message


def _check_reachable(name: str, source: Source) -> None:
  request = urllib.request.Request(source.url, method="HEAD")
  try:
    # TensorFlow Datasets would retry for minutes before it gives up.
    with urllib.request.urlopen(request, timeout=10.0):
      pass
  except urllib.error.HTTPError:
    # The server is reachable; TensorFlow Datasets reports missing files.
    pass
  except OSError as error:
    raise ConnectionError(
      f"The data set {name!r} cannot be downloaded: {source.url} did not "
      f"answer ({error}). Prepare it where there is a network, with "
      f"`python -m jdist.data prepare {name}`, and copy its folder to "
      f"{tfds_dir() / source.tfds_name}."
    ) from error


def decode(
  prepared: pathlib.Path, split: str, size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Decodes all records of a split to uint8 pixels and int32 labels, in order.

  Images of different sizes are scaled until the shorter side is `size`, and
  their middle is taken.
  """
  tfds = checks.import_extra("tensorflow_datasets", "data")
  pil = checks.import_extra("PIL.Image", "data")
  checks.import_extra("array_record", "data")
  builder = tfds.builder_from_directory(prepared)
  # Decoding by Pillow saves a third of the time that TensorFlow Datasets needs,
  # and a warning about OpenCV.  Two threads took as long as one: the images are
  # small.
  source = builder.as_data_source(
    split=split, decoders={"image": tfds.decode.SkipDecoding()}
  )
  shape = builder.info.features["image"].shape
  if size is not None:
    shape = (size, size, shape[-1])
  # The arrays are allocated once: a list of images would double the memory.
  images = np.empty((len(source), *shape), np.uint8)
  labels = np.empty(len(source), np.int32)
  for start in range(0, len(source), _CHUNK):
    rows = range(start, min(start + _CHUNK, len(source)))
    for row, record in zip(rows, source.__getitems__(rows), strict=True):
      with pil.open(io.BytesIO(record["image"])) as image:
        images[row] = pixels(image, shape, size)
      labels[row] = record["label"]
  return images, labels


def decode_text(prepared: pathlib.Path, split: str) -> np.ndarray:
  """Returns the bytes of all records of a split of a text, uint8 [n]."""
  tfds = checks.import_extra("tensorflow_datasets", "data")
  checks.import_extra("array_record", "data")
  source = tfds.builder_from_directory(prepared).as_data_source(split=split)
  texts = [bytes(source[i]["text"]) for i in range(len(source))]
  return np.frombuffer(b"".join(texts), np.uint8)


def pixels(image: Any, shape: tuple[int, ...], size: int | None) -> np.ndarray:
  """Returns an image as an array of a shape, scaled and cropped to a size."""
  # Some photographs are grayscale or CMYK.
  if shape[-1] == 3 and image.mode != "RGB":
    image = image.convert("RGB")
  if size is not None:
    # Rounding must not make the shorter side less than the crop.
    scale = size / min(image.size)
    if scale != 1:
      image = image.resize([max(size, round(n * scale)) for n in image.size])
    left, top = ((n - size) // 2 for n in image.size)
    image = image.crop((left, top, left + size, top + size))
  return np.asarray(image).reshape(shape)


def measure(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns mean and standard deviation of each channel of uint8 images."""
  # Counting values is exact, and a float64 copy of all pixels would need eight
  # times their memory.
  num_channels = images.shape[-1]
  counts = np.zeros((num_channels, 256), np.int64)
  for start in range(0, len(images), _CHUNK):
    chunk = images[start : start + _CHUNK].reshape(-1, num_channels)
    for count, values in zip(counts, chunk.T, strict=True):
      count += np.bincount(values, minlength=256)
  values = np.arange(256)
  weights = counts / counts.sum(axis=1, keepdims=True)
  mean = weights @ values
  away = np.square(values - mean[:, None])
  return mean, np.sqrt(np.sum(weights * away, axis=1))
