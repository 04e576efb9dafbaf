"""Checks out an older commit next to this tree, for as long as it is needed."""

import contextlib
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[pathlib.Path]:
  """Yields a temporary work tree of the commit."""
  with tempfile.TemporaryDirectory() as folder:
    tree = pathlib.Path(folder) / "before"
    git = ["git", "-C", str(ROOT), "worktree"]
    add = [*git, "add", "--detach", "-q", str(tree), commit]
    subprocess.run(add, check=True)
    try:
      yield tree
    finally:
      subprocess.run([*git, "remove", "--force", str(tree)], check=True)
