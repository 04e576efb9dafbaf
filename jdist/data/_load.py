"""Data sets by name, and texts from files, decoded once and cached."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence

import numpy as np

from jdist import checks, signatures
from jdist.data import _files, _prepare
from jdist.data._dataset import Dataset, TextDataset
from jdist.storage import array_files

_WHAT = "a decoded set"


@signatures.checked
def load(
  name: str | os.PathLike[str],
  split: _prepare.Split = "train",
  *,
  size: signatures.PositiveInt | None = None,
  download: bool = False,
) -> Dataset:
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

  A path reads your own data, of whose classes every fifth sample, in the order
  of names or rows, is for testing: a folder with a sub-folder of images for
  each class, which become RGB; or a file .npz, .npy or .parquet with the
  classes in its column `label`. Of its other columns one alone may hold images
  [n, height, width] or [n, height, width, channels]; numbers become the
  channels of an image of one pixel, in float32.

  Args:
    name: A name of the table, or of `DATASETS`, or a path; `load_text` reads
      texts.
    split: "train" (default) or "test".
    size: Height and width to which images of a folder are scaled and cropped.
      None (default) needs images of one size.
    download: Whether to prepare a missing set first, see `prepare`, which needs
      a network and TensorFlow. Default False.

  Raises:
    ValueError: If the name or split is unknown, or files are not as above.
    FileNotFoundError: If the set is not prepared; names the command.

  >>> from jdist import data
  >>> digits = data.load("digits")
  >>> len(digits), digits.images.shape, digits.num_classes
  (1442, (1442, 8, 8, 1), 10)
  """
  if name not in _prepare.DATASETS and os.path.exists(name):
    return _files.load(pathlib.Path(name), split, size)
  name = os.fspath(name)
  source = _prepare.find(name, images=True)
  if callable(source):
    found = checks.call(name, source, split)
    wanted = "a function that returns a `data.Dataset` or a `data.TextDataset`"
    checks.check_type(name, found, Dataset | TextDataset, wanted)
    return found
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
  known = source.num_classes, tuple(mean), tuple(std)
  return Dataset(name, split, images, labels, *known)


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
  chosen = _files.hold_out(labels) == (split == "test")
  images = images[chosen].reshape(-1, 8, 8, 1).astype(np.uint8)
  return images, labels[chosen].astype(np.int32)


def _read_cached(name: str, split: str, download: bool) -> list[np.ndarray]:
  """Reads a set from the cache, or decodes it."""
  prepared = _prepare.require_prepared(name, download=download)
  source = _prepare.find(name)
  part = source.test_split if split == "test" else split
  return cached(
    path_of(name, prepared, split),
    ("images", "labels"),
    lambda: _prepare.decode(prepared, part, source.size),
  )


def _read_statistics(name: str) -> tuple[list[float], list[float]]:
  """Returns mean and deviation of the train split, measured if missing."""
  prepared = _prepare.require_prepared(name)
  mean, std = cached(
    path_of(name, prepared, "statistics"),
    ("mean", "std"),
    lambda: _prepare.measure(_read_cached(name, "train", download=False)[0]),
  )
  return mean.tolist(), std.tolist()


@signatures.checked
def load_text(
  source: str | os.PathLike[str],
  split: _prepare.Split = "train",
  *,
  window_length: signatures.PositiveInt = 128,
  test_fraction: float = 0.1,
  download: bool = False,
) -> TextDataset:
  """Loads one split of a text: its bytes are the tokens, 0 to 255.

  The split is cut into consecutive windows of `window_length` predictions, so
  that an epoch predicts each byte once; a rest shorter than a window is
  dropped.  A byte is predicted from the earlier ones of its window.

  "tiny_shakespeare" (Karpathy, 2015) has 1,003,854 bytes for training and
  55,770 for testing, as TensorFlow Datasets splits it; its "validation" split
  is not used.

  Args:
    source: "tiny_shakespeare", or any file.
    split: "train" (default) or "test".
    window_length: Predictions of a window, >= 1; default 128.
    test_fraction: The fraction at the end of a file that is "test", in (0, 1];
      default 0.1.
    download: Whether to prepare a missing set first, as in `load`.

  Raises:
    ValueError: If the text or split is unknown, or shorter than a window.
    FileNotFoundError: If the set is not prepared; names the command.

  >>> import tempfile
  >>> with tempfile.NamedTemporaryFile() as file:
  ...   _ = file.write(b"abcdefghij" * 10), file.flush()
  ...   text = load_text(file.name, window_length=4)
  >>> len(text), bytes(text.windows[0]), bytes(text.windows[1])
  (22, b'abcde', b'efghi')
  """
  test_fraction = checks.check_number(
    "test_fraction", test_fraction, open_low=True, high=1
  )
  name = os.fspath(source)
  if name in _prepare.TEXT_NAMES:
    found = read_bytes(name, split, download=download)
  else:
    found = _read_file(name, split, test_fraction)
    name = pathlib.Path(name).stem
  size = checks.counted(len(found), "byte")
  remedy = f"The {split} split of {name} has {size}."
  checks.check_int("window_length", window_length, 1, len(found) - 1, remedy)
  # Windows are views of the bytes.  Neighbours share one byte: the last target
  # of a window is the first token of the next.
  windows = np.lib.stride_tricks.sliding_window_view(found, window_length + 1)
  return TextDataset(name, split, windows[::window_length])


def read_bytes(name: str, split: str, *, download: bool = False) -> np.ndarray:
  """Returns a split of a named text, uint8 [n], from the cache if possible."""
  prepared = _prepare.require_prepared(name, download=download)
  path = path_of(name, prepared, split)
  return cached(
    path, ("text",), lambda: (_prepare.decode_text(prepared, split),)
  )[0]


def _read_file(path: str, split: str, test_fraction: float) -> np.ndarray:
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f"`source` must be one of {', '.join(_prepare.TEXT_NAMES)}, or a file, "
      f"got {path!r}."
    )
  text = np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
  # The test part is the end of the file: text near a training window is easier
  # to predict than text that follows all of them.
  cut = len(text) - round(len(text) * test_fraction)
  return text[cut:] if split == "test" else text[:cut]


def path_of(name: str, prepared: pathlib.Path, part: str) -> pathlib.Path:
  """Returns the directory of a part of a set, as this version prepares it."""
  base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
  cache = pathlib.Path(os.environ.get("JDIST_CACHE_DIR") or f"{base}/jdist")
  flat = name.replace("/", "-")
  return cache.expanduser() / f"{flat}-{prepared.name}-{part}"


def cached(
  path: pathlib.Path,
  names: Sequence[str],
  make: Callable[[], Sequence[np.ndarray]],
) -> list[np.ndarray]:
  """Returns arrays by name, which are made where an entry is missing.

  A damaged entry is made again, too.
  """
  with contextlib.suppress(OSError, ValueError, KeyError):
    arrays, _ = array_files.load_arrays(path, what=_WHAT)
    return [arrays[name] for name in names]
  made = list(make())
  _write(path, dict(zip(names, made, strict=True)))
  return made


def _write(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
  """Writes an entry in one move, so that no reader sees half of it.

  An entry that cannot be written costs the next run seconds and does not end
  this one.
  """
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each process writes to a directory of its own: several runs may decode
    # the same set at once, and the last one to finish stays.
    with tempfile.TemporaryDirectory(
      dir=path.parent, prefix=f".{path.name}-"
    ) as own:
      made = pathlib.Path(own) / path.name
      array_files.save_arrays(made, arrays, {"what": _WHAT})
      array_files.remove(path)
      made.rename(path)
