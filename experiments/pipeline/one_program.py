"""Measured over forecast steps of every table that one program runs.

    python experiments/pipeline/one_program.py sleeping    # 4 devices
    python experiments/pipeline/one_program.py computing   # 2, a core each
    python experiments/pipeline/one_program.py split       # what a split costs

The devices are virtual CPUs of this process, and `OneProgram.times` forecasts.
`sleeping`: passes take given seconds; in a second line one device has 30 % of
its speed.  `computing`: the stages multiply matrices, each in a loop, and the
process keeps its memory; in each repeat `layer_costs` times the stages, one at
a time, before all tables run: once while the other core has nothing to do, and
once while it multiplies matrices as well.  Two cores of one processor share
caches and power, so that each may be slower when both compute; a second
forecast counts that for the seconds in which both devices do.  On a
machine that others use a step is slow whenever they have one of its cores, so
the least times of each third of the repeats are compared, and the thirds show
the spread.  `split`: the processor's seconds of steps with split backward
passes (zb_h1) and with whole ones (1F1B), and the memory pages that a step
touches for the first time.  With `MALLOC_MMAP_MAX_=0` and
`MALLOC_TRIM_THRESHOLD_=4000000000` in the environment glibc gives a step the
memory of the one before.  Rows go to `results/one_program.jsonl`;
`measured_report.py` prints them.
"""

import contextlib
import dataclasses
import os
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import launch
import numpy as np
import optax
import timed_layers
import tyro

from jdist import collectives, models, pipeline, training

RESULTS = pathlib.Path(__file__).resolve().parent / "results/one_program.jsonl"
_SLOW = 1  # The device that is slow.
# A core for each device: what it computes, it computes on one.
_FLAGS = "--xla_cpu_multi_thread_eigen=false"


@dataclasses.dataclass(frozen=True)
class Config:
  """A comparison of measured and forecast times.

  Attributes:
    forward_s: Of a device's layers that sleep; backward passes take twice as
      long.
    slow: The share of its speed that the second device has.
    repeats: Of the costs and of all tables, in turn; a multiple of three.
    steps: Of a table in a repeat.
    turns: So many products a device's computing stages have together.
  """

  kind: str = "sleeping"
  devices: int = 4
  microbatches: int = 8
  forward_s: float = 0.05
  slow: float = 1.0
  repeats: int = 3
  width: int = 8
  samples: int = 4
  layers: int = 2
  steps: int = 1
  turns: int = 1


PRESETS = {
  "sleeping": (Config(), Config(slow=0.3)),
  "computing": (
    Config(
      kind="computing", devices=2, width=256, samples=128, turns=32,
      repeats=15, steps=4,
    ),
  ),
  "split": tuple(
    Config(
      kind="split", devices=2, width=512, samples=x, layers=4, repeats=24
    )
    for x in (128, 512)
  ),
}  # fmt: skip


def make_tables(config: Config) -> list[pipeline.Table]:
  """Every named table that one program can run."""
  found = []
  for name, entry in pipeline.TABLES.items():
    options = {"num_iterations": 4} if entry.asynchronous else {}
    number = 1 if name == "pipedream" else config.microbatches
    table = pipeline.make_table(name, config.devices, number, **options)
    try:
      make_pipe(config, table)
    except ValueError as error:
      print(f"{name} is refused: {str(error).partition('. ')[0]}.", flush=True)
    else:
      found.append(table)
  return found


def make_layers(
  config: Config, num_stages: int, splits: bool = False
) -> list[models.Layer]:
  """The layers for tables with as many stages; some split backward passes."""
  number = config.layers * config.devices
  if config.kind == "split":
    return [
      timed_layers.dense(f"layer{i}", config.width) for i in range(number)
    ]
  if config.kind == "computing":
    # A layer for each stage: independent loops would run on two cores, too.
    turns = config.turns * config.devices // num_stages
    return [
      timed_layers.looped(f"layer{i}", config.width, turns)
      for i in range(num_stages)
    ]
  seconds = config.forward_s / config.layers
  parts = (seconds, seconds) if splits else (2 * seconds, 0.0)
  return [
    timed_layers.sleeping(f"layer{i}", config.width, seconds, *parts)
    for i in range(number)
  ]


