"""Writes the figures of the storms, and the picture of one.

python experiments/storm/report.py          # the pages, storm.png, storm.json
python experiments/storm/report.py --check  # fails if a number differs
"""

import collections
import dataclasses
import json
import pathlib
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import absences
import mixed
import run
import studies

from jdist import cluster

_FOLDER = pathlib.Path(__file__).resolve().parent
# The aims: seconds to the next merge and to a return, percent of the living in
# a merge, percent of the final loss.
_MERGE_S, _BACK_S, _LIVING, _LOSS = 5.0, 30.0, 95.0, 0.6
# The commit of the storms that count; the others were before what the page
# says was mended, and on a busier machine.
_COMMIT = "4ae1bbb1"
_NAMES = {"SIGKILL": "kills", "SIGSTOP": "stops", "cut": "cuts"}
_ENDS = {"SIGKILL": "a kill", "SIGCONT": "a stop", "heal": "a cut"}
_STATES = {"SIGKILL": "killed", "SIGSTOP": "stopped", "cut": "cut off"}
_OVER = {"SIGSTOP": "SIGCONT", "cut": "heal"}
_COLOURS = {"SIGKILL": "#d55e00", "SIGSTOP": "#e69f00", "cut": "#cc79a7"}


def pairs(rows, name="full", calm="undisturbed", presets=run.PRESETS):
  """Returns a preset's rows and their undisturbed runs, in order of seeds."""
  storms, calm = (of(rows, presets[x]) for x in (name, calm))
  calm = {x["seed"]: x for x in calm}
  found = [(x, calm[x["seed"]]) for x in storms if x["seed"] in calm]
  return sorted(found, key=lambda x: x[0]["seed"])


def of(rows, storm):
  """Returns the rows of a setting."""
  config = run.config_of(storm)
  return [x for x in rows if x["config"] == config]


def worse(storm, calm):
  """Returns by how many percent a storm's final loss is higher."""
  return 100 * (storm["final_loss"] / calm["final_loss"] - 1)


def faults(row):
  """Counts a storm's faults by kind."""
  counts = collections.Counter(x["kind"] for x in row["faults"])
  return {kind: counts[kind] for kind in _NAMES}


def returns(row, kind=None):
  """Returns the seconds of all returns, and how many did not happen."""
  kinds = row["back_s"] if kind is None else (kind,)
  found = [x for y in kinds for x in row["back_s"][y]]
  return [x for x in found if x is not None], found.count(None)


def share(row):
  """Returns the percentage of the living in a merge, on average."""
  return 100 * row["merged_share"]


def share_of_all(row):
  """Returns the percentage of all workers in a merge, on average."""
  merged = statistics.mean(x[1] for x in row["merges"])
  return 100 * merged / row["config"]["workers"]


def _two(found):
  if not found:
    return "-"
  return f"{statistics.median(found):.1f}, {max(found):.1f}"


def _met(holds):
  return "met" if holds else "**missed**"


def verdict(found):
  """Returns the aims and what came of them."""
  storms = [x for x, _ in found]
  minutes = sum(x["wall_s"] - x["config"]["calm_s"] for x in storms) / 60
  counts = collections.Counter()
  for row in storms:
    counts.update(faults(row))
  number = counts.total()
  named = ", ".join(f"{counts[x]} {_NAMES[x]}" for x in _NAMES)
  merge_s = [x for row in storms for x in row["next_merge_s"]]
  gaps = [x for row in storms for x in row["merge_gap_s"]]
  shares = [share(row) for row in storms]
  losses = [worse(*x) for x in found]
  mean, seeds = statistics.mean(losses), {x["seed"] for x in storms}
  rounds = sum(row["updates"] for row in storms)
  return "\n".join((
    f"- {len(storms)} storms, {minutes:.1f} minutes with faults: {number} "
    f"({named}), {60 * number / minutes:.1f} an hour.",
    f"- Next merge after a fault: {statistics.median(merge_s):.1f} s in the "
    f"median and {max(merge_s):.1f} s at most (aim {_MERGE_S:g}): "
    f"{_met(max(merge_s) <= _MERGE_S)}; {sum(x <= _MERGE_S for x in merge_s)} "
    f"of {len(merge_s)} within {_MERGE_S:g} s. The longest time between two "
    f"merges is {max(gaps):.1f} s.",
    *(
      _back([x for x in storms if _setup(x) == setup], *setup)
      for setup in sorted({_setup(x) for x in storms})
    ),
    f"- Rounds that commit: {rounds} of {rounds}, since no merge depends on "
    "any one worker (aim 97 %): met.",
    f"- Of the living, {statistics.mean(shares):.1f} % take part in a merge in "
    f"the mean, {min(shares):.1f} % in the worst run (aim {_LIVING:g}): "
    f"{_met(min(shares) >= _LIVING)}. Of all workers, those away among them, "
    f"{statistics.mean(map(share_of_all, storms)):.1f} % do.",
    f"- Final loss against the undisturbed run: {mean:+.2f} % in the mean of "
    f"{len(losses)} storms over {len(seeds)} seeds, from {min(losses):+.2f} to "
    f"{max(losses):+.2f} % (aim {_LOSS:g}): {_met(mean <= _LOSS)} in the mean, "
    f"{sum(x <= _LOSS for x in losses)} of {len(losses)} storms one by one.",
  ))  # fmt: skip


