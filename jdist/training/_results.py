"""Result rows: one JSON object a line, each of which stands alone."""

import functools
import importlib.metadata
import math
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jdist.storage import json_lines

_PACKAGES = ("jdist", "jax", "jaxlib", "flax", "optax", "numpy")


def make_row(
  config: dict[str, Any], seed: int, **measured: Any
) -> dict[str, Any]:
  """Puts what was measured beside all that is needed to measure it again.

  Args:
    config: every option of the run.
    seed: its seed.
    **measured: the results, units in their names.

  Returns:
    `{config, seed, commit, device, versions, ...measured}`.
  """
  return {
    "config": config,
    "seed": seed,
    "commit": _commit(),
    "device": _device(),
    "versions": _versions(),
    **measured,
  }


def append_rows(
  path: str | os.PathLike[str], rows: Iterable[dict[str, Any]]
) -> None:
  """Appends rows to a file, each in one write.

  What is not a finite number, such as the loss of a run that has diverged,
  becomes null: JSON has no other word for it.

  Raises:
    OSError: when they cannot be written, as the disk is full for instance.
  """
  json_lines.append(path, map(_plain, rows))


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads all rows of a file; a last line that was cut off is left out."""
  return list(json_lines.read(path))


def _plain(x: Any) -> Any:
  """Returns a value in a form that JSON can hold."""
  if isinstance(x, dict):
    return {name: _plain(value) for name, value in x.items()}
  if isinstance(x, list | tuple):
    return [_plain(value) for value in x]
  if isinstance(x, np.generic):
    x = x.item()
  return None if isinstance(x, float) and not math.isfinite(x) else x


@functools.cache
def _commit() -> str:
  """The commit of the code that runs, with `+` when it was changed since."""
  folder = pathlib.Path(__file__).parent
  try:
    git = functools.partial(
      subprocess.run, cwd=folder, capture_output=True, text=True, check=True
    )
    commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    changed = git(["git", "status", "--porcelain", "-uno"]).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return "unknown"  # Installed, not checked out: the version says it.
  return commit + ("+" if changed else "")


def _device() -> str:
  first = jax.devices()[0]
  kind = first.device_kind
  if first.platform == "cpu":
    kind = f"{platform.machine()} CPU with {os.cpu_count()} cores"
  return f"{jax.device_count()} x {kind} in {jax.process_count()} processes"


@functools.cache
def _versions() -> dict[str, str]:
  versions = {"python": platform.python_version()}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      versions[package] = "not installed"
  return versions