def make_stages(config: Config, table: pipeline.Table) -> Any:
  """The table's stages; stage s lies on device s modulo their number."""
  given = table.num_stages, bool(table.splits_backward)
  layers = make_layers(config, *given)
  if config.kind == "sleeping" and config.slow < 1:
    slower = dataclasses.replace(
      config, forward_s=config.forward_s / config.slow
    )
    slow_layers = make_layers(slower, *given)
    for i in range(len(layers)):
      if i * table.num_stages // len(layers) % config.devices == _SLOW:
        layers[i] = slow_layers[i]
  return pipeline.cut_layers(layers, table.num_stages)


def make_pipe(config: Config, table: pipeline.Table) -> pipeline.OneProgram:
  """A table's runtime; a CPU's sends do not overlap what it computes."""
  (micro,) = timed_layers.make_batches(1, config.samples, config.width)
  return pipeline.OneProgram(
    make_stages(config, table), timed_layers.squared_error, table, micro,
    inputs="x", late_sends=False,
  )  # fmt: skip


def given_costs(
  config: Config, table: pipeline.Table
) -> list[pipeline.LayerCost]:
  """The costs of stages that sleep."""
  found = []
  for i in range(table.num_stages):
    slow = config.slow if i % config.devices == _SLOW else 1.0
    seconds = config.forward_s * config.devices / table.num_stages / slow
    found.append(pipeline.LayerCost(forward_s=seconds, backward_s=2 * seconds))
  return found


def timed_costs(config: Config, num_stages: int) -> list[pipeline.LayerCost]:
  """The costs of all stages that compute, timed one at a time."""
  (micro,) = timed_layers.make_batches(1, config.samples, config.width)
  return pipeline.layer_costs(
    make_layers(config, num_stages),
    micro,
    inputs="x",
    source="timed",
    repeats=5,
  )


def least(turns: list[list[pipeline.LayerCost]]) -> list[pipeline.LayerCost]:
  """Returns the least costs of each layer."""
  names = ("forward_s", "backward_s", "weight_s")
  return [
    pipeline.LayerCost(**{x: min(getattr(y, x) for y in own) for x in names})
    for own in zip(*turns, strict=True)
  ]


def seconds_of(
  costs: list[pipeline.LayerCost],
) -> Callable[[pipeline.Op, int], float]:
  """Returns the seconds of an action as one program runs it."""
  op_s = pipeline.Op

  def seconds(op: pipeline.Op, stage: int) -> float:
    cost = costs[stage]
    again_s = cost.forward_s
    if op == op_s.FORWARD:
      # The last stage runs in its backward pass alone.
      return 0.0 if stage + 1 == len(costs) else again_s
    if op == op_s.BACKWARD:
      return again_s + cost.backward_s
    # No gradient of the batch is needed: the first weight part is all.
    if stage == 0:
      whole = again_s + cost.backward_s
      return whole if op == op_s.BACKWARD_WEIGHT else 0.0
    return (
      again_s + cost.input_s if op == op_s.BACKWARD_INPUT else cost.weight_s
    )

  return seconds


