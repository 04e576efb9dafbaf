"""Checkpoints of a server of real workers, each a whole file or none."""

import concurrent.futures
import dataclasses
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jdist import training
from jdist.server.runtime import _envelope
from jdist.storage import sealed_json

_KEPT = 2
_WORKER = "worker "
Header = dict[str, Any]
Parts = dict[str, np.ndarray]


@dataclasses.dataclass
class _Saving:
  """A checkpoint that waits for the workers' states."""

  header: Header
  parts: Parts
  owing: set[str]
  done: concurrent.futures.Future[int] | None


class LiveCheckpoints:
  """Writes checkpoints once the workers' states have come, and reads them.

  Args:
    folder: where they are; none are written and read if None.
    identity: what a checkpoint must have been made with.

  Attributes:
    found: header and parts of the newest one that is whole, if there is one.
    states: of workers, in that one.

  Raises:
    OtherRunError: when it is of another run.
  """

  def __init__(self, folder: str | None, identity: dict[str, Any]):
    self._folder = None if folder is None else pathlib.Path(folder)
    self._identity = identity
    self._saving: _Saving | None = None
    self.found = None if self._folder is None else _newest(self._folder)
    self.states: Parts = {}
    if self.found is None:
      return
    header, parts = self.found
    training.check_same_run(header["identity"], identity, argument="identity")
    for name in [x for x in parts if x.startswith(_WORKER)]:
      self.states[name.removeprefix(_WORKER)] = parts.pop(name)

  @property
  def on(self) -> bool:
    """Returns whether any are written."""
    return self._folder is not None

  @property
  def first_s(self) -> float:
    """Seconds at which a run goes on, 0 of one that begins."""
    return 0.0 if self.found is None else float(self.found[0]["now_s"])

  def begin(
    self,
    header: Header,
    parts: Parts,
    owing: set[str],
    done: concurrent.futures.Future[int] | None = None,
  ) -> Callable[[], None]:
    """Begins one that waits for the states of some workers.

    Args:
      header: of the server.
      parts: of the server.
      owing: workers whose states are still to come.
      done: is told after which update it is, once it is written.

    Returns:
      What writes it without them, unless it is written.
    """
    self.write()
    header = header | {"identity": self._identity}
    saving = self._saving = _Saving(header, dict(parts), set(owing), done)
    if not owing:
      self.write()

    def give_up() -> None:
      if self._saving is saving:
        self.write()

    return give_up

  def add_state(self, worker: str, state: np.ndarray) -> None:
    """Takes the state of a worker; the last one has the checkpoint written."""
    if self._saving is not None:
      self._saving.parts[_WORKER + worker] = np.array(state)
      self._saving.owing.discard(worker)
      if not self._saving.owing:
        self.write()

  def write(self) -> None:
    """Writes the one that was begun, with the states that have come."""
    saving, self._saving = self._saving, None
    if saving is None or self._folder is None:
      return
    payload = np.concatenate(list(saving.parts.values()))
    header = saving.header | {
      "parts": [[name, len(part)] for name, part in saving.parts.items()],
      "hash": hashlib.sha256(payload.tobytes()).hexdigest(),
    }
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._folder / f"update_{header['updates']:010d}.jdist"
    sealed_json.write_whole(path, _envelope.pack(header, payload).tobytes())
    # Later ones are damaged: this run began with the newest that was whole.
    there = sorted(self._folder.glob("update_*.jdist"))
    at = there.index(path)
    for other in there[: max(0, at + 1 - _KEPT)] + there[at + 1 :]:
      other.unlink()
    if saving.done is not None:
      saving.done.set_result(header["updates"])


def _newest(folder: pathlib.Path) -> tuple[Header, Parts] | None:
  """Returns the newest checkpoint that is whole, if there is one."""
  for path in sorted(folder.glob("update_*.jdist"), reverse=True):
    try:
      data = np.frombuffer(path.read_bytes(), np.uint8)
      header, payload = _envelope.unpack(data)
    except (OSError, _envelope.MalformedError):
      continue
    if hashlib.sha256(payload.tobytes()).hexdigest() != header.get("hash"):
      continue
    parts, start = {}, 0
    for name, size in header["parts"]:
      parts[name] = payload[start : start + size]
      start += size
    return header, parts
  return None
