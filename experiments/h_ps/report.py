"""The tables and the pictures of the experiment, from its rows.

python experiments/h_ps/report.py          # in time alone
python experiments/h_ps/report.py mnist    # with gradients
"""

import operator
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import studies

from jdist import training
from jdist.training import comparison

# Speeds, r and passes.
Setting: TypeAlias = tuple[Any, ...]
_COLOURS = {
  "bsp": "#333333", "asp": "#0072b2", "ssp": "#999999", "tasks": "#e69f00",
  "pipeline": "#009e73", "bits": "#cc79a7", "h_ps": "#d55e00",
  "h_ps, local step": "#56b4e9", "h_ps, momentum": "#7b3294",
  "h_ps, foresight": "#d55e00", "h_ps, late in half": "#56b4e9",
}  # fmt: skip
_SPEEDS_RATIO = operator.itemgetter("speeds", "ratio")


def _key(row: comparison.Row) -> tuple[str, float]:
  speeds, ratio = _SPEEDS_RATIO(row["config"])
  return speeds, ratio


def _rates(
  rows: Sequence[comparison.Row],
) -> dict[tuple[str, float, str], float]:
  """Returns samples a second by speeds, ratio and variant."""
  return {(*_key(row), row["method"]): row["samples_per_s"] for row in rows}


def _over(
  rows: Sequence[comparison.Row],
) -> list[tuple[comparison.Row, list[float]]]:
  """Returns H-PS's rows, and their rates over each baseline and the bound."""
  rates = _rates(rows)
  found = []
  for row in [row for row in rows if row["method"] == "h_ps"]:
    others = [rates[*_key(row), name] for name in config.BASELINES]
    others.append(row["bounds"]["h_ps"])
    found.append((row, [row["samples_per_s"] / x for x in others]))
  return found


def _bound_of_the_clock(setting: config.Setting) -> float:
  """Returns samples a second if the chain of two rounds alone bounds a round.

  A gradient, its push and the pull that follows take t + q c, in which two
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


def over_baselines(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of H-PS over each baseline, measured and by arithmetic."""
  lines = []
  for row, (*over, of_bound) in _over(rows):
    names = ("speeds", "ratio", "total", "encoding", "jitter")
    setting = config.Setting(**{x: row["config"][x] for x in names})
    bound = row["bounds"]
    wanted = [f"{bound['h_ps'] / bound[x]:.2f}" for x in config.BASELINES]
    of_clock = row["samples_per_s"] / _bound_of_the_clock(setting)
    lines.append(
      f"{setting.speeds} | {setting.ratio:g} "
      f"| {' | '.join(f'{x:.2f}' for x in over)} | {' / '.join(wanted)} "
      f"| {of_bound:.2f} | {of_clock:.2f}"
    )
  return studies.table(
    "speeds | r | over BSP | over ASP | over SSP | by arithmetic, over BSP / "
    "ASP / SSP | of H-PS's bound | of the clock's",
    lines,
  )