def make_run(config: Config, pipe: pipeline.OneProgram) -> Callable[[], float]:
  """Returns what runs a step and returns its seconds; compiles it."""
  kinds = (jax.sharding.AxisType.Auto,) * 2
  shape = (1, config.devices)
  mesh = jax.make_mesh(shape, ("worker", "stage"), axis_types=kinds)
  team = collectives.workers(1, mesh=mesh)
  optimizer = optax.sgd(1e-3)
  state = pipe.init_state(team, optimizer)
  step = team.jit(
    pipe.make_step(optimizer, axis=team.axis),
    out_specs=(team.specs(state), None),
  )
  samples = config.samples * pipe.table.num_microbatches
  (batch,) = timed_layers.make_batches(1, samples, config.width)
  placed = team.place(jax.tree.map(lambda x: x[None], batch))

  def run() -> float:
    nonlocal state
    start = time.monotonic()
    state, metrics = step(state, placed)
    jax.block_until_ready((state, metrics))
    return time.monotonic() - start

  for _ in range(1 + pipe.grid.behind):  # Until the pipeline is full.
    run()
  return run


def make_idle(config: Config, table: pipeline.Table) -> Callable[[], float]:
  """Returns what measures a tick whose layers only pass on their inputs."""

  def passing(name: str) -> models.Layer:
    params = {name: {"w": np.ones((), np.float32)}}
    return models.Layer(
      name, params, {}, lambda p, s, x, **_: (x * p[name]["w"], s)
    )

  layers = [passing(f"layer{i}") for i in range(table.num_stages)]
  (micro,) = timed_layers.make_batches(1, config.samples, config.width)
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(layers, table.num_stages), timed_layers.squared_error,
    table, micro, inputs="x", late_sends=False,
  )  # fmt: skip
  run = make_run(config, pipe)
  return lambda: run() / len(pipe.grid.rows)


def forecast_s(
  config: Config,
  pipe: pipeline.OneProgram,
  costs: list[pipeline.LayerCost] | None,
  tick_s: float,
) -> float:
  """Returns a step's seconds, by the stages' costs if they were timed."""
  stages = given_costs(config, pipe.table) if costs is None else costs
  # A permute of virtual CPU devices waits for all of them, see the tests.
  return pipe.times(
    seconds_of(stages), 0.0, between_s=tick_s, all_wait=True
  ).step_s


def both_s(
  config: Config,
  pipe: pipeline.OneProgram,
  costs: list[pipeline.LayerCost],
) -> float:
  """Returns the seconds of a step in which both of two devices compute."""
  seconds = seconds_of(costs)
  work_s = sum(
    seconds(op, stage)
    for op in (pipeline.Op.FORWARD, pipeline.Op.BACKWARD)
    for stage in range(len(costs))
  )
  # A tick takes as long as the longer pass, so that what all ticks take less
  # than all passes is when both compute.
  ticks_s = pipe.times(seconds, 0.0, all_wait=True).step_s
  return config.microbatches * work_s - ticks_s


def make_products(config: Config) -> Callable[[], Any]:
  """Returns what multiplies matrices, as the stages do."""
  layer = timed_layers.looped("layer", config.width, config.turns)
  x = np.ones((config.samples, config.width), np.float32)
  run = jax.jit(lambda p: layer.apply(p, {}, x, train=True)[0])
  return lambda: run(layer.params).block_until_ready()


