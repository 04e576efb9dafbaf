"""The parameter data set on the disk.

    manifest.json   the network, the cuts, the steps, versions; never changes
    front_04.npy    [samples, parameters] float32, for a cut behind 4 layers
    rear_04.npy     the parameters behind it, where they are collected
    rows.jsonl      a line for each sample, with its hashes

The arrays have their full size from the start.  A sample counts when its line
is in `rows.jsonl`, which is written after it; so a run that is killed at any
moment loses at most the sample that was being written.  Nothing is pickled.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdist import _version, training
from jdist.prediction.mp2 import _cut
from jdist.storage import array_files, sealed_json

_FORMAT = 1
_MANIFEST = "manifest.json"
_ROWS = "rows.jsonl"


def file_of(half: str, cut: _cut.Cut) -> str:
  """Returns the name of a file, by the number of layers in front of the cut."""
  return f"{half}_{len(cut.front):02}.npy"


def sizes_of(cuts: Sequence[_cut.Cut], halves: Sequence[str]) -> dict[str, int]:
  """Returns the length of a sample in each file, by the file's name."""
  return {
    file_of(half, cut): getattr(cut, f"num_{half}")
    for cut in cuts
    for half in halves
  }


class ParameterSet:
  """Samples of one network's parameters, from a run; read only.

  Attributes:
    cuts: where the network was cut, the shallowest first.
    steps: the steps at which samples are taken, all that were planned.
    metadata: of the `Collector`, `{}` without any.
    done: the number of samples so far.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens the files that a `Collector` has written, or is still writing.

    Raises:
      ValueError: when there is no such data set, or not of this format.
    """
    self._directory = array_files.folder(directory)
    body = read_manifest(self._directory)
    if body is None:
      raise ValueError(
        f"`directory` must hold a parameter data set, but {self._directory} "
        f"has no {_MANIFEST}. Collect one with `prediction.Collector`."
      )
    self.cuts = tuple(map(_cut.Cut.from_description, body["cuts"]))
    self.steps: tuple[int, ...] = tuple(body["steps"])
    self.metadata: dict[str, Any] = body["metadata"]
    self._halves: list[str] = body["halves"]
    names = sizes_of(self.cuts, self._halves).keys()
    self._rows = read_rows(self._directory, self.steps, set(names))
    self.done = len(self._rows)

  def __repr__(self) -> str:
    return (
      f"ParameterSet({self.done} of {len(self.steps)} samples, "
      f"{', '.join(map(repr, self.cuts))})"
    )

  def fronts(self, cut: _cut.Cut) -> np.ndarray:
    """Returns the samples in front of a cut.

    Args:
      cut: one of `cuts`, or an equal one of another name.

    Returns:
      float32 [done, num_front], mapped from the disk and read only, in the
      order of the steps.

    Raises:
      ValueError: when the samples are of another network, or cut elsewhere;
        names the first leaf that differs.
    """
    return self._open("front", cut)

  def rears(self, cut: _cut.Cut) -> np.ndarray:
    """Returns the samples behind a cut, float32 [done, num_rear].

    Raises:
      ValueError: as `fronts`, and when only the fronts were collected.
    """
    if "rear" not in self._halves:
      raise ValueError(
        "`rears` must have been collected, but this set has fronts only. "
        "Collect with `rears=True`."
      )
    return self._open("rear", cut)

  def verify(self) -> None:
    """Reads everything, and compares it with the hashes.

    Raises:
      ValueError: when something has changed, naming the file and sample.
    """
    for cut in self.cuts:
      for half in self._halves:
        name = file_of(half, cut)
        samples = self._open(half, cut)
        for row, vector in zip(self._rows, samples, strict=True):
          if row["sha256"][name] != digest(vector):
            raise sealed_json.DamagedError(
              self._directory / name,
              f"has changed in sample {row['row']}, of step {row['step']}",
            )

  def _open(self, half: str, cut: _cut.Cut) -> np.ndarray:
    _cut.check_cut("cut", cut)
    same = [mine.fingerprint == cut.fingerprint for mine in self.cuts]
    if not any(same):
      away = [abs(len(mine.front) - len(cut.front)) for mine in self.cuts]
      near = self.cuts[int(np.argmin(away))]
      _cut.refuse_other_cut("cut", cut, near)
    shape = (len(self.steps), getattr(cut, f"num_{half}"))
    array = open_array(self._directory / file_of(half, cut), shape, "r")
    return array[: self.done]


