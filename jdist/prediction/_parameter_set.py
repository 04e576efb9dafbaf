"""The parameter data set on the disk.

    manifest.json   the network, the cuts, the steps; never changes
    front_04.npy    [samples, parameters] float32, for a cut behind 4 layers
    rows.jsonl      a line for each sample, with its hashes

The arrays have their full size from the start.  A sample counts when its line
is in `rows.jsonl`, which is written after it; so a run that is killed at any
moment loses at most the sample that was being written.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jdist import signatures
from jdist.prediction import _cut
from jdist.storage import array_files, hashes, json_lines, sealed_json

_FORMAT = 1
_MANIFEST = "manifest.json"
_ROWS = "rows.jsonl"


def file_of(cut: _cut.Cut) -> str:
  """Returns the name of a file, by the number of layers in front of the cut."""
  return f"front_{len(cut.front):02}.npy"


class Files:
  """The files of a data set, which a `Collector` writes."""

  def __init__(self, directory: pathlib.Path):
    """Reads the manifest and the rows, which must be ours and undamaged."""
    self.directory = directory
    self.body = sealed_json.read(directory / _MANIFEST, form=_FORMAT)
    self.cuts = tuple(map(_cut.Cut.from_description, self.body["cuts"]))
    # The length of a sample in each file of arrays.
    self.sizes = _sizes(self.cuts)
    self.rows = self._read_rows()

  @classmethod
  def create(
    cls, directory: pathlib.Path, cuts: Sequence[_cut.Cut], body: dict[str, Any]
  ) -> "Files":
    """Makes the files; the manifest is the last one and marks them as complete.

    Empty rows, which are the first file, distinguish an interrupted creation,
    which may be overwritten, from the files of other programs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = directory / _ROWS
    sizes = _sizes(cuts)
    begun = rows.exists() and not rows.stat().st_size
    foreign = [name for name in (_ROWS, *sizes) if (directory / name).exists()]
    if foreign and not begun:
      raise ValueError(
        f"`directory` must not hold files of others, but {directory} has "
        f"{foreign[0]} and no {_MANIFEST}. Choose another directory."
      )
    # Until the manifest exists, empty rows mark these files as ours.
    rows.touch()
    for name, size in sizes.items():
      array_files.create_rows(directory / name, len(body["steps"]), size)
    sealed_json.write(directory / _MANIFEST, body, form=_FORMAT)
    return cls(directory)

  def open(self, name: str, *, write: bool = False) -> np.memmap:
    """Maps an array into memory."""
    path = self.directory / name
    length = len(self.body["steps"])
    return array_files.open_rows(path, length, self.sizes[name], write=write)

  def append(self, row: dict[str, Any]) -> None:
    """Adds the line of a sample whose arrays are written."""
    json_lines.append(self.directory / _ROWS, [row])
    self.rows.append(row)

  def keep(self, number: int) -> None:
    """Removes the lines of all but the first samples."""
    self.rows = self.rows[:number]
    json_lines.write(self.directory / _ROWS, self.rows)

  def _read_rows(self) -> list[dict[str, Any]]:
    path, steps = self.directory / _ROWS, self.body["steps"]
    try:
      rows: list[Any] = list(json_lines.read(path))
    except (OSError, ValueError) as error:
      raise hashes.DamagedError(path, f"cannot be read ({error})") from error
    for number, row in enumerate(rows):
      found = row.get("sha256") if isinstance(row, dict) else None
      if not (
        isinstance(found, dict)
        and found.keys() == self.sizes.keys()
        and number < len(steps)
        and (row.get("row"), row.get("step")) == (number, steps[number])
      ):
        raise hashes.DamagedError(
          path, f"has a line {number + 1} that is not of sample {number}"
        )
    return rows


def _sizes(cuts: Sequence[_cut.Cut]) -> dict[str, int]:
  return {file_of(cut): cut.num_front for cut in cuts}


@signatures.explained
@signatures.checked
class ParameterSet:
  """Samples of one network's parameters, from a run; read only.

  Attributes:
    cuts: The cuts of the network, the shallowest first.
    steps: All planned steps at which samples are taken.
    metadata: The metadata of the `Collector`, `{}` without any.
    done: The number of samples so far.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens the files that a `Collector` has written, or is still writing.

    Raises:
      ValueError: If the directory holds no such set, or a damaged one.
    """
    path = array_files.folder(directory)
    try:
      self._files = Files(path)
    except FileNotFoundError as error:
      raise ValueError(
        f"`directory` must hold a parameter data set, but {path} has no "
        f"{_MANIFEST}. Collect one with `prediction.Collector`."
      ) from error
    self.cuts = self._files.cuts
    self.steps: tuple[int, ...] = tuple(self._files.body["steps"])
    self.metadata: dict[str, Any] = self._files.body["metadata"]
    self.done = len(self._files.rows)

  def __repr__(self) -> str:
    return (
      f"ParameterSet({self.done} of {len(self.steps)} samples, "
      f"{', '.join(map(repr, self.cuts))})"
    )

  def fronts(self, cut: _cut.Cut) -> np.ndarray:
    """Returns the samples in front of one of `cuts`, in the order of the steps.

    Returns:
      float32 [done, num_front], mapped from the disk and read only.

    Raises:
      ValueError: If the samples are of another network or cut.
    """
    # An equal cut of a network with another name has the same fronts.
    same = [mine.fingerprint == cut.fingerprint for mine in self.cuts]
    if not any(same):
      away = [abs(len(mine.front) - len(cut.front)) for mine in self.cuts]
      # The message compares with the most similar cut.
      near = self.cuts[int(np.argmin(away))]
      _cut.refuse_other_cut("cut", cut, near)
    return self._files.open(file_of(cut))[: self.done]

  def verify(self) -> None:
    """Raises a DamagedError, which names the sample, for a changed one."""
    for name in self._files.sizes:
      # A collector may be writing the row that follows the last line.
      rows = zip(self._files.rows, self._files.open(name), strict=False)
      for row, vector in rows:
        if row["sha256"][name] != hashes.hash_bytes(vector):
          raise hashes.DamagedError(
            self._files.directory / name,
            f"has changed in sample {row['row']}, of step {row['step']}",
          )
