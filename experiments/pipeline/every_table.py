"""Measured over simulated times of every table in processes.

    python experiments/pipeline/every_table.py
    python experiments/pipeline/every_table.py --slow 0.3   # one slower device

The stages sleep: of a backward pass that a table splits, half in each part.
With `--slow` the second device sleeps as long as at that share of its speed.
Rows go to `results/every_table.jsonl`; `measured_report.py` prints them.  One
program is not measured: virtual devices of one process share its threads.
"""

import dataclasses
import os
import pathlib
import statistics
from typing import Any

import launch
import measured
import optax
import timed_layers
import tyro

from jdist import pipeline, training

RESULTS = pathlib.Path(__file__).resolve().parent / "results/every_table.jsonl"
_SLOW = 1  # The device that is slow, as in `measured.cluster_of`.


@dataclasses.dataclass(frozen=True)
class Config:
  """A comparison of measured and simulated times.

  Attributes:
    forward_s: Of half of a device's layers; backward passes take twice as long.
    slow: The share of its speed that the second device has.
  """

  devices: int = 4
  microbatches: int = 4
  iterations: int = 4
  forward_s: float = 0.08
  slow: float = 1.0
  repeats: int = 2
  width: int = 8
  samples: int = 4


def make_tables(config: Config) -> list[pipeline.Table]:
  """Every table that has a name."""
  found = []
  for name, entry in pipeline.TABLES.items():
    number = 1 if name == "pipedream" else config.microbatches
    options = {}
    if entry.asynchronous:
      # Updates after each micro-batch make short iterations.
      turns = config.microbatches if number == 1 else 1
      options["num_iterations"] = turns * config.iterations
    found.append(pipeline.make_table(name, config.devices, number, **options))
  return found


def make_stages(config: Config, table: pipeline.Table) -> Any:
  """Two layers for each device, as the table's stages."""
  parts = (1.0, 1.0) if table.splits_backward else (2.0, 0.0)
  back_s, weight_s = (config.forward_s * x for x in parts)
  layers = [
    timed_layers.sleeping(
      f"layer{i}", config.width, config.forward_s, back_s, weight_s
    )
    for i in range(2 * config.devices)
  ]
  return pipeline.cut_layers(layers, table.num_stages)


def make_costs(
  config: Config, table: pipeline.Table
) -> list[pipeline.LayerCost]:
  """The costs of the table's stages at full speed."""
  forward_s = config.forward_s * 2 * config.devices / table.num_stages
  found = [
    pipeline.LayerCost(
      f"stage {i}",
      forward_s=forward_s,
      backward_s=2 * forward_s,
      # No gradient of the batch is needed, so the first weight part is all.
      weight_s=2 * forward_s if i == 0 else None,
      output_bytes=4.0 * config.samples * config.width,
    )
    for i in range(table.num_stages)
  ]
  # PACI's backward passes run the stage again, at the newest parameters.
  again = table.weights == "newest"
  return [x.recomputed(0.0) for x in found] if again else found


def _batches(config: Config, table: pipeline.Table) -> list[Any]:
  samples = config.samples * table.num_microbatches
  return timed_layers.make_batches(table.num_iterations, samples, config.width)


def measure(peers: pipeline.Peers, config: Config) -> Any:
  """Runs every table in processes; what one of them returns."""
  if peers.device == _SLOW:
    timed_layers.Slowness.factor = 1 / config.slow
  link, found = measured.measure_link(peers), []
  for table in make_tables(config):
    batches = _batches(config, table)
    process = pipeline.StageProcess(
      make_stages(config, table), timed_layers.squared_error, table,
      timed_layers.make_batches(1, config.samples, config.width)[0],
      peers=peers, inputs="x", timeline=True,
    )  # fmt: skip
    state, _ = process.run(process.init_state(optax.sgd(1e-3)), batches)
    process.trace()  # The first run compiles.
    traces = []
    for _ in range(config.repeats):
      state, _ = process.run(state, batches)
      traces.append(list(process.trace()))
    found.append((traces, os.getloadavg()[0]))
  return link, found


def compare(config: Config) -> list[dict[str, Any]]:
  """Returns a row for each runtime and table."""
  link, runs = launch.run_processes(config.devices, measure, config)[0]
  machines = measured.cluster_of(config.devices, link, config.slow)
  rows = []
  for table, (traces, load) in zip(make_tables(config), runs, strict=True):
    times = pipeline.simulate(table, make_costs(config, table), machines)
    # A table of one iteration is measured as a whole.
    if table.num_iterations == 1:
      seconds = [max(x.end_s for x in spans) for spans in traces]
      foretold_s = times.makespan_s
    else:
      given = table.window, table.num_iterations
      seconds = [measured.steady_s(spans, *given) for spans in traces]
      foretold_s = times.iteration_s
    ratio = statistics.median(seconds) / foretold_s
    rows.append(
      training.make_row(
        dataclasses.asdict(config), 0, table=table.name,
        iteration_s=list(seconds), simulated_iteration_s=foretold_s,
        iteration_ratio=ratio, load=load,
      )
    )  # fmt: skip
    print(f"{table.name}: {ratio:.3f}, load {load:.1f}", flush=True)
  return rows


def main(config: Config) -> None:
  """Measures every table."""
  training.append_rows(RESULTS, compare(config))


if __name__ == "__main__":
  main(tyro.cli(Config))
