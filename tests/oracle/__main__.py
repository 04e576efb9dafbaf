"""Repeats combinations of the oracle: `python -m tests.oracle SEED [COUNT]`."""

import sys
import time
import traceback

from tests import conftest as conftest  # Devices and strict promotion.
from tests.oracle import _check, _combination

first, count = int(sys.argv[1]), int([*sys.argv, "1"][2])
failed = []
for seed in range(first, first + count):
  start = time.process_time()
  one = _combination.draw(seed)
  try:
    _check.check(one)
    print(f"{seed}: right, {time.process_time() - start:.1f} s", flush=True)
  except Exception as error:
    failed.append(seed)
    if count == 1:
      traceback.print_exc()
    else:
      print(
        f"{seed}: {type(error).__name__} {str(error)[:500]} {one}", flush=True
      )
print(f"{count - len(failed)} of {count} are right; wrong: {failed}")
sys.exit(bool(failed))