def compare(config: Config) -> list[dict[str, Any]]:
  """Returns a row for each table."""
  tables = make_tables(config)
  pipes = [make_pipe(config, table) for table in tables]
  runs = [make_run(config, pipe) for pipe in pipes]
  computes = config.kind == "computing"
  idle = next(make_idle(config, x) for x in tables if x.name == "1f1b")
  costs: dict[int, list[list[pipeline.LayerCost]]] = {
    table.num_stages: [] for table in tables
  }
  beside: dict[int, list[list[pipeline.LayerCost]]] = {x: [] for x in costs}
  ticks: list[float] = []
  steps: list[list[float]] = [[] for _ in tables]
  with contextlib.ExitStack() as stack:
    if computes:
      other = stack.enter_context(
        contextlib.closing(launch.OtherCore(make_products, config))
      )
    for _ in range(config.repeats):
      if computes:
        for number, own_costs in costs.items():
          own_costs.append(timed_costs(config, number))
          with other.busy():
            beside[number].append(timed_costs(config, number))
        ticks.append(min(idle() for _ in range(9)))
      for own, run in zip(steps, runs, strict=True):
        own.append(min(run() for _ in range(config.steps)))
  rows, third = [], config.repeats // 3
  for pipe, own in zip(pipes, steps, strict=True):
    pairs, shared, slower = [], [], []
    for i in range(0, config.repeats, third):
      part = slice(i, i + third)
      given: tuple[Any, float] = None, 0.0
      if computes:
        timed = costs[pipe.table.num_stages]
        given = least(timed[part]), min(ticks[part])
      pairs.append((min(own[part]), forecast_s(config, pipe, *given)))
      if computes:
        both = least(beside[pipe.table.num_stages][part])
        slower.append(_sum_s(both) / _sum_s(given[0]))
        more_s = (slower[-1] - 1) * both_s(config, pipe, given[0])
        shared.append(pairs[-1][0] / (pairs[-1][1] + more_s))
    ratios = [a / b for a, b in pairs]
    extra = {}
    if computes:
      extra = {
        "shared_ratio": statistics.median(shared), "shared_ratios": shared,
        "slower_beside": slower,
      }  # fmt: skip
    rows.append(
      training.make_row(
        dataclasses.asdict(config), 0, table=pipe.table.name, step_s=own,
        tick_s=ticks, forecast_s=[x for _, x in pairs],
        ratio=statistics.median(ratios), spread=[min(ratios), max(ratios)],
        load=os.getloadavg()[0], **extra,
      )
    )  # fmt: skip
    values = (rows[-1]["ratio"], *rows[-1]["spread"], *shared, *slower)
    print(pipe.table.name, *(f"{x:.3f}" for x in values), flush=True)
  return rows


def _sum_s(costs: list[pipeline.LayerCost]) -> float:
  return sum(x.forward_s + x.backward_s for x in costs)


def split(config: Config) -> list[dict[str, Any]]:
  """Returns a row for each table: the processor's seconds, and new pages."""
  names, me = ("1f1b", "zb_h1"), resource.RUSAGE_SELF
  runs = {
    name: make_run(
      config,
      make_pipe(
        config, pipeline.make_table(name, config.devices, config.microbatches)
      ),
    )
    for name in names
  }
  steps: dict[str, list[Any]] = {name: [] for name in names}
  for _ in range(config.repeats):
    for name, run in runs.items():
      before = resource.getrusage(me)
      run()
      steps[name].append((before, resource.getrusage(me)))
  rows: list[dict[str, Any]] = []
  for name, own in steps.items():
    seconds = [
      b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in own
    ]
    whole = rows[0]["processor_s"] if rows else seconds
    rows.append(
      training.make_row(
        dataclasses.asdict(config), 0, table=name, processor_s=seconds,
        new_pages=[b.ru_minflt - a.ru_minflt for a, b in own],
        ratio=min(seconds) / min(whole),
        reuses=os.environ.get("MALLOC_MMAP_MAX_") == "0",
        load=os.getloadavg()[0],
      )
    )  # fmt: skip
    print(name, config.samples, rows[-1]["ratio"], flush=True)
  return rows


def main(
  kind: tyro.conf.Positional[Literal["sleeping", "computing", "split"]], /
) -> None:
  """Measures a preset."""
  keeps = launch.KEPT_MEMORY.items() <= os.environ.items()
  if kind == "computing" and not keeps:
    # glibc reads them when a process starts.
    os.execve(
      sys.executable,
      [sys.executable, *sys.argv],
      os.environ | launch.KEPT_MEMORY,
    )
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
  os.environ["JAX_PLATFORMS"] = "cpu"
  configs = PRESETS[kind]
  collectives.make_cpu_devices(configs[0].devices)
  for config in configs:
    rows = split(config) if kind == "split" else compare(config)
    training.append_rows(RESULTS, rows)


if __name__ == "__main__":
  tyro.cli(main)
