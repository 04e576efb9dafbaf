"""One split of an image classification set, or of a text, in memory."""

import dataclasses
from typing import Any

import numpy as np

from jdist import checks, signatures


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """Holds one split of an image classification set.

  `load` returns a set by name; the constructor takes your own arrays.

  Attributes:
    name: The name of the set, as in `load`.
    split: "train" or "test".
    images: Raw pixels, uint8 [n, height, width, channels].
    labels: Classes, integers [n] in 0 .. num_classes - 1.
    num_classes: The number of classes.
    mean: The mean of each channel over all pixels of the **train** split,
      whichever split this is, in the units of the raw pixels.
    std: The standard deviation, likewise.

  >>> digits = Dataset(
  ...   name="mine", split="train", num_classes=2, mean=(2.0,), std=(2.0,),
  ...   images=np.array([[[[0]]], [[[4]]]], np.uint8),
  ...   labels=np.array([0, 1], np.int32),
  ... )
  >>> len(digits), digits.input_shape
  (2, (1, 1, 1))
  >>> digits.normalize(digits.images).ravel().tolist()
  [-1.0, 1.0]
  """

  name: str
  split: str
  images: np.ndarray = dataclasses.field(repr=False)
  labels: np.ndarray = dataclasses.field(repr=False)
  num_classes: int
  mean: tuple[float, ...]
  std: tuple[float, ...]

  def __post_init__(self) -> None:
    for field in ("images", "labels"):
      checks.check_array(field, getattr(self, field))
    if self.images.ndim != 4:
      raise ValueError(
        "`images` must be [n, height, width, channels], got shape "
        f"{self.images.shape}. Add the missing axes, for gray images "
        "`images[..., None]`."
      )
    if self.labels.shape != (len(self.images),):
      raise ValueError(
        "`labels` must hold one class per image, shape "
        f"({len(self.images)},), got {self.labels.shape}."
      )
    _check_classes("labels", self.labels, self.num_classes)
    num_channels = self.images.shape[-1]
    for field, values in (("mean", self.mean), ("std", self.std)):
      if len(values) != num_channels or not np.isfinite(values).all():
        raise ValueError(
          f"`{field}` must hold one finite number per channel, {num_channels}, "
          f"got {values}."
        )
    if min(self.std, default=0) <= 0:
      raise ValueError(f"`std` must be positive, got {self.std}.")

  def __len__(self) -> int:
    return len(self.images)

  @property
  def input_shape(self) -> tuple[int, int, int]:
    """The (height, width, channels) of one image."""
    _, height, width, num_channels = self.images.shape
    return height, width, num_channels

  def select(self, rows: np.ndarray) -> "Dataset":
    """Returns the data set of the chosen samples, in the given order."""
    return dataclasses.replace(
      self, images=self.images[rows], labels=self.labels[rows]
    )

  def batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns samples as {"image": uint8 [*rows.shape, height, width,
    channels], "label": integers [*rows.shape]}.
    """
    return {"image": self.images.take(rows, 0), "label": self.labels[rows]}

  def normalize(self, images: np.ndarray) -> Any:
    """Returns `(images - mean) / std` per channel, in float32.

    It takes NumPy and JAX arrays, so that it can be a part of a jitted step:
    the host then sends one byte per pixel to the device instead of four.
    """
    # Only methods that NumPy and JAX arrays share are used.  The constants have
    # the rank of the images, as users may forbid rank promotion.
    shape = (1,) * (images.ndim - 1) + (len(self.mean),)
    mean = np.asarray(self.mean, np.float32).reshape(shape)
    std = np.asarray(self.std, np.float32).reshape(shape)
    return (images.astype(np.float32) - mean) / std


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True, eq=False)
class TextDataset:
  """Holds windows of a text, of which every token but the first is predicted.

  `load_text` returns windows of bytes; the constructor takes your own tokens.

  Attributes:
    name: The name of the text.
    split: "train" or "test".
    windows: Tokens, integers [n, length + 1] in 0 .. num_classes - 1.
    num_classes: The size of the vocabulary; default 256, for bytes.

  >>> text = TextDataset("mine", "train", np.array([[7, 8, 9], [9, 0, 1]]))
  >>> len(text), text.input_shape
  (2, (2,))
  >>> {name: x.tolist() for name, x in text.batch(np.array([1])).items()}
  {'tokens': [[9, 0]], 'targets': [[0, 1]]}
  """

  name: str
  split: str
  windows: np.ndarray = dataclasses.field(repr=False)
  num_classes: int = 256

  def __post_init__(self) -> None:
    checks.check_array("windows", self.windows)
    if self.windows.ndim != 2 or self.windows.shape[1] < 2:
      raise ValueError(
        "`windows` must be [n, length + 1] with a length of at least 1, got "
        f"shape {self.windows.shape}."
      )
    _check_classes("windows", self.windows, self.num_classes)

  def __len__(self) -> int:
    return len(self.windows)

  @property
  def input_shape(self) -> tuple[int]:
    """The (length,) of one input."""
    return (self.windows.shape[1] - 1,)

  def select(self, rows: np.ndarray) -> "TextDataset":
    """Returns the data set of the chosen windows, in the given order."""
    return dataclasses.replace(self, windows=self.windows[rows])

  def batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns windows as {"tokens", "targets"}, int32 [*rows.shape, length].

    Targets are the tokens shifted by one place.
    """
    windows = self.windows[rows].astype(np.int32)
    return {"tokens": windows[..., :-1], "targets": windows[..., 1:]}


def _check_classes(name: str, values: np.ndarray, num_classes: int) -> None:
  if not np.issubdtype(values.dtype, np.integer):
    raise ValueError(
      f"`{name}` must be integers, got {values.dtype}. Convert them with "
      f"`{name}.astype(np.int32)`."
    )
  # An index out of range would be clamped inside jit, without an error.
  if values.size and (values.min() < 0 or values.max() >= num_classes):
    raise ValueError(
      f"`{name}` must lie in 0 .. {num_classes - 1}, got {values.min()} .. "
      f"{values.max()}. Raise `num_classes`, or number them from 0."
    )
