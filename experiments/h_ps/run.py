"""H-PS, its parts and other protocols on a virtual clock, in time alone.

    python experiments/h_ps/run.py

All settings take under a minute; rows that are there are not computed again.
"""

import dataclasses
import pathlib
from typing import Any

import config

from jdist import cluster, server, training

_ROUNDS = 200
# Links and speeds that a clock without jitter has, and one with both prices.
_SETTINGS = (
  config.Setting("1x", 0.1),
  config.Setting("1x", 0.1, encoding=0.03),
  config.Setting("1x", 0.1, encoding=0.03, jitter=0.1),
)


def settings() -> list[config.Setting]:
  """Every speed and ratio, under each of the further conditions."""
  return [
    dataclasses.replace(condition, speeds=speeds, ratio=ratio)
    for condition in _SETTINGS
    for speeds in config.SPEEDS
    for ratio in config.RATIOS
  ]


def entries_of(setting: config.Setting) -> dict[str, Any]:
  """Returns the config of a setting's rows."""
  return dataclasses.asdict(setting) | {"rounds": _ROUNDS}


def simulate(
  setting: config.Setting, variant: str, trace: cluster.Trace | None = None
) -> server.Simulation:
  """Runs a variant until as many samples are applied as of 200 rounds."""
  machines = setting.machines()
  num = len(machines.nodes)
  protocol = config.build(
    config.VARIANTS[variant], setting.total, num, updates=_ROUNDS
  )
  run = server.Simulation(machines, protocol, setting.costs(), trace=trace)
  run.run(samples=_ROUNDS * setting.total)
  return run


def row(setting: config.Setting, variant: str) -> dict[str, Any]:
  """Runs a variant and returns its row."""
  run = simulate(setting, variant)
  return training.make_row(
    entries_of(setting),
    0,
    method=variant,
    **run.summary(),
    bounds=config.bounds(setting),
    utilisation_of={
      name: node.compute_s / run.now_s for name, node in run.nodes.items()
    },
    plans=list(getattr(run.state, "plans", {}).values()),
  )


def main(folder: pathlib.Path) -> None:
  """Writes a row for each setting and variant, and two timelines."""
  path = folder / "results" / "clock.jsonl"
  rows = training.read_rows(path) if path.exists() else []
  for setting in settings():
    entries = entries_of(setting)
    found = {x["method"]: x for x in rows if x["config"] == entries}
    for name in config.VARIANTS:
      if name not in found:
        found[name] = row(setting, name)
        training.append_rows(path, [found[name]])
    rates = {name: found[name]["samples_per_s"] for name in found}
    over = ", ".join(
      f"{rates['h_ps'] / rates[name]:.2f} of {name}"
      for name in config.BASELINES
    )
    print(
      f"{setting.speeds}, r = {setting.ratio:g}, encoding "
      f"{setting.encoding:g}, jitter {setting.jitter:g}: h_ps {over}, "
      f"{rates['h_ps'] / config.bounds(setting)['h_ps']:.2f} of the bound",
      flush=True,
    )
  for variant in ("bsp", "h_ps"):
    trace = cluster.Trace(until_s=1.0)
    setting = config.Setting("8x", 1.0)
    run = simulate(setting, variant, trace)
    cluster.plot_trace(
      trace,
      folder / "results" / f"timeline-{variant}.png",
      title=f"{variant}: speeds of 8x, r = 1, the first second",
      resources=[
        row
        for node in run.machines.nodes
        for row in (f"switch->{node.name}", node.name, f"{node.name}->switch")
      ],
      end_s=1.0,
    )


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
