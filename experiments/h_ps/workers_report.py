"""Tables and a picture of the runs on real workers, from their rows.

python experiments/h_ps/workers_report.py
"""

import collections
import pathlib
import statistics
import sys
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import setups
import studies

from jdist import training

Row: TypeAlias = dict[str, Any]


def rows_of(name: str) -> list[Row]:
  """Returns the rows of a command, none if it was not run."""
  path = setups.RESULTS / f"ray_{name}.jsonl"
  return training.read_rows(path) if path.exists() else []


def gain(rows: list[Row]) -> str:
  """Returns a table of seconds of each protocol, and of H-PS over each."""

  def key(row: Row) -> tuple[str, float]:
    speeds = "/".join(f"{x:g}" for x in row["config"]["speeds"])
    return speeds, row["config"]["ratio"]

  lines = []
  for (speeds, ratio), own in studies.group(rows, key).items():
    found = {
      name: [x["wall_s"] for x in own if x["config"]["variant"] == name]
      for name in ("h_ps", *config.BASELINES)
    }
    if all(found.values()):
      middle = {name: statistics.median(x) for name, x in found.items()}
      over = [middle[x] / middle["h_ps"] for x in config.BASELINES]
      lines.append(
        (
          speeds,
          f"{ratio:g}",
          min(map(len, found.values())),
          *(
            f"{middle[name]:.2f} ({min(x):.2f} to {max(x):.2f})"
            for name, x in found.items()
          ),
          " / ".join(f"{x:.2f}" for x in over),
        )
      )
  return studies.table(
    "speeds | r | runs of each | H-PS, s | BSP | ASP | SSP | H-PS over BSP / "
    "ASP / SSP",
    lines,
  )


def _an_update(row: Row) -> float:
  return row["wall_s"] / row["updates"]


def clock(rows: list[Row]) -> str:
  """Returns a table of times per update, real and on the clock."""
  lines, wrong = [], []
  for name, own in studies.group(rows, lambda row: row["name"]).items():
    first, virtual = own[0]["config"], own[0]["clock"]
    real = statistics.median(map(_an_update, own))
    wanted = virtual["virtual_s"] / virtual["updates"]
    wrong.append(abs(real / wanted - 1))
    stale = statistics.median(x["staleness"]["mean_over_updates"] for x in own)
    busy = statistics.median(x["server_busy_s"] / x["wall_s"] for x in own)
    lines.append(
      f"{name} | {first['ratio']:g} | {first['variant']} "
      f"| {1e3 * real:.1f} ({len(own)}) | {1e3 * wanted:.1f} "
      f"| {real / wanted:.3f} | {stale:.2f} "
      f"| {virtual['staleness']['mean_over_updates']:.2f} | {100 * busy:.0f}"
    )
  found = studies.table(
    "set-up | r | protocol | ms an update, real (runs) | clock | real / clock "
    "| staleness, real | clock | server busy, %",
    lines,
  )
  if wrong:
    found += (
      f"\n\nWrong by {100 * statistics.median(wrong):.1f} % in the median, "
      f"{100 * max(wrong):.1f} % at most."
    )
  return found