def _setup(row):
  return row["config"]["spares"], row["commit"]


def _back(storms, spares, commit):
  """Returns how soon victims were back, with a number of waiting processes.

  A worker that a second fault hits before it is back cannot return until that
  fault ends: the time counts from the end of its last fault.
  """
  found = [
    x
    for row in storms
    for x in run.returns(row["faults"], row["changes"])
    if x[1] is not None
  ]
  back_s = [x for _, x, interrupted in found if not interrupted]
  again = [x for _, x, interrupted in found if interrupted]
  missing = sum(returns(row)[1] for row in storms)
  short = sum(row["short"] for row in storms)
  kinds = "; ".join(
    f"after {name} {statistics.median(own):.1f} and {max(own):.1f} s"
    for kind, name in _ENDS.items()
    if (own := [x for y, x, late in found if y == kind and not late])
  )
  twice = (
    f" {len(again)} had another fault before it was back, and returned "
    f"{max(again):.1f} s at most after the end of the first."
    if again
    else ""
  )
  return (
    f"- The victim back, with {spares} waiting "
    f"process{'es' * (spares > 1)}, {len(storms)} storms of {commit}: "
    f"{statistics.median(back_s):.1f} s in the median and {max(back_s):.1f} s "
    f"at most from the end of its last fault (aim {_BACK_S:g}): "
    f"{_met(max(back_s) <= _BACK_S)}; {sum(x <= _BACK_S for x in back_s)} of "
    f"{len(back_s)} within {_BACK_S:g} s ({kinds}).{twice} {missing} had not "
    f"returned when a run ended, and {short} stops and cuts were over before "
    "the server noticed."
  )


def table(found):
  """Returns the table of all storms."""
  return studies.table(
    "commit | spares | seed | load: at the start, at the end "
    "| kills, stops, cuts | minutes | next merge, s: median, "
    "most | back after a kill, s | after a stop, s | after a cut, s | living "
    "in a merge, % | of all | time between merges, s: median, most | final "
    "loss | undisturbed | more, %",
    [
      (
        x["commit"][:7], x["config"]["spares"], x["seed"],
        f"{x['load'][0]:.0f}, {x['load'][-1]:.0f}",
        ", ".join(map(str, faults(x).values())),
        f"{x['wall_s'] / 60:.1f}", _two(x["next_merge_s"]),
        *(_two(returns(x, kind)[0]) for kind in _ENDS),
        f"{share(x):.1f}", f"{share_of_all(x):.1f}", _two(x["merge_gap_s"]),
        f"{x['final_loss']:.5f}", f"{y['final_loss']:.5f}",
        f"{worse(x, y):+.2f}",
      )
      for x, y in found
    ],
  )  # fmt: skip


def on_clock(found):
  """Returns what the same absences cost on the clock, over many seeds."""
  losses = [worse(*x) for x in found]
  mean = statistics.mean(losses)
  margin = 1.96 * statistics.stdev(losses) / len(losses) ** 0.5
  absent = statistics.mean(100 - 100 * x["share_of_all"] for x, _ in found)
  number = statistics.mean(x["outages"] for x, _ in found)
  return (
    f"- {len(losses)} seeds on the virtual clock, {number:.0f} absences in a "
    f"run, {absent:.1f} % of all workers missing from a merge: the final loss "
    f"is {mean:+.2f} ± {margin:.2f} % above that of the undisturbed run in the "
    f"mean (95 %), from {min(losses):+.2f} to {max(losses):+.2f} %."
  )


