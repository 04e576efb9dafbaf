"""Commands print and write the same as when their output was last read.

These commands compute without arrays, so that all of their output repeats:
protocols on the virtual clock, pipelines' tables and plans, help texts and the
files of other schedulers.  Each case is a file in `printed/`.  After a change
that is meant, write them again and read the difference:

    JDIST_PRINTED=write pytest tests/cli/test_printed.py
"""

import json
import os
import pathlib
import re

import pytest

from jdist import cli, pipeline, server

pytest.importorskip("simpy")
pytest.importorskip("matplotlib")

_FOLDER = pathlib.Path(__file__).parent / "printed"
# These values of a row name the machine and the code that made it.
_OF_THE_RUN = ("commit", "device", "versions", "run", "seed")
_MACHINES = """
server = "ps"

[[nodes]]
name = "fast"
count = 2
speed = 8.0
memory_gb = 16

[[nodes]]
name = "slow"
speed = 2.5
jitter = 0.3
memory_gb = 4
slowdowns = [{start_s = 1.0, end_s = 2.5, factor = 0.5}]
outages = [{start_s = 2.8, end_s = 3.6}]

[[links]]
between = ["fast*", "switch"]
bandwidth_gbit_per_s = 1.0
latency_ms = 0.5

[[links]]
between = ["slow", "switch"]
bandwidth_gbit_per_s = 0.2
latency_ms = 2.0
sharing = "fair"

[[links]]
between = ["ps", "switch"]
bandwidth_gbit_per_s = 1.0

[profile]
seconds_per_sample = 0.02
seconds_per_batch = 0.01
bytes_per_sample = 30_000_000
bytes_of_model = 500_000_000
pull_bytes = 4_000_000
push_bytes = 3_000_000
seconds_per_encoding = 0.002
"""
_COSTS = """
[[stages]]
forward_s = 0.010
backward_s = 0.022
output_bytes = 400_000
parameter_bytes = 9_000_000
saved_bytes = 3_000_000

[[stages]]
forward_s = 0.014
backward_s = 0.026
output_bytes = 200_000
parameter_bytes = 20_000_000
saved_bytes = 2_000_000

[[stages]]
forward_s = 0.006
backward_s = 0.015
output_bytes = 100_000
parameter_bytes = 41_000_000
saved_bytes = 1_000_000

[[stages]]
forward_s = 0.012
backward_s = 0.021
output_bytes = 1_000
parameter_bytes = 30_000_000
saved_bytes = 500_000
"""
_SIMULATE = "simulate {cluster} --updates 60 --batch-size 16 --output {out}"
# A device of a pipeline is always there.
_DEVICES = "\n".join(
  x for x in _MACHINES.splitlines() if x[:4] not in ("slow", "outa", "jitt")
)
_TABLES = " ".join(pipeline.TABLES)
# Tables of a stage on each device.
_PLAIN = " ".join(
  x for x in pipeline.TABLES if x not in ("zb_v", "interleaved")
)
_CASES = {
  **{
    f"simulate-{name}": f"{_SIMULATE} --protocols {name}"
    for name in server.PROTOCOLS
  },
  "simulate-options": (
    f"{_SIMULATE} --protocols ssp fedbuff ringmaster bsp n_softsync "
    "decoupled_diloco --bound 1 --buffer 2 --max-staleness 2 --backups 1 "
    "--splits 3 --fragments 4 --quorum 1.0 --grace 0.1 --ahead 2 --seed 5"
  ),
  "simulate-h-ps-parts": (
    f"{_SIMULATE} --protocols h_ps --parts tasks pipeline --pipeline-from 0.5"
  ),
  "simulate-seconds": (
    "simulate {cluster} --seconds 30 --protocols dbs ssp --output {out} "
    "--drawn-seconds 4"
  ),
  "draw": f"pipeline draw {_TABLES} --stages 3 --microbatches 6",
  "check": f"pipeline check {_TABLES} --stages 3 --microbatches 6",
  "check-blocking": (
    "pipeline check gpipe interleaved ours --sends blocking --stages 2 "
    "--microbatches 4 --window 2 --chunks 3 --iterations 3"
  ),
  "pipeline-simulate": (
    f"pipeline simulate {_PLAIN} --stages 4 --costs {{costs}} --output {{out}}"
  ),
  "pipeline-simulate-cluster": (
    "pipeline simulate gpipe 1f1b zb_h2 --stages 3 --cluster {devices} "
    "--forward-s 0.02 --backward-s 0.05 --parameter-bytes 1e6 --saved-bytes "
    "1e5 --output-bytes 1e5 --output {out}"
  ),
  "plan": (
    "pipeline plan --costs {costs} --cluster {devices} --batch-size 24 "
    "--samples 2 --output {out}"
  ),
  "plan-late": (
    "pipeline plan 2bw ours pipedream --costs {costs} --stages 3 --batch-size "
    "12 --max-delay 3 --output {out}"
  ),
  **{
    f"launch-{name}": (
      f"launch -n 4 --print {name} --name mine -- train --method diloco "
      "--checkpoints /kept"
    )
    for name in ("slurm", "kubernetes", "mpi")
  },
  "launch-kuberay": (
    "launch --print kuberay -- train --protocol asp --driver ray --cluster "
    "{cluster} --checkpoints /kept"
  ),
  "help": "--help",
  **{
    f"help-{name}": f"{name} --help"
    for name in (
      "train", "compare", "advise", "overlap", "bytes", "simulate", "pipeline",
      "report", "launch",
    )
  },
}  # fmt: skip


def _short(text):
  """Rounds long numbers: processors differ in the last digits of some."""
  return re.sub(
    r"-?\d+\.\d{9,}(e[-+]\d+)?", lambda x: f"{float(x[0]):.9g}", text
  )


def _written(folder):
  """Returns the first rows and events of timelines as text, a line each."""
  lines = []
  if (rows := folder / "rows.jsonl").exists():
    for row in map(json.loads, rows.read_text().splitlines()[:20]):
      kept = {k: x for k, x in row.items() if k not in _OF_THE_RUN}
      kept["config"] = {k: x for k, x in row["config"].items() if x is not None}
      lines += [f"{k}: {json.dumps(x)}" for k, x in kept.items()]
  for path in sorted(folder.glob("*.json")):
    found = json.loads(path.read_text())
    if events := isinstance(found, dict) and found.get("traceEvents"):
      lines.append(f"{path.name}: {len(events)} events")
      lines += [json.dumps(x) for x in events[:40]]
  return "\n".join(lines)


@pytest.mark.parametrize("case", _CASES)
def test_output_is_as_it_was_read(case, tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "100")
  monkeypatch.chdir(tmp_path)
  files = {"cluster": _MACHINES, "devices": _DEVICES, "costs": _COSTS}
  for name, text in files.items():
    (tmp_path / f"{name}.toml").write_text(text)
  words = _CASES[case].format(out="out", **{x: f"{x}.toml" for x in files})
  status = cli.main(words.split())
  out, error = capsys.readouterr()
  out += error + _written(tmp_path / "out")
  found = f"$ jdist {words}\nstatus {status}\n{out}"
  found = _short(found).replace(str(tmp_path), "DIR").rstrip() + "\n"
  path = _FOLDER / f"{case}.txt"
  if os.environ.get("JDIST_PRINTED") == "write":
    path.write_text(found)
  assert found == path.read_text()
