"""One split of a text, in windows of tokens, in memory."""

import dataclasses

import numpy as np


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
    if self.windows.ndim != 2 or self.windows.shape[1] < 2:
      raise ValueError(
        "`windows` must be [n, length + 1] with a length of at least 1, got "
        f"shape {self.windows.shape}."
      )
    if not np.issubdtype(self.windows.dtype, np.integer):
      raise ValueError(
        f"`windows` must be integers, got {self.windows.dtype}. Convert them "
        "with `windows.astype(np.int32)`."
      )
    # An index out of range would be clamped inside jit, without an error.
    low, high = 0, self.num_classes - 1
    if len(self.windows):
      low, high = int(self.windows.min()), int(self.windows.max())
    if low < 0 or high >= self.num_classes:
      raise ValueError(
        f"`windows` must lie in 0 .. {self.num_classes - 1}, got {low} .. "
        f"{high}. Raise `num_classes`, or number the tokens from 0."
      )

  def __len__(self) -> int:
    return len(self.windows)

  @property
  def input_shape(self) -> tuple[int]:
    """Shape of one input: (length,)."""
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
