"""Protocols on machines that fail at random, in time alone.

    python experiments/failures/run.py

A row for each protocol, number of workers and part of the time that a machine
is down.  Runs whose rows are there are not repeated.
"""

import dataclasses
import pathlib
from typing import Any

import config

from jdist import cluster, server, training

_FAILING = tuple(x for x in config.FRACTIONS if x)
# Virtual seconds of each run, by the number of workers.
_SECONDS = {100: 600.0, 1000: 150.0}


def simulate(
  setting: config.Setting,
  variant: str,
  seconds: float,
  seed: int = 0,
  trace: cluster.Trace | None = None,
) -> server.Simulation:
  """Runs a variant for some virtual seconds."""
  run = server.Simulation(
    setting.machines(seed, seconds),
    config.build(variant, setting),
    setting.costs,
    seed=seed,
    trace=trace,
    detection_s=setting.detection_s,
  )
  run.run(seconds=seconds)
  return run


def merged(run: server.Simulation) -> float:
  """Samples in updates; of fragments, those whose progress is merged."""
  return getattr(run.state, "merged_samples", run.applied_samples)


def row(
  setting: config.Setting, variant: str, seconds: float, seed: int = 0
) -> dict[str, Any]:
  """Runs a variant and returns its row."""
  run = simulate(setting, variant, seconds, seed)
  possible = setting.possible(seed, seconds)
  return training.make_row(
    dataclasses.asdict(setting) | {"seconds": seconds},
    seed,
    method=variant,
    possible_samples=possible,
    merged_samples=merged(run),
    goodput=merged(run) / possible,
    up=possible / (setting.workers * seconds * config.BATCH / config.TASK_S),
    **run.summary(),
  )


def main(folder: pathlib.Path) -> None:
  """Writes all rows, and draws some workers of two protocols."""
  path = folder / "results" / "clock.jsonl"
  done = {
    (row["config"]["workers"], row["config"]["fraction"], row["method"])
    for row in (training.read_rows(path) if path.exists() else ())
  }
  for workers, seconds in _SECONDS.items():
    for fraction in config.FRACTIONS if workers == 100 else _FAILING:
      setting = config.Setting(fraction, workers)
      for variant in config.VARIANTS:
        if (workers, fraction, variant) in done:
          continue
        found = row(setting, variant, seconds)
        training.append_rows(path, [found])
        print(
          f"{workers} workers, {fraction:.0%} down, {variant}: "
          f"{found['goodput']:.1%}",
          flush=True,
        )
  for variant in ("bsp", "decoupled_diloco"):
    trace = cluster.Trace(until_s=120.0)
    run = simulate(
      config.Setting(0.2, 100, cycle_s=120.0), variant, 120.0, trace=trace
    )
    cluster.plot_trace(
      trace,
      folder / "results" / f"timeline-{variant}.png",
      title=f"{variant}: 12 of 100 workers, each 20 % of the time down",
      resources=[node.name for node in run.machines.nodes[:12]],
      end_s=120.0,
    )


if __name__ == "__main__":
  main(pathlib.Path(__file__).resolve().parent)
