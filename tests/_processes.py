"""Runs one function in several real processes that form one JAX run.

    def count_devices(scale):
      import jax

      return scale * jax.device_count()

    assert _processes.run(count_devices, 10, num_processes=2) == [20, 20]

The function's source is written to a file and run there: it imports what it
needs itself, takes and returns what JSON can hold, and may assert.
"""

import contextlib
import inspect
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from typing import Any

from jdist import channel

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_POLL_S = 0.05
_TAIL_CHARACTERS = 3000
# The flags of XLA that decide which bits a program computes.
_FLAGS = ("--xla_backend_optimization_level", "--xla_cpu_max_isa")

_MAIN = """

import json, os, pathlib, sys, traceback

process, processes, devices, port = (int(arg) for arg in sys.argv[1:5])
if processes:
  import jax
  from jdist import collectives

  jax.config.update("jax_numpy_dtype_promotion", "strict")
  collectives.start_processes(
    f"127.0.0.1:{{port}}", processes, process, cpu_devices_per_process=devices
  )
try:
  result = {name}(*json.loads(sys.argv[5]))
except BaseException:
  traceback.print_exc()
  sys.stderr.flush()
  os._exit(1)  # An ordinary exit would wait until the others have ended.
if processes:
  jax.distributed.shutdown()  # Waits for the others, so that none is cut off.
pathlib.Path(sys.argv[6]).write_text(json.dumps(result))
"""


class ProcessesError(AssertionError):
  """A process failed or took too long; shows what all of them printed."""


def run(
  function: Callable[..., Any],
  *args: Any,
  num_processes: int,
  devices_per_process: int = 1,
  timeout_s: float = 600.0,
  join: bool = True,
) -> list[Any]:
  """Runs `function(*args)` in each of several processes.

  Args:
    function: a function that needs nothing from around it.
    *args: what JSON can hold.
    num_processes: how many processes.
    devices_per_process: virtual CPU devices of each.
    timeout_s: after which all processes are killed; far more than they take,
      as a busy machine slows them down.
    join: whether the processes call `collectives.start_processes` first.

  Returns:
    What the function returned in process 0, 1, ...

  Raises:
    ProcessesError: when a process failed, upon which the others are killed, or
      when they took too long.
  """
  __tracebackhide__ = True  # The processes' own tracebacks say more.
  source = textwrap.dedent(inspect.getsource(function))
  port = free_port()
  with tempfile.TemporaryDirectory() as folder_name:
    folder = pathlib.Path(folder_name)
    script = folder / f"{function.__name__}.py"
    script.write_text(source + _MAIN.format(name=function.__name__))
    processes: list[subprocess.Popen[bytes]] = []
    try:
      for i in range(num_processes):
        command = [
          sys.executable, "-W", "error::DeprecationWarning:jdist", str(script),
          str(i), str(num_processes if join else 0), str(devices_per_process),
          str(port), json.dumps(args), str(folder / f"{i}.json"),
        ]  # fmt: skip
        # To a file and not a pipe, which would block without a reader.
        with (folder / f"{i}.log").open("wb") as log:
          processes.append(
            subprocess.Popen(
              command,
              cwd=_ROOT,
              env=environment() | {channel.RUN_DIRECTORY: folder_name},
              stdin=subprocess.DEVNULL,
              stdout=log,
              stderr=subprocess.STDOUT,
            )
          )
      trouble = _wait(processes, timeout_s)
    finally:
      for process in processes:
        process.kill()
        process.wait()
    if trouble:
      raise ProcessesError(f"{trouble}\n{_logs(folder, num_processes)}")
    return [
      json.loads((folder / f"{i}.json").read_text())
      for i in range(num_processes)
    ]


def free_port() -> int:
  """A port of the loopback interface without a listener.

  Below those that systems give to connections as their own ends: of these one
  could take it before a process of the test listens there.
  """
  while True:
    port = random.SystemRandom().randrange(10_000, 30_000)
    with socket.socket() as sock, contextlib.suppress(OSError):
      sock.bind(("127.0.0.1", port))
      return port


def listening(pid: int) -> list[tuple[str, int]]:
  """Returns the addresses at which a process and those below it listen."""
  rows = {}
  for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in pathlib.Path(path).read_text().splitlines()[1:]:
      words = line.split()
      host, port = words[1].split(":")
      # Four bytes at a time, each group from the last to the first.
      groups = [host[i : i + 8] for i in range(0, len(host), 8)]
      packed = b"".join(bytes.fromhex(x)[::-1] for x in groups)
      family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
      if words[3] == "0A":
        rows[words[9]] = socket.inet_ntop(family, packed), int(port, 16)
  found = []
  for each in [pid, *descendants(pid)]:
    paths = []
    with contextlib.suppress(FileNotFoundError):  # It has ended since.
      paths = list(pathlib.Path(f"/proc/{each}/fd").iterdir())
    for path in paths:
      with contextlib.suppress(OSError):
        inode = path.readlink().name.removeprefix("socket:[").rstrip("]")
        found += [rows[inode]] if inode in rows else []
  return found


def descendants(pid: int) -> list[int]:
  """Returns the processes that a process and those below it have started."""
  found = []
  for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
      for child in map(int, path.read_text().split()):
        found += [child, *descendants(child)]
  return found


def environment() -> dict[str, str]:
  """Returns the environment of a program on CPUs that asks for its own devices.

  XLA's flags that shape programs are passed on, so that bits are comparable;
  this process's virtual devices and threads are not.
  """
  paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
  drop = {"NPROC", "JAX_NUM_CPU_DEVICES"}
  kept = {name: x for name, x in os.environ.items() if name not in drop}
  flags = os.environ.get("XLA_FLAGS", "").split()
  return kept | {
    "JAX_PLATFORMS": "cpu",
    # Otherwise one would be kept in the home directory.
    "JDIST_SECRET": "of all tests",
    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    "XLA_FLAGS": " ".join(x for x in flags if x.startswith(_FLAGS)),
  }


def _wait(
  processes: list[subprocess.Popen[bytes]], timeout_s: float
) -> str | None:
  """Waits for all to end well; says what went wrong."""
  deadline_s = time.monotonic() + timeout_s
  while True:
    codes = [process.poll() for process in processes]
    failed = [i for i, code in enumerate(codes) if code]
    if failed:
      return f"Process {failed[0]} ended with status {codes[failed[0]]}."
    if None not in codes:
      return None
    if time.monotonic() > deadline_s:
      running = [i for i, code in enumerate(codes) if code is None]
      return f"Processes {running} still ran after {timeout_s} s."
    time.sleep(_POLL_S)


def _logs(folder: pathlib.Path, num_processes: int) -> str:
  return "\n".join(
    f"--- process {i} ---\n"
    + (folder / f"{i}.log").read_text(errors="replace")[-_TAIL_CHARACTERS:]
    for i in range(num_processes)
  )
