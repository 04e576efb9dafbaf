r"""Runs Flower's FedAvg on hosts with slow links, and writes a row.

    export FLOWER_BIN=...   # the bin folder with flwr, torch beside it
    sudo -E python scripts/slow_network.py --hosts 2 --rate 100mbit -- \
      python experiments/peers/flower/on_hosts.py

Host 0 has the SuperLink, each host a SuperNode.
"""

import contextlib
import itertools
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time

from jdist import training

_FOLDER = pathlib.Path(__file__).resolve().parent
ROWS = _FOLDER.parent / "results" / "flower.jsonl"
_PORT = 8000
_CONFIG = """[superlink]
default = "hosts"

[superlink.hosts]
address = "127.0.0.1:{port}"
insecure = true
"""


def _wait(address):
  """Waits for a server."""
  for _ in range(1200):
    with contextlib.suppress(OSError), socket.create_connection(address, 1):
      return
    time.sleep(0.1)
  raise SystemExit(f"There is no server at {address}.")


def main():
  """Runs this host's part."""
  host = int(os.environ["JDIST_PROCESS"])
  link = os.environ["JDIST_COORDINATOR"].rpartition(":")[0]
  programs = pathlib.Path(os.environ["FLOWER_BIN"])
  home = pathlib.Path(tempfile.gettempdir(), f"peers-flower-{os.getppid()}")
  # Each host has a home of its own, on the same disk.
  (home / str(host)).mkdir(parents=True, exist_ok=True)
  output, end = home / "rounds.jsonl", home / "end"
  os.environ |= {
    "FLWR_HOME": str(home / str(host)), "PEERS_FOLDER": str(_FOLDER.parent),
    "PEERS_OUTPUT": str(output), "FLWR_TELEMETRY_ENABLED": "0",
    "PATH": f"{programs}:{os.environ['PATH']}",
  }  # fmt: skip
  problem = pathlib.Path(tempfile.gettempdir(), "jdist-peers.npz")
  os.environ.setdefault("PEERS_PROBLEM", str(problem))
  os.sched_setaffinity(0, {host % (os.cpu_count() or 1)})
  started = []
  log = (home / f"log{host}").open("w")

  def start(name, *words):
    command = (str(programs / name), "--insecure", *words)
    started.append(subprocess.Popen(command, stdout=log, stderr=log))

  if not host:
    start("flower-superlink", "--disable-runtime-dependency-installation",
          "--host", "0.0.0.0", "--port", str(_PORT))  # fmt: skip
  _wait((link, _PORT))
  start("flower-supernode", "--superlink", f"{link}:{_PORT}", "--port",
        str(9094 + host), "--node-config", f"host={host}")  # fmt: skip
  try:
    if host:
      while not end.exists():
        time.sleep(0.2)
      return
    (home / "0" / "config.toml").write_text(_CONFIG.format(port=_PORT))
    command = ("flwr", "run", str(_FOLDER), "hosts", "--stream")
    subprocess.run(command, check=True, stdout=log, stderr=log, timeout=280)
    ends = [json.loads(x)[1] for x in output.read_text().splitlines()]
    versions = subprocess.run(
      (str(programs / "flwr"), "--version"), capture_output=True, text=True
    ).stdout.split()
    row = training.make_row(
      {"bits_per_s": float(os.environ["JDIST_BITS_PER_S"]), "hosts": 2}, 0,
      round_s=[b - a for a, b in itertools.pairwise(ends)],
      flower=versions[-1], load=os.getloadavg()[0],
    )  # fmt: skip
    training.append_rows(ROWS, [row])
    print("seconds of each round:", row["round_s"])
  finally:
    end.touch()
    for process in started:
      process.terminate()


if __name__ == "__main__":
  main()