def gains(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of H-PS over each baseline by speeds, as a range over r."""
  by_speeds: dict[str, list[list[float]]] = {}
  for row, over in _over(rows):
    by_speeds.setdefault(row["config"]["speeds"], []).append(over)
  return studies.table(
    "speeds | over BSP | over ASP | over SSP | of H-PS's bound",
    [
      (
        speeds,
        *(f"{min(x):.2f} to {max(x):.2f}" for x in zip(*found, strict=True)),
      )
      for speeds, found in by_speeds.items()
    ],
  )


def shares(rows: Sequence[comparison.Row]) -> str:
  """Returns the bytes of each plan's messages relative to those in 32 bits."""
  # On the clock alone a whole message is one tensor.
  plans = dict.fromkeys(
    tuple(row["shares"]) for row in rows if row.get("shares")
  ) or [config.shares()]
  return "\n".join(
    f"Plans' bytes, of exact ones: {', '.join(f'{x:.3f}' for x in plan)}."
    for plan in plans
  )


def ablation(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of the gain over BSP by each part and each pair."""
  names = [x for x in config.VARIANTS if x != "bsp"]
  rates = _rates(rows)
  return studies.table(
    " | ".join(["speeds", "r", *names]),
    [
      (
        speeds,
        f"{ratio:g}",
        *(
          f"{rates[speeds, ratio, x] / rates[speeds, ratio, 'bsp']:.2f}"
          for x in names
        ),
      )
      for speeds, ratio in dict.fromkeys(key[:2] for key in rates)
    ],
  )


def extremes(rows: Sequence[comparison.Row]) -> str:
  """Returns a table of the least gains by encoding time and jitter."""
  lines = []
  for (encoding, jitter), found in studies.group(
    rows, lambda row: (row["config"]["encoding"], row["config"]["jitter"])
  ).items():
    own = _over(found)
    *over, parts = zip(*(each for _, each in own), strict=True)
    busy = min(min(row["utilisation_of"].values()) for row, _ in own)
    least = " | ".join(f"{min(x):.2f}" for x in over)
    lines.append(
      f"{encoding:g} | {jitter:g} | {least} "
      f"| {min(parts):.2f} to {max(parts):.2f} | {100 * busy:.0f}"
    )
  return studies.table(
    "encoding | jitter | least over BSP | over ASP | over SSP | of the bound, "
    "least to most | busy %, least of any worker",
    lines,
  )


def utilisation(
  rows: Sequence[comparison.Row], speeds: str, ratio: float
) -> str:
  """Returns a table of each worker's busy time, the fastest worker first."""
  found = {
    row["method"]: row["utilisation_of"]
    for row in rows
    if _key(row) == (speeds, ratio)
  }
  workers = list(next(iter(found.values())))
  return studies.table(
    " | ".join(["busy, %", *workers]),
    [
      (name, *(f"{100 * min(1.0, own[x]):.0f}" for x in workers))
      for name, own in found.items()
    ],
  )


def draw(rows: Sequence[comparison.Row], path: pathlib.Path) -> None:
  """Draws samples a second over r, relative to workers that never wait."""
  rates = _rates(rows)
  all_speeds = list(dict.fromkeys(key[0] for key in rates))
  ratios = list(dict.fromkeys(key[1] for key in rates))
  with studies.picture(
    path, 1, len(all_speeds), sharey=True, legend=8,
    figsize=(2.6 * len(all_speeds), 3.9),
  ) as (grid,):  # fmt: skip
    for axes, speeds in zip(grid, all_speeds, strict=True):
      settings = [config.Setting(speeds, r) for r in ratios]
      most = [sum(x.rates) for x in settings]
      bound = [config.bounds(x)["h_ps"] for x in settings]
      axes.plot(
        ratios, [b / m for b, m in zip(bound, most, strict=True)],
        color="black", ls=":", lw=1.2, marker="_", label="H-PS by arithmetic",
      )  # fmt: skip
      for name in ("bsp", "asp", "ssp", "tasks", "pipeline", "bits", "h_ps"):
        own = [rates[speeds, r, name] for r in ratios]
        axes.plot(
          ratios, [x / m for x, m in zip(own, most, strict=True)],
          color=_COLOURS[name], lw=2.4 if name == "h_ps" else 1.3, marker="o",
          ls="--" if name in config.BASELINES else "-", ms=3, label=name,
        )  # fmt: skip
      axes.set_xscale("log")
      axes.set_xticks(ratios, [f"{r:g}" for r in ratios])
      axes.minorticks_off()
      axes.set_ylim(0, 1.05)
      axes.set_title(speeds, fontsize=10)
      axes.set_xlabel("r")
    grid[0].set_ylabel("samples a second, of\nworkers that never wait")


# The reports of runs with gradients follow.


def _reached_s(row: comparison.Row, target: float) -> float | None:
  """Returns the virtual seconds to an accuracy."""
  curve = ((x["train_s"], x["accuracy"]) for x in row["curve"])
  return studies.reached_at(curve, target)


def trained(rows: Sequence[comparison.Row], target: float) -> str:
  """Returns a table of accuracies at equal samples, and of the time taken."""
  runs = studies.best_runs(rows, comparison.by_loss)
  tuned = studies.tuned_rates(rows, comparison.by_loss)
  lines = []
  base: tuple[float, float] | None = None
  for name, own in runs.items():
    seconds = comparison.mean(own, "train_s")
    reached = None
    if None not in [_reached_s(row, target) for row in own]:
      reached = comparison.mean(own, lambda row: _reached_s(row, target))
    if name == "bsp" and reached is not None:
      base = (seconds, reached)
    more = comparison.paired_difference(own, runs.get("bsp", ()))
    rate = f"{own[0]['learning_rate']:g}"
    if name in tuned and tuned[name].end is not None:
      rate += f" ({tuned[name].end})"
    sent = comparison.mean(own, lambda x: x["pushed_bytes"] + x["pulled_bytes"])
    gradients = comparison.mean(
      own, lambda row: sum(row["staleness"]["counts"].values())
    )
    mean, spread = studies.mean_accuracy(own)
    points = "" if more is None or name == "bsp" else more.plus_minus()
    over = "" if base is None else f"{base[0] / seconds:.2f}"
    times = ("never", "")
    if reached is not None:
      sooner = "" if base is None else f"{base[1] / reached:.2f}"
      times = (f"{reached:.1f}", sooner)
    lines.append(
      f"{name} | {rate} | {mean:.2f} ± {spread:.2f} | {points} "
      f"| {comparison.mean(own, 'test_loss'):.4f} | {seconds:.1f} | {over} "
      f"| {times[0]} | {times[1]} | {sent / (2 * 4e6 * gradients):.2f}"
    )
  return studies.table(
    "variant | rate | accuracy, % | points more than bsp (95 % interval) "
    f"| test loss | virtual s | over bsp | s to {100 * target:g} % | over bsp "
    "| bytes, of exact ones",
    lines,
  )


def draw_trained(
  by_setting: dict[Setting, list[comparison.Row]], path: pathlib.Path
) -> None:
  """Draws accuracy over virtual time, the mean of the seeds."""
  num = len(by_setting)
  with studies.picture(path, 1, num, figsize=(5.2 * num, 4.0)) as (grid,):
    for axes, (setting, rows) in zip(grid, by_setting.items(), strict=True):
      runs = studies.best_runs(rows, comparison.by_loss)
      for name, own in runs.items():
        curve = studies.mean_curve(own, "accuracy", "train_s")
        axes.plot(
          [x for x, _ in curve], [100 * y for _, y in curve], marker="o", ms=3,
          color=_COLOURS[name], lw=2.2 if name == "h_ps" else 1.3, label=name,
        )  # fmt: skip
      axes.set_title(_title(setting), fontsize=10)
      axes.set_xlabel("virtual seconds")
      axes.set_ylabel("test accuracy, %")
      axes.legend(frameon=False, fontsize=9, loc="lower right")


def _title(setting: Setting) -> str:
  speeds, ratio, epochs = setting
  return f"speeds {speeds}, r = {ratio:g}, {epochs:g} passes"


def main(folder: pathlib.Path) -> None:
  """Prints and draws the results of a preset, or of the clock alone."""
  results = folder / "results"
  if len(sys.argv) > 1:
    preset = sys.argv[1]
    target = float(sys.argv[2]) if len(sys.argv) > 2 else 0.95
    setting_of = operator.itemgetter("speeds", "ratio", "epochs")
    by_setting = studies.group(
      training.read_rows(results / f"{preset}.jsonl"),
      lambda row: setting_of(row["config"]),
    )
    for setting, rows in by_setting.items():
      print(f"\n### {_title(setting)}\n\n{trained(rows, target)}")
      print(f"\n{shares(rows)}")
    draw_trained(by_setting, results / f"{preset}.png")
    return
  rows = training.read_rows(results / "clock.jsonl")
  plain = [
    row
    for row in rows
    if row["config"]["encoding"] == row["config"]["jitter"] == 0.0
  ]
  print(f"{gains(plain)}\n\n{over_baselines(plain)}\n\n{ablation(plain)}")
  print(f"\n{extremes(rows)}")
  print(f"\n{utilisation(plain, '8x', 1.0)}\n\n{shares(plain)}")
  draw(plain, results / "clock.png")


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
