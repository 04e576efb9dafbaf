"""A Ray cluster of several hosts, as the page says, and one of them dies.

The hosts are network namespaces of this machine, with an address, a home and
directories for Ray of their own each.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from tests import _processes
from tests.server import test_ray_engine

# Where Ray keeps its sessions; paths of sockets there must be short.
_RAY = pathlib.Path(tempfile.gettempdir()) / "ray"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location(
  "slow_network", _ROOT / "scripts" / "slow_network.py"
)
slow_network = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(slow_network)


class Host:
  """A host of the network, on which commands run."""

  def __init__(self, name, number, folder):
    self.name, self.address = name, f"10.77.0.{number + 1}"
    self.folder = folder / name
    for part in ("ray", "shm", ".ray"):
      (self.folder / part).mkdir(parents=True)

  def start(self, *words):
    script = (
      f"mkdir -p {_RAY}; mount --bind {self.folder}/ray {_RAY}; "
      f"mount --bind {self.folder}/shm /dev/shm; hostname {self.name}; "
      'exec "$@"'
    )
    # Not the token of an engine that this process has had.
    environment = {
      x: y
      for x, y in _processes.environment().items()
      if not x.startswith("RAY_")
    } | {
      "HOME": str(self.folder),
      "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
      "RAY_AUTH_MODE": "token",
    }
    return subprocess.Popen(
      ("ip", "netns", "exec", self.name, "unshare", "--uts", "bash", "-c",
       script, "host", *words),
      cwd=_ROOT, env=environment, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip

  def run(self, *words):
    process = self.start(*words)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0, told
    return told

  def processes(self):
    """Returns process ids and their titles."""
    told = subprocess.run(
      ("ip", "netns", "pids", self.name), capture_output=True, text=True
    ).stdout
    found = {}
    for pid in map(int, told.split()):
      with contextlib.suppress(OSError):
        title = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        found[pid] = title.decode().split("\0")[0]
    return found

  def works(self):
    return any("ray::Worker" in title for title in self.processes().values())

  def power_off(self):
    for pid in self.processes():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_for(condition, what, timeout_s=120.0):
  end_s = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < end_s, f"Waited {timeout_s} s until {what}."
    time.sleep(0.5)


@pytest.fixture
def hosts(tmp_path):
  tools = all(map(shutil.which, ("ip", "tc", "unshare")))
  if os.geteuid() or not tools:
    pytest.skip("network namespaces need root, and ip, tc and unshare")
  prefix = f"jr{os.getpid() % 10000}"
  with slow_network.network(3, "none", 0.0, prefix) as names:
    found = [Host(x, i, tmp_path) for i, x in enumerate(names)]
    try:
      yield found
    finally:
      for host in found:
        host.power_off()


@test_ray_engine.needs_ray
@pytest.mark.slow
def test_training_on_three_hosts_survives_the_loss_of_one(hosts, tmp_path):
  head, *others = hosts
  head.run("ray", "get-auth-token", "--generate")
  for host in others:
    shutil.copy(head.folder / ".ray/auth_token", host.folder / ".ray")
  join = ("ray", "start", "--num-cpus", "2")
  head.run(*join, "--head", "--port", "6379")
  for host in others:
    host.run(*join, "--address", f"{head.address}:6379")

  words = test_ray_engine.words(
    tmp_path, "--batch-size", "64", "--no-paced", "--address",
    f"{head.address}:6379", "--cpus-per-worker", "1.2", "--epochs", "1000",
    "--evaluate-every-epochs", "20",
  )  # fmt: skip
  run = head.start("jdist", *words)
  lines = []
  reader = threading.Thread(target=lambda: lines.extend(run.stdout))
  reader.start()

  # A worker needs more than half a host: each of the others has one.
  wait_for(lambda: all(x.works() for x in others), "both hosts have workers")
  wait_for(lambda: any("accuracy" in x for x in lines), "it trains")
  others[1].power_off()
  events = re.compile(r"^(worker\d) (lost|gone|back)", re.M)

  def found():
    return events.findall("".join(lines))

  wait_for(found, "one is missed")
  (lost, kind), *_ = found()
  assert kind == "lost"
  others[1].run(*join, "--address", f"{head.address}:6379")
  wait_for(others[1].works, "the host has a worker again")
  wait_for(lambda: (lost, "back") in found(), "it is back")
  before = len(lines)
  wait_for(lambda: "accuracy" in "".join(lines[before:]), "it trains on")
  run.send_signal(signal.SIGTERM)
  assert run.wait(60) == 143
  reader.join()
  run.stdout.close()
  told = "".join(lines)
  assert float(re.findall(r"accuracy ([\d.]+) %", told)[-1]) > 90.0
  # The worker that joined again has exact parameters, and stays.
  assert found()[-1] == (lost, "back")