def draw(rows: list[Row], path: pathlib.Path) -> None:
  """Draws how stale each worker's gradients were: real above, clock below."""
  runs = studies.group(rows, lambda row: row["name"])
  columns = 3
  with studies.picture(
    path, -(-len(runs) // columns), columns, figsize=(13, 10), dpi=110, grid={},
    title="Part of each worker's gradients by staleness: on Ray above each "
    "line (orange), on the clock below it (blue)",
  ) as grid:  # fmt: skip
    for axes, (name, every) in zip(grid.flat, runs.items(), strict=False):
      own = [x for x in every if "ages" in x["clock"]]
      ages = own[0]["clock"]["ages"]
      for place, worker in enumerate(ages):
        real = _parts([x["nodes"][worker]["ages"] for x in own])
        for sign, parts, colour in (
          (1, real, "#d55e00"), (-1, _parts([ages[worker]]), "#0072b2"),
        ):  # fmt: skip
          axes.bar(
            list(parts), [0.42 * sign * x for x in parts.values()], 0.8,
            bottom=place, color=colour,
          )  # fmt: skip
        axes.axhline(place, color="black", lw=0.6)
      speeds = [f"speed {speed:g}" for speed in own[0]["config"]["speeds"]]
      axes.set_yticks(range(len(ages)), speeds, fontsize=8)
      axes.set_ylim(-0.6, len(ages) - 0.4)
      axes.set_xlim(-0.6, max(axes.get_xlim()[1], 2.6))
      axes.xaxis.get_major_locator().set_params(integer=True)
      plural = "s" if len(own) > 1 else ""
      axes.set_title(f"{name} ({len(own)} run{plural})", fontsize=10)
    for axes in grid.flat[len(runs) :]:
      axes.axis("off")
    for axes in grid[-1]:
      axes.set_xlabel("staleness, updates")


def _parts(counted: list[dict[str, int]]) -> dict[int, float]:
  """Returns the part of all gradients with each staleness, in rising order."""
  total: collections.Counter[int] = collections.Counter()
  for counts in counted:
    for age, count in counts.items():
      total[int(age)] += count
  return {age: total[age] / total.total() for age in sorted(total)}


def scale(rows: list[Row]) -> str:
  """Returns a table of the cost of an update, and of bytes a second."""
  alone = {
    x["config"]["num_bytes"]: _an_update(x)
    for x in rows
    if x["config"]["workers"] == 1
  }
  lines = []
  for row in rows:
    workers, num_bytes = row["config"]["workers"], row["config"]["num_bytes"]
    rate = (row["pushed_bytes"] + row["pulled_bytes"]) / row["wall_s"] / 1e6
    lines.append(
      f"{workers} | {num_bytes:,} | {row['updates'] / row['wall_s']:.0f} "
      f"| {1e3 * _an_update(row):.2f} "
      f"| {1e3 * alone[num_bytes] / workers:.2f} | {rate:.0f} "
      f"| {100 * row['server_busy_s'] / row['wall_s']:.0f}"
    )
  return studies.table(
    "workers | bytes a message | updates a second | ms an update | clock's "
    "| MB/s, push and pull | server busy, %",
    lines,
  )


def returns(row: Row) -> list[tuple[float, float]]:
  """Returns each fault's seconds until its detection and until recovery."""
  found = []
  for fault in row["faults"]:
    later = {"lost": [], "back": []}
    for event in row["events"]:
      after_s = event["at_s"] - fault["at_s"]
      if event["worker"] == fault["worker"] and after_s >= 0:
        later.setdefault(event["kind"], []).append(after_s)
    if later["lost"] and later["back"]:
      found.append((later["lost"][0], later["back"][0]))
  return found


def faults() -> str:
  """Returns a table of the faults and their consequences."""
  lines = []
  for row in rows_of("kills"):
    found = returns(row)
    noticed, back = zip(*found, strict=True)
    whole = row["samples"] + row["lost_samples"]
    lines.append(
      f"SIGKILL of a worker, {len(row['faults'])} times ({len(found)} back) "
      f"| {statistics.median(noticed):.1f}, {max(noticed):.1f} at most "
      f"| {row['lost_samples']} of {whole} samples "
      f"| {statistics.median(back):.1f}, {max(back):.1f} at most"
    )
  for row in rows_of("server"):
    ((noticed_s, back_s),) = returns(row)
    at, resumed = row["faults"][0]["updates"], row["resumed"]
    lines.append(
      f"SIGKILL of the server at update {at}, a checkpoint every 5 "
      f"| {noticed_s:.1f} | {at - resumed} updates: resumed at {resumed} "
      f"| {back_s:.1f}"
    )
  for row in rows_of("hang"):
    noticed_s, back_s = hung(row)
    lines.append(
      f"SIGSTOP of a worker under BSP, limit 3 s | {noticed_s:.1f} "
      f"| {row['lost_samples']} samples | {back_s:.1f} after SIGCONT"
    )
  return studies.table(
    "fault | noticed after, s | lost | recovered after, s", lines
  )


def hung(row: Row) -> tuple[float, float]:
  """Returns the seconds from SIGSTOP to loss, and from SIGCONT to return."""
  stopped_s, woken_s = (x["at_s"] for x in row["faults"])
  num = len(row["config"]["speeds"])
  seen = row["seen"]
  left = next(t for t, _, n in seen if t > stopped_s and n < num)
  back = next(t for t, _, n in seen if t > woken_s and n == num)
  return left - stopped_s, back - woken_s


def kept(rows: list[Row], undisturbed: list[Row]) -> str:
  """Returns a line of accuracies, with kills and without."""
  own, others = (
    ", ".join(f"{100 * x['accuracy']:.2f}" for x in runs)
    for runs in (rows, undisturbed)
  )
  return f"With kills {own} %, undisturbed {others} %."


def replays(rows: list[Row]) -> str:
  """Returns a table of recorded runs, and whether a replay ends equal."""
  return studies.table(
    "protocol | updates | recorded, MB | the same bits again",
    [
      f"{x['config']['variant']} | {x['updates']} "
      f"| {x['recorded_bytes'] / 1e6:.1f} | {'yes' if x['equal'] else 'NO'}"
      for x in rows
    ],
  )


def main() -> None:
  """Prints all tables, and draws the picture."""
  for name, table in (
    ("gain", gain), ("computes", gain), ("clock", clock), ("scale", scale),
    ("replay", replays),
  ):  # fmt: skip
    rows = rows_of(name)
    if rows:
      print(f"## {name}\n\n{table(rows)}\n")
  print(f"## faults\n\n{faults()}\n")
  print(kept(rows_of("kills"), rows_of("undisturbed")))
  for row in rows_of("profile"):
    print(f"latency {1e3 * row['latency_s']:.2f} ms")
  if rows_of("clock"):
    draw(rows_of("clock"), setups.RESULTS / "ray_staleness.png")


if __name__ == "__main__":
  main()
