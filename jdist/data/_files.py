"""A folder of images, or a table in a file, as a data set."""

import functools
import pathlib
from typing import Any

import numpy as np

from jdist import checks
from jdist.data import _prepare
from jdist.data._dataset import Dataset


def hold_out(labels: np.ndarray) -> np.ndarray:
  """Marks every fifth sample of each class, bool [n]: the test split."""
  held_out = np.zeros(len(labels), bool)
  for k in np.unique(labels):
    held_out[np.flatnonzero(labels == k)[4::5]] = True
  return held_out


def load(path: pathlib.Path, split: str, size: int | None) -> Dataset:
  """Reads a split of a folder or a file, see `load` of the room."""
  files = [path]
  if path.is_dir():
    folders = sorted(x for x in path.glob("[!.]*") if x.is_dir())
    images = {x: sorted(x.glob("[!.]*")) for x in folders}
    empty = [x for x in folders if not images[x]]
    if empty or not folders:
      raise ValueError(
        f"{[*empty, path][0]} must have images: a folder of images has a "
        "sub-folder for each class."
      )
    files = [x for found in images.values() for x in found]
  stamps = tuple((x, x.stat().st_mtime_ns) for x in files)
  return _read(path, size, stamps)[split]


@functools.lru_cache(maxsize=1)  # A run asks for one split after the other.
def _read(path: pathlib.Path, size: int | None, stamps: Any) -> Any:
  """Returns both splits of files, which change with their stamps."""
  inputs = None
  if path.is_dir():
    names = np.array([x.parent.name for x, _ in stamps])
  else:
    inputs, names = _read_table(path)
  classes, labels = np.unique(names, return_inverse=True)
  held_out = hold_out(labels)
  if not held_out.any():
    raise ValueError(
      f"{path} must have five samples of a class or more: every fifth one is "
      "for testing."
    )
  # The splits are views of one array: the test split stands at its end.
  order, cut = np.argsort(held_out, kind="stable"), -held_out.sum()
  inputs = _decode(stamps, order, size) if inputs is None else inputs[order]
  known, labels = inputs[:cut], labels[order].astype(np.int32)
  if known.dtype == np.uint8:
    mean, std = _prepare.measure(known)
  else:
    # NumPy sums rows one after the other, in which float32 loses digits.
    mean, std = (f((0, 1, 2), np.float64) for f in (known.mean, known.std))
  same = mean.tolist(), np.where(std > 0, std, 1).tolist()
  return {
    split: Dataset(path.stem, split, x, y, len(classes), *map(tuple, same))
    for split, x, y in (
      ("train", known, labels[:cut]), ("test", inputs[cut:], labels[cut:]),
    )
  }  # fmt: skip


def _decode(stamps: Any, order: np.ndarray, size: int | None) -> np.ndarray:
  pil = checks.import_extra("PIL.Image", "data")
  files = [stamps[i][0] for i in order]
  images: Any = None
  for row, file in enumerate(files):
    try:
      with pil.open(file) as image:
        if image.mode[0] in "IF":  # Pillow would cut 16 bits off at 255.
          raise ValueError(
            f"{file} must have 8 bits a channel, got mode {image.mode}. Save "
            "images with more as arrays, in a file .npz."
          )
        own = (*image.size[::-1], 3) if size is None else (size, size, 3)
        if images is None:
          images = np.empty((len(files), *own), np.uint8)
        if own != images.shape[1:]:
          raise ValueError(
            f"`size` (`--image-size`) must be given for images of different "
            f"sizes: {file} has {own[1]}x{own[0]} pixels, and {files[0]} "
            f"{images.shape[2]}x{images.shape[1]}."
          )
        images[row] = _prepare.pixels(image, own, size)
    except OSError as error:
      raise ValueError(f"{file} must be an image: {error}.") from None
  return images


def _read_table(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Returns inputs [n, height, width, channels], and the class of each."""
  read: Any = np.load
  if path.suffix == ".parquet":
    read = checks.import_extra("pyarrow.parquet", "data").read_table
  try:
    table = read(path)
    listed = getattr(table, "column_names", None) or getattr(table, "files", ())
    names = [*(listed or table.dtype.names or ())]
    # Pandas writes the numbers of rows among the columns of a table.
    names = [x for x in names if not x.startswith("__index_level_")]
    columns = {x: np.asarray(table[x]) for x in names}
  except Exception as error:  # Of NumPy, zipfile, zlib or Arrow.
    raise ValueError(
      f"{path} must be a folder of images, or a file .npz, .npy or .parquet: "
      f"{error}."
    ) from None
  labels = np.array(columns.pop("label", np.empty(0)).tolist())
  fit = labels.ndim == 1 and labels.size and labels.dtype.kind in "biuSU"
  if not fit or not columns:
    raise ValueError(
      f"{path} must have columns, and a column `label` with a whole number or "
      f"a text in each row, got {', '.join(columns) or 'no other names'}."
    )
  for name, x in columns.items():
    most = float(np.finfo(np.float32).max) if x.dtype.kind == "f" else 2**24
    numbers = x.size and x.dtype.kind in "biuf"
    numbers = numbers and max(-float(x.min()), float(x.max())) <= most
    if numbers and x.ndim and x.dtype.kind == "f" and x.itemsize > 4:
      lost, span = abs(x - x.astype(np.float32)).max(0), np.ptp(x, 0)
      numbers = not ((lost > span / 1000) & (span > 0)).any()
    if x.shape[:1] != labels.shape or not numbers:
      raise ValueError(
        f"The column {name} of {path} must have a finite float32, or an array "
        f"of them, for each of the {len(labels)} labels, got {x.dtype} "
        f"{list(x.shape)}{'' if numbers else ' with others'}. Divide integers "
        "above 2**24, and subtract a large mean: float32 would round them."
      )
  first, *more = columns.values()
  if not more and first.ndim in (3, 4):
    kind = np.uint8 if first.dtype == np.uint8 else np.float32
    return first.reshape(*first.shape[:3], -1).astype(kind, copy=False), labels
  # A row is an image of one pixel, whose channels are the columns.
  rows = [x.reshape(len(x), -1).astype(np.float32) for x in (first, *more)]
  return np.concatenate(rows, 1)[:, None, None], labels
