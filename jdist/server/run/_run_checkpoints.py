"""Checkpoints of a server's run.

    update_0000000012/    a manifest and arrays, see `array_files`

The manifest holds the marks and what the engine notes in JSON; the arrays are
the states of the server's learner and of the workers.
"""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypedDict

import numpy as np

from jdist import channel, training
from jdist.server.run import _run_marks
from jdist.storage import array_files, lease, numbered_files, plain_data

_KEPT = 2
_WHAT = "a server's checkpoint"
_WORKER = "worker "
Parts = dict[str, np.ndarray]


class Header(TypedDict):
  """The part of a checkpoint that holds no arrays."""

  updates: int  # They name the checkpoint.
  now_s: float
  marks: list[_run_marks.Mark]
  limits: list[float]  # Where the run's plan has these marks.
  state: Any  # Further notes of the engine, as JSON can hold them.


class _Body(TypedDict):
  what: str
  identity: dict[str, Any]
  header: Header


@dataclasses.dataclass
class _Saving:
  """A checkpoint that waits for the states of workers."""

  header: Header
  parts: Parts
  owing: set[str]
  done: concurrent.futures.Future[int] | None


class RunCheckpoints:
  """Reads the checkpoints of a server's run, and writes new ones.

  Without a folder it reads and writes nothing.

  Raises:
    OtherRunError: If the newest checkpoint has another identity.
    ValueError: If the directory has checkpoints of another kind, or another
      run that is alive has leased it.
  """

  def __init__(self, folder: str | None, identity: dict[str, Any]):
    self._folder = None if folder is None else array_files.folder(folder)
    self._identity = identity
    self._saving: _Saving | None = None
    # The newest whole checkpoint, and the workers' states in it, by name.
    self.found: tuple[Header, Parts] | None = None
    self.states: Parts = {}
    self._whole: set[int] = set()
    if self._folder is None:
      return
    self._folder.mkdir(parents=True, exist_ok=True)
    # It is released when this process ends.
    lease.Lease(self._folder, channel.run_id()).claim()
    found = numbered_files.read_newest(_targets(self._folder), _read)
    if found is None:
      return
    body, parts = found
    training.check_same_run(body["identity"], identity, argument="identity")
    self.found = body["header"], parts
    self._whole.add(body["header"]["updates"])
    self.states = {
      name.removeprefix(_WORKER): part
      for name, part in parts.items()
      if name.startswith(_WORKER)
    }

  @property
  def on(self) -> bool:
    """Returns whether checkpoints are written."""
    return self._folder is not None

  @property
  def first_s(self) -> float:
    """The seconds at which a run is resumed; 0 for a new run."""
    return 0.0 if self.found is None else self.found[0]["now_s"]

  def begin(
    self,
    header: Header,
    parts: Parts,
    owing: set[str],
    done: concurrent.futures.Future[int] | None = None,
  ) -> Callable[[], None]:
    """Writes a checkpoint once the states of some workers have arrived.

    Returns a function that writes it without the states of workers who still
    owe them; `done` gets its update once it is written.
    """
    # An earlier checkpoint may still wait: it is whole without those states.
    self.write()
    saving = self._saving = _Saving(header, dict(parts), set(owing), done)
    if not owing:
      self.write()

    def give_up() -> None:
      if self._saving is saving:
        self.write()

    return give_up

  def add_state(self, worker: str, state: np.ndarray) -> None:
    """Adds the state of a worker; the last one completes the checkpoint."""
    if self._saving is not None:
      # A copy, as the bytes belong to a message that Ray may free.
      self._saving.parts[_WORKER + worker] = np.array(state)
      self._saving.owing.discard(worker)
      if not self._saving.owing:
        self.write()

  def write(self) -> None:
    """Writes the checkpoint that waits, with the states that are there."""
    saving, self._saving = self._saving, None
    if saving is None or self._folder is None:
      return
    updates = saving.header["updates"]
    target = self._folder / f"update_{updates:010d}"
    marks = plain_data.to_plain(saving.header["marks"])
    body = _Body(
      what=_WHAT,
      identity=self._identity,
      header=saving.header | {"marks": marks},
    )
    if updates not in self._whole:
      # A damaged manifest does not say which arrays are stale, so that nothing
      # could be saved over it.
      array_files.remove(target)
    array_files.save_arrays(target, saving.parts, dict(body))
    self._whole.add(updates)
    # This run resumed from the newest whole checkpoint: later ones are damaged.
    there = _targets(self._folder)
    at = there.index(target)
    for other in there[:at] + there[at + _KEPT :]:
      array_files.remove(other)
    if saving.done is not None:
      saving.done.set_result(updates)


def _targets(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the directories of checkpoints, the newest first."""
  return list(numbered_files.find(folder, "update_").values())


def _read(target: pathlib.Path) -> tuple[_Body, Parts]:
  arrays, body = array_files.load_arrays(target, what=_WHAT)
  return plain_data.from_plain(body, _Body, "checkpoint"), arrays
