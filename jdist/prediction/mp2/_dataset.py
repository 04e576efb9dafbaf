"""The parameter data set on the disk.

    manifest.json   the network, the cuts, the steps, versions; never changes
    front_04.npy    [samples, parameters] float32, for a cut behind 4 layers
    rear_04.npy     what is behind it, where that was wanted
    rows.jsonl      one line for each sample that is there, with its hashes

The arrays have their full size from the start. A sample counts when its line is
in `rows.jsonl`, which is written after it; so a run that is killed at any
moment loses at most the sample that was being written. Nothing is pickled.
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
  """The name of a file, by how many layers are in front of the cut."""
  return f"{half}_{len(cut.front):02}.npy"


def files_of(cuts: Sequence[_cut.Cut], halves: Sequence[str]) -> set[str]:
  """The names of all arrays of a data set."""
  return {file_of(half, cut) for cut in cuts for half in halves}


class ParameterSet:
  """Samples of one network's parameters, from a run; read only.

  Attributes:
    cuts: where the network was cut, the shallowest first.
    steps: the steps at which samples are taken, all that were planned.
    metadata: what was given to the `Collector`, `{}` where nothing was.
    done: how many samples are there.
  """

  def __init__(self, directory: str | os.PathLike[str]):
    """Opens what a `Collector` has written, or is still writing.

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
    self._rows = read_rows(
      self._directory, self.steps, files_of(self.cuts, self._halves)
    )
    self.done = len(self._rows)

  def __repr__(self) -> str:
    return (
      f"ParameterSet({self.done} of {len(self.steps)} samples, "
      f"{', '.join(map(repr, self.cuts))})"
    )

  def fronts(self, cut: _cut.Cut) -> np.ndarray:
    """The samples in front of a cut.

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
    """The samples behind a cut, float32 [done, num_rear]; as `fronts`.

    Raises:
      ValueError: also when only the fronts were collected.
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
            raise ValueError(
              f"`directory` {self._directory} is damaged: {name} has changed "
              f"in sample {row['row']}, of step {row['step']}. Collect anew."
            )

  def _open(self, half: str, cut: _cut.Cut) -> np.ndarray:
    _cut.check_cut("cut", cut)
    for mine in self.cuts:
      if mine.fingerprint == cut.fingerprint:
        break
    else:
      near = min(
        self.cuts, key=lambda mine: abs(len(mine.front) - len(cut.front))
      )
      _cut.refuse_other_cut("cut", cut, near)
    shape = (len(self.steps), getattr(cut, f"num_{half}"))
    array = open_array(self._directory / file_of(half, cut), shape, "r")
    return array[: self.done]


def digest(vector: np.ndarray) -> str:
  """A hash of all bits of a sample."""
  return hashlib.sha256(np.ascontiguousarray(vector).data).hexdigest()


def plan(
  cuts: Sequence[_cut.Cut],
  halves: Sequence[str],
  steps: Sequence[int],
  metadata: dict[str, Any],
) -> dict[str, Any]:
  """What a manifest says besides versions."""
  body = {
    "cuts": [cut.describe() for cut in cuts],
    "halves": list(halves),
    "steps": list(steps),
    "metadata": metadata,
  }
  return json.loads(json.dumps(body))  # Tuples become lists there.


def create(
  directory: pathlib.Path, cuts: Sequence[_cut.Cut], body: dict[str, Any]
) -> None:
  """Makes the files; the manifest comes last, and says that they are there.

  No rows come first: by them what was begun here and stopped, and may be
  written over, is told from what somebody else has put there.
  """
  directory.mkdir(parents=True, exist_ok=True)
  rows = directory / _ROWS
  arrays = {
    directory / file_of(half, cut): (len(body["steps"]), size)
    for cut in cuts
    for half, size in (("front", cut.num_front), ("rear", cut.num_rear))
    if half in body["halves"]
  }
  begun = rows.exists() and not rows.stat().st_size
  foreign = [path.name for path in (rows, *arrays) if path.exists()]
  if foreign and not begun:
    raise ValueError(
      f"`directory` must not hold files of others, but {directory} has "
      f"{foreign[0]} and no {_MANIFEST}. Choose another directory."
    )
  rows.touch()
  for path, shape in arrays.items():
    np.lib.format.open_memmap(path, "w+", np.float32, shape).flush()
  packages = {"jdist": _version, "jax": jax, "numpy": np}
  sealed_json.write(
    directory / _MANIFEST,
    body,
    form=_FORMAT,
    versions={name: x.__version__ for name, x in packages.items()},
  )


def read_manifest(directory: pathlib.Path) -> dict[str, Any] | None:
  """The plan that `create` was given, or None where nothing was created."""
  path = directory / _MANIFEST
  if not path.exists():
    return None
  try:
    return sealed_json.read(path, form=_FORMAT)
  except sealed_json.DamagedError as error:
    raise ValueError(
      f"`directory` {directory} is damaged: {_MANIFEST} {error}. Collect anew "
      "in another directory."
    ) from error
  except sealed_json.OtherFormatError as error:
    raise ValueError(f"`directory` {directory} {error}") from error


def read_rows(
  directory: pathlib.Path, steps: Sequence[int], names: set[str]
) -> list[dict[str, Any]]:
  """The lines of the samples that are there.

  Args:
    directory: of the data set, made by `create`.
    steps: that were planned.
    names: of the arrays, each of which has a hash in every line.

  Raises:
    ValueError: when a line is missing, of another sample, or none of ours.
  """

  def damaged(what: str) -> ValueError:
    return ValueError(
      f"`directory` {directory} is damaged: {what}. Collect anew in another "
      "directory."
    )

  try:
    rows: list[Any] = training.read_rows(directory / _ROWS)
  except FileNotFoundError as error:
    raise damaged(f"{_ROWS} is missing") from error
  except ValueError as error:
    raise damaged(f"{_ROWS} cannot be read ({error})") from error
  for number, row in enumerate(rows):
    hashes = row.get("sha256") if isinstance(row, dict) else None
    if not (
      isinstance(hashes, dict)
      and hashes.keys() == names
      and number < len(steps)
      and (row.get("row"), row.get("step")) == (number, steps[number])
    ):
      raise damaged(f"line {number + 1} of {_ROWS} is not of sample {number}")
  return rows


def append_row(directory: pathlib.Path, row: dict[str, Any]) -> None:
  """Says that a sample is there."""
  training.append_rows(directory / _ROWS, [row])


def keep_rows(directory: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  """Takes back what was said of all other samples."""
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  sealed_json.write_whole(directory / _ROWS, lines.encode())


def open_array(path: pathlib.Path, shape: tuple[int, ...], mode: Any) -> Any:
  """Maps an array of `create` into memory."""
  try:
    array = np.load(path, mmap_mode=mode, allow_pickle=False)
  except (OSError, ValueError) as error:
    raise ValueError(
      f"`directory` {path.parent} is damaged: {path.name} cannot be read "
      f"({error}). Collect anew in another directory."
    ) from error
  if array.shape != shape or array.dtype != np.float32:
    raise ValueError(
      f"`directory` {path.parent} is damaged: {path.name} holds "
      f"{array.dtype}{list(array.shape)} and not float32{list(shape)}. "
      "Collect anew in another directory."
    )
  return array
