"""Timelines of real processes, against the simulator's.

    python experiments/pipeline/measured.py sleeping
    python experiments/pipeline/measured.py computing
    sudo python experiments/pipeline/measured.py quota

Each stage is a process of its own.  `sleeping`: 4 and 8 stages whose passes
take given seconds.  `computing`: two stages, a core each, whose seconds are
measured beforehand while the other one waits, with all that its processor
computes around the passes.  A run begins when the machine is idle, or when its
patience ends, and a row has how many cores others kept busy.  `quota`: so, but
a control group leaves the second stage 30 % of a core in all runs but those for
the costs.  Rows go to `results/measured.jsonl`, or `measured_quota.jsonl`;
`measured_report.py` draws.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import launch
import numpy as np
import optax
import timed_layers
import tyro

from jdist import cluster, pipeline, training
from jdist.pipeline.processes import _peers

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results" / "measured.jsonl"
QUOTA = HERE / "results" / "measured_quota.jsonl"
SPANS = HERE / "results" / "measured_spans.jsonl"


@dataclasses.dataclass(frozen=True)
class Config:
  """A comparison of measured and simulated times."""

  kind: str = "sleeping"

  forward_s: tuple[float, ...] = (0.04,) * 4
  """Of each stage; empty where it is measured."""

  backward_factor: float = 2.0
  """Backward passes take so many times as long."""

  microbatches: int = 8
  iterations: int = 6
  """In a table."""

  window: int = 2
  """Of the table without a flush."""

  tables: tuple[str, ...] = ("gpipe", "1f1b", "ours")
  repeats: int = 5

  width: int = 8
  samples: int = 4
  """Of a micro-batch."""

  layers: int = 1
  """Each device has so many; some tables make two stages of them."""

  bound: bool = False
  """Whether each process has a core of its own."""

  most_busy: float = 0.2
  patience_s: float = 60.0
  """Until a run begins although others keep more cores busy."""

  drawn: bool = False
  """Whether spans are kept for a picture."""

  quota: float = 1.0
  """The share of a core that the second stage has; its costs are at 1."""

  @property
  def stages(self) -> int:
    """The processes."""
    return len(self.forward_s) or 2


_ALL = tuple(pipeline.TABLES)
_UNEVEN = (0.04, 0.06, 0.03, 0.05)
PRESETS = {
  "sleeping": [
    Config(),
    Config(forward_s=_UNEVEN, drawn=True),
    # More processes than cores: what they do beside sleeping takes turns.
    Config(forward_s=(0.1,) * 8, iterations=5),
    Config(
      forward_s=tuple(2.5 * x for x in _UNEVEN * 2), iterations=5
    ),
  ],
  "computing": [
    Config(
      kind="computing", forward_s=(), width=512, samples=128, layers=4,
      bound=True, drawn=True, tables=_ALL,
    ),
    Config(
      kind="computing", forward_s=(), width=768, samples=256, layers=4,
      bound=True, tables=_ALL,
    ),
  ],
  "quota": [
    Config(
      kind="computing", forward_s=(), width=768, samples=256, layers=4,
      bound=True, quota=0.3, microbatches=4, iterations=4,
      tables=_ALL,
    ),
  ],
}  # fmt: skip


def make_tables(config: Config) -> list[pipeline.Table]:
  """The tables of a comparison."""
  return [
    pipeline.make_table(
      name,
      config.stages,
      config.microbatches,
      num_iterations=config.iterations,
      **({"window": config.window} if name == "ours" else {}),
    )
    for name in config.tables
  ]


def one_at_a_time(config: Config, num_stages: int) -> pipeline.Table:
  """A table of so many stages in which no two devices compute at once."""
  naive = pipeline.make_table(
    "naive",
    num_stages,
    config.microbatches,
    num_iterations=config.iterations,
  )

  def turn(action: pipeline.Action) -> tuple[int, bool, int, int]:
    ahead = action.op == pipeline.Op.FORWARD
    place = action.stage if ahead else 2 * num_stages - action.stage
    update = action.op == pipeline.Op.UPDATE
    return action.iteration, update, action.microbatch, place

  devices = [
    itertools.chain(*naive.devices[device :: config.stages])
    for device in range(config.stages)
  ]
  ordered = tuple(tuple(sorted(x, key=turn)) for x in devices)
  return dataclasses.replace(naive, devices=ordered)


def numbers_of_stages(config: Config) -> list[int]:
  """The numbers of stages of a comparison's tables."""
  return sorted({table.num_stages for table in make_tables(config)})


def make_layers(config: Config) -> list[Any]:
  """The layers of all stages."""
  if config.kind == "sleeping":
    return [
      timed_layers.sleeping(
        f"layer{i}", config.width, seconds, config.backward_factor * seconds
      )
      for i, seconds in enumerate(config.forward_s)
    ]
  return [
    timed_layers.dense(f"layer{i}", config.width)
    for i in range(config.layers * config.stages)
  ]


