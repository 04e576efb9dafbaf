"""Tables and a picture of the runs on real workers, from their rows.

python experiments/h_ps/workers_report.py
"""

import collections
import pathlib
import statistics
from typing import Any, TypeAlias

import config
import setups

from jdist import training

Row: TypeAlias = dict[str, Any]


def rows_of(name: str) -> list[Row]:
  """The rows of a command, if it was run."""
  path = setups.RESULTS / f"ray_{name}.jsonl"
  return training.read_rows(path) if path.exists() else []


def _speeds(row: Row) -> str:
  return "/".join(f"{x:g}" for x in row["config"]["speeds"])


def gain(rows: list[Row]) -> str:
  """Markdown: seconds of each protocol, and H-PS over each."""
  lines = [
    "| speeds | r | runs of each | H-PS, s | BSP | ASP | SSP "
    "| H-PS over BSP / ASP / SSP |",
    "|---|---|---|---|---|---|---|---|",
  ]
  keys = dict.fromkeys((_speeds(x), x["config"]["ratio"]) for x in rows)
  for speeds, ratio in keys:
    own = [
      x for x in rows if (_speeds(x), x["config"]["ratio"]) == (speeds, ratio)
    ]
    found = {
      name: [x["wall_s"] for x in own if x["config"]["variant"] == name]
      for name in ("h_ps", *config.BASELINES)
    }
    if not all(found.values()):
      continue
    middle = {name: statistics.median(x) for name, x in found.items()}
    cells = [
      f"{middle[name]:.2f} ({min(x):.2f} to {max(x):.2f})"
      for name, x in found.items()
    ]
    over = " / ".join(
      f"{middle[x] / middle['h_ps']:.2f}" for x in config.BASELINES
    )
    lines.append(
      f"| {speeds} | {ratio:g} | {min(map(len, found.values()))} "
      f"| {' | '.join(cells)} | {over} |"
    )
  return "\n".join(lines)


def _an_update(row: Row) -> float:
  return row["wall_s"] / row["updates"]


