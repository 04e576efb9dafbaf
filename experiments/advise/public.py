"""Reads a public grid of measured runs, which the adviser is compared with.

    git clone https://github.com/Adnan082/diloco-measured
    python experiments/advise/public.py diloco-measured

The grid has 36 settings: synchronous SGD, Local SGD and DiLoCo of torchft on
four machines with one GPU each, on links of four rates. A row has the figures
of one setting, the medians over its repeats: the link's rate as iperf found it,
the steps that were counted and the rounds that ended in them, the seconds of a
step's computation and those of a mean step.
"""

import collections
import json
import pathlib
import statistics
import subprocess
import sys

from jdist import advice, cluster, training

ROWS = pathlib.Path(__file__).resolve().parent / "results" / "public.jsonl"
_SOURCE = "https://github.com/Adnan082/diloco-measured"
_WORKERS = 4
_FLOAT_BYTES = 4
# How often a ring sends each parameter.
RING = 2 * (_WORKERS - 1) / _WORKERS


def collect(folder):
  """Writes a row for each setting of a clone."""
  git = ("git", "-C", str(folder))

  def text(*words):
    return subprocess.run(
      [*git, *words], capture_output=True, text=True, check=True
    ).stdout

  commit = text("rev-parse", "--short=12", "HEAD").strip()
  names = text("ls-tree", "-r", "--name-only", "HEAD").split()
  found = collections.defaultdict(list)
  for name in names:
    path = pathlib.PurePosixPath(name)
    if "raw_step_telemetry_" not in name or path.suffix != ".json":
      continue
    run = json.loads(text("show", f"HEAD:{name}"))
    about = json.loads(text("show", f"HEAD:results/raw/{path.name}"))
    spec, shaping = about["spec"], about["shaping"]
    if not spec["bandwidth_requested_bps"]:
      continue  # The link was not slowed down.
    steps = [x for x in run["step_records"] if x["step"] >= run["warmup_steps"]]
    found[
      spec["algorithm"], spec["H"], spec["bandwidth_requested_bps"]
    ].append({
      # What iperf found, where it is recorded.
      "bits_per_s": (shaping or {}).get(
        "measured_bps", spec["bandwidth_requested_bps"]
      ),
      "params": run["n_params"],
      "steps": len(steps),
      "rounds": sum(x["did_outer_step"] for x in steps),
      "compute_s": statistics.median(x["compute_time_ms"] for x in steps) / 1e3,
      "step_s": statistics.mean(x["wall_time_ms"] for x in steps) / 1e3,
    })  # fmt: skip
  rows = [
    {
      "source": _SOURCE, "source_commit": commit, "method": method,
      "interval": interval, "rate": rate, "repeats": len(runs),
    } | {key: statistics.median(x[key] for x in runs) for key in runs[0]}
    for (method, interval, rate), runs in sorted(found.items())
  ]  # fmt: skip
  ROWS.unlink(missing_ok=True)
  training.append_rows(ROWS, rows)
  print(f"{len(rows)} settings")


def compare(rows):
  """Returns a dict for each setting, by the link and the computation alone."""
  found = []
  for row in rows:
    size = _FLOAT_BYTES * row["params"]
    # As many rounds as in the measured steps.
    interval = row["steps"] / row["rounds"]
    # A ring of the machines: the latency is not in the grid, and a message of
    # this size takes a thousand times as long.
    costs = advice.MethodCosts(
      interval, [row["compute_s"]], [0.0], RING * size, 0, 0
    )
    link = cluster.Link(row["bits_per_s"])
    said = advice.Advice({row["method"]: costs}, link).seconds(row["method"])[1]
    # The formula of the papers: the parameters are sent once.
    formula = row["compute_s"] + link.send_s(size) / interval
    found.append({
      "method": row["method"], "interval": row["interval"],
      "rate": row["rate"], "params": row["params"],
      "said": said, "took": row["step_s"],
      "error": said / row["step_s"] - 1, "formula": formula / row["step_s"] - 1,
    })  # fmt: skip
  return found


if __name__ == "__main__":
  if len(sys.argv) != 2:
    raise SystemExit("public.py must be given the folder of a clone.")
  collect(pathlib.Path(sys.argv[1]))
