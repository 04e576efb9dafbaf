"""Counts the rows whose code is not in this history, for docs/experiments.md.

python experiments/provenance.py          # writes the table
python experiments/provenance.py --check  # fails if a number differs
"""

import pathlib
import subprocess

import studies

from jdist import training

_FOLDER = pathlib.Path(__file__).resolve().parent
PAGE = _FOLDER.parent / "docs/experiments.md"


def commits() -> set[str]:
  """Returns all commits that lead to this one, as rows name them."""
  found = subprocess.run(
    ["git", "-C", str(_FOLDER), "rev-list", "--abbrev-commit", "--abbrev=12",
     "HEAD"],
    check=True, capture_output=True, text=True,
  )  # fmt: skip
  return set(found.stdout.split())


def counts() -> list[tuple[str, int, int, int]]:
  """Returns files, their rows, those of changed code and of lost commits."""
  known, found = commits(), []
  for path in sorted(_FOLDER.glob("*/results/*.jsonl")):
    # Rows of others' measurements name their source instead.
    named = [
      str(row["commit"]) for row in training.read_rows(path) if "commit" in row
    ]
    changed = sum(x.endswith("+") for x in named)
    lost = sum(not x.endswith("+") and x not in known for x in named)
    if changed or lost:
      name = f"{path.parents[1].name}/{path.stem}"
      found.append((name, len(named), changed, lost))
  return found


def main() -> None:
  """Writes the table of all files that have such rows."""
  table = studies.table(
    "file | rows | of changed code | of a commit that is not here", counts()
  )
  studies.publish({PAGE: {"provenance": table}}, lambda: None)


if __name__ == "__main__":
  main()
