"""Real processes over a real slow link: what is hidden and what is not."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import pytest

from jdist import training
from tests import _processes
from tests.experiments import _loading, test_comparisons

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*words, timeout_s=400):
  return subprocess.run(
    (sys.executable, "scripts/slow_network.py", *words),
    cwd=_ROOT,
    env=_processes.environment(),
    capture_output=True,
    text=True,
    timeout=timeout_s,
  )


def can():
  if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare"))):
    return False
  name = f"jdist-probe-{os.getpid()}"
  made = subprocess.run(("ip", "netns", "add", name), capture_output=True)
  if made.returncode:
    return False
  subprocess.run(("ip", "netns", "del", name), check=True)
  return True


@pytest.mark.slow
def test_a_streamed_step_hides_its_communication_and_ssgd_none(tmp_path):
  if not can():
    pytest.skip("needs root and network namespaces")
  if jax.__version_info__ >= (0, 12):
    # Runs 7 and 9 of experiments/msdpu/TABLES.md: the same program on 0.10.2
    # hides its communication.
    pytest.skip("CPUs of JAX 0.12 hide a third of a message at most")
  rows = tmp_path / "rows.jsonl"
  # Twenty blocks: those of the shorter steps scatter by a fifth, and the
  # median of five by as much as there is room below the bound.
  done = run(
    "--hosts", "2", "--rate", "100mbit", "--",
    sys.executable, "scripts/bench_overlap.py", "--output", str(rows),
    "--blocks", "20", "--kinds", "ssgd", "streamed H=1", "streamed H=4",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  steps = training.read_rows(rows)[0]["steps"]
  # In one run, block by block: the sum of both, or little more than the
  # longer of the two.
  assert steps["ssgd"]["over_none_hidden"] > 0.9
  for name in ("streamed H=1", "streamed H=4"):
    assert steps[name]["over_all_hidden"] <= 1.15, steps


@pytest.mark.slow
def test_steps_of_a_comparison_are_measured_over_links(tmp_path):
  if not can():
    pytest.skip("needs root and network namespaces")
  pytest.importorskip("sklearn")
  folder = test_comparisons.copied("compression", tmp_path)
  done = run(
    "--hosts", "2", "--rate", "1mbit", "--",
    sys.executable, str(folder / "run.py"), "smoke", "--times",
    "--variants", "ssgd", "int4 + feedback",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2000:]
  rows = training.read_rows(folder / "results" / "smoke-2x1mbit.jsonl")
  named = {row["method"]: row for row in rows}
  assert list(named) == ["ssgd", "ssgd again", "int4 + feedback", "computation"]
  assert {(row["hosts"], row["bits_per_s"]) for row in rows} == {(2, 1e6)}
  # One of the hosts told, and nothing is faster than its bytes allow: a link
  # lets two packets through at once, less than the eight steps of a block.
  assert done.stdout.count("ssgd again") == 1
  assert named["computation"]["sent_bytes"] == 0
  synchronous, other = named["ssgd"], named["int4 + feedback"]
  block = 8 * synchronous["sent_bytes"]
  assert block > 2**18
  assert 8 * synchronous["step_s"] >= 8 * (block - 2**12) / 1e6
  assert other["step_s"] < 0.7 * synchronous["step_s"]


_LINK = """
import os
from jdist import advice, collectives
number = int(os.environ["JDIST_PROCESS"])
collectives.start_processes(
  os.environ["JDIST_COORDINATOR"], 2, number, cpu_devices_per_process=1
)
found = advice.measure_link(collectives.workers(2), num_bytes=2**20)
if not number:
  print("link", found.bandwidth_bits_per_s / 1e6, 1e3 * found.latency_s)