def digest(vector: np.ndarray) -> str:
  """Returns a hash of all bits of a sample."""
  return hashlib.sha256(np.ascontiguousarray(vector).data).hexdigest()


def create(
  directory: pathlib.Path, cuts: Sequence[_cut.Cut], body: dict[str, Any]
) -> None:
  """Makes the files; the manifest comes last, and says that they are there.

  No rows come first: by them an unfinished start of ours, which may be written
  over, differs from the files of others.
  """
  directory.mkdir(parents=True, exist_ok=True)
  rows = directory / _ROWS
  sizes = sizes_of(cuts, body["halves"])
  begun = rows.exists() and not rows.stat().st_size
  foreign = [name for name in (_ROWS, *sizes) if (directory / name).exists()]
  if foreign and not begun:
    raise ValueError(
      f"`directory` must not hold files of others, but {directory} has "
      f"{foreign[0]} and no {_MANIFEST}. Choose another directory."
    )
  rows.touch()
  for name, size in sizes.items():
    shape = (len(body["steps"]), size)
    np.lib.format.open_memmap(directory / name, "w+", np.float32, shape).flush()
  packages = {"jdist": _version, "jax": jax, "numpy": np}
  sealed_json.write(
    directory / _MANIFEST,
    body,
    form=_FORMAT,
    versions={name: x.__version__ for name, x in packages.items()},
  )


def read_manifest(directory: pathlib.Path) -> dict[str, Any] | None:
  """Returns the body of `create`, or None where nothing was created."""
  path = directory / _MANIFEST
  return sealed_json.read(path, form=_FORMAT) if path.exists() else None


def read_rows(
  directory: pathlib.Path, steps: Sequence[int], names: set[str]
) -> list[dict[str, Any]]:
  """Returns the lines of the samples so far.

  Args:
    directory: of the data set, made by `create`.
    steps: that were planned.
    names: of the arrays, each of which has a hash in every line.

  Raises:
    ValueError: when a line is missing, of another sample, or none of ours.
  """
  path = directory / _ROWS
  try:
    rows: list[Any] = training.read_rows(path)
  except FileNotFoundError as error:
    raise sealed_json.DamagedError(path, "is missing") from error
  except ValueError as error:
    raise sealed_json.DamagedError(path, f"cannot be read ({error})") from error
  for number, row in enumerate(rows):
    hashes = row.get("sha256") if isinstance(row, dict) else None
    if not (
      isinstance(hashes, dict)
      and hashes.keys() == names
      and number < len(steps)
      and (row.get("row"), row.get("step")) == (number, steps[number])
    ):
      raise sealed_json.DamagedError(
        path, f"has a line {number + 1} that is not of sample {number}"
      )
  return rows


def append_row(directory: pathlib.Path, row: dict[str, Any]) -> None:
  """Adds the line of a sample that is there."""
  training.append_rows(directory / _ROWS, [row])


def keep_rows(directory: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  """Removes the lines of all other samples."""
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  sealed_json.write_whole(directory / _ROWS, lines.encode())


def open_array(path: pathlib.Path, shape: tuple[int, ...], mode: Any) -> Any:
  """Maps an array of `create` into memory."""
  try:
    array = np.load(path, mmap_mode=mode, allow_pickle=False)
  except (OSError, ValueError) as error:
    raise sealed_json.DamagedError(path, f"cannot be read ({error})") from error
  if array.shape != shape or array.dtype != np.float32:
    raise sealed_json.DamagedError(
      path,
      f"holds {array.dtype}{list(array.shape)} and not float32{list(shape)}",
    )
  return array
