"""Where each runtime wins: one program, or a process for each stage.

    python experiments/pipeline/runtimes.py

The same layers, table and batches on two devices: `OneProgram` on two virtual
devices of one process, and `StageProcess` in two processes; in turn.  An
iteration's time is that of a table of eight, all in all.
"""

import dataclasses
import functools
import os
import pathlib
import statistics
import time
from typing import Any

import jax
import launch
import numpy as np
import optax
import timed_layers
import tyro

from jdist import collectives, pipeline, training

RESULTS = (
  pathlib.Path(__file__).resolve().parent
  / "results"
  / "measured_runtimes.jsonl"
)
_ITERATIONS = 8


@dataclasses.dataclass(frozen=True)
class Config:
  """A model on two devices."""

  name: str
  width: int
  samples: int
  """Of a micro-batch."""

  layers: int = 4
  cut: int = 2
  microbatches: int = 8
  tables: tuple[str, ...] = ("1f1b", "ours")
  repeats: int = 9


MODELS = (
  Config("tiny", 32, 4),
  Config("small", 256, 32),
  Config("larger", 512, 128),
  Config("uneven, 1 and 5 layers", 512, 128, layers=6, cut=1),
)


def _optimizer() -> optax.GradientTransformation:
  return optax.sgd(1e-3, momentum=0.9)


def _one_program(config: Config, table: str, stages: Any, batch: Any) -> Any:
  """Returns what runs eight iterations in one program."""
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((1, 2), ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(1, mesh=mesh)
  options = {"window": 2} if table == "ours" else {}
  pipe = pipeline.OneProgram(
    stages,
    timed_layers.squared_error,
    pipeline.make_table(table, 2, config.microbatches, **options),
    jax.tree.map(lambda x: x[: config.samples], batch),
    inputs="x",
  )
  optimizer = _optimizer()
  state = pipe.init_state(team, optimizer)
  step = team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  placed = team.place(jax.tree.map(lambda x: x[None], batch))

  def run() -> float:
    nonlocal state
    start = time.monotonic()
    for _ in range(_ITERATIONS):
      state, metrics = step(state, placed)
      jax.block_until_ready(metrics)
    jax.block_until_ready(state)
    return (time.monotonic() - start) / _ITERATIONS

  return run


def _processes(
  config: Config, table: str, stages: Any, batch: Any, peers: pipeline.Peers
) -> Any:
  """Returns what runs eight iterations in two processes."""
  options = {"window": 2} if table == "ours" else {}
  made = pipeline.make_table(
    table, 2, config.microbatches, num_iterations=_ITERATIONS, **options
  )
  process = pipeline.StageProcess(
    stages,
    timed_layers.squared_error,
    made,
    jax.tree.map(lambda x: x[: config.samples], batch),
    peers=peers,
    inputs="x",
  )
  state = process.init_state(_optimizer())

  def run() -> float:
    nonlocal state
    peers.check_agreement({}, 10**6)
    start = time.monotonic()
    state, _ = process.run(state, [batch] * _ITERATIONS)
    peers.check_agreement({}, 10**6 + 1)
    return (time.monotonic() - start) / _ITERATIONS

  return run


def measure(peers: pipeline.Peers, config: Config) -> list[dict[str, Any]]:
  """Runs both in turn; what one process returns."""
  layers = [
    timed_layers.dense(f"layer{i}", config.width) for i in range(config.layers)
  ]
  stages = pipeline.cut_layers(layers, [config.cut])
  samples = config.samples * config.microbatches
  (batch,) = timed_layers.make_batches(1, samples, config.width)
  found = []
  for table in config.tables:
    one = None
    if peers.device == 0:
      one = _one_program(config, table, stages, batch)
      one()  # Compiles.
    both = _processes(config, table, stages, batch, peers)
    both()
    seconds: dict[str, list[float]] = {"one_program": [], "processes": []}
    load = []
    for _ in range(config.repeats):
      load.append(os.getloadavg()[0])
      if one is not None:
        seconds["one_program"].append(one())
      seconds["processes"].append(both())
    found.append({"table": table, "load": load, "iteration_s": seconds})
  return found


def main(repeats: int = 9) -> None:
  """Measures all models, a row for each and each table.

  Args:
    repeats: of both, in turn.
  """
  before = os.environ.get("XLA_FLAGS", "")
  flag = "--xla_force_host_platform_device_count=2"
  os.environ["XLA_FLAGS"] = f"{before} {flag}"
  for config in MODELS:
    config = dataclasses.replace(config, repeats=repeats)
    answers = launch.run_processes(2, measure, config)
    for found in answers[0]:
      pairs = np.array(
        [found["iteration_s"][x] for x in ("one_program", "processes")]
      )
      ratio = statistics.median(pairs[0] / pairs[1])
      row = training.make_row(
        dataclasses.asdict(config), 0, **found, ratio=ratio
      )
      training.append_rows(RESULTS, [row])
      median = functools.partial(np.median, axis=1)
      print(config.name, found["table"], median(pairs), ratio, flush=True)


if __name__ == "__main__":
  tyro.cli(main)