"""


@pytest.mark.slow
def test_measured_link_has_the_rate_of_the_network():
  if not can():
    pytest.skip("needs root and network namespaces")
  words = ("--hosts", "2", "--rate", "10mbit", "--")
  done = run(*words, sys.executable, "-c", _LINK)
  assert done.returncode == 0, done.stderr[-2000:]
  (line,) = (x for x in done.stdout.splitlines() if x.startswith("link"))
  _, rate, latency_ms = line.split()
  # Headers take a twentieth of the rate.
  assert 8 < float(rate) < 10.5
  assert float(latency_ms) < 10


def test_a_command_must_be_given():
  done = run("--hosts", "2")
  assert done.returncode == 2
  assert "a command must follow" in done.stderr


@pytest.mark.parametrize(
  ("option", "value", "rule"),
  [
    ("rate", "0mbit", "from 1kbit"),
    ("rate", "none,-1mbit", "from 1kbit"),
    ("rate", "1e400mbit", "to 8000gbit"),
    ("rate", "nanmbit", "must be a number"),
    ("rate", "5mb", "with gbit, mbit or kbit"),
    ("hosts", "0", "from 1 to 250"),
    ("hosts", "251", "from 1 to 250"),
    ("delay-ms", "-1", "from 0"),
    ("delay-ms", "nan", "from 0"),
    ("timeout-s", "0", "from 0.1"),
    ("queue-ms", "0", "from 1"),
  ],
)
def test_impossible_networks_are_one_line(
  option, value, rule, capsys, monkeypatch
):
  script = _loading.load(
    "slow_network", "../scripts/slow_network.py", monkeypatch
  )
  words = [f"--{option}={value}", "--", "true"]
  monkeypatch.setattr(sys, "argv", ["slow_network.py", *words])
  with pytest.raises(SystemExit) as stopped:
    script.main()
  said = f"{stopped.value}{capsys.readouterr().err}"
  assert f"`--{option}`" in said and rule in said


@pytest.mark.skipif(not can(), reason="network namespaces need root")
@pytest.mark.parametrize(
  ("number", "more"),
  [
    (signal.SIGKILL, ()), (signal.SIGHUP, ()),
    (signal.SIGKILL, ("--queue-ms", "1000")),
  ],
)  # fmt: skip
def test_killed_network_leaves_nothing(number, more):
  if more and not pathlib.Path("/dev/net/tun").exists():
    pytest.skip("needs tun devices")
  command = "scripts/slow_network.py", *more, "--", "sleep", "1000"
  with subprocess.Popen((sys.executable, *command), cwd=_ROOT) as network:
    prefix = f"jd{network.pid % 100000}"

    def left():
      folders = pathlib.Path("/run/netns"), pathlib.Path("/etc/netns")
      return [x for one in folders for x in one.glob(f"{prefix}*")]

    def wait_until(count):
      end_s = time.monotonic() + 60
      while len(left()) != count and time.monotonic() < end_s:
        time.sleep(0.05)

    wait_until(5)  # Two hosts, each with its file of hosts, and the switch.
    assert len(left()) == 5
    network.send_signal(number)
  wait_until(0)
  assert not left()


@pytest.mark.skipif(not can(), reason="network namespaces need root")
def test_daemon_ends_with_the_network():
  command = "setsid sleep 1000 > /dev/null 2>&1 & echo daemon $!"
  told = run("--hosts", "1", "--rate", "none", "--", "bash", "-c", command)
  assert told.returncode == 0
  titles = (
    pathlib.Path(f"/proc/{told.stdout.split()[-1]}/cmdline").read_bytes()
    for _ in range(600)
    if not time.sleep(0.1)
  )
  with contextlib.suppress(OSError):  # It has ended, and perhaps gone.
    assert b"" in titles


@pytest.mark.parametrize("version", [1, 2])
def test_a_quota_is_set_and_taken_away_again(tmp_path, monkeypatch, version):
  script = _loading.load(
    "slow_network", "../scripts/slow_network.py", monkeypatch
  )
  folder = tmp_path if version == 2 else tmp_path / "cpu"
  folder.mkdir(exist_ok=True)
  if version == 2:
    (tmp_path / "cgroup.controllers").touch()
  with script.cpu_quota([7, 8], 0.25, str(tmp_path)):
    (group,) = (x for x in folder.iterdir() if x.is_dir())
    files = {x.name: x.read_text() for x in group.iterdir()}
  # A quarter of each 10 ms. A real group keeps both processes, a file the last.
  quota = {"cpu.max": "2500 10000"}
  if version == 1:
    quota = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}
  assert files == quota | {"cgroup.procs": "8"}
  assert (folder / "cgroup.procs").read_text() == "8"