def measure_link(peers: pipeline.Peers) -> tuple[float, float]:
  """Returns seconds of a small message and bytes a second of large ones.

  Between the first two devices, while the others wait.
  """
  found = []
  for number, size in enumerate((8, 1 << 22)):
    array = np.zeros(size, np.uint8)
    seconds = []
    for i in range(20):
      tag = _peers.Tag(_peers.Kind.MOVED, number, i, -1)
      start = time.monotonic()
      if peers.device == 0:
        peers.send(1, tag, [array])
        peers.receive(1, tag, [array])
      elif peers.device == 1:
        peers.receive(0, tag, [array])
        peers.send(0, tag, [array])
      seconds.append((time.monotonic() - start) / 2)
    found.append(statistics.median(seconds))
  latency_s, large_s = found
  return latency_s, (1 << 22) / max(large_s - latency_s, 1e-9)


def measure(peers: pipeline.Peers, config: Config) -> dict[str, Any]:
  """Runs all tables in turn; what one process returns."""
  tables, alone = make_tables(config), []
  if config.kind == "computing":
    # In these tables a stage computes alone.
    alone = [one_at_a_time(config, x) for x in numbers_of_stages(config)]
  runs = []
  for table in alone + tables:
    stages = pipeline.cut_layers(make_layers(config), table.num_stages)
    count = table.num_microbatches
    shape = timed_layers.make_batches(1, config.samples, config.width)[0]
    process = pipeline.StageProcess(
      stages,
      timed_layers.squared_error,
      table,
      shape,
      peers=peers,
      inputs="x",
      timeline=True,
    )
    state = process.init_state(optax.sgd(1e-3, momentum=0.9))
    batches = timed_layers.make_batches(
      table.num_iterations, config.samples * count, config.width
    )
    state, _ = process.run(state, batches)  # Compiles.
    process.trace()
    runs.append([process, state, batches, []])
  link = measure_link(peers)
  busy, used_s = [], []
  for repeat in range(config.repeats):
    for number, run in enumerate(runs):
      process, state, batches, traces = run
      if peers.device == 0:
        cores = launch.wait_until_idle(config.most_busy, config.patience_s)
        busy.append((cores, os.getloadavg()[0]))
      peers.check_agreement({}, 1000 + repeat)
      # The first tables are those of the costs, which are of a whole core.
      slow = peers.device == 1 and config.quota < 1 and number >= len(alone)
      began_s = time.process_time()
      with _quota(config.quota) if slow else contextlib.nullcontext():
        run[1], _ = process.run(state, batches)
      used_s.append(time.process_time() - began_s)
      traces.append(list(process.trace()))
  return {
    "link": link,
    "busy": [busy[i :: len(runs)] for i in range(len(runs))],
    "used_s": [used_s[i :: len(runs)] for i in range(len(alone))],
    "traces": [x[3] for x in runs],
  }


def _quota(share: float) -> contextlib.AbstractContextManager[None]:
  """Leaves this process that share of a core."""
  sys.path.append(str(HERE.parents[1] / "scripts"))
  import slow_network

  return slow_network.cpu_quota([os.getpid()], share)


def steady_s(spans: Sequence[cluster.Span], window: int, count: int) -> float:
  """Returns an iteration's seconds while the pipeline is full.

  As `PipelineTimes.iteration_s`: the last iterations of a window do not count.
  """
  ends = [0.0] * count
  for span in spans:
    if span.kind == "update":
      # Such as U2/0@1: the first iteration has no number.
      number = int(span.name.partition("@")[2] or 0)
      ends[number] = max(ends[number], span.end_s)
  last = max(count - window, 0)
  first = last // 2
  return (ends[last] - ends[first]) / (last - first)


def _stage_of(span: cluster.Span) -> int:
  """Returns the stage of a pass or an update, such as F2/0@1."""
  return int(span.name.partition("/")[2].partition("@")[0])