def unequal(rows):
  """Returns what a sharded and a slow worker change, by setting."""
  lines, calm = [], {}
  for name, wanted in mixed.SETTINGS.items():
    own = [x for x in rows if x["config"] == dataclasses.asdict(wanted)]
    accuracy = {x["seed"]: 100 * x["metrics"]["accuracy"] for x in own}
    calm = calm or accuracy
    more = [y - calm[x] for x, y in accuracy.items() if x in calm]
    margin = 1.96 * statistics.stdev(more) / len(more) ** 0.5
    samples = [
      statistics.mean(x["samples"][worker] for x in own) for worker in
      wanted.names
    ]  # fmt: skip
    lines.append((
      name, len(own), f"{statistics.mean(accuracy.values()):.2f} ± "
      f"{statistics.stdev(accuracy.values()):.2f}",
      "-" if name == "equal" else
      f"{statistics.mean(more):+.2f} ± {margin:.2f}",
      f"{statistics.mean(x['metrics']['loss'] for x in own):.4f}",
      f"{statistics.mean(100 * x['share_of_all'] for x in own):.1f}",
      ", ".join(f"{100 * x / sum(samples):.0f}" for x in samples),
      f"{statistics.mean(x['wall_s'] for x in own):.0f}",
    ))  # fmt: skip
  return studies.table(
    "workers | runs | accuracy, %: mean, s.d. | more than equal, points: mean, "
    "95 % | loss | workers in a merge, % | samples of each worker, % | seconds",
    lines,
  )


def setting(rows, found):
  """Returns what the rows were made with."""
  config = found[0][0]["config"]
  lines = [
    f"- {config['workers']} workers, rounds of {config['interval']} steps of "
    f"{config['step_s']:g} s, {config['merges']} merges; a merge waits for "
    f"{100 * config['quorum']:g} % of the members and then for the others at "
    f"most as long as a round; a worker without a push for "
    f"{config['timeout_s']:g} s counts as lost.",
    f"- {config['faults_per_hour']:g} faults an hour, kills, stops and cuts "
    f"alike, after {config['calm_s']:g} s without any; stops and cuts last "
    f"{config['stop_s'][0]:g} to "
    f"{config['stop_s'][1]:g} s.",
  ]
  used = list({id(x): x for pair in found for x in pair}.values())
  for row, calm in pairs(rows, "paced", "paced-undisturbed"):
    used += [row, calm]
    same = row["final_loss"] == calm["final_loss"]
    part = sum(x[1] < row["config"]["workers"] for x in row["merges"])
    lines.append(
      f"- Without faults, in processes with the pauses of a storm, seed "
      f"{row['seed']}: a merge in {_two(row['merge_gap_s'])} s (median, most), "
      f"final loss {'equal to the bit to' if same else 'not equal to'} that of "
      f"the undisturbed run in threads ({row['final_loss']:.5f}, "
      f"{calm['final_loss']:.5f}); {part} of {len(row['merges'])} merges were "
      "without a member that was late."
    )
  commits = ", ".join(dict.fromkeys(x["commit"] for x in used))
  devices = ", ".join(dict.fromkeys(str(x["device"]) for x in used))
  lines.append(f"- {len(used)} rows, of the commits {commits}, on {devices}.")
  return "\n".join(lines)


def trace(row):
  """Returns who was a member, the faults and the merges, as spans."""
  found, end_s = cluster.Trace(), row["wall_s"]
  names = [f"worker{i}" for i in range(row["config"]["workers"])]
  for name in names:
    own = [x for x in row["changes"] if x[3] == name]
    for change, after in zip(own, [*own[1:], [end_s]], strict=True):
      if change[2] != "left":
        found.add(name, change[2], change[0], after[0], "member")
    for x in row["faults"]:
      if x["worker"] == name and x["kind"] in _NAMES:
        ends = [
          *(y[0] for y in own if y[2] != "left" and x["kind"] == "SIGKILL"),
          *(
            y["at_s"]
            for y in row["faults"]
            if (y["kind"], y["worker"]) == (_OVER.get(x["kind"]), name)
          ),
          end_s,
        ]
        end = min(y for y in ends if y > x["at_s"] or y == end_s)
        found.add(name, x["kind"], x["at_s"], end, _STATES[x["kind"]])
  before_s = 0.0
  for at_s, merged, living in row["merges"]:
    found.add("merges", f"{merged} of {living}", before_s, at_s, "merge")
    before_s = at_s
  return found


