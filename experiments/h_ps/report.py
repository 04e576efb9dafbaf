"""The tables and the pictures of the experiment, from its rows.

python experiments/h_ps/report.py          # in time alone
python experiments/h_ps/report.py mnist    # with gradients
"""

import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import config

from jdist import training
from jdist.training import comparison

Row: TypeAlias = dict[str, Any]
# Speeds, r and passes.
Setting: TypeAlias = tuple[Any, ...]
_COLOURS = {
  "bsp": "#333333", "asp": "#0072b2", "ssp": "#999999", "tasks": "#e69f00",
  "pipeline": "#009e73", "bits": "#cc79a7", "h_ps": "#d55e00",
  "h_ps, local step": "#56b4e9", "h_ps, momentum": "#7b3294",
  "h_ps, foresight": "#d55e00", "h_ps, late in half": "#56b4e9",
}  # fmt: skip


def _rates(rows: Sequence[Row]) -> dict[tuple[str, float, str], float]:
  """Samples a second by speeds, ratio and variant."""
  return {
    (row["config"]["speeds"], row["config"]["ratio"], row["method"]): (
      row["samples_per_s"]
    )
    for row in rows
  }


def _pick(rows: Sequence[Row], encoding: float, jitter: float) -> list[Row]:
  return [
    row
    for row in rows
    if (row["config"]["encoding"], row["config"]["jitter"])
    == (encoding, jitter)
  ]


def _bound_of_the_clock(setting: config.Setting) -> float:
  """Samples a second if the chain of two rounds alone bounds a round.

  A gradient, its push and the pull that comes of it take t + q c, in which two
  rounds are made.
  """
  from jdist import server

  plans = server.BitPlans()
  sizes = server.BalancedBatches(setting.total).sizes(setting.rates)

  def round_s(plan: int) -> float:
    encoding = 2 * setting.encoding_s if plan else 0.0
    compute = max(
      (n + encoding * 1000.0) / rate
      for n, rate in zip(sizes, setting.rates, strict=True)
    )
    return max(compute, (compute + plans.share(plan) * setting.exchange_s) / 2)

  return setting.total / min(map(round_s, range(len(plans.bits))))


def over_baselines(rows: Sequence[Row]) -> str:
  """Markdown: H-PS over each baseline, and beside what arithmetic gives."""
  lines = [
    "| speeds | r | over BSP | over ASP | over SSP | by arithmetic, over BSP "
    "/ ASP / SSP | of H-PS's bound | of the clock's |",
    "|---|---|---|---|---|---|---|---|",
  ]
  rates = _rates(rows)
  for row in rows:
    if row["method"] != "h_ps":
      continue
    speeds, ratio = row["config"]["speeds"], row["config"]["ratio"]
    known = {
      x: row["config"][x]
      for x in ("speeds", "ratio", "total", "encoding", "jitter")
    }
    setting = config.Setting(**known)
    bound, own = row["bounds"], rates[speeds, ratio, "h_ps"]
    over = [own / rates[speeds, ratio, x] for x in config.BASELINES]
    wanted = [bound["h_ps"] / bound[x] for x in config.BASELINES]
    lines.append(
      f"| {speeds} | {ratio:g} | "
      + " | ".join(f"{x:.2f}" for x in over)
      + f" | {' / '.join(f'{x:.2f}' for x in wanted)} "
      f"| {own / bound['h_ps']:.2f} "
      f"| {own / _bound_of_the_clock(setting):.2f} |"
    )
  return "\n".join(lines)


def gains(rows: Sequence[Row]) -> str:
  """Markdown: H-PS over each baseline by speeds, least to most of all r."""
  lines = [
    "| speeds | over BSP | over ASP | over SSP | of H-PS's bound |",
    "|---|---|---|---|---|",
  ]
  rates = _rates(rows)
  own = [row for row in rows if row["method"] == "h_ps"]
  for speeds in dict.fromkeys(row["config"]["speeds"] for row in own):
    found = [row for row in own if row["config"]["speeds"] == speeds]
    over = [
      [
        row["samples_per_s"] / rates[speeds, row["config"]["ratio"], other]
        for row in found
      ]
      for other in config.BASELINES
    ]
    over.append([x["samples_per_s"] / x["bounds"]["h_ps"] for x in found])
    cells = [f"{min(x):.2f} to {max(x):.2f}" for x in over]
    lines.append(f"| {speeds} | {' | '.join(cells)} |")
  return "\n".join(lines)


def shares(rows: Sequence[Row]) -> str:
  """Text: the bytes of each plan's messages, of those in 32 bits."""
  # In time alone all of a message is one tensor.
  plans = dict.fromkeys(
    tuple(row["shares"]) for row in rows if row.get("shares")
  ) or [config.shares()]
  return "\n".join(
    f"Plans' bytes, of exact ones: {', '.join(f'{x:.3f}' for x in plan)}."
    for plan in plans
  )


