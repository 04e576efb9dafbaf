"""The identity of a run: an id that all may see, and a secret.

`jdist launch` and the files that it prints give both to each process in its
environment. Processes that are started by hand on one machine, or on several
that share home directories, find a secret in a file of the user's own.
"""

import contextlib
import functools
import hmac
import importlib.metadata
import json
import os
import pathlib
import platform
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

_RUN_ID, _SECRET = "JDIST_RUN_ID", "JDIST_SECRET"
# A directory of the launcher's for sockets, which it removes in the end.
RUN_DIRECTORY = "JDIST_RUN_DIRECTORY"


class Identity(NamedTuple):
  """The identity of a run.

  Attributes:
    run_id: The id that stands in rows and leases; empty if it was not given.
    secret: Known to all processes of the run alone.
  """

  run_id: str
  secret: bytes

  def key(self, purpose: str) -> bytes:
    """Returns the key of connections with a purpose in this run."""
    # Neither another run of the same user nor another kind of connection
    # accepts its proofs.
    words = f"jdist\0{self.run_id}\0{purpose}"
    return hmac.digest(self.secret, words.encode(), "sha256")

  def environment(self) -> dict[str, str]:
    """Returns the variables that give this identity to a process."""
    return {_RUN_ID: self.run_id, _SECRET: self.secret.decode()}


def draw() -> Identity:
  """Returns the identity of a new run."""
  return Identity(secrets.token_hex(6), secrets.token_hex(32).encode())


def run_id() -> str:
  """Returns the id of this process's run, which is drawn unless it is given."""
  if not _run_ids:
    adopt(os.environ.get(_RUN_ID) or draw().run_id)
  return _run_ids[-1]


def adopt(other: str) -> None:
  """Takes over the id of the run that this process has joined."""
  _run_ids.append(other)


_run_ids: list[str] = []


@functools.cache
def package_versions() -> dict[str, str]:
  """Returns the versions that all processes of a run must have in common."""
  packages = "jdist", "jax", "jaxlib", "flax", "optax", "numpy"
  found = dict.fromkeys(packages, "not installed")
  found["python"] = ".".join(platform.python_version_tuple()[:2])
  for package in packages:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      found[package] = importlib.metadata.version(package)
  return found


@functools.cache
def identity() -> Identity:
  """Returns the identity that the environment gives to this process.

  Raises:
    OSError: If no secret is given, and none can be kept in a file.
  """
  secret = os.environ.get(_SECRET, "").encode() or _kept_secret()
  return Identity(os.environ.get(_RUN_ID, ""), secret)


def private_directory(path: pathlib.Path) -> pathlib.Path:
  """Makes a directory that no other user may enter, and returns it."""
  path.mkdir(parents=True, exist_ok=True, mode=0o700)
  path.chmod(0o700)  # Only its owner may, which root is everywhere.
  if path.stat().st_uid != os.getuid():
    raise PermissionError(f"{path} belongs to another user.")
  return path


def _kept_secret() -> bytes:
  """Returns the secret in the user's home directory, which is drawn once."""
  path = pathlib.Path.home() / ".config" / "jdist" / "secret"
  try:
    if not path.exists():
      own = private_directory(path.parent) / f"secret-{secrets.token_hex(8)}"
      own.touch(0o600)
      own.write_text(secrets.token_hex(32))
      # Unlike a rename, a link does not replace the secret that another process
      # has drawn at the same time.
      with contextlib.suppress(FileExistsError):
        path.hardlink_to(own)
      own.unlink()
    return path.read_bytes()
  except OSError as error:
    raise OSError(
      f"{path} cannot keep the secret of your runs: {error.strerror}. Set "
      f"`{_SECRET}` to the same long random text for every process."
    ) from error


def disagreement(
  facts: Mapping[str, Any], others: Mapping[str, Any], here: str, there: str
) -> str:
  """Returns the error for processes `here` and `there`; empty if both agree."""
  # JSON has no tuples, and unlike Python's its NaN is equal to itself.
  ours, theirs = (
    {name: json.dumps(x, sort_keys=True) for name, x in each.items()}
    for each in (facts, others)
  )
  found = [
    f"{name} is {ours.get(name, 'missing')} in {here} and "
    f"{theirs.get(name, 'missing')} in {there}"
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  ]
  if not found:
    return ""
  more = f", and {len(found) - 5} more differ" if len(found) > 5 else ""
  return (
    f"all processes of a run must agree, but {', '.join(found[:5])}{more}. "
    "Start all of them with the same options and versions."
  )
