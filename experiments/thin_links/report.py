"""Writes the figures of the thin links' page from the rows.

python experiments/thin_links/report.py          # its pages
python experiments/thin_links/report.py --check  # fails if a number differs
"""

import collections
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import run
import studies

# The aims: communication over computation of synchronous SGD, and percent of
# the throughput without messages.
_RATIO, _KEPT = 60.0, 95.0
_NAMES = {
  "ssgd": "synchronous SGD",
  "late": "Local SGD int4, a round late",
  "waiting": "Local SGD int4, awaited",
}


def kept(row):
  """Returns the percentage of the throughput without messages."""
  parts = zip(_alone(row), _in_the_run(row), strict=True)
  return 100 * statistics.mean(alone / step for alone, step in parts)


def _alone(row):
  """Returns each worker's time of a step without messages."""
  return row["alone_s"]


def _in_the_run(row):
  """Returns each worker's time of a step, with the waits between rounds."""
  # `step_s` begins after the first step that is counted, and so after a wait.
  length = row["config"]["interval"]
  rounds = [statistics.mean(map(sum, _scaled(x, length))) for x in _rounds(row)]
  return [x / length for x in rounds] or row["step_s"]


def _rounds(row):
  """Returns the rounds of each worker; synchronous SGD has none."""
  return row.get("rounds_s", [])


def _scaled(rounds, length):
  return [(step_s * length, wait_s) for step_s, wait_s in rounds]


def ratio(row):
  """Returns communication over computation."""
  return 100 / kept(row) - 1


def waits(row):
  """Returns the percentage of a worker's time in which it waits, as a mean."""
  shares = []
  for rounds in _rounds(row):
    steps, waits_s = zip(
      *_scaled(rounds, row["config"]["interval"]), strict=True
    )
    shares.append(100 * sum(waits_s) / sum(steps + waits_s))
  return statistics.mean(shares)


def of(rows, method):
  """Returns the rows of a method's whole runs, on links with short queues."""
  steps = run.PRESETS[method].steps
  wanted = (method, steps)
  return [
    x
    for x in rows
    if (x["config"]["method"], x["config"]["steps"]) == wanted
    and "queue_ms" not in x["config"]
  ]


def far(row):
  """Returns the number of the worker that is not on the server's host."""
  return row["hosts"].index(1)


def beats(row):
  """Returns the seconds of the far worker's heartbeats, and those lost."""
  found = row["heartbeats_s"][f"worker{far(row)}"]
  return found, sum(x > row["config"]["patience_s"] for x in found)


def lost(row):
  """Counts workers that the run, or Ray, took for lost."""
  return len(row["events"]) + sum(x[2] == "left" for x in row["changes"])


def _met(holds):
  return "met" if holds else "**missed**"


def verdict(rows):
  """Returns the aims and what came of them."""
  ssgd, late, waiting = (of(rows, x) for x in _NAMES)
  found = [x for row in late for x in beats(row)[0]]
  missing = sum(beats(row)[1] for row in late)
  checks = sum(row["missed_checks"] for row in late)
  ratios, shares = [ratio(x) for x in ssgd], [kept(x) for x in late]
  rate = late[0]["config"]["bits_per_s"] / 1e6
  gone = sum(map(lost, late))
  lines = [
    f"- Synchronous SGD at {rate:g} Mbit/s: communication over computation "
    f"{min(ratios):.1f} (aim {_RATIO:g} or more), "
    f"{statistics.mean(map(kept, ssgd)):.2f} % of its own throughput without "
    "messages.",
    f"- The elastic run, a round late: {statistics.mean(shares):.2f} % of its "
    f"own throughput without messages in the mean of {len(late)} runs, "
    f"{min(shares):.2f} at least (aim {_KEPT:g}): "
    f"{_met(min(shares) >= _KEPT)}. Between rounds its workers waited for "
    f"{statistics.mean(map(waits, late)):.2f} % of their time; the rest is "
    "that steps in the run took longer than alone, on two shared cores."
    f" It took {sum(x['rounds'] for x in late)} rounds; both workers were in "
    f"{sum(y[1] == 2 for x in late for y in x['merges'])} of their merges.",
    f"- Heartbeats of the far worker: {len(found)}, answered after "
    f"{1e3 * statistics.median(found):.0f} ms in the median and "
    f"{max(found):.2f} s at most; {missing} lost (later than "
    f"{late[0]['config']['patience_s']:g} s). Of Ray's own health checks "
    f"{checks} were missed, and {gone} times a worker was taken for lost: "
    f"{_met(missing + checks + gone == 0)}.",
  ]
  if waiting:
    lines.append(
      f"- Without the overlap the same run keeps "
      f"{statistics.mean(map(kept, waiting)):.1f} %, and waits for "
      f"{statistics.mean(map(waits, waiting)):.1f} % of its time."
    )
  return "\n".join(lines)


