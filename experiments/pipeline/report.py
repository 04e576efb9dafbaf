"""The tables and the pictures of the comparison, from its rows.

python experiments/pipeline/report.py hosts
"""

import pathlib
import statistics
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import training

Row: TypeAlias = dict[str, Any]
# Network, topology, stages; method and partition.
Cell: TypeAlias = tuple[str, str, int]
Run: TypeAlias = tuple[str, str]
BASELINES = ("naive", "gpipe", "1f1b", "pipedream", "2bw")
_OURS = ("ours", "ours")
_REPLICATED = ("pipedream", "paper, replicated")
_PARTITIONS = {"paper": "their papers' partitions", "ours": "our partitions"}
_SUMMED = {
  "paper": "their papers' partitions",
  "paper, replicated": "the same, PipeDream's stages replicated",
  "ours": "our partitions",
}
_COLOURS = {
  "naive": "#333333", "gpipe": "#0072b2", "1f1b": "#009e73",
  "pipedream": "#cc79a7", "2bw": "#d55e00",
}  # fmt: skip


def by_cell(rows: Iterable[Row]) -> dict[Cell, dict[Run, Row]]:
  """Returns the rows of each cell."""
  found: dict[Cell, dict[Run, Row]] = {}
  for row in rows:
    cell = row["network"], row["topology"], row["stages"]
    found.setdefault(cell, {})[row["method"], row["partition"]] = row
  return found


def gain(runs: Mapping[Run, Row], method: str, partition: str) -> float | None:
  """Returns our speedup; None if the other does not fit into memory."""
  if partition == "paper, replicated" and method != "pipedream":
    partition = "paper"
  other = runs[method, partition]["samples_per_s"]
  return runs[_OURS]["samples_per_s"] / other if other else None


def gains(runs: Mapping[Run, Row], partition: str) -> list[float]:
  """Returns our speedup over each baseline that fits into memory."""
  found = [gain(runs, name, partition) for name in BASELINES]
  return [x for x in found if x is not None]


def share(runs: Mapping[Run, Row]) -> float:
  """Returns our part of the rate that any contiguous partition allows."""
  ours = runs[_OURS]
  return float(ours["samples_per_s"] / ours["bound_samples_per_s"])


def _table(titles: str, lines: Iterable[str | Iterable[Any]]) -> str:
  return studies.table(titles, lines) + "\n"


def _number(value: float | None) -> str:
  return "-" if value is None else f"{value:.2f}"


def gain_table(
  cells: Mapping[Cell, Mapping[Run, Row]], partition: str, stages: int
) -> str:
  """Returns a table of our speedup over each baseline, with the means."""
  chosen = {cell: runs for cell, runs in cells.items() if cell[2] == stages}
  lines = []
  for (network, topology, _), runs in chosen.items():
    found = [gain(runs, name, partition) for name in BASELINES]
    lines.append([
      network, topology, *map(_number, found),
      _number(statistics.mean(gains(runs, partition))),
      f"{100 * share(runs):.1f}", runs[_OURS]["table"],
    ])  # fmt: skip
  means = []
  for name in BASELINES:
    each = [gain(runs, name, partition) for runs in chosen.values()]
    means.append(statistics.mean(x for x in each if x is not None))
  every = [x for runs in chosen.values() for x in gains(runs, partition)]
  lines.append([
    "**mean**", "", *map(_number, means), f"**{statistics.mean(every):.2f}**",
    "", "",
  ])  # fmt: skip
  names = " | ".join(BASELINES)
  titles = f"network | machines | {names} | mean | % of the bound | table"
  return _table(titles, lines)


def summary_table(cells: Mapping[Cell, Mapping[Run, Row]]) -> str:
  """Returns a table of mean speedups by number of stages."""
  lines = []
  for stages in sorted({cell[2] for cell in cells}):
    for partition, words in _SUMMED.items():
      chosen = {k: v for k, v in cells.items() if k[2] == stages}
      equal = [v for k, v in chosen.items() if k[1] == "equal"]
      every = [x for v in chosen.values() for x in gains(v, partition)]
      same = [x for v in equal for x in gains(v, partition)]
      plain = [
        x
        for v in chosen.values()
        for name in BASELINES
        if name != "naive" and (x := gain(v, name, partition)) is not None
      ]
      means = (statistics.mean(x) for x in (every, plain, same))
      lines.append(
        f"{stages} | {words} | {' | '.join(f'{x:.2f}' for x in means)} "
        f"| {min(every):.3f} | {100 * min(map(share, chosen.values())):.1f}"
      )
  return _table(
    "stages | baselines with | mean | without naive | equal machines | least "
    "of any | least % of the bound",
    lines,
  )


