"""Coded messages between stages on slow links, against plain ones.

    sudo python experiments/pipeline/slow_edges.py sleeping     # 8 hosts
    sudo python experiments/pipeline/slow_edges.py computing    # 2 hosts
    sudo python experiments/pipeline/slow_edges.py longer

Each stage is a process on a host of its own (`scripts/slow_network.py`: network
namespaces whose links are limited in both directions), and sleeps for as long
as its passes take, or computes.  Where stages compute the links change in turn,
and all codecs of a table in each turn.  Rows go to `results/slow_edges.jsonl`.
"""

import dataclasses
import json
import os
import pathlib
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
  """Stages that sleep or compute, and what they send."""

  stages: int = 8
  forward_s: float = 0.1
  """This is a stage's time; its backward pass takes twice as long."""

  layers: int = 0
  """The dense layers of a stage that computes; with none it sleeps."""

  microbatches: int = 16
  samples: int = 8192
  width: int = 32
  """A message has their product of numbers, 1 MB without a codec."""

  iterations: int = 2
  repeats: int = 2
  tables: tuple[str, ...] = ("1f1b", "zb_h2")
  rates: tuple[str, ...] = ("10gbit", "100mbit")
  turns: int = 1
  """The number of measurements of each rate."""


PRESETS = {
  "sleeping": Config(),
  "computing": Config(
    stages=2, layers=4, microbatches=8, samples=1024, width=256, repeats=2,
    tables=("1f1b",), turns=2,
  ),
  # Its stages compute for longer than their messages take in 4 bits.
  "longer": Config(
    stages=2, layers=12, microbatches=8, samples=1024, width=256, repeats=2,
    tables=("1f1b",), turns=2,
  ),
}  # fmt: skip


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
    seconds = [config.forward_s * x for x in (1, *parts)]
    layers = [
      timed_layers.dense(f"layer{i}", config.width)
      if config.layers
      else timed_layers.sleeping(f"layer{i}", config.width, *seconds)
      for i in range(config.stages * max(1, config.layers))
    ]
    shape = timed_layers.make_batches(1, config.samples, config.width)[0]
    batches = timed_layers.make_batches(
      table.num_iterations, config.samples * config.microbatches, config.width
    )
    runs = []
    for codec in CODECS.values():
      message = codec and reducers.MessageCodec(codec, reducers.ErrorFeedback())
      process = pipeline.StageProcess(
        pipeline.cut_layers(layers, config.stages), timed_layers.squared_error,
        table, shape, peers=peers, inputs="x", timeline=True, edges=message,
      )  # fmt: skip
      state, _ = process.run(process.init_state(optax.sgd(1e-3)), batches)
      process.trace()  # The first run compiles.
      runs.append([process, state, []])
    for _ in range(config.repeats):
      for run in runs:  # What else the machine does meets all codecs.
        run[1], _ = run[0].run(run[1], batches)
        run[2].append(max(x.end_s for x in run[0].trace()))
    load = os.getloadavg()[0]
    found += [(turns, process.edge_bytes, load) for process, _, turns in runs]
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
  """Measures at each rate, and simulates."""
  preset, flags = sys.argv[1], "--xla_cpu_multi_thread_eigen=false"
  config = PRESETS[preset]
  env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
  found: dict[tuple[str, str, str], dict[str, Any]] = {}
  for rate in config.rates * config.turns:
    words = [sys.executable, str(NETWORK), "--hosts", str(config.stages)]
    words += ["--rate", rate, "--timeout-s", "1500", "--"]
    done = subprocess.run(
      [*words, sys.executable, __file__, preset, "host"],
      env=env, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    runs = iter(json.loads(done.stdout.splitlines()[-1]))
    bits_per_s = {"10gbit": 1e10, "100mbit": 1e8}[rate]
    machines = measured.cluster_of(config.stages, (1e-4, bits_per_s / 8))
    for name in config.tables:
      for kind, codec in CODECS.items():
        seconds, edge_bytes, load = next(runs)
        key = name, rate, kind
        if key in found:
          found[key]["turn_s"] += seconds
          continue
        simulated_s = None
        if not config.layers:
          table, costs = make_table(config, name), make_costs(config)
          costs = costs if codec is None else [x.coded(codec) for x in costs]
          simulated_s = pipeline.simulate(table, costs, machines).makespan_s
        found[key] = training.make_row(
          dataclasses.asdict(config), 0, table=name, rate=rate, codec=kind,
          turn_s=seconds, simulated_s=simulated_s, edge_bytes=edge_bytes,
          load=load,
        )  # fmt: skip
        print(f"{rate} {name} {kind}: {seconds}, {simulated_s}, {load:.1f}")
  training.append_rows(RESULTS, list(found.values()))


if __name__ == "__main__":
  on_host(PRESETS[sys.argv[1]]) if sys.argv[2:] else main()