def table(rows):
  """Returns the table of all runs."""
  lines = []
  for method, name in _NAMES.items():
    for row in of(rows, method):
      cells = ["-"] * 6
      if method != "ssgd":
        seconds, missing = beats(row)
        cells = [
          f"{row['pushed_bytes'] / row['rounds'] / 2e6:.2f}",
          f"{row['pulled_bytes'] / row['rounds'] / 2e6:.2f}",
          f"{len(seconds)}, {missing}",
          f"{1e3 * statistics.median(seconds):.0f}, {1e3 * max(seconds):.0f}",
          row["missed_checks"], lost(row),
        ]  # fmt: skip
      step_s = statistics.mean(_in_the_run(row))
      lines.append((
        name, row["seed"], row["commit"][:7], row["config"]["steps"],
        row["config"]["interval"], f"{1e3 * statistics.mean(_alone(row)):.1f}",
        f"{1e3 * step_s:.1f}", f"{kept(row):.2f}", f"{ratio(row):.3f}", *cells,
      ))  # fmt: skip
  return studies.table(
    "run | seed | commit | steps | H | ms a step without messages | ms a step "
    "| kept, % | communication / computation | MB up a round and worker | MB "
    "down | heartbeats, lost | ms to the answer: median, most | Ray's checks "
    "missed | workers lost",
    lines,
  )


def queues(rows):
  """Returns what heartbeats wait for behind a router with a long queue."""
  found = [x for x in rows if "queue_ms" in x["config"]]
  lines = []
  for row in sorted(found, key=lambda x: (_paced(x), x["seed"])):
    seconds, missing = beats(row)
    ordered = sorted(seconds)
    lines.append((
      "pieces" if _paced(row) else "whole", row["seed"], row["commit"][:7],
      f"{row['config']['queue_ms'] / 1e3:g}", f"{kept(row):.2f}",
      len(seconds), f"{1e3 * statistics.median(seconds):.0f}",
      f"{1e3 * ordered[int(0.95 * len(ordered))]:.0f}",
      f"{1e3 * ordered[-1]:.0f}", missing,
    ))  # fmt: skip
  return studies.table(
    "payloads | seed | commit | s of the queue | kept, % | heartbeats | ms to "
    "the answer: median | 95 % within | most | lost",
    lines,
  )


def _paced(row):
  return row["config"].get("paced", True)


def sockets(rows):
  """Returns what each kind of connection between the hosts has carried."""
  row = of(rows, "late")[0]
  near, other = row["sockets"]
  owner = {x["near"]: x["process"] for x in near}
  found = collections.defaultdict(lambda: [0, 0, 0])
  for x in other:
    # A listening process has one port, a connecting one has many.
    here, there = x["process"], owner.get(x["far"], "an ended process")
    counts = found[here, there, _carries(x)]
    for i, value in enumerate((1, x["sent"], x["received"])):
      counts[i] += value
  order = sorted(found.items(), key=lambda x: -sum(x[1][1:]))
  return studies.table(
    "process of host 1 | of host 0 | connections | MB sent | MB received",
    [
      (a, b, number, f"{sent / 1e6:.2f}", f"{received / 1e6:.2f}")
      for (a, b, _), (number, sent, received) in order
    ],
  )


def _carries(connection):
  return max(connection["sent"], connection["received"]) > 5e6


