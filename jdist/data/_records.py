"""Records of TensorFlow Datasets as arrays, without TensorFlow."""

import io
import pathlib
from typing import Any

import numpy as np

from jdist import checks

_CHUNK = 1000


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
        images[row] = _pixels(image, shape, size)
      labels[row] = record["label"]
  return images, labels


def decode_text(prepared: pathlib.Path, split: str) -> np.ndarray:
  """Returns the bytes of all records of a split of a text, uint8 [n]."""
  tfds = checks.import_extra("tensorflow_datasets", "data")
  checks.import_extra("array_record", "data")
  source = tfds.builder_from_directory(prepared).as_data_source(split=split)
  texts = [bytes(source[i]["text"]) for i in range(len(source))]
  return np.frombuffer(b"".join(texts), np.uint8)


def _pixels(image: Any, shape: tuple[int, ...], size: int | None) -> np.ndarray:
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
