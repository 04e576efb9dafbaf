"""Cuts of a process's connections, in a network namespace of this program.

All processes of a run are in one namespace, which has a loopback interface and
nothing else.  A cut is a rule of its routing for each port of the process: the
kernel drops every packet from and to it, as a link that is down does.  What TCP
has not delivered it sends again, at intervals that double.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys

# Rules that drop packets come before that of the local addresses.
_LOCAL, _FIRST = "1000", 10
_SETTINGS = pathlib.Path("/proc/sys/net/ipv4")
_TABLES = ("tcp", "tcp6")


# Makes any user the root of a namespace of users, where the kernel has them.
_AS_ROOT = ("unshare", "--user", "--map-root-user")


def possible() -> bool:
  """Returns whether this program can cut links: it needs `ip` and a namespace.

  Root may make one.  Other users need `unshare`, and a kernel that lets them.
  """
  if shutil.which("ip") is None:
    return False
  if os.geteuid() == 0:
    return True
  able = shutil.which(_AS_ROOT[0]) is not None
  return able and not subprocess.call(
    (*_AS_ROOT, "true"), stderr=subprocess.DEVNULL
  )


def enter() -> None:
  """Moves this program, and all that it starts, into its own namespace.

  Unless it is root, it begins again from its first line, as root of a namespace
  of users: a process with threads cannot enter one.
  """
  if os.geteuid() != 0:
    sys.stdout.flush()
    os.execvp(_AS_ROOT[0], (*_AS_ROOT, sys.executable, *sys.argv))
  os.unshare(os.CLONE_NEWNET)
  _ip(
    "link set lo up",
    f"rule add pref {_LOCAL} lookup local",
    "rule del pref 0",
  )


def limit_rto(seconds: float) -> None:
  """Limits the interval at which TCP sends again (Linux 6.15 or later)."""
  path = _SETTINGS / "tcp_rto_max_ms"
  path.write_text(f"{1000 * seconds:.0f}")


def _ip(*lines: str) -> None:
  text = "".join(f"{x}\n" for x in lines)
  subprocess.run(
    ("ip", "-batch", "-"), input=text, text=True, check=True,
    capture_output=True,
  )  # fmt: skip


def ports_of(process: int) -> set[int]:
  """Returns the local ports of a process's TCP sockets."""
  root, own = pathlib.Path(f"/proc/{process}"), set()
  for path in (root / "fd").iterdir():
    with contextlib.suppress(OSError):  # Closed in between.
      own.add(os.readlink(path))
  found = set()
  for table in _TABLES:
    for line in (root / "net" / table).read_text().splitlines()[1:]:
      words = line.split()
      if f"socket:[{words[9]}]" in own:
        found.add(int(words[1].rpartition(":")[2], 16))
  return found


class Cuts:
  """The links that are down, by the name of their worker."""

  def __init__(self) -> None:
    self._down: dict[str, tuple[int, int, set[int]]] = {}

  def cut(self, name: str, process: int) -> None:
    """Takes down all connections of a process."""
    taken = {number for number, _, _ in self._down.values()}
    number = min(set(range(_FIRST, _FIRST + 900)) - taken)
    self._down[name] = number, process, set()
    self.follow()

  def follow(self) -> None:
    """Takes down what the processes have opened since."""
    for number, process, known in self._down.values():
      with contextlib.suppress(OSError):  # It has ended.
        fresh = ports_of(process) - known
        known |= fresh
        # No command without a line: most calls find nothing.
        lines = [
          f"rule add pref {number} ipproto tcp {side} {port} blackhole"
          for port in sorted(fresh)
          for side in ("sport", "dport")
        ]
        if lines:
          _ip(*lines)

  def heal(self, name: str) -> None:
    """Brings the connections of a worker up again."""
    number, _, known = self._down.pop(name)
    _ip(*[f"rule del pref {number}"] * (2 * len(known)))
