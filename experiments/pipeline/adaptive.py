"""A device becomes three times slower, and layers move away from it.

    python experiments/pipeline/adaptive.py

Real processes, whose layers sleep given seconds.  Beside the adaptive run: the
plan that one would make for the slow device, in turn with it, and a run that
nothing disturbs, whose parameters the adaptive one must have.
"""

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import launch
import numpy as np
import optax
import replanning
import timed_layers
import tyro

from jdist import cluster, pipeline, training

RESULTS = (
  pathlib.Path(__file__).resolve().parent
  / "results"
  / "measured_adaptive.jsonl"
)


@dataclasses.dataclass(frozen=True)
class Config:
  """An adaptive run and what it is compared with."""

  devices: int = 4
  layers: int = 12
  forward_s: float = 0.04
  """Of a layer; its backward pass takes twice as long."""

  microbatches: int = 6
  iterations: int = 3
  """In a table, after which it is measured."""

  window: int = 2
  slow_device: int = 1
  factor: float = 3.0
  """By which it becomes slower."""

  tables_before: int = 5
  """Of the even speeds; the first one compiles."""

  tables_after: int = 12
  patience: int = 2
  threshold: float = 0.5
  decay: float = 0.0
  compared: int = 6
  """The last tables, in turn with those of a fresh plan."""

  width: int = 8
  samples: int = 4


def _optimizer() -> optax.GradientTransformation:
  # With a count of its updates.
  rate = optax.constant_schedule(0.05)
  return optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(rate))


def _costs(config: Config) -> list[pipeline.LayerCost]:
  return [
    pipeline.LayerCost(
      f"layer{i}",
      forward_s=config.forward_s,
      backward_s=2 * config.forward_s,
      output_bytes=4.0 * config.samples * config.width,
    )
    for i in range(config.layers)
  ]


def _maker(
  config: Config, peers: pipeline.Peers
) -> Callable[[pipeline.Plan], pipeline.StageProcess]:
  """Returns what makes a process of a plan."""
  layers = [
    timed_layers.sleeping(
      f"layer{i}", config.width, config.forward_s, 2 * config.forward_s
    )
    for i in range(config.layers)
  ]

  def make(plan: pipeline.Plan) -> pipeline.StageProcess:
    table = pipeline.ours(
      config.devices,
      config.microbatches,
      window=config.window,
      num_iterations=config.iterations,
    )
    # Stage s on the device that the plan has for it.
    order = [int(name.removeprefix("worker")) for name in plan.nodes]
    devices = tuple(table.devices[order.index(i)] for i in range(len(order)))
    return pipeline.StageProcess(
      pipeline.cut_layers(layers, plan.cuts),
      timed_layers.squared_error,
      dataclasses.replace(table, devices=devices),
      timed_layers.make_batches(1, config.samples, config.width)[0],
      peers=peers,
      inputs="x",
      timeline=True,
    )

  return make


def _run(
  config: Config, make: Any, machines: cluster.Cluster, patience: int
) -> replanning.AdaptiveRun:
  costs = _costs(config)
  plan = pipeline.partition(costs, machines)
  replanner = replanning.Replanner(
    plan,
    costs,
    machines,
    patience=patience,
    threshold=config.threshold,
    decay=config.decay,
  )
  return replanning.AdaptiveRun(make, replanner, _optimizer())


def _ended(run: replanning.AdaptiveRun, state: pipeline.ProcessState) -> Any:
  """Returns all parameters, and how often this process has updated them."""
  (kept,) = state.opt_state.values()
  params, _ = run.process.gather(state)
  return jax.device_get(params), int(kept[1].count)


def measure(peers: pipeline.Peers, config: Config) -> dict[str, Any]:
  """Runs all three; what one process returns."""
  make = _maker(config, peers)
  even = cluster.workers([1.0] * config.devices)
  speeds = [1.0] * config.devices
  speeds[config.slow_device] = 1 / config.factor
  number = config.tables_before + config.tables_after
  batches = timed_layers.make_batches(
    number * config.iterations,
    config.samples * config.microbatches,
    config.width,
  )
  chunks = [
    batches[i : i + config.iterations]
    for i in range(0, len(batches), config.iterations)
  ]
  run = _run(config, make, even, config.patience)
  # These are never patient enough to move anything.
  fresh = _run(config, make, cluster.workers(speeds), 10**6)
  still = _run(config, make, even, 10**6)
  state, other = run.init_state(seed=1), fresh.init_state(seed=1)
  rates, fresh_rates, cuts, losses, load = [], [], [], [], []
  for i, chunk in enumerate(chunks):
    slow = i >= config.tables_before and peers.device == config.slow_device
    timed_layers.Slowness.factor = config.factor if slow else 1.0
    cuts.append(list(run.plan.cuts))
    state, metrics = run.run(state, chunk)
    losses += [x["loss"] for x in metrics]
    rates.append(run.samples_per_s)
    load.append(os.getloadavg()[0])
    if i >= number - config.compared - 1:
      other, _ = fresh.run(other, chunk)
      fresh_rates.append(fresh.samples_per_s)
  params, updates = _ended(run, state)
  timed_layers.Slowness.factor = 1.0
  state, wanted = still.init_state(seed=1), []
  for chunk in chunks:
    state, metrics = still.run(state, chunk)
    wanted += [x["loss"] for x in metrics]
  kept, kept_updates = _ended(still, state)
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(kept), strict=True)
  return {
    "samples_per_s": rates,
    # The first one compiles.
    "fresh_samples_per_s": fresh_rates[1:],
    "fresh_cuts": list(fresh.plan.cuts),
    "nodes": list(run.plan.nodes),
    "fresh_nodes": list(fresh.plan.nodes),
    "cuts": cuts,
    "moved_after_step": [[x, y.returns] for x, y in run.history],
    "updates": updates,
    "undisturbed_updates": kept_updates,
    "largest_difference": max(
      float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs
    ),
    "equal_losses": losses == wanted,
    "load": load,
  }


def main(config: Config) -> None:
  """Measures, and appends a row."""
  answers = launch.run_processes(config.devices, measure, config)
  found = answers[0]
  last = found["samples_per_s"][-config.compared :]
  fresh = statistics.median(found["fresh_samples_per_s"])
  found["recovered"] = statistics.median(last) / fresh
  found["differences"] = [x["largest_difference"] for x in answers]
  row = training.make_row(dataclasses.asdict(config), 1, **found)
  training.append_rows(RESULTS, [row])
  print(row)


if __name__ == "__main__":
  main(tyro.cli(Config))