def save(row, calm, path):
  """Writes a storm for `jdist report`: its trace, losses and workers."""
  trace(row).save_perfetto(path)
  events = json.loads(path.read_text())["traceEvents"]
  series = [
    (
      "test loss",
      at_s,
      {"storm": loss, "undisturbed, at the same merges": other},
    )
    for (at_s, loss), (_, other) in zip(
      row["curve"], calm["curve"], strict=True
    )
  ]
  series += [
    ("workers", at_s, {"members": living, "in the merge": merged})
    for at_s, merged, living in row["merges"]
  ]
  events += [
    {"name": name, "ph": "C", "pid": 0, "ts": 1e6 * at_s, "args": values}
    for name, at_s, values in series
  ]
  lines = ",\n".join(json.dumps(x, separators=(",", ":")) for x in events)
  path.write_text(f'{{"traceEvents":[\n{lines}\n]}}\n')


def draw(row, calm, path):
  """Draws who is a member, the faults, the merges and the loss."""
  import matplotlib

  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, (top, middle, below) = plt.subplots(
    3, 1, sharex=True, figsize=(11, 7.5), height_ratios=(4, 1.6, 1.6)
  )
  names = [f"worker{i}" for i in range(row["config"]["workers"])]
  spans = [x for x in trace(row) if x.resource in names]
  for x in spans:
    y, faulty = names.index(x.resource), x.kind != "member"
    if x.name != "SIGKILL":  # Its mark is enough: no member is left.
      top.plot(
        [x.start_s / 60, x.end_s / 60], [y, y], lw=1.5 if faulty else 5,
        color=_COLOURS[x.name] if faulty else "#0072b2",
        alpha=None if faulty else 0.45,
        solid_capstyle="projecting" if faulty else "butt",
      )  # fmt: skip
  for kind, marker in (("SIGKILL", "x"), ("SIGSTOP", "|"), ("cut", "|")):
    mine = [x for x in spans if x.name == kind]
    top.scatter(
      [x.start_s / 60 for x in mine], [names.index(x.resource) for x in mine],
      marker=marker, s=45, color=_COLOURS[kind], label=_NAMES[kind], zorder=3,
    )  # fmt: skip
  top.set_yticks(range(len(names)), names)
  top.set_ylim(-0.6, len(names) - 0.4)
  top.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
  top.set_title("members (blue) and faults", loc="left")
  times, merged, living = zip(*row["merges"], strict=True)
  times = [x / 60 for x in times]
  middle.step(times, living, where="post", color="#999999", label="members")
  middle.plot(times, merged, ".", ms=3, color="#009e73", label="in the merge")
  middle.set_ylim(0, len(names) + 0.7)
  middle.set_yticks(range(0, len(names) + 1, 2))
  middle.set_ylabel("workers")
  middle.legend(loc="lower right", ncols=2, frameon=False)
  at = [x / 60 for x, _ in row["curve"]]
  for of_run, style, label in ((calm, "#999999", "undisturbed, at the same "
    "merges"), (row, "#333333", "storm")):  # fmt: skip
    losses = [x for _, x in of_run["curve"]]
    below.plot(at, losses, color=style, label=label)
  below.legend(frameon=False)
  below.set(xlabel="minutes", ylabel="test loss")
  for axes in (top, middle, below):
    axes.set_xlim(0, row["wall_s"] / 60)
    for side in ("top", "right"):
      axes.spines[side].set_visible(False)
  figure.tight_layout()
  figure.savefig(path, dpi=130)


def main():
  """Writes the page and the picture, or checks the page."""
  rows = studies.read(run.ROWS)
  found = pairs(rows) + pairs(rows, "one-spare")
  last = [x for x in found if x[0]["commit"].startswith(_COMMIT)]
  before = [x for x in found if not x[0]["commit"].startswith(_COMMIT)]
  parts = {
    "verdict": verdict(last),
    "clock": on_clock(
      pairs(studies.read(absences.ROWS), "storm", presets=absences.PRESETS)
    ),
    "unequal": unequal(studies.read(mixed.ROWS)),
  }  # fmt: skip
  peers = pairs(rows + studies.read(run.PEERS), "peers")
  tables = {
    "setting": setting(rows, found), "before": verdict(before),
    "storms": table(last + before),
    "peers": verdict(peers), "peers-storms": table(peers),
  }  # fmt: skip

  def show():
    draw(*last[0], run.ROWS.parent / "storm.png")
    save(*last[0], run.ROWS.parent / "storm.json")

  pages = {"README.md": parts, "TABLES.md": tables}
  studies.publish({_FOLDER / x: y for x, y in pages.items()}, show)


if __name__ == "__main__":
  main()