def clock(rows: list[Row]) -> str:
  """Markdown: time per update, real and on the clock."""
  lines = [
    "| set-up | r | protocol | ms an update, real (runs) | clock "
    "| real / clock | staleness, real | clock | server busy, % |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  wrong = []
  for name in dict.fromkeys(x["name"] for x in rows):
    own = [x for x in rows if x["name"] == name]
    real = statistics.median(map(_an_update, own))
    wanted = own[0]["clock"]["virtual_s"] / own[0]["clock"]["updates"]
    wrong.append(abs(real / wanted - 1))
    stale = [
      statistics.median(x["staleness"]["mean_over_updates"] for x in own),
      own[0]["clock"]["staleness"]["mean_over_updates"],
    ]
    busy = statistics.median(x["server_busy_s"] / x["wall_s"] for x in own)
    lines.append(
      f"| {name} | {own[0]['config']['ratio']:g} "
      f"| {own[0]['config']['variant']} | {1e3 * real:.1f} ({len(own)}) "
      f"| {1e3 * wanted:.1f} | {real / wanted:.3f} | {stale[0]:.2f} "
      f"| {stale[1]:.2f} | {100 * busy:.0f} |"
    )
  if wrong:
    lines.append(
      f"\nWrong by {100 * statistics.median(wrong):.1f} % in the median, "
      f"{100 * max(wrong):.1f} % at most."
    )
  return "\n".join(lines)


def draw(rows: list[Row], path: pathlib.Path) -> None:
  """Draws how stale each worker's gradients were: real above, clock below."""
  pyplot = training.pyplot()
  names = list(dict.fromkeys(x["name"] for x in rows))
  rows = [x for x in rows if "ages" in x["clock"]]
  columns = 3
  figure, grid = pyplot.subplots(
    -(-len(names) // columns), columns, squeeze=False, figsize=(13, 10),
    layout="constrained",
  )  # fmt: skip
  for axes, name in zip(grid.flat, names, strict=False):
    own = [x for x in rows if x["name"] == name]
    workers = list(own[0]["clock"]["ages"])
    for place, worker in enumerate(workers):
      real = _parts([x["nodes"][worker]["ages"] for x in own])
      clock = _parts([own[0]["clock"]["ages"][worker]])
      for sign, parts, colour in ((1, real, "#d55e00"), (-1, clock, "#0072b2")):
        axes.bar(
          list(parts), [0.42 * sign * x for x in parts.values()], 0.8,
          bottom=place, color=colour,
        )  # fmt: skip
      axes.axhline(place, color="black", lw=0.6)
    speeds = own[0]["config"]["speeds"]
    axes.set_yticks(
      range(len(workers)), [f"speed {speed:g}" for speed in speeds], fontsize=8
    )
    axes.set_ylim(-0.6, len(workers) - 0.4)
    axes.set_xlim(-0.6, max(axes.get_xlim()[1], 2.6))
    axes.xaxis.get_major_locator().set_params(integer=True)
    plural = "s" if len(own) > 1 else ""
    axes.set_title(f"{name} ({len(own)} run{plural})", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
  for axes in grid.flat[len(names) :]:
    axes.axis("off")
  for axes in grid[-1]:
    axes.set_xlabel("staleness, updates")
  figure.suptitle(
    "Part of each worker's gradients by staleness: on Ray above each line "
    "(orange), on the clock below it (blue)", fontsize=11,
  )  # fmt: skip
  figure.savefig(path, dpi=110)
  pyplot.close(figure)


def _parts(counted: list[dict[str, int]]) -> dict[int, float]:
  """Parts of all by their number, in rising order."""
  total: collections.Counter[int] = collections.Counter()
  for counts in counted:
    for age, count in counts.items():
      total[int(age)] += count
  return {age: total[age] / total.total() for age in sorted(total)}


def scale(rows: list[Row]) -> str:
  """Markdown: what an update costs, and bytes a second."""
  lines = [
    "| workers | bytes a message | updates a second | ms an update "
    "| clock's | MB/s, push and pull | server busy, % |",
    "|---|---|---|---|---|---|---|",
  ]
  alone = {
    x["config"]["num_bytes"]: _an_update(x)
    for x in rows
    if x["config"]["workers"] == 1
  }
  for row in rows:
    one = row["config"]
    rate = (row["pushed_bytes"] + row["pulled_bytes"]) / row["wall_s"] / 1e6
    wanted = alone[one["num_bytes"]] / one["workers"]
    lines.append(
      f"| {one['workers']} | {one['num_bytes']:,} "
      f"| {row['updates'] / row['wall_s']:.0f} | {1e3 * _an_update(row):.2f} "
      f"| {1e3 * wanted:.2f} | {rate:.0f} "
      f"| {100 * row['server_busy_s'] / row['wall_s']:.0f} |"
    )
  return "\n".join(lines)


def returns(row: Row) -> list[tuple[str, str, float, float]]:
  """Fault, worker, and seconds until it was noticed, and until it was back."""
  found = []
  for fault in row["faults"]:
    later = [
      x for x in row["events"]
      if x["worker"] == fault["worker"] and x["at_s"] >= fault["at_s"]
    ]  # fmt: skip
    lost = [x["at_s"] for x in later if x["kind"] == "lost"]
    back = [x["at_s"] for x in later if x["kind"] == "back"]
    if lost and back:
      found.append(
        (
          fault["fault"],
          fault["worker"],
          lost[0] - fault["at_s"],
          back[0] - fault["at_s"],
        )
      )
  return found


def faults() -> str:
  """Markdown: each fault, and what became of it."""
  lines = [
    "| fault | noticed after, s | lost | recovered after, s |",
    "|---|---|---|---|",
  ]
  for row in rows_of("kills"):
    found = returns(row)
    noticed, back = [x[2] for x in found], [x[3] for x in found]
    whole = row["samples"] + row["lost_samples"]
    cells = [
      f"SIGKILL of a worker, {len(row['faults'])} times ({len(found)} back)",
      f"{statistics.median(noticed):.1f}, {max(noticed):.1f} at most",
      f"{row['lost_samples']} of {whole} samples",
      f"{statistics.median(back):.1f}, {max(back):.1f} at most",
    ]
    lines.append(f"| {' | '.join(cells)} |")
  for row in rows_of("server"):
    ((_, _, noticed_s, back_s),) = returns(row)
    at, resumed = row["faults"][0]["updates"], row["resumed"]
    lines.append(
      f"| SIGKILL of the server at update {at}, a checkpoint every 5 "
      f"| {noticed_s:.1f} | {at - resumed} updates: resumed at {resumed} "
      f"| {back_s:.1f} |"
    )
  for row in rows_of("hang"):
    noticed_s, back_s = hung(row)
    lines.append(
      f"| SIGSTOP of a worker under BSP, limit 3 s | {noticed_s:.1f} "
      f"| {row['lost_samples']} samples | {back_s:.1f} after SIGCONT |"
    )
  return "\n".join(lines)


def hung(row: Row) -> tuple[float, float]:
  """Seconds from SIGSTOP until it left, and from SIGCONT until it was back."""
  stopped_s, woken_s = (x["at_s"] for x in row["faults"])
  num = len(row["config"]["speeds"])
  seen = row["seen"]
  left = next(t for t, _, n in seen if t > stopped_s and n < num)
  back = next(t for t, _, n in seen if t > woken_s and n == num)
  return left - stopped_s, back - woken_s


def kept(rows: list[Row], undisturbed: list[Row]) -> str:
  """Text: accuracy of a run with kills, and of undisturbed ones."""
  own = ", ".join(f"{100 * x['accuracy']:.2f}" for x in rows)
  others = ", ".join(f"{100 * x['accuracy']:.2f}" for x in undisturbed)
  return f"With kills {own} %, undisturbed {others} %."


def replays(rows: list[Row]) -> str:
  """Markdown: recorded runs, and whether they end with the same bits again."""
  lines = [
    "| protocol | updates | recorded, MB | the same bits again |",
    "|---|---|---|---|",
  ]
  lines += [
    f"| {x['config']['variant']} | {x['updates']} "
    f"| {x['recorded_bytes'] / 1e6:.1f} | {'yes' if x['equal'] else 'NO'} |"
    for x in rows
  ]
  return "\n".join(lines)


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
