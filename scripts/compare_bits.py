"""Compares the bits of every method with those before the house was rebuilt.

    python scripts/compare_bits.py

Checks out the tree of `BEFORE` into a temporary folder, runs
`bits/cases_before.py` there and `bits/cases.py` here, 30 steps on 3 and on 8
workers each, and prints where parameters or anchors differ.  Takes about five
minutes; exits with 1 where a case differs that is not in `TOLERATED`.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import old_tree

BEFORE = "b390ebc"
HERE = pathlib.Path(__file__).parent
_MIX = (
  "where a worker goes on is computed in the conditional now, where LLVM "
  "merges a product and a sum, or does not"
)
# Equal within 1e-6 of the largest entry, and why not to the bit.
TOLERATED = {
  "update_first": "buckets are flat now, with the same effect",
  "overlap_local_sgd": _MIX,
  "streaming_diloco": _MIX,
  "streaming_diloco at once": _MIX,
  "steps late": _MIX,
}


def run(tree, table, out):
  environment = os.environ | {
    "PYTHONPATH": str(tree),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=1",
  }
  command = [sys.executable, str(HERE / "bits/harness.py"), str(table), out]
  return subprocess.Popen(command, env=environment, cwd=tree)


def differences(before, after):
  """The largest difference of each case and number of workers."""
  found = {}
  for key in before.files:
    name, workers, _ = key.split("|", 2)
    case = found.setdefault((name, int(workers)), [])
    if key not in after.files:
      case.append(np.inf)
    elif before[key].tobytes() == after[key].tobytes():
      case.append(0.0)
    else:
      largest = max(np.abs(before[key]).max(), np.finfo(np.float32).tiny)
      case.append(np.abs(before[key] - after[key]).max() / largest)
  return {case: float(max(values)) for case, values in found.items()}


def main():
  with (
    old_tree.checked_out(BEFORE) as old,
    tempfile.TemporaryDirectory() as folder,
  ):
    outs = [f"{folder}/{name}.npz" for name in ("before", "after")]
    runs = [
      run(old, HERE / "bits/cases_before.py", outs[0]),
      run(old_tree.ROOT, HERE / "bits/cases.py", outs[1]),
    ]
    if [one for one in runs if one.wait()]:
      sys.exit("A table did not run to its end.")
    found = differences(*map(np.load, outs))
  wrong = 0
  for (name, workers), difference in found.items():
    if difference:
      allowed = name in TOLERATED and difference <= 1e-6
      wrong += not allowed
      why = f"tolerated: {TOLERATED[name]}" if allowed else "NOT EQUAL"
      print(f"{name}, {workers} workers: {difference:.2g} relative, {why}")
  equal = sum(not difference for difference in found.values())
  print(f"{equal} of {len(found)} cases equal to the bit, {wrong} wrong.")
  sys.exit(wrong > 0)


if __name__ == "__main__":
  main()