def ablation(rows: Sequence[Row]) -> str:
  """Markdown: what each part, and each pair, gives over BSP."""
  names = [x for x in config.VARIANTS if x != "bsp"]
  lines = [
    f"| speeds | r | {' | '.join(names)} |",
    "|---|---|" + "---|" * len(names),
  ]
  rates = _rates(rows)
  for speeds, ratio in dict.fromkeys(key[:2] for key in rates):
    cells = [
      f"{rates[speeds, ratio, x] / rates[speeds, ratio, 'bsp']:.2f}"
      for x in names
    ]
    lines.append(f"| {speeds} | {ratio:g} | {' | '.join(cells)} |")
  return "\n".join(lines)


def extremes(rows: Sequence[Row]) -> str:
  """Markdown: the least over each baseline and of the bound, by condition."""
  lines = [
    "| encoding | jitter | least over BSP | over ASP | over SSP "
    "| of the bound, least to most | busy %, least of any worker |",
    "|---|---|---|---|---|---|---|",
  ]
  keys = dict.fromkeys(
    (row["config"]["encoding"], row["config"]["jitter"]) for row in rows
  )
  for encoding, jitter in keys:
    found = _pick(rows, encoding, jitter)
    rates = _rates(found)
    own = [row for row in found if row["method"] == "h_ps"]

    def over(row: Row, other: str, rates: Any = rates) -> float:
      key = row["config"]["speeds"], row["config"]["ratio"]
      return rates[*key, "h_ps"] / rates[*key, other]

    parts = [row["samples_per_s"] / row["bounds"]["h_ps"] for row in own]
    busy = min(min(row["utilisation_of"].values()) for row in own)
    cells = [f"{min(over(x, y) for x in own):.2f}" for y in config.BASELINES]
    lines.append(
      f"| {encoding:g} | {jitter:g} | {' | '.join(cells)} "
      f"| {min(parts):.2f} to {max(parts):.2f} | {100 * busy:.0f} |"
    )
  return "\n".join(lines)


def utilisation(rows: Sequence[Row], speeds: str, ratio: float) -> str:
  """Markdown: of the time, in which each worker computed, fastest first."""
  found = {
    row["method"]: row["utilisation_of"]
    for row in rows
    if (row["config"]["speeds"], row["config"]["ratio"]) == (speeds, ratio)
  }
  workers = list(next(iter(found.values())))
  lines = [
    f"| busy, % | {' | '.join(workers)} |", "|---|" + "---|" * len(workers),
  ]  # fmt: skip
  for name, own in found.items():
    cells = [f"{100 * min(1.0, own[worker]):.0f}" for worker in workers]
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join(lines)


def draw(rows: Sequence[Row], path: pathlib.Path) -> None:
  """Samples a second over r, of what all workers never waiting would take."""
  pyplot = training.pyplot()
  rates = _rates(rows)
  all_speeds = list(dict.fromkeys(key[0] for key in rates))
  ratios = list(dict.fromkeys(key[1] for key in rates))
  figure, grid = pyplot.subplots(
    1, len(all_speeds), sharey=True, figsize=(2.6 * len(all_speeds), 3.9),
    layout="constrained",
  )  # fmt: skip
  for axes, speeds in zip(grid, all_speeds, strict=True):
    most = [sum(config.Setting(speeds, r).rates) for r in ratios]
    bound = [config.bounds(config.Setting(speeds, r))["h_ps"] for r in ratios]
    axes.plot(
      ratios, [b / m for b, m in zip(bound, most, strict=True)], color="black",
      ls=":", lw=1.2, marker="_", label="H-PS by arithmetic",
    )  # fmt: skip
    for name in ("bsp", "asp", "ssp", "tasks", "pipeline", "bits", "h_ps"):
      axes.plot(
        ratios,
        [rates[speeds, r, name] / m for r, m in zip(ratios, most, strict=True)],
        color=_COLOURS[name],
        lw=2.4 if name == "h_ps" else 1.3,
        ls="--" if name in config.BASELINES else "-",
        marker="o",
        ms=3,
        label=name,
      )
    axes.set_xscale("log")
    axes.set_xticks(ratios, [f"{r:g}" for r in ratios])
    axes.minorticks_off()
    axes.set_ylim(0, 1.05)
    axes.set_title(speeds, fontsize=10)
    axes.set_xlabel("r")
    axes.grid(alpha=0.3, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
  grid[0].set_ylabel("samples a second, of\nworkers that never wait")
  handles, labels = grid[0].get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside lower center", ncols=8, frameon=False,
    fontsize=9,
  )  # fmt: skip
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


# With gradients.


def _best(rows: Sequence[Row]) -> tuple[dict[str, list[Row]], dict[str, Any]]:
  """Each variant's compared rows at its best rate, and how it was tuned."""
  tried: dict[str, dict[float, tuple[float, float]]] = {}
  for row in rows:
    if row["purpose"] == "tuning":
      tried.setdefault(row["method"], {})[row["learning_rate"]] = (
        comparison.by_loss(row)
      )
  tuned = {name: comparison.best_of(own) for name, own in tried.items()}
  found: dict[str, list[Row]] = {}
  for row in rows:
    own = tuned.get(row["method"])
    if row["purpose"] == "comparison" and (
      own is None or own.best == row["learning_rate"]
    ):
      found.setdefault(row["method"], []).append(row)
  return found, tuned