def memory_table(cells: Mapping[Cell, Mapping[Run, Row]], stages: int) -> str:
  """Returns a table of the largest memory of any device."""
  lines = []
  runs = [_OURS, *((name, "paper") for name in BASELINES)]
  for (network, topology, number), found in cells.items():
    if number == stages:
      values = [
        max(found[run]["memory_bytes"].values()) / 1e9
        if found[run]["samples_per_s"]
        else None
        for run in runs
      ]
      lines.append([network, topology, *map(_number, values)])
  names = " | ".join(BASELINES)
  return _table(f"network | machines | ours | {names}", lines)


def utilisation_table(
  cells: Mapping[Cell, Mapping[Run, Row]], stages: int
) -> str:
  """Returns a table of each device's utilisation under our plan."""
  lines = []
  for (network, topology, number), found in cells.items():
    if number == stages:
      busy = found[_OURS]["utilisation"]
      each = [f"{100 * busy.get(f'd{i}', 0.0):.0f}" for i in range(number)]
      mean = 100 * sum(busy.values()) / number
      lines.append([network, topology, *each, f"{mean:.0f}"])
  devices = " | ".join(f"d{i}" for i in range(stages))
  return _table(f"network | machines | {devices} | mean", lines)


def replicated_table(cells: Mapping[Cell, Mapping[Run, Row]]) -> str:
  """Returns a table of our speedup over PipeDream with replicated stages."""
  lines = []
  for (network, topology, stages), runs in cells.items():
    row = runs[_REPLICATED]
    replicas = "-".join(map(str, row.get("replicas") or ()))
    lines.append(
      f"{network} | {topology} | {stages} "
      f"| {_number(gain(runs, *_REPLICATED))} | {replicas} "
      f"| {row['minibatch_samples']:g} of {runs[_OURS]['minibatch_samples']:g}"
    )
  return _table(
    "network | machines | devices | ours over it | machines a stage | samples "
    "of a micro-batch",
    lines,
  )


def slowed_table(rows: Iterable[Row]) -> str:
  """Returns a table of runs in which a device becomes slow."""
  lines = []
  for row in rows:
    rates = [
      f"{row[f'{x}_samples_per_s']:.1f}"
      for x in ("before", "during", "after", "fresh")
    ]
    lines.append(
      f"{row['network']} | {row['stages']} | {' | '.join(rates)} "
      f"| {100 * row['recovered']:.1f} | {row['iterations_until_noticed']} "
      f"| {row['moved_layers']} | {row['moved_bytes'] / 1e6:.1f} "
      f"| {row['drain_s']:.2g}, {row['move_s']:.2g}, {row['refill_s']:.2g} "
      f"| {row['paid_back_s']:.1f}"
    )
  return _table(
    "network | stages | before | during | after | a fresh plan | recovered, % "
    "| iterations until noticed | layers moved | MB | drain, move, fill, s "
    "| paid back after, s",
    lines,
  )


