"""Texts by name or from a file, cut into windows of bytes."""

import os
import pathlib

import numpy as np

from jdist import checks, signatures
from jdist.data import _cache, _catalog, _prepare, _records
from jdist.data._text_dataset import TextDataset


@signatures.checked
def load_text(
  source: str | os.PathLike[str],
  split: str = "train",
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
    ValueError: when the text or split is unknown, or shorter than a window.
    FileNotFoundError: when the set is not prepared; names the command.
    ImportError: when a package is missing; names what to install.

  >>> import tempfile
  >>> with tempfile.NamedTemporaryFile() as file:
  ...   _ = file.write(b"abcdefghij" * 10), file.flush()
  ...   text = load_text(file.name, window_length=4)
  >>> len(text), bytes(text.windows[0]), bytes(text.windows[1])
  (22, b'abcde', b'efghi')
  """
  _catalog.check_split(split)
  test_fraction = checks.check_number(
    "test_fraction", test_fraction, open_low=True, high=1
  )
  name = os.fspath(source)
  if name in _catalog.TEXT_NAMES:
    found = read_bytes(name, split, download=download)
  else:
    found = _read_file(name, split, test_fraction)
    name = pathlib.Path(name).stem
  if len(found) <= window_length:
    raise ValueError(
      f"`window_length` must be less than the {len(found)} bytes of the "
      f"{split} split of {name}, got {window_length}. Take a shorter one, or a "
      "longer text."
    )
  # Windows are views of the bytes.  Neighbours share one byte: the last target
  # of a window is the first token of the next.
  windows = np.lib.stride_tricks.sliding_window_view(found, window_length + 1)
  return TextDataset(name, split, windows[::window_length])


def read_bytes(name: str, split: str, *, download: bool = False) -> np.ndarray:
  """Returns a split of a named text, uint8 [n], from the cache if possible."""
  prepared = _prepare.require_prepared(name, download=download)
  path = _cache.path_of(name, prepared, split)
  (text,) = _cache.cached(
    path, ("text",), lambda: (_records.decode_text(prepared, split),)
  )
  return text


def _read_file(path: str, split: str, test_fraction: float) -> np.ndarray:
  if not pathlib.Path(path).is_file():
    raise ValueError(
      f"`source` must be one of {', '.join(_catalog.TEXT_NAMES)}, or a file, "
      f"got {path!r}."
    )
  text = np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
  # The test part is the end of the file: text near a training window is easier
  # to predict than text that follows all of them.
  cut = len(text) - round(len(text) * test_fraction)
  return text[cut:] if split == "test" else text[:cut]
