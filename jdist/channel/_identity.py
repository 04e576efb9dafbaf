"""The identity of a run: an id that all may see, and a secret.

`jdist launch` and the files that it prints give both to each process in its
environment. Processes that are started by hand on one machine, or on several
that share home directories, find a secret in a file of the user's own.
"""

import functools
import hmac
import json
import os
import pathlib
import secrets
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

RUN_ID, SECRET = "JDIST_RUN_ID", "JDIST_SECRET"


class TransientError(OSError):
  """An error that may heal by itself, so that the same command may succeed.

  A taken port and a full disk raise it, and wrong options never do.
  """


class Identity(NamedTuple):
  """The identity of a run.

  Attributes:
    run_id: The id that stands in rows and leases; empty if it was not given.
    secret: What all processes of the run know, and nobody else.
  """

  run_id: str
  secret: bytes

  def key(self, purpose: str) -> bytes:
    """Returns the key of connections with a purpose in this run."""
    # Neither another run of the same user nor another kind of connection
    # accepts its proofs.
    words = f"jdist\0{self.run_id}\0{purpose}"
    return hmac.digest(self.secret, words.encode(), "sha256")


@functools.cache
def identity() -> Identity:
  """Returns the identity that the environment gives to this process.

  Raises:
    OSError: If no secret is given, and none can be kept in a file.
  """
  secret = os.environ.get(SECRET, "").encode() or _kept_secret()
  return Identity(os.environ.get(RUN_ID, ""), secret)


def private_directory(path: pathlib.Path) -> pathlib.Path:
  """Makes a directory that nobody else may enter, and returns it.

  Raises:
    PermissionError: If it belongs to somebody else.
  """
  path.mkdir(parents=True, exist_ok=True, mode=0o700)
  found = path.stat()
  if found.st_uid != os.getuid():
    raise PermissionError(f"{path} belongs to another user.")
  if stat.S_IMODE(found.st_mode) & 0o077:
    path.chmod(0o700)
  return path


def _kept_secret() -> bytes:
  """Returns the secret in the user's home directory, which is drawn once."""
  path = pathlib.Path.home() / ".config" / "jdist" / "secret"
  try:
    if not path.exists():
      own = private_directory(path.parent) / f"secret-{secrets.token_hex(8)}"
      own.touch(0o600)
      own.write_text(secrets.token_hex(32))
      try:
        # Unlike a rename, a link does not replace what another process has
        # drawn at the same time.
        path.hardlink_to(own)
      except FileExistsError:
        pass
      own.unlink()
    return path.read_bytes()
  except OSError as error:
    raise OSError(
      f"{path} cannot keep the secret of your runs: {error.strerror}. Set "
      f"`{SECRET}` to the same long random text for every process."
    ) from error


def differences(
  facts: Mapping[str, Any], others: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
  """Returns the values of both by name where they differ, in JSON's words."""
  # JSON has no tuples, and unlike Python's its NaN is equal to itself.
  pairs = {
    name: tuple(json.dumps(x.get(name), sort_keys=True) for x in (facts, others))
    for name in sorted(facts.keys() | others.keys())
  }
  return {name: (a, b) for name, (a, b) in pairs.items() if a != b}