def costs_of(
  config: Config,
  num_stages: int,
  alone: Sequence[Any] = (),
  used_s: Sequence[Sequence[float]] = (),
) -> list[pipeline.LayerCost]:
  """The stages' costs: as given, or medians of runs of one stage at a time.

  A processor also starts the passes, and sends and receives: its seconds in a
  run, `used_s` of each device, are divided among the passes by their lengths.
  """
  output_bytes = 4.0 * config.samples * config.width
  found = []
  for stage in range(num_stages):
    device = stage % config.stages
    if config.kind == "sleeping":
      seconds = config.forward_s[stage]
      times = {"forward": seconds, "backward": config.backward_factor * seconds}
    else:
      spans = [x for trace in alone for x in trace]
      times = {
        kind: statistics.median(
          x.seconds for x in spans if x.kind == kind and stage == _stage_of(x)
        )
        for kind in ("forward", "backward", "update")
      }
      run_s = statistics.median(
        sum(x.seconds for x in trace if x.resource == f"device {device}")
        for trace in alone
      )
      whole = statistics.median(used_s[device]) / run_s
      times = {kind: whole * seconds for kind, seconds in times.items()}
    found.append(
      pipeline.LayerCost(
        f"stage {stage}",
        output_bytes=output_bytes,
        # No gradient of the batch is needed, so the first weight part is all.
        weight_s=None if stage else times["backward"],
        **{f"{kind}_s": value for kind, value in times.items()},
      )
    )
  return found


def cluster_of(
  number: int, link: tuple[float, float], second: float = 1.0
) -> cluster.Cluster:
  """This machine's processes, the second one's speed, and their links."""
  latency_s, bytes_per_s = link
  names = [f"device {i}" for i in range(number)]
  way = cluster.Link(8 * bytes_per_s, latency_s)
  return cluster.Cluster(
    tuple(
      cluster.Node(name, speed=second if i == 1 else 1.0)
      for i, name in enumerate(names)
    ),
    cluster.Topology(dict.fromkeys(itertools.pairwise(names), way)),
    server=names[0],
  )


def compare(config: Config) -> list[dict[str, Any]]:
  """Returns a row for each table."""
  cores = range(config.stages) if config.bound else None
  answers = launch.run_processes(config.stages, measure, config, cores=cores)
  first = answers[0]
  traces, busy = first["traces"], first["busy"]
  costs = {}
  for number in numbers_of_stages(config):
    own = []
    if config.kind == "computing":
      place = len(costs)
      own = [traces[place], [x["used_s"][place] for x in answers]]
    costs[number] = costs_of(config, number, *own)
  if config.kind == "computing":
    traces, busy = traces[len(costs) :], busy[len(costs) :]
  machines = cluster_of(config.stages, first["link"], config.quota)
  rows = []
  for table, found, load in zip(make_tables(config), traces, busy, strict=True):
    given = costs[table.num_stages]
    if table.weights == "newest":
      # PACI's backward passes run the stage again.
      given = [x.recomputed(0.0) for x in given]
    times = pipeline.simulate(table, given, machines)
    whole = [max(x.end_s for x in spans) for spans in found]
    steady = [
      steady_s(spans, table.window, table.num_iterations) for spans in found
    ]
    row = training.make_row(
      dataclasses.asdict(config),
      0,
      table=table.name,
      processes=config.stages,
      costs_s=[[x.forward_s, x.backward_s, x.update_s] for x in given],
      link_latency_s=first["link"][0],
      link_bytes_per_s=first["link"][1],
      busy_cores=[x for x, _ in load],
      load=[x for _, x in load],
      makespan_s=whole,
      simulated_makespan_s=times.makespan_s,
      makespan_ratio=statistics.median(whole) / times.makespan_s,
      iteration_s=steady,
      simulated_iteration_s=times.iteration_s,
      iteration_ratio=statistics.median(steady) / times.iteration_s,
    )
    rows.append(row)
    print(
      f"{config.kind} {config.stages} {table.name}: makespan "
      f"{row['makespan_ratio']:.3f}, iteration {row['iteration_ratio']:.3f}, "
      f"others {load[0][0]:.2f} cores, load {load[0][1]:.1f}",
      flush=True,
    )
    if not config.drawn:
      continue
    # Of an even number of runs no one is in the middle.
    middle = whole.index(statistics.median_low(whole))
    spans = [
      [x.resource, x.name, round(x.start_s, 5), round(x.end_s, 5), x.kind]
      for x in found[middle]
    ]
    label = {"kind": config.kind, "forward_s": config.forward_s}
    label |= {"width": config.width, "table": table.name}
    training.append_rows(
      SPANS, [{**label, "commit": row["commit"], "spans": spans}]
    )
  return rows


def main(
  kind: tyro.conf.Positional[str],
  /,
  repeats: int = 5,
  patience_s: float = 60.0,
  only: int | None = None,
) -> None:
  """Measures a preset: `sleeping`, `computing` or `quota`.

  Args:
    kind: of the stages.
    repeats: of each run.
    patience_s: until a run begins on a busy machine.
    only: the number of one comparison of the preset.
  """
  configs = PRESETS[kind]
  for config in configs if only is None else [configs[only]]:
    config = dataclasses.replace(config, repeats=repeats, patience_s=patience_s)
    rows = compare(config)
    training.append_rows(RESULTS if config.quota == 1 else QUOTA, rows)


if __name__ == "__main__":
  sys.exit(tyro.cli(main))
