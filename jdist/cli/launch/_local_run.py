"""A training run in several processes on this machine, restarted if it fails.

status      of a process                         next
0           trained                              ends with 0
2, 3, 141   wrong options, diverged, nothing     ends with it: a restart would
            reads the output                     end in the same way
143         SIGTERM, saved                       restarts, unless the launcher
                                                 itself has received the signal
75          disk full, port taken, peer lost     restarts from the last
                                                 checkpoint, with back-off
any other   killed, an error                     the same

All processes get the run's id and a secret of its own in their environment.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, IO

from jdist import channel
from jdist.cli import _run_end

# Statuses with which the same command would end again.
_FINAL = (0, 2, 3, 141)
_SIGTERM_STATUS = 128 + signal.SIGTERM
_MAX_BACKOFF_S = 60.0
# Processes that have lost a peer end within 15 s by themselves, and within a
# second or so if it was killed: only those that had not joined it do not.
_PATIENCE_S = 20.0
_PATIENCE_KILLED_S = 5.0
# Time to save a checkpoint upon SIGTERM.
_SAVING_S = 120.0
_POLL_S = 0.05


@dataclasses.dataclass
class LocalRun:
  """The processes of a run, each with the command and options of its own.

  At most `restarts` follow each other without a newer checkpoint, the first of
  them after `backoff_s`, each further one after twice the time.
  """

  command: Sequence[str]
  num_processes: int
  _: dataclasses.KW_ONLY
  checkpoints: str | None
  restarts: int
  backoff_s: float

  def __post_init__(self) -> None:
    self._stop: signal.Signals | None = None
    self._environment: dict[str, str] = {}

  def run(self) -> int:
    """Runs until it has trained or no restart helps; returns the status."""
    failures, identity = 0, channel.draw().environment()
    with (
      self._signals(),
      tempfile.TemporaryDirectory(prefix="jdist-") as folder,
    ):
      self._environment = {
        # XLA takes memory anew in each step; huge pages are cleared faster.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **_compiled(),
        **os.environ,
        **identity,
        # What killed processes leave behind goes with the run.
        channel.RUN_DIRECTORY: folder,
      }
      while True:
        newest = self._newest()
        status, reason = judge(self._attempt())
        if status in _FINAL or self._stop is not None:
          return status
        # Progress forgives earlier failures, so that a long run survives any
        # number of them.
        if status == _SIGTERM_STATUS or self._newest() > newest:
          failures = 0
        failures += 1
        if failures > self.restarts:
          if self.restarts:
            _say(f"{reason}; given up after {self.restarts} restarts.")
          return status
        wait_s = min(self.backoff_s * 2 ** (failures - 1), _MAX_BACKOFF_S)
        step = self._newest()
        where = f"step {step}" if step >= 0 else "the beginning"
        _say(
          f"{reason}; restarting all from {where} in {wait_s:g} s (restart "
          f"{failures} of {self.restarts} without a new checkpoint)."
        )
        self._sleep(wait_s)
        if self._stop is not None:
          return 128 + self._stop

  def _newest(self) -> int:
    """Returns the step of the newest checkpoint; -1 if there is none."""
    if self.checkpoints is None:
      return -1
    found = pathlib.Path(self.checkpoints).glob("step_*.json")
    return max((int(path.stem[5:]) for path in found), default=-1)

  def _attempt(self) -> list[int]:
    """Starts all processes, waits for them, and returns their statuses."""
    # Each attempt needs another port: the last one's may still be taken.
    port = _free_port()
    processes: list[subprocess.Popen[str]] = []
    echoes = []
    try:
      for number in range(self.num_processes):
        words = list(self.command)
        if self.num_processes > 1:
          words += [
            "--coordinator-address", f"127.0.0.1:{port}", "--num-processes",
            str(self.num_processes), "--process-id", str(number),
          ]  # fmt: skip
        # Only the first process may draw its progress bar on the terminal.
        pipe = {} if number == 0 else {"stderr": subprocess.PIPE}
        processes.append(
          subprocess.Popen(words, text=True, env=self._environment, **pipe)  # type: ignore[call-overload]
        )
        if number:
          echoes.append(_Echo(number, processes[-1].stderr))
      statuses = self._wait(processes)
    finally:
      for process in processes:
        if process.poll() is None:
          process.kill()
        process.wait()
      for echo in echoes:
        echo.thread.join()
    # Processes with the same status have printed the same line.
    shown = {statuses[0]}
    for echo, status in zip(echoes, statuses[1:], strict=True):
      if status not in shown:
        shown.add(status)
        echo.show()
    return statuses

  def _wait(self, processes: list[subprocess.Popen[str]]) -> list[int]:
    """Waits for all processes, and kills those that outlive a failed one."""
    end_s: float | None = None
    passed_on = False
    killed: set[int] = set()
    while True:
      codes = [process.poll() for process in processes]
      if None not in codes:
        # Those that were killed here have lost another one.
        return [
          _run_end.AGAIN if number in killed else code
          for number, code in enumerate(codes)
          if code is not None
        ]
      if self._stop is not None and not passed_on:
        passed_on, end_s = True, time.monotonic() + _SAVING_S
        # A terminal sends SIGINT to all processes itself; they ignore a second.
        for process in processes:
          process.send_signal(self._stop)
      if end_s is None and any(codes):
        first = min(code for code in codes if code)
        patience_s = _PATIENCE_KILLED_S if first < 0 else _PATIENCE_S
        end_s = time.monotonic() + patience_s
      if end_s is not None and time.monotonic() > end_s:
        killed |= {i for i, code in enumerate(codes) if code is None}
        for process in processes:
          process.kill()
      time.sleep(_POLL_S)

  def _sleep(self, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while self._stop is None and time.monotonic() < end_s:
      time.sleep(_POLL_S)

  @contextlib.contextmanager
  def _signals(self) -> Iterator[None]:
    """Records SIGTERM and SIGINT, which are then sent to the processes."""

    def note(number: int, frame: Any) -> None:
      del frame
      self._stop = signal.Signals(number)

    before = {
      number: signal.signal(number, note)
      for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)


class _Echo:
  """Prints the stderr of another process than the first with its number."""

  def __init__(self, number: int, stream: IO[str] | None):
    self._number = number
    assert stream is not None
    self._stream = stream
    # Lines of jdist wait until it is known whether another process has printed
    # the same ones.
    self._held: list[str] = []
    self.thread = threading.Thread(target=self._read, daemon=True)
    self.thread.start()

  def _read(self) -> None:
    with self._stream:
      for line in self._stream:
        if line.startswith("jdist: "):
          self._held.append(line)
        else:
          self._print(line)

  def _print(self, line: str) -> None:
    print(f"[{self._number}] {line}", end="", file=sys.stderr, flush=True)

  def show(self) -> None:
    for line in self._held:
      self._print(line)


def judge(statuses: Sequence[int]) -> tuple[int, str]:
  """Returns the status of a run with the reason, by those of its processes.

  The root cause decides: a process that was killed, before those that have lost
  it as a peer.

  >>> judge([75, 75, -9, 75])
  (137, 'process 2 was killed by SIGKILL')
  >>> judge([0, 0])
  (0, 'all processes have ended well')
  >>> judge([3, 3])
  (3, 'process 0 has ended with status 3')
  """
  if not any(statuses):
    return 0, "all processes have ended well"

  def rank(item: tuple[int, int]) -> int:
    status = item[1]
    if status in (2, 3):
      return 0
    if status == _SIGTERM_STATUS:
      return 3
    return {_run_end.AGAIN: 2, 0: 4}.get(status, 1)

  number, status = min(enumerate(statuses), key=rank)
  if status < 0:
    name = signal.Signals(-status).name
    return 128 - status, f"process {number} was killed by {name}"
  if status == _SIGTERM_STATUS:
    return status, "SIGTERM has ended the processes, which have saved"
  again = " (try again)" if status == _run_end.AGAIN else ""
  return status, f"process {number} has ended with status {status}{again}"


def _compiled() -> dict[str, str]:
  """Returns variables by which restarted processes find compiled programs."""
  base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
  try:
    # Another user's program would run with this user's rights.
    path = channel.private_directory(base.expanduser() / "jdist" / "compiled")
  except OSError as error:
    _say(f"compiled programs are not kept: {error}")
    return {}
  return {
    "JAX_COMPILATION_CACHE_DIR": str(path),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }


def _say(text: str) -> None:
  print(f"jdist: launch: {text}", file=sys.stderr, flush=True)


def _free_port() -> int:
  with socket.socket() as found:
    found.bind(("127.0.0.1", 0))
    return int(found.getsockname()[1])
