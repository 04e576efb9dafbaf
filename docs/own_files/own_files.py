"""A folder of images, or a table, as a data set of the command line.

OWN_FILES=photos jdist train --dataset own_files:load --model cnn

OWN_FILES is a folder with a sub-folder of images for each class, or a file
.npz or .parquet with the classes in its column "label" and numbers in the
others.  Every tenth sample of a class is for testing.
"""

import functools
import os
import pathlib

import numpy as np
import PIL.Image

from jdist import data

SIZE = 32  # Height and width to which images are scaled and cropped.


def load(split):
  """Returns the "train" or the "test" part as a `data.Dataset`."""
  path = pathlib.Path(os.environ.get("OWN_FILES", ""))
  inputs, names, mean, std, tests = _read(path)
  chosen = tests if split == "test" else ~tests
  classes, labels = np.unique(names, return_inverse=True)
  return data.Dataset(
    path.stem, split, inputs[chosen], labels[chosen].astype(np.int32),
    len(classes), tuple(mean.tolist()), tuple(std.tolist()),
  )  # fmt: skip


@functools.cache
def _read(path):
  if path.is_dir():
    inputs, names = _images(path)
  elif path.suffix == ".npz":
    with np.load(path) as columns:
      inputs, names = _table(path, dict(columns))
  elif path.suffix == ".parquet":
    import pyarrow.parquet

    columns = pyarrow.parquet.read_table(path).to_pydict()
    inputs, names = _table(path, {k: np.array(x) for k, x in columns.items()})
  else:
    raise ValueError(
      "`OWN_FILES` must be a folder of images, or a file .npz or .parquet, got "
      f"{str(path)!r}."
    )
  tests = np.zeros(len(names), bool)
  for name in set(names):
    tests[np.flatnonzero(names == name)[9::10]] = True
  if not tests.any():
    raise ValueError(f"{path} must have ten samples of a class at least.")
  known = inputs[~tests].astype(np.float32)
  std = known.std((0, 1, 2))
  return inputs, names, known.mean((0, 1, 2)), np.where(std > 0, std, 1), tests


def _images(folder):
  inputs, names = [], []
  for file in sorted(x for x in folder.glob("*/*") if x.is_file()):
    try:
      with PIL.Image.open(file) as image:
        image = image.convert("RGB")
    except OSError as error:
      raise ValueError(f"{file} must be an image: {error}.") from None
    side = min(image.size)
    left, top = ((n - side) // 2 for n in image.size)
    image = image.crop((left, top, left + side, top + side))
    inputs.append(np.asarray(image.resize((SIZE, SIZE))))
    names.append(file.parent.name)
  if not inputs:
    raise ValueError(
      f"{folder} must have a sub-folder of images for each class."
    )
  return np.stack(inputs), np.array(names)


def _table(path, columns):
  if "label" not in columns:
    raise ValueError(
      f"{path} must have a column `label`, got {', '.join(columns)}."
    )
  names = columns.pop("label")
  try:
    # A row is an image of one pixel, whose channels are the columns.
    rows = np.stack([x.astype(np.float32) for x in columns.values()], -1)
  except ValueError as error:
    raise ValueError(f"Columns of {path} must be numbers: {error}.") from None
  if not np.isfinite(rows).all():
    raise ValueError(f"Columns of {path} must be finite numbers.")
  return rows[:, None, None], names
