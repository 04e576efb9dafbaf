"""A run's lease of a directory, which it loses when it is dead.

The file `lease.json` names the run and its process, and a counter that the
process raises every few seconds. Another run watches the counter by its own
clock, so that clocks may differ, and needs no locks of the file system. On the
same machine it looks for the process itself, and need not wait.
"""

import atexit
import contextlib
import json
import os
import pathlib
import platform
import threading
import time
from typing import Any

from jdist.storage import sealed_json

_BEAT_S = 3.0
# The counter of a run that is alive changes within this time.
_PATIENCE_S = 15.0
# Time in which two runs that have both found a dead one see who came last.
_SETTLE_S = 1.0


class Lease:
  """The lease of a directory by a run; the same run may take it again."""

  def __init__(self, directory: pathlib.Path, run_id: str):
    """Prepares a lease, which `claim` takes."""
    self._path, self._run = directory / "lease.json", run_id
    self._beat = 0
    self._held: threading.Event | None = None

  def claim(self) -> None:
    """Takes the lease, unless this has been done.

    Raises:
      OSError: If the file cannot be written.
      ValueError: If another run has it, which is alive.
    """
    if self._held is not None:
      return
    while True:
      found = self._read()
      if found is None:
        # Only one of two runs creates the file.
        with contextlib.suppress(FileExistsError), self._path.open("x") as file:
          file.write(json.dumps(self._entry()))
          break
      elif found.get("run") == self._run:
        self._write()
        break
      elif _is_dead(found) or self._is_silent(found):
        self._write()
        time.sleep(_SETTLE_S)
        break
    self.check()
    self._held = threading.Event()
    threading.Thread(
      target=self._renew, args=(self._held,), daemon=True, name="jdist-lease"
    ).start()
    atexit.register(self.release)

  def check(self) -> None:
    """Raises a ValueError if another run has taken the lease."""
    found = self._read()
    if found is not None and found.get("run") != self._run:
      raise self._refusal(found)

  def release(self) -> None:
    """Gives the lease back, if this run has it."""
    if self._held is None:
      return
    self._held.set()
    self._held = None
    found = self._read()
    if found is not None and found.get("run") == self._run:
      self._path.unlink(missing_ok=True)

  def _is_silent(self, found: dict[str, Any]) -> bool:
    """Returns whether an entry stays; raises for that of a living run."""
    begin = time.monotonic()
    # On one machine the process itself has been found alive.
    if found.get("machine") == _machine() != "":
      raise self._refusal(found)
    while time.monotonic() - begin < _PATIENCE_S:
      time.sleep(0.1)
      now = self._read()
      if now is None or now.get("run") != found.get("run"):
        return False
      if now != found:
        raise self._refusal(found)
    return True

  def _refusal(self, found: dict[str, Any]) -> ValueError:
    return ValueError(
      f"`directory` {self._path.parent} is in use by run {found.get('run')} "
      f"(process {found.get('process')} on {found.get('host')}). Wait until it "
      "has ended, or take another directory."
    )

  def _renew(self, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
      # A disk that is full for a moment costs no lease, and a lost lease shows
      # at the next `check`.
      with contextlib.suppress(OSError):
        found = self._read()
        if found is None or found.get("run") == self._run:
          self._beat += 1
          self._write()

  def _entry(self) -> dict[str, Any]:
    return {
      "run": self._run, "host": platform.node(), "process": os.getpid(),
      "began": _began(os.getpid()), "machine": _machine(), "beat": self._beat,
    }  # fmt: skip

  def _write(self) -> None:
    sealed_json.write_text(self._path, json.dumps(self._entry()))

  def _read(self) -> dict[str, Any] | None:
    """Returns the entry; None without a file, and empty while it is created."""
    try:
      found = json.loads(self._path.read_text())
    except FileNotFoundError:
      return None
    except (OSError, ValueError, RecursionError):
      found = {}
    return found if isinstance(found, dict) else {}


def _is_dead(found: dict[str, Any]) -> bool:
  """Returns whether the process of an entry ran here and is gone."""
  here = found.get("machine") == _machine() != ""
  return here and found.get("began") != _began(found.get("process"))


def _machine() -> str:
  """Returns a name of this machine since it has started; empty if unknown."""
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # In another container the same number is another process.
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return ""


def _began(process: Any) -> str:
  """Returns when a process has started, which tells it from a later one."""
  try:
    words = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return ""
  state, *fields = words.rpartition(")")[2].split()
  # One that has ended, and whose parent has not noticed yet.
  return "" if state in "ZX" else fields[18]
