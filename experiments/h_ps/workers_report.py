"""Tables and a picture of the runs on real workers, from their rows.

python experiments/h_ps/workers_report.py
"""

import pathlib
import statistics
from typing import Any, TypeAlias

import config

from jdist import training

Row: TypeAlias = dict[str, Any]
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def rows_of(name: str) -> list[Row]:
  """The rows of a command, if it was run."""
  path = RESULTS / f"ray_{name}.jsonl"
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
  """Draws how stale gradients were, real beside the clock."""
  pyplot = training.pyplot()
  names = list(dict.fromkeys(x["name"] for x in rows))
  figure, grid = pyplot.subplots(
    2, -(-len(names) // 2), figsize=(13, 5), layout="constrained"
  )
  for axes, name in zip(grid.flat, names, strict=False):
    own = [x for x in rows if x["name"] == name]
    both = (("real", own, "#d55e00"), ("clock", [own[0]["clock"]], "#0072b2"))
    for side, (label, found, colour) in enumerate(both):
      counts: dict[int, float] = {}
      for row in found:
        for age, count in row["staleness"]["counts"].items():
          counts[int(age)] = counts.get(int(age), 0) + count
      total = sum(counts.values())
      axes.bar(
        [age + 0.4 * side - 0.2 for age in counts],
        [count / total for count in counts.values()],
        0.4,
        color=colour,
        label=label,
      )
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("staleness, updates")
    axes.spines[["top", "right"]].set_visible(False)
  for axes in grid.flat[len(names) :]:
    axes.axis("off")
  grid[0, 0].set_ylabel("part of gradients")
  grid[0, 0].legend(frameon=False)
  figure.savefig(path, dpi=110)
  pyplot.close(figure)


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


def kills(rows: list[Row]) -> str:
  """Markdown: how soon killed workers were back."""
  lines = [
    "| kills | spare processes | noticed after, s: median, most "
    "| back after, s: median, most | samples lost | pushed twice "
    "| accuracy, % |",
    "|---|---|---|---|---|---|---|",
  ]
  for row in rows:
    found = returns(row)
    if not found:
      continue
    noticed = [x[2] for x in found]
    back = [x[3] for x in found]
    lines.append(
      f"| {len(row['faults'])} ({len(found)} back) | {row['spares']} "
      f"| {statistics.median(noticed):.1f}, {max(noticed):.1f} "
      f"| {statistics.median(back):.1f}, {max(back):.1f} "
      f"| {row['lost_samples']} of {row['samples'] + row['lost_samples']} "
      f"| {row['discarded'].get('repeated', 0)} "
      f"| {100 * row['accuracy']:.2f} |"
    )
  return "\n".join(lines)


def deaths(rows: list[Row]) -> str:
  """Markdown: how soon a killed server was back, and what was lost."""
  lines = [
    "| killed at update | noticed after, s | all back after, s "
    "| resumed at update | lost | pushed twice |",
    "|---|---|---|---|---|---|",
  ]
  for row in rows:
    found = returns(row)
    if found:
      at, resumed = row["faults"][0]["updates"], row["resumed"]
      lines.append(
        f"| {at} | {found[0][2]:.1f} | {found[0][3]:.1f} | {resumed} "
        f"| {at - resumed} | {row['discarded'].get('repeated', 0)} |"
      )
  return "\n".join(lines)


def main() -> None:
  """Prints all tables, and draws the picture."""
  for name, table in (
    ("gain", gain), ("computes", gain), ("clock", clock), ("scale", scale),
    ("kills", kills),
  ):  # fmt: skip
    rows = rows_of(name)
    if rows:
      print(f"## {name}\n\n{table(rows)}\n")
  if rows_of("server"):
    print(f"## server\n\n{deaths(rows_of('server'))}\n")
  for row in rows_of("profile"):
    print(f"latency {1e3 * row['latency_s']:.2f} ms")
  if rows_of("clock"):
    draw(rows_of("clock"), RESULTS / "ray_staleness.png")


if __name__ == "__main__":
  main()