def draw_gains(
  cells: Mapping[Cell, Mapping[Run, Row]], path: pathlib.Path
) -> None:
  """Draws ours over each baseline, the papers' partitions filled."""
  import matplotlib.pyplot as plt

  stages = max(cell[2] for cell in cells)
  chosen = [(k, v) for k, v in cells.items() if k[2] == stages]
  figure, axes = plt.subplots(figsize=(8, 0.38 * len(chosen) + 1.6))
  for y, (_, runs) in enumerate(chosen):
    for i, name in enumerate(BASELINES):
      for partition in _PARTITIONS:
        value = gain(runs, name, partition)
        if value is not None:
          # Apart, where several have the same value.
          filled = partition == "paper"
          axes.plot(
            value, y + 0.13 * (i - 2), "o", color=_COLOURS[name],
            markersize=4.5 if filled else 8,
            markerfacecolor=_COLOURS[name] if filled else "none",
            label=name if not y and filled else None,
          )  # fmt: skip
  every = [x for _, runs in chosen for x in gains(runs, "paper")]
  mean = statistics.mean(every)
  axes.axvline(mean, color="#888888", linestyle=":", label=f"mean {mean:.2f}")
  axes.axvline(1.0, color="#888888", linewidth=0.8)
  axes.set_xscale("log")
  axes.set_xticks(
    [1, 1.5, 2, 3, 4, 6, 8], ["1", "1.5", "2", "3", "4", "6", "8"]
  )
  axes.minorticks_off()
  axes.set_yticks(range(len(chosen)), [f"{k[0]}, {k[1]}" for k, _ in chosen])
  axes.invert_yaxis()
  axes.set_xlabel("our samples a second over the baseline's")
  axes.set_title(
    f"{stages} stages; dots: the paper's own partition, rings: ours",
    fontsize=10,
  )
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(axis="x", alpha=0.3)
  axes.legend(
    frameon=False, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.12),
    fontsize=9, columnspacing=1.0, handletextpad=0.3,
  )  # fmt: skip
  figure.savefig(path, dpi=130, bbox_inches="tight")
  plt.close(figure)


def draw_utilisation(
  cells: Mapping[Cell, Mapping[Run, Row]], path: pathlib.Path
) -> None:
  """Draws how busy each device is, next to two baselines."""
  import matplotlib.pyplot as plt

  stages = max(cell[2] for cell in cells)
  chosen = [(k, v) for k, v in cells.items() if k[2] == stages]
  runs = {
    "1F1B, its partition": ("1f1b", "paper"),
    "2BW, its partition": ("2bw", "paper"),
    "ours": _OURS,
  }
  figure, panels = plt.subplots(
    1, len(runs), sharey=True, figsize=(10, 0.34 * len(chosen) + 1.1)
  )
  for axes, (title, run) in zip(panels, runs.items(), strict=True):
    values = [
      [
        100 * found[run].get("utilisation", {}).get(f"d{i}", 0.0)
        for i in range(stages)
      ]
      for _, found in chosen
    ]
    axes.imshow(values, vmin=0, vmax=100, cmap="Blues", aspect="auto")
    for y, line in enumerate(values):
      for x, value in enumerate(line):
        axes.text(
          x, y, f"{value:.0f}", ha="center", va="center", fontsize=7,
          color="white" if value > 60 else "black",
        )  # fmt: skip
    axes.set_title(title, fontsize=10)
    axes.set_xticks(range(stages), [f"d{i}" for i in range(stages)], fontsize=8)
    axes.tick_params(length=0)
  names = [f"{k[0]}, {k[1]}" for k, _ in chosen]
  panels[0].set_yticks(range(len(chosen)), names, fontsize=8)
  figure.suptitle("Busy, % of an iteration, each device", fontsize=10)
  figure.tight_layout()
  figure.savefig(path, dpi=130)
  plt.close(figure)


def main(name: str) -> None:
  """Prints the tables of a preset, and draws its pictures."""
  folder = pathlib.Path(__file__).resolve().parent / "results"
  cells = by_cell(training.read_rows(folder / f"{name}.jsonl"))
  print(summary_table(cells))
  for stages in sorted({cell[2] for cell in cells}, reverse=True):
    for partition, words in _PARTITIONS.items():
      print(
        f"{stages} stages, {words}\n\n{gain_table(cells, partition, stages)}"
      )
    print(f"Busy, %, ours, {stages} stages\n")
    print(utilisation_table(cells, stages))
    print(f"Peak memory, GB, {stages} stages\n")
    print(memory_table(cells, stages))
  print("PipeDream with several machines in a stage\n")
  print(replicated_table(cells))
  slowed = folder / f"{name}-slowed.jsonl"
  if slowed.exists():
    print("A device three times slower, samples a second\n")
    print(slowed_table(training.read_rows(slowed)))
  draw_gains(cells, folder / f"{name}.png")
  draw_utilisation(cells, folder / f"{name}-utilisation.png")


if __name__ == "__main__":
  main(sys.argv[1] if sys.argv[1:] else "hosts")
