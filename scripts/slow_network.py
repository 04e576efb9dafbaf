r"""Runs a command on several "hosts" with slow links, all on this machine.

    sudo python scripts/slow_network.py --hosts 2 --rate 100mbit -- \\
      python scripts/bench_overlap.py

Every host is a Linux network namespace with a name, a hosts file and a link to
a common switch, limited in both directions.  The command is run on all of
them, with these variables in its environment:

    JDIST_COORDINATOR   address and port of host 0, for `jax.distributed`
    JDIST_PROCESS       the host's number
    JDIST_PROCESSES     how many there are
    JDIST_BITS_PER_S    the rate of the last link, where there is a limit
    JDIST_QUEUE_MS      its queue, if it is given
    GLIBC_TUNABLES      memory in huge pages, unless it is set

Needs root, `ip` and `tc`.  All that it makes is removed again, even after a
SIGKILL, and no other namespace is touched: nothing is routed out of these.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import user_wire

_PORT = 9912
_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
# Removes namespaces, and their processes and control groups, when its input
# ends: its parent has closed it or is dead.
_REMOVE = """
cat > /dev/null
for name; do
  while ids=$(ip netns pids "$name") && [ "$ids" ]; do
    kill -9 $ids
    for id in $ids; do groups="$groups $id"; done
    sleep 0.05
  done
  ip netns del "$name"
  rm -rf "/etc/netns/$name"
