"""Runs the benches of an older tree and of this one in turn, and compares.

    python scripts/bench_against.py b390ebc

Checks the commit out into a temporary folder.  Each bench is run in a process
of its own, old and new in turn, each tree by its own script; so is the import
of the library.  `traces` counts how often a training run traces its loss, by
this tree's `trace_updates.py`.  What is compared are the times, ratios and
counts by name: the median of new over old, beside the spread of old over old,
which is the noise of the machine.  Run it alone: it takes fifteen minutes.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import old_tree

# Smaller than by default, as there are several runs of each.
_BENCHES = {
  "step": ["bench_step.py", "--blocks", "12", "--rows"],
  "overhead": [
    "bench_overhead.py", "--model", "resnet8", "--blocks", "5", "--output",
  ],
  "codecs": ["bench_codecs.py", "--repeats", "15", "--output"],
}  # fmt: skip
_IMPORT = (
  "import time; t = time.perf_counter(); import jdist; "
  "print(time.perf_counter() - t)"
)


def _times(row: Any, path: tuple[str, ...] = ()) -> dict[str, float]:
  """Returns the times and ratios in a row, by their path."""
  if isinstance(row, dict):
    found: dict[str, float] = {}
    for key, value in row.items():
      if key not in ("config", "versions", "seed"):
        found |= _times(value, (*path, key))
    return found
  name = "/".join(path)
  # The codecs' are ratios to a copy.
  is_time = path[:1] == ("codecs",) or any(
    part.endswith(("_s", "_ms", "_us", "ratio")) for part in path
  )
  if is_time and isinstance(row, float) and row > 0:
    return {name: row}
  return {}


def _run(tree: pathlib.Path, command: list[str]) -> str:
  environment = os.environ | {
    "PYTHONPATH": str(tree),
    "JAX_PLATFORMS": "cpu",
  }
  done = subprocess.run(
    [sys.executable, *command],
    cwd=tree,
    env=environment,
    capture_output=True,
    text=True,
  )
  if done.returncode:
    sys.exit(f"{command} in {tree} failed:\n{done.stderr[-2000:]}")
  return done.stdout


def _measure(tree: pathlib.Path, name: str) -> dict[str, float]:
  """Runs a bench once and returns its times."""
  if name == "import":
    return {"import jdist": float(_run(tree, ["-c", _IMPORT]))}
  if name == "traces":
    script = str(old_tree.ROOT / "scripts" / "trace_updates.py")
    return json.loads(_run(tree, [script, "--runs"]))
  script, *options = _BENCHES[name]
  with tempfile.NamedTemporaryFile(suffix=".jsonl") as rows:
    _run(tree, [str(tree / "scripts" / script), *options, rows.name])
    text = pathlib.Path(rows.name).read_text()
  found: dict[str, float] = {}
  for line in text.splitlines():
    row = json.loads(line)
    label = row.get("codec") or row.get("name") or ""
    found |= {f"{label} {key}": value for key, value in _times(row).items()}
  return found


def _compare(
  old: list[dict[str, float]], new: list[dict[str, float]]
) -> dict[str, dict[str, float]]:
  """Returns new over old, and the spread of old over old, by name."""
  report = {}
  for name in old[0]:
    if not all(name in one for one in (*old, *new)):
      continue
    ratios = [n[name] / o[name] for o, n in zip(old, new, strict=True)]
    others = [x[name] / y[name] for x in old for y in old if x is not y] or [
      1.0
    ]
    report[name] = {
      "new": statistics.median(x[name] for x in new),
      "old": statistics.median(x[name] for x in old),
      "new_over_old": statistics.median(ratios),
      "least": min(ratios),
      "most": max(ratios),
      "noise_least": min(others),
      "noise_most": max(others),
    }
  return report


def main() -> None:
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("commit")
  benches = ["import", "traces", *_BENCHES]
  parser.add_argument("--benches", nargs="+", default=benches, choices=benches)
  parser.add_argument("--pairs", type=int, default=3)
  parser.add_argument("--output", help="a file of rows to append to")
  options = parser.parse_args()
  if options.pairs < 2:
    parser.error("--pairs must be at least 2: the noise is that of two runs")
  with old_tree.checked_out(options.commit) as before:
    for bench in options.benches:
      old, new = [], []
      # Counts have no noise.
      for _ in range(1 if bench == "traces" else options.pairs):
        old.append(_measure(before, bench))
        new.append(_measure(old_tree.ROOT, bench))
      report = _compare(old, new)
      for name, found in report.items():
        print(
          f"{bench:9s} {name:50s} new/old {found['new_over_old']:.3f} "
          f"({found['least']:.3f} to {found['most']:.3f}), old/old "
          f"{found['noise_least']:.3f} to {found['noise_most']:.3f}",
          flush=True,
        )
      if options.output is not None:
        from jdist import training

        config = {k: v for k, v in vars(options).items() if k != "output"}
        row = training.make_row(
          config, 0, bench=bench, against=options.commit, times=report
        )
        training.append_rows(options.output, [row])


if __name__ == "__main__":
  main()
