"""Repeats combinations of the oracle: `python -m tests.oracle SEED [COUNT]`.

With `--processes` the workers are in two real processes.  Combinations whose
workers cannot be divided, or are not one on a device, are left out.
"""

import sys
import tempfile
import time
import traceback

from tests import _processes
from tests import conftest as conftest  # It sets devices and promotion.
from tests.oracle import _check, _combination

# One worker, and several on a device.
_OTHERS = ("none", "several")


def check_in_processes(seeds, folder):
  """Checks combinations in a process of several, and returns the times."""
  import dataclasses
  import time

  from tests.oracle import _check, _combination

  found = []
  for seed in seeds:
    start = time.process_time()
    one = dataclasses.replace(_combination.draw(seed), substrate="processes")
    _check.check(one, folder)
    found.append(time.process_time() - start)
  return found


def main(words):
  """Checks combinations one by one; returns those that are wrong."""
  processes = "--processes" in words
  numbers = [int(x) for x in words if x != "--processes"]
  first, count = numbers[0], (numbers[1:] or [1])[0]
  failed, number = [], 0
  for seed in range(first, first + count):
    one = _combination.draw(seed)
    if processes and (one.substrate in _OTHERS or one.workers % 2):
      continue
    number += 1
    start = time.process_time()
    try:
      if processes:
        with tempfile.TemporaryDirectory() as folder:
          seconds = _processes.run(
            check_in_processes, [seed], folder, num_processes=2,
            devices_per_process=one.workers // 2, timeout_s=1800.0,
          )[0][0]  # fmt: skip
      else:
        _check.check(one)
        seconds = time.process_time() - start
      print(f"{seed}: right, {seconds:.1f} s", flush=True)
    except Exception as error:
      failed.append(seed)
      if count == 1:
        traceback.print_exc()
      else:
        text = str(error)[-500:] if processes else str(error)[:500]
        print(f"{seed}: {type(error).__name__} {text} {one}", flush=True)
  print(f"{number - len(failed)} of {number} are right; wrong: {failed}")
  return failed


if __name__ == "__main__":
  sys.exit(bool(main(sys.argv[1:])))