def of_shards(rows):
  """Returns the updates a second of one server and of its shards."""
  ordered = {
    (x["config"]["seconds"], x["seed"], x["config"]["shards"]): x for x in rows
  }
  lines, wanted = [], {2: 1.8, 4: 3.2}
  for (seconds, seed, num), row in sorted(ordered.items()):
    config = row["config"]
    one = ordered[seconds, seed, 1]["updates_per_s"]
    factor = row["updates_per_s"] / one
    aim = wanted.get(num)
    # A part goes to each server, and one comes from it, for each update.
    part = 4 * config["tensors"] * config["entries"] / num
    ceiling = config["bits_per_s"] / 8 / part
    lines.append((
      num, seed, config["workers"], row["commit"][:7], row["updates"],
      f"{config['skipped_s']:g}", f"{row['counted_s']:.1f}",
      f"{row['updates_per_s']:.3f}",
      f"{100 * row['updates_per_s'] / ceiling:.0f}", f"{factor:.2f}",
      "-" if aim is None else f"{aim:g}: {_met(factor >= aim)}",
      f"{row['staleness']:.1f}",
    ))  # fmt: skip
  return studies.table(
    "servers | run | workers | commit | updates | after s | in s "
    "| updates a second | of what the links carry, % | times one server | aim "
    "| staleness",
    lines,
  )


def of_peers(rows):
  """Returns the seconds of a round by a server, and by peers."""
  usual = {
    x["config"]["bits"]: statistics.median(x["rounds_s"])
    for x in rows
    if not x["config"]["peers"]
  }
  first = {x["config"]["bits"]: x["parameters"] for x in reversed(rows)}
  lines = []
  for row in sorted(rows, key=lambda x: (x["config"]["bits"], x["seed"])):
    config, seconds = row["config"], row["rounds_s"]
    rounds, middle = config["rounds"], statistics.median(seconds)
    received, sent = (
      f"{row[x] / rounds / 1e6:.2f}" for x in ("server_received", "server_sent")
    )
    lines.append((
      "by peers" if config["peers"] else "by the server", config["bits"],
      row["commit"][:7], rounds, f"{middle:.2f}",
      f"{min(seconds):.2f} to {max(seconds):.2f}",
      f"{usual[config['bits']] / middle:.2f}",
      f"{row['pulled_bytes'] / rounds / config['workers'] / 1e6:.2f}",
      received, sent,
      "yes" if row["parameters"] == first[config["bits"]] else "**no**",
    ))  # fmt: skip
  return studies.table(
    "merges | bits of a push | commit | rounds | s a round | from, to | times "
    "as fast | MB to a worker a round | MB received at the server's interface "
    "a round | sent | the same bits at the end",
    lines,
  )


def setting(rows):
  """Returns what the rows were made with."""
  config = of(rows, "late")[0]["config"]
  used = [x for name in _NAMES for x in of(rows, name)]
  commits = ", ".join(dict.fromkeys(x["commit"] for x in used))
  return (
    f"- Links of {config['bits_per_s'] / 1e6:g} Mbit/s, an MLP with layers of "
    f"{' and '.join(map(str, config['hidden']))}, {config['batch']} images and "
    f"{1e3 * config['step_s']:g} ms a step, rounds of {config['interval']} "
    f"steps; a heartbeat each {config['heartbeat_s']:g} s. "
    f"{len(used)} rows, of the commits {commits}."
  )


def main():
  """Fills the page by its rows."""
  rows = studies.read(run.ROWS)
  divided = studies.read(run.FOLDER / "results" / "shards.jsonl")
  parts = {
    "verdict": verdict(rows), "runs": table(rows), "sockets": sockets(rows),
    "queues": queues(rows), "setting": setting(rows),
  }  # fmt: skip
  peers = studies.read(run.FOLDER / "results" / "peers.jsonl")
  ceiling = {"peers": of_peers(peers), "shards": of_shards(divided)}
  pages = {"README.md": parts, "SERVER_LINK.md": ceiling}
  studies.publish(
    {run.FOLDER / name: x for name, x in pages.items()}, lambda: None
  )


if __name__ == "__main__":
  main()
