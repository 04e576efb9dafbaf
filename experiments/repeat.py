"""Runs one row of an experiment again, with the code that the row names.

    python experiments/repeat.py          # names the experiments
    python experiments/repeat.py msdpu    # minutes of a core at most

The row's commit is checked out beside this clone.  There the experiment's own
command runs what is missing in the file of rows, from which the row was taken
out.  All numbers of both rows are compared but times; to the last digit they
agree with the versions of packages that the row names, which are printed.
Experiments whose rows are times of a machine, or of a GPU, are left out.
"""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from jdist import training

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Two runs of one row differ in these.
_OWN = (
  "run", "commit", "device", "versions", "train_s", "took_s", "partition_s",
  "place_s",
)  # fmt: skip
# Options that say which rows are run, not how.
_FREE = ("seeds", "tuning_seeds", "variants", "rates", "extensions")
_KEYS = (
  "purpose", "method", "seed", "learning_rate", "first", "network", "topology",
  "stages", "partition",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Repeat:
  """A row, and the command that runs it.

  Attributes:
    rows: The file of rows.
    row: Entries that identify the row, the last of several.
    command: The script and its arguments, which may name entries of the row.
  """

  rows: str
  row: dict[str, Any]
  command: tuple[str, ...]


_SEED = ("--variants", "{method}", "--seeds", "{seed}")
REPEATS = {
  "compression": Repeat(
    "compression/results/cifar10.jsonl",
    {"purpose": "comparison", "method": "int4 + feedback"},
    ("compression/run.py", "cifar10", *_SEED),
  ),
  "dbs_sgd": Repeat(
    "dbs_sgd/results/cifar10.jsonl",
    {"purpose": "comparison", "method": "dbs"},
    ("dbs_sgd/run.py", "cifar10"),
  ),
  "failures": Repeat(
    "failures/results/clock.jsonl", {"method": "bsp"}, ("failures/run.py",)
  ),
  "first_comparison": Repeat(
    "first_comparison/results/comparison.jsonl",
    {"method": "ssgd", "seed": 300},
    ("first_comparison/run.py", "compare"),
  ),
  "h_ps": Repeat(
    "h_ps/results/clock.jsonl", {"method": "h_ps"}, ("h_ps/run.py",)
  ),
  "mp2": Repeat(
    "mp2/results/mnist.jsonl",
    {"purpose": "comparison", "method": "top-k 1 % + feedback"},
    ("mp2/run.py", "mnist", *_SEED),
  ),
  "msdpu": Repeat(
    "msdpu/results/cifar10-20-protocol.jsonl",
    {"purpose": "comparison", "method": "msdpu, int4"},
    ("msdpu/run.py", "cifar10-20-protocol", *_SEED),
  ),
  "pipeline": Repeat(
    "pipeline/results/planner.jsonl", {}, ("pipeline/planner.py",)
  ),
  "storm": Repeat(
    "storm/results/absences.jsonl",
    {"seed": 0, "outages": 45},
    ("storm/absences.py",),
  ),
  "successor": Repeat(
    "successor/results/mnist-mlp.jsonl",
    {"purpose": "comparison", "method": "top-k, momentum 0.3"},
    ("successor/run.py", "mnist-mlp"),
  ),
}  # fmt: skip


def unlike(row: dict[str, Any], other: dict[str, Any]) -> float:
  """Returns how many options differ; infinity for another run."""
  if any(row.get(x) != other.get(x) for x in _KEYS):
    return math.inf
  configs = row["config"], other["config"]
  both = set.intersection(*map(set, configs)) - set(_FREE)
  return sum(configs[0][key] != configs[1][key] for key in both)


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
  """Yields the numbers of a row but those of its time, with their names."""
  if isinstance(value, dict):
    for key, x in value.items():
      timed = value.get("clock") == "wall" and key == "samples_per_s"
      if not timed and key not in _OWN:
        yield from numbers(x, f"{name}.{key}")
  elif isinstance(value, list):
    for i, x in enumerate(value):
      yield from numbers(x, f"{name}[{i}]")
  elif isinstance(value, int | float):
    yield name.removeprefix("."), value


def repeat(name: str) -> bool:
  """Runs a row again; returns whether all its numbers are the same."""
  one = REPEATS[name]
  path = _ROOT / "experiments" / one.rows
  rows = training.read_rows(path)
  at = max(
    i
    for i, row in enumerate(rows)
    if one.row.items() <= row.items() and not row["commit"].endswith("+")
  )
  old = rows[at]
  there = _ROOT.with_name(f"{_ROOT.name}-{old['commit']}")
  git = ("git", "-C", str(_ROOT), "worktree")
  subprocess.run([*git, "add", "--detach", there, old["commit"]], check=True)
  try:
    copy = there / "experiments" / one.rows
    copy.parent.mkdir(exist_ok=True)
    # Older commits refuse to run with changed rows.
    hide = ("git", "-C", str(there), "update-index", "--assume-unchanged")
    for each in path.parent.glob("*.jsonl"):
      kept = each.read_text().splitlines(keepends=True)
      kept = kept[:at] + kept[at + 1 :] if each == path else kept
      copy.with_name(each.name).write_text("".join(kept))
      name_there = str(copy.with_name(each.name))
      subprocess.run([*hide, name_there], check=False, capture_output=True)
    script, *options = (x.format(**old) for x in one.command)
    command = [sys.executable, f"experiments/{script}", *options]
    print(" ".join(command[1:]), old["versions"], flush=True)
    subprocess.run(
      command, check=True, cwd=there, stdout=subprocess.DEVNULL,
      env=os.environ | {"PYTHONPATH": str(there)},
    )  # fmt: skip
    made = training.read_rows(copy)[len(rows) - 1 :]
  finally:
    subprocess.run([*git, "remove", "--force", there], check=True)
  new = min(made, key=lambda row: unlike(old, row), default=None)
  if new is None or unlike(old, new) == math.inf:
    print(f"{name}: the command made no such row.")
    return False
  before, after = dict(numbers(old)), dict(numbers(new))
  differ = [x for x in before if before[x] != after.get(x)]
  for x in differ[:10]:
    print(f"{name}: {x} is {before[x]} in the row, and {after.get(x)} again.")
  print(f"{name}: {len(before) - len(differ)} of {len(before)} numbers agree.")
  return not differ


if __name__ == "__main__":
  names = sys.argv[1:]
  if not names or set(names) - set(REPEATS):
    sys.exit(f"Name some of {', '.join(REPEATS)}, got {names}.")
  sys.exit(not all([repeat(name) for name in names]))  # noqa: C419
