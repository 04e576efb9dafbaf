"""Processes of a pipeline on this machine, and how busy it is otherwise."""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jdist import channel, pipeline

# A core for each process: what a program computes, it computes on one.
_FLAGS = "--xla_cpu_multi_thread_eigen=false"
# glibc would give much of a step's memory back, and each page of it anew in the
# next one: the tables that save more would take longer.
KEPT_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
_TOKEN = "of one machine"  # All listen on its loopback alone.


def run_processes(
  number: int,
  work: Callable[..., Any],
  *args: Any,
  cores: Sequence[int] | None = None,
) -> list[Any]:
  """Runs `work(peers, *args)` in processes of their own.

  Args:
    number: of processes; each is a device of the pipeline.
    work: a function of a module, not a local one.
    *args: the same for all.
    cores: to which each is bound; to none if None.

  Returns:
    What it returned, of each device.

  Raises:
    RuntimeError: when one has failed.
  """
  context = multiprocessing.get_context("spawn")
  answers = context.SimpleQueue()
  listeners = [channel.listen() for _ in range(number)]
  addresses = [x.getsockname()[:2] for x in listeners]
  before = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{before} {_FLAGS}"
  os.environ |= KEPT_MEMORY
  os.environ["JAX_PLATFORMS"] = "cpu"
  started = []
  try:
    for device, listener in enumerate(listeners):
      core = None if cores is None else cores[device]
      process = context.Process(
        target=_run,
        args=(device, addresses, listener, core, answers, work, args),
      )
      process.start()
      listener.close()
      started.append(process)
    found: dict[int, Any] = {}
    while len(found) < number:
      device, failed, answer = answers.get()
      if failed:
        raise RuntimeError(f"Device {device} has failed:\n{answer}")
      found[device] = answer
    for process in started:
      process.join()
  finally:
    os.environ["XLA_FLAGS"] = before
    for process in started:
      process.terminate()
  return [found[i] for i in range(number)]


def _run(
  device: int,
  addresses: Any,
  listener: Any,
  core: int | None,
  answers: Any,
  work: Any,
  args: Any,
) -> None:
  if core is not None:
    os.sched_setaffinity(0, {core})
  try:
    with pipeline.connect(
      device, addresses, _TOKEN, listener=listener, connect_s=240
    ) as peers:
      answers.put((device, False, work(peers, *args)))
  except BaseException:
    answers.put((device, True, traceback.format_exc()))


class OtherCore:
  """A process that keeps a core busy while it is wanted.

  Args:
    make: A function of a module; it returns what the process repeats.
    *args: Its arguments.
  """

  def __init__(
    self, make: Callable[..., Callable[[], Any]], *args: Any
  ) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    self._process = context.Process(
      target=_repeat, args=(ready, make, args), daemon=True
    )
    self._process.start()
    ready.wait()
    self._signal(signal.SIGSTOP)

  @contextlib.contextmanager
  def busy(self) -> Iterator[None]:
    """Keeps the core busy meanwhile."""
    self._signal(signal.SIGCONT)
    try:
      yield
    finally:
      self._signal(signal.SIGSTOP)

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.join()

  def _signal(self, number: int) -> None:
    os.kill(self._process.pid, number)


def _repeat(ready: Any, make: Any, args: Any) -> None:
  run = make(*args)
  while True:
    run()
    ready.set()


def busy_cores(seconds: float = 1.0) -> float:
  """Returns how many cores of this machine are at work, on average."""
  begin = _cpu_ticks()
  time.sleep(seconds)
  end = _cpu_ticks()
  idle, total = (b - a for a, b in zip(begin, end, strict=True))
  return (1 - idle / total) * (os.cpu_count() or 1)


def _cpu_ticks() -> tuple[int, int]:
  """Returns idle and all ticks since the machine has started."""
  with open("/proc/stat") as file:
    ticks = [int(x) for x in file.readline().split()[1:9]]
  return ticks[3] + ticks[4], sum(ticks)


def wait_until_idle(most: float, patience_s: float) -> float:
  """Waits until less than so many cores are busy, or for so long.

  Returns:
    The busy cores, at last.
  """
  deadline = time.monotonic() + patience_s
  while True:
    busy = busy_cores()
    if busy <= most or time.monotonic() > deadline:
      return busy
