"""A process's way to Ray: import, token, address, signals."""

import contextlib
import functools
import os
import pathlib
import secrets
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from jdist import checks

MODE, TOKEN, _TOKEN_PATH = (
  "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
)  # fmt: skip
# Ray reads a process's token once.
_OWN_TOKEN = secrets.token_hex(32)


def set_token() -> None:
  """Turns token authentication on, with this process's own token.

  A token of the environment is kept.  Raises a ValueError if Ray has been
  imported before, because it reads the token at its import.
  """
  if os.environ.get(MODE) == "token":
    return
  if "ray" in sys.modules and MODE not in _SET:
    raise ValueError(
      f"`{MODE}=token` must be set before Ray is imported, or a `RayEngine` "
      "be the first that imports it: it starts nothing without a token."
    )
  _SET.add(MODE)
  os.environ[MODE], os.environ[TOKEN] = "token", _OWN_TOKEN


# Variables that this process has set itself, after which a second call is
# allowed although Ray has been imported.
_SET: set[str] = set()


import_ray = functools.partial(checks.import_extra, "ray", "ray")


def check_address(address: str | None) -> None:
  """Raises a ValueError unless a cluster answers at an address.

  A cluster on another machine also needs token authentication.
  """
  if address is None:
    return
  host, _, port = address.rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(
      f"`address` must be HOST:PORT of a Ray cluster's head, got {address!r}."
    )
  if host not in ("localhost", "::1") and not host.startswith("127."):
    if os.environ.get(MODE) != "token":
      raise ValueError(
        f"`address` {address} is not on this machine, and {MODE} is not "
        f"`token`: set {MODE}=token and {_TOKEN_PATH} on every node."
      )
    default = pathlib.Path.home() / ".ray" / "auth_token"
    path = pathlib.Path(os.environ.get(_TOKEN_PATH, default))
    if not os.environ.get(TOKEN) and not path.is_file():
      raise ValueError(
        f"There is no token at {path}: copy the head's, or set {_TOKEN_PATH}."
      )
  try:
    socket.create_connection((host, int(port)), timeout=5.0).close()
  except OSError as error:
    raise ValueError(
      f"No Ray cluster answers at {address}: "
      f"{str(error.strerror or error).lower()}. `ray status` on its head says "
      "the address."
    ) from None


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
  """Silences Ray's messages at its start, and keeps the handler of SIGTERM.

  Ray's own handlers end its processes while the run still needs them.  By
  default SIGTERM ends a process at once; from here on it raises a `SystemExit`,
  by which a run stops its engine.
  """
  import logging

  logger = logging.getLogger("ray")
  before, handler = logger.level, signal.getsignal(signal.SIGTERM)
  logger.setLevel(logging.ERROR)
  try:
    with warnings.catch_warnings():
      # Ray's forks execute another program at once, so the warning about forks
      # of threaded processes does not apply.
      warnings.filterwarnings("ignore", message=".*os.fork.*")
      warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
      yield
  finally:
    logger.setLevel(before)
    if handler in (signal.SIG_DFL, None):
      handler = _end
    set_handler(handler)


def set_handler(handler: Any) -> None:
  """Sets what SIGTERM does, in the main thread; others cannot."""
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, handler)


def _end(number: int, frame: Any) -> None:
  del frame
  raise SystemExit(128 + number)