def _reached_s(row: Row, target: float) -> float | None:
  """Virtual seconds to an accuracy, between two evaluations by a line."""
  before = (0.0, 0.0)
  for point in row["curve"]:
    now = (point["train_s"], point["accuracy"])
    if now[1] >= target:
      part = (target - before[1]) / max(now[1] - before[1], 1e-12)
      return before[0] + part * (now[0] - before[0])
    before = now
  return None


def trained(rows: Sequence[Row], target: float) -> str:
  """Markdown: accuracy at equal samples, and the time that it took."""
  runs, tuned = _best(rows)
  lines = [
    "| variant | rate | accuracy, % | points more than bsp (95 % interval) "
    f"| test loss | virtual s | over bsp | s to {100 * target:g} % "
    "| over bsp | bytes, of exact ones |",
    "|---|---|---|---|---|---|---|---|---|---|",
  ]
  base: tuple[float, float] | None = None
  for name, own in runs.items():
    accuracy = [comparison.accuracy(row) for row in own]
    loss = statistics.mean(row["test_loss"] for row in own)
    seconds = statistics.mean(row["train_s"] for row in own)
    times = [x for row in own if (x := _reached_s(row, target)) is not None]
    reached = statistics.mean(times) if len(times) == len(own) else None
    if name == "bsp" and reached is not None:
      base = (seconds, reached)
    spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
    more = comparison.paired_difference(own, runs.get("bsp", ()))
    points = (
      ""
      if more is None or name == "bsp"
      else f"{more.mean:+.2f} ± {more.high - more.mean:.2f}"
    )
    rate = f"{own[0]['learning_rate']:g}"
    if name in tuned and tuned[name].end is not None:
      rate += f" ({tuned[name].end})"
    gradients = statistics.mean(
      sum(row["staleness"]["counts"].values()) for row in own
    )
    sent = statistics.mean(
      row["pushed_bytes"] + row["pulled_bytes"] for row in own
    )
    cells = [
      name, rate, f"{statistics.mean(accuracy):.2f} ± {spread:.2f}", points,
      f"{loss:.4f}", f"{seconds:.1f}",
      "" if base is None else f"{base[0] / seconds:.2f}",
      "never" if reached is None else f"{reached:.1f}",
      "" if base is None or reached is None else f"{base[1] / reached:.2f}",
      f"{sent / (2 * 4e6 * gradients):.2f}",
    ]  # fmt: skip
    lines.append(f"| {' | '.join(cells)} |")
  return "\n".join(lines)


def draw_trained(
  by_setting: dict[Setting, list[Row]], path: pathlib.Path
) -> None:
  """Accuracy over virtual time, mean of the seeds."""
  pyplot = training.pyplot()
  figure, grid = pyplot.subplots(
    1, len(by_setting), squeeze=False, figsize=(5.2 * len(by_setting), 4.0),
    layout="constrained",
  )  # fmt: skip
  for axes, ((speeds, ratio, epochs), rows) in zip(
    grid[0], by_setting.items(), strict=True
  ):
    for name, own in _best(rows)[0].items():
      points = list(zip(*(row["curve"] for row in own), strict=True))
      axes.plot(
        [statistics.mean(p["train_s"] for p in x) for x in points],
        [100 * statistics.mean(p["accuracy"] for p in x) for x in points],
        color=_COLOURS[name], lw=2.2 if name == "h_ps" else 1.3, marker="o",
        ms=3, label=name,
      )  # fmt: skip
    axes.set_title(
      f"speeds {speeds}, r = {ratio:g}, {epochs:g} passes", fontsize=10
    )
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
  figure.savefig(path, dpi=130)
  pyplot.close(figure)


def main(folder: pathlib.Path) -> None:
  """Prints and draws what there are rows for."""
  results = folder / "results"
  if len(sys.argv) > 1:
    preset = sys.argv[1]
    by_setting: dict[Setting, list[Row]] = {}
    for row in training.read_rows(results / f"{preset}.jsonl"):
      names = ("speeds", "ratio", "epochs")
      key = tuple(row["config"][name] for name in names)
      by_setting.setdefault(key, []).append(row)
    for (speeds, ratio, epochs), rows in by_setting.items():
      table = trained(rows, float(sys.argv[2]) if len(sys.argv) > 2 else 0.95)
      print(
        f"\n### speeds {speeds}, r = {ratio:g}, {epochs:g} passes\n\n{table}"
      )
      print(f"\n{shares(rows)}")
    draw_trained(by_setting, results / f"{preset}.png")
    return
  rows = training.read_rows(results / "clock.jsonl")
  plain = _pick(rows, 0.0, 0.0)
  print(f"{gains(plain)}\n\n{over_baselines(plain)}\n\n{ablation(plain)}")
  print(f"\n{extremes(rows)}")
  print(f"\n{utilisation(plain, '8x', 1.0)}\n\n{shares(plain)}")
  draw(plain, results / "clock.png")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
