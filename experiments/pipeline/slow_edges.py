"""Coded messages between 8 stages on slow links, beside plain ones.

    sudo python experiments/pipeline/slow_edges.py

Each stage is a process on a host of its own (`scripts/slow_network.py`: network
namespaces whose links are limited in both directions), and sleeps for as long
as its passes take.  Rows go to `results/slow_edges.jsonl`.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import measured
import optax
import timed_layers

from jdist import codecs, pipeline, reducers, training

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "slow_edges.jsonl"
NETWORK = HERE.parents[1] / "scripts" / "slow_network.py"
CODECS = {"none": None, "int8": codecs.Quantize(8), "int4": codecs.Quantize(4)}


@dataclasses.dataclass(frozen=True)
class Config:
  """Stages that sleep and what they send."""

  stages: int = 8
  forward_s: float = 0.1
  """This is a stage's time; its backward pass takes twice as long."""

  microbatches: int = 16
  samples: int = 8192
  width: int = 32
  """A message has their product of numbers, 1 MB without a codec."""

  iterations: int = 2
  repeats: int = 2
  tables: tuple[str, ...] = ("1f1b", "zb_h2")
  rates: tuple[str, ...] = ("10gbit", "100mbit")


def make_costs(config: Config) -> list[pipeline.LayerCost]:
  """The stages' costs."""
  return [
    pipeline.LayerCost(
      f"stage {i}",
      config.forward_s,
      2 * config.forward_s,
      # No gradient of the batch is needed, so the first weight part is all.
      weight_s=2 * config.forward_s if i == 0 else None,
      output_bytes=4.0 * config.samples * config.width,
    )
    for i in range(config.stages)
  ]


def make_table(config: Config, name: str) -> pipeline.Table:
  """Returns a table, the same for each codec and rate."""
  if name != "zb_h2":
    return pipeline.make_table(name, config.stages, config.microbatches)
  times = [pipeline.StageTimes(1.0, 1.0, 1.0, 0.3)] * config.stages
  return pipeline.zb_h2(
    times, config.microbatches, num_iterations=config.iterations
  )


def measure(peers: pipeline.Peers, config: Config) -> list[Any]:
  """Runs every table with every codec; returns the seconds of its turns."""
  found = []
  for name in config.tables:
    table = make_table(config, name)
    parts = (1.0, 1.0) if table.splits_backward else (2.0, 0.0)
    layers = [
      timed_layers.sleeping(
        f"layer{i}", config.width, *(config.forward_s * x for x in (1, *parts))
      )
      for i in range(config.stages)
    ]
    shape = timed_layers.make_batches(1, config.samples, config.width)[0]
    batches = timed_layers.make_batches(
      table.num_iterations, config.samples * config.microbatches, config.width
    )
    for codec in CODECS.values():
      message = codec and reducers.MessageCodec(codec, reducers.ErrorFeedback())
      process = pipeline.StageProcess(
        pipeline.cut_layers(layers, config.stages), timed_layers.squared_error,
        table, shape, peers=peers, inputs="x", timeline=True, edges=message,
      )  # fmt: skip
      state, _ = process.run(process.init_state(optax.sgd(1e-3)), batches)
      process.trace()  # The first run compiles.
      seconds = []
      for _ in range(config.repeats):
        state, _ = process.run(state, batches)
        seconds.append(max(x.end_s for x in process.trace()))
      found.append((seconds, process.edge_bytes, os.getloadavg()[0]))
  return found


def on_host(config: Config) -> None:
  """Runs one stage; the first one prints what it has measured."""
  device = int(os.environ["JDIST_PROCESS"])
  host, _, port = os.environ["JDIST_COORDINATOR"].partition(":")
  others = [("", 0)] * (config.stages - 1)
  with pipeline.connect(
    device, [(host, int(port)), *others], "on one machine", connect_s=280
  ) as peers:
    found = measure(peers, config)
  if not device:
    print(json.dumps(found), flush=True)


def main() -> None:
  """Measures at each rate, beside the simulator."""
  config, flags = Config(), "--xla_cpu_multi_thread_eigen=false"
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  rows = []
  for rate in config.rates:
    words = [sys.executable, str(NETWORK), "--hosts", str(config.stages)]
    words += ["--rate", rate, "--timeout-s", "1500", "--"]
    done = subprocess.run(
      [*words, sys.executable, __file__, "host"],
      env=env, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    runs = iter(json.loads(done.stdout.splitlines()[-1]))
    bits_per_s = {"10gbit": 1e10, "100mbit": 1e8}[rate]
    machines = measured.cluster_of(config.stages, (1e-4, bits_per_s / 8))
    for name in config.tables:
      for kind, codec in CODECS.items():
        seconds, edge_bytes, load = next(runs)
        table, costs = make_table(config, name), make_costs(config)
        costs = costs if codec is None else [x.coded(codec) for x in costs]
        times = pipeline.simulate(table, costs, machines)
        row = training.make_row(
          dataclasses.asdict(config), 0, table=name, rate=rate, codec=kind,
          turn_s=seconds, simulated_s=times.makespan_s, edge_bytes=edge_bytes,
          load=load,
        )  # fmt: skip
        rows.append(row)
        ratio = statistics.median(seconds) / times.makespan_s
        print(f"{rate} {name} {kind}: {seconds}, {ratio:.3f}, load {load:.1f}")
  training.append_rows(RESULTS, rows)


if __name__ == "__main__":
  on_host(Config()) if sys.argv[1:] else main()