done
for id in $groups; do rmdir /sys/fs/cgroup/{,cpu/}jdist-$id-*; done
"""


def _call(*words: str) -> None:
  done = subprocess.run(words, capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


def bytes_per_s(rate: str) -> float:
  """Returns the bytes a second of a rate such as 100mbit."""
  for unit, bits in _UNITS.items():
    if rate.endswith(unit):
      with contextlib.suppress(ValueError):
        found = float(rate.removesuffix(unit)) * bits / 8
        # A bucket lets no smaller or larger rate through.
        if 1e2 <= found <= 1e12:
          return found
  raise SystemExit(
    "`--rate` must be a number with gbit, mbit or kbit, from 1kbit to "
    f"8000gbit, or none, got {rate!r}."
  )


def _of(rates: str, number: int) -> str:
  own = rates.split(",")
  return own[min(number, len(own) - 1)]


def _limit(
  namespace: str, device: str, rate: str, delay_ms: float, what: str = "add"
) -> None:
  """A token bucket on one end of a link, and half of the delay."""
  words = ("ip", "netns", "exec", namespace, "tc", "qdisc", what, "dev")
  per_s = bytes_per_s(rate)
  # TCP hands packets of up to 64 KiB to a network card, which cuts them up, and
  # a bucket lets two of them through at once. Both may hold two milliseconds of
  # the link, as a larger bucket fills while hosts compute and hides messages.
  # On fast links they keep their size: with smaller ones both ends wake many
  # times as often, work of these cores that no host would do.
  packet = min(65536, max(1514, int(per_s / 1000)))
  burst, queue = int(2.2 * packet), min(2**30, max(2**18, int(per_s / 20)))
  _call("ip", "-n", namespace, "link", "set", device, "gso_max_size",
        str(packet))  # fmt: skip
  _call(
    *words, device, "root", "handle", "1:", "tbf", "rate", rate,
    "burst", str(burst), "limit", str(queue),
  )  # fmt: skip
  if delay_ms:
    _call(
      *words, device, "parent", "1:", "netem", "delay", f"{delay_ms / 2}ms",
      "limit", "20000",
    )  # fmt: skip


def change_rate(names: list[str], rate: str) -> None:
  """Changes the rate of all links of a network that has one already."""
  switch = f"{names[0].removesuffix('0')}-switch"
  for i, name in enumerate(names):
    _limit(name, "eth0", rate, 0.0, "change")
    _limit(switch, f"port{i}", rate, 0.0, "change")


def sent_bytes(name: str) -> int:
  """Returns the bytes that a host has sent, as its interface counts them."""
  shown = subprocess.run(
    ("ip", "-n", name, "-s", "-j", "link", "show", "dev", "eth0"),
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def inside(name: str, command: list[str]) -> list[str]:
  """Returns a command that runs another one on a host."""
  # A host name of its own: gloo binds to what that resolves to.
  script = 'hostname "$0" && exec "$@"'
  words = ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c"]
  return [*words, script, name, *command]


@contextlib.contextmanager
def cpu_quota(
  processes: list[int], share: float, groups: str = "/sys/fs/cgroup"
) -> Iterator[None]:
  """Gives processes, all together, a share of one core.

  It is a control group, which takes the core away for the rest of each 10 ms.
  """
  root, period_us = pathlib.Path(groups), 10_000
  whole = (root / "cgroup.controllers").exists()  # Version 2 of the groups.
  name = f"jdist-{os.getpid()}-{processes[0]}"
  folder = (root if whole else root / "cpu") / name
  quota = {"cpu.max": f"{share * period_us:.0f} {period_us}"}
  if not whole:
    quota = {
      "cpu.cfs_period_us": str(period_us),
      "cpu.cfs_quota_us": f"{share * period_us:.0f}",
    }
  try:
    folder.mkdir()
    for file, value in quota.items():
      (folder / file).write_text(value)
    for process in processes:
      (folder / "cgroup.procs").write_text(str(process))
    yield
  finally:
    for process in processes:
      with contextlib.suppress(OSError):  # It may have ended.
        (folder.parent / "cgroup.procs").write_text(str(process))
    with contextlib.suppress(OSError):
      folder.rmdir()


@contextlib.contextmanager
def network(
  hosts: int,
  rate: str,
  delay_ms: float,
  prefix: str,
  queue_ms: float | None = None,
) -> Iterator[list[str]]:
  """Makes the namespaces; yields their names, and removes them.

  With `queue_ms` packets wait in user space, as `user_wire` has it.
  """
  names, switch = [f"{prefix}{i}" for i in range(hosts)], f"{prefix}-switch"
  remover = subprocess.Popen(
    ("bash", "-c", _REMOVE, "remove", *names, switch),
    stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
  )  # fmt: skip
  try:
    _call("ip", "netns", "add", switch)
    _call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", switch, "link", "set", "bridge", "up")
    told = "127.0.0.1 localhost\n" + "".join(
      f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(names)
    )
    devices: list[int] = []
    for i, name in enumerate(names):
      _call("ip", "netns", "add", name)
      folder = pathlib.Path("/etc/netns") / name
      folder.mkdir(parents=True)
      (folder / "hosts").write_text(told)
      if queue_ms is None:
        _call(
          "ip", "link", "add", "eth0", "netns", name, "type", "veth",
          "peer", "name", f"port{i}", "netns", switch,
        )  # fmt: skip
      else:
        devices.append(user_wire.open_device(name))
      host = ("ip", "-n", name)
      _call(*host, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
      _call(*host, "link", "set", "lo", "up")
      _call(*host, "link", "set", "eth0", "up")
      if queue_ms is not None:
        # BBR, the default of some machines, keeps queues short by itself.
        _call(
          *inside(
            name, ["sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"]
          )
        )
        continue
      _call("ip", "-n", switch, "link", "set", f"port{i}", "master", "bridge")
      _call("ip", "-n", switch, "link", "set", f"port{i}", "up")
      own = _of(rate, i)
      if own != "none":
        _limit(name, "eth0", own, delay_ms)
        _limit(switch, f"port{i}", own, delay_ms)
    if queue_ms is not None:
      rates = [_of(rate, i) for i in range(hosts)]
      links = user_wire.Links(
        [None if x == "none" else bytes_per_s(x) for x in rates],
        delay_ms / 1000, queue_ms / 1000,
      )  # fmt: skip
      threading.Thread(
        target=user_wire.carry, args=(devices, links), daemon=True
      ).start()
    yield names
  finally:
    remover.communicate()


def run(
  names: list[str], command: list[str], rate: str, timeout_s: float
) -> int:
  """Runs a command on all hosts; the highest exit status."""
  started = []
  limit, last = {}, _of(rate, len(names))
  if last != "none":
    limit = {"JDIST_BITS_PER_S": f"{8 * bytes_per_s(last):.0f}"}
  for i, name in enumerate(names):
    environment = (
      # Else the kernel clears the memory of each step page by page.
      {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
      | os.environ
      | limit
      | {
        "JDIST_COORDINATOR": f"10.77.0.1:{_PORT}",
        "JDIST_PROCESS": str(i),
        "JDIST_PROCESSES": str(len(names)),
      }
    )
    started.append(
      subprocess.Popen(
        inside(name, command), env=environment, start_new_session=True
      )
    )
  end_s = time.monotonic() + timeout_s
  try:
    while any(p.poll() is None for p in started):
      failed = [p.returncode for p in started if p.poll()]
      if failed or time.monotonic() > end_s:
        return failed[0] if failed else 124
      time.sleep(0.1)
  finally:
    for process in started:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
  return max(abs(p.returncode) for p in started)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=(__doc__ or "").split("\n", 1)[0],
    usage="%(prog)s [--hosts N] [--rate RATE] [--delay-ms MS] -- COMMAND ...",
  )
  parser.add_argument("--hosts", type=int, default=2)
  parser.add_argument(
    "--rate",
    default="100mbit",
    help="of every link, or none; or RATE,RATE of the first ones and the rest",
  )
  parser.add_argument(
    "--delay-ms", type=float, default=0.0, help="one way; needs netem"
  )
  parser.add_argument(
    "--queue-ms", type=float,
    help="the traffic that may wait for a link, as at a home router (a second "
    "and more): a switch in user space, which needs no netem, for 100 Mbit/s",
  )  # fmt: skip
  parser.add_argument("--timeout-s", type=float, default=300.0)
  parser.add_argument("command", nargs=argparse.REMAINDER)
  options = parser.parse_args()
  command = [word for word in options.command if word != "--"]
  if not command:
    parser.error("a command must follow `--`")
  for name, given, least, most in (
    ("hosts", options.hosts, 1, 250), ("delay-ms", options.delay_ms, 0, 1e5),
    ("timeout-s", options.timeout_s, 0.1, 1e7),
    ("queue-ms", 1 if options.queue_ms is None else options.queue_ms, 1, 1e5),
  ):  # fmt: skip
    if not least <= given <= most:
      parser.error(
        f"`--{name}` must be from {least:g} to {most:g}, got {given:g}"
      )
  for own in options.rate.split(","):
    if own != "none":
      bytes_per_s(own)
  missing = [tool for tool in ("ip", "tc", "unshare") if not shutil.which(tool)]
  if missing or os.geteuid():
    raise SystemExit(
      f"slow_network.py needs root and the programs ip, tc and unshare; "
      f"missing: {', '.join(missing) or 'root'}."
    )
  if options.queue_ms is not None and not user_wire.possible():
    raise SystemExit(
      "slow_network.py needs Python 3.12 and /dev/net/tun for `--queue-ms`."
    )
  for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, lambda number, _: sys.exit(128 + number))
  prefix = f"jd{os.getpid() % 100000}"
  if options.queue_ms is not None:
    os.environ["JDIST_QUEUE_MS"] = f"{options.queue_ms:g}"
  with network(
    options.hosts, options.rate, options.delay_ms, prefix, options.queue_ms
  ) as names:
    status = run(names, command, options.rate, options.timeout_s)
  raise SystemExit(status)


if __name__ == "__main__":
  main()
