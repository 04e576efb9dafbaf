"""A Ray cluster over the hosts of `scripts/slow_network.py`."""

import contextlib
import json
import os
import pathlib
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

# Ray's nodes keep their sockets and logs here.
_RAY = pathlib.Path(tempfile.gettempdir(), "ray")


def connections() -> list[dict[str, Any]]:
  """Returns this host's connections to the other one, with their bytes."""
  listed = _told("ss", "-tnpiOH", "state", "established")
  found = []
  for line in listed.splitlines():
    words = line.split()
    near, far = (x.rpartition(":") for x in words[2:4])
    users = re.findall(r'"([^"]+)",pid=(\d+)', line)
    if not users or near[0] == far[0]:
      continue
    title = b""
    with contextlib.suppress(OSError):  # It has ended since, but sent bytes.
      title = pathlib.Path(f"/proc/{users[0][1]}/cmdline").read_bytes()
    sent, received = (
      int((re.findall(rf"bytes_{x}:(\d+)", line) or [0])[0])
      for x in ("acked", "received")
    )
    found.append({
      "process": re.split(r"[\0 ]", title.decode())[0].rpartition("/")[2],
      "near": int(near[2]), "far": int(far[2]), "sent": sent,
      "received": received,
    })  # fmt: skip
  return found


def missed_checks() -> int:
  """Returns how often Ray's own health check had no answer."""
  logs = (_RAY / "session_latest" / "logs").glob("gcs_server*")
  return sum(
    len(re.findall("[Hh]ealth check failed", x.read_text(errors="replace")))
    for x in logs
  )


def _told(*words: str) -> str:
  done = subprocess.run(words, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"{' '.join(words)}: {done.stderr[-2000:]}")
  return done.stdout


def wait_for(path: pathlib.Path) -> None:
  """Waits until a file exists."""
  while not path.exists():
    time.sleep(0.1)


def _start(*words: str) -> None:
  """Starts this host's node, with directories of its own."""
  _RAY.mkdir(exist_ok=True)
  for place in (_RAY, "/dev/shm"):
    _told("mount", "-t", "tmpfs", "tmpfs", str(place))
  os.environ.setdefault("RAY_worker_niceness", "0")  # By default it is 15.
  program = pathlib.Path(sys.executable).parent / "ray"
  command = (
    str(program), "start", "--object-store-memory", "200000000",
    "--disable-usage-stats", "--include-log-monitor", "false", *words,
  )  # fmt: skip
  for _ in range(10):
    # Ray ends a node whose agents start slowly, as they do on a busy machine.
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0:
      return
    listed = _told("ip", "netns", "pids", socket.gethostname())
    for process in {*map(int, listed.split())} - {os.getpid()}:
      with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
  raise SystemExit("Ray did not start.")


def shared_folder() -> pathlib.Path:
  """Returns a folder of this run: all hosts have one parent, and one disk."""
  folder = pathlib.Path(tempfile.gettempdir(), f"jdist-thin-{os.getppid()}")
  folder.mkdir(exist_ok=True)
  return folder


def start(
  folder: pathlib.Path,
  cpus: int,
  *,
  far: int = 1,
  resources: tuple[str, str] | None = None,
) -> str | None:
  """Starts a node of Ray on each host, with one CPU on all but host 0.

  Args:
    folder: A folder that all hosts share.
    cpus: CPUs of host 0's node, one for each server and worker there.
    far: The number of the other hosts.
    resources: Names of a resource that host 0 has, and that the others have.

  Returns:
    The address on host 0. Others return None once the folder has `end`.
  """
  host = os.environ["JDIST_COORDINATOR"].rpartition(":")[0]
  number = int(os.environ["JDIST_PROCESS"])
  address, token, up = f"{host}:6379", folder / "token", folder / "up"
  os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
  given: tuple[str, ...] = ()
  if resources is not None:
    given = ("--resources", json.dumps({resources[number > 0]: 1}))
  if number:
    wait_for(up)
    _start("--address", address, "--num-cpus", "1", *given)
    (folder / f"joined{number}").touch()
    while not (folder / "end").exists():
      if (folder / "over").exists() and not (folder / "sockets.json").exists():
        (folder / "sockets.part").write_text(json.dumps(connections()))
        (folder / "sockets.part").rename(folder / "sockets.json")
      time.sleep(0.1)
    return None
  token.touch(0o600)
  token.write_text(secrets.token_hex(32))
  _start(
    "--head", "--port", "6379", "--num-cpus", str(cpus), "--node-ip-address",
    host, "--include-dashboard", "false", *given,
  )  # fmt: skip
  up.touch()
  for i in range(far):
    wait_for(folder / f"joined{i + 1}")
  return address
