"""`jdist overlap --stages`: what a pipeline sends, and what hides it."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist import cluster, collectives, pipeline, profiling, training
from jdist.cli import _commands, _output
from jdist.cli.pipelines import _tables
from jdist.cli.programs import _overlap_inputs, _overlap_report
from jdist.pipeline import Op


@dataclasses.dataclass(frozen=True)
class FoundStages:
  """Figures of a pipeline's compiled program.

  Sends are `late` if they run in parallel with the next tick; `around` counts
  the conditionals between a send's start and its end, and `sent_bytes` a tick's
  bytes in each direction. The durations are those of each stage's forward pass
  and longest kind of backward pass, of a tick without its passes, and of a pass
  that does nothing.
  """

  late: bool
  around: tuple[int, ...]
  times: pipeline.TickTimes
  sent_bytes: int
  forward_s: tuple[float, ...]
  backward_s: tuple[float, ...]
  between_s: float
  idle_s: float
  memory_bytes: int
  compile_s: float


def overlap(
  options: _commands.Overlap,
  table: pipeline.Table,
  topology: profiling.GpuTarget,
  device: cluster.Device,
) -> None:
  """Compiles with late sends and without, and writes a table and rows."""
  assert options.stages is not None
  task = _overlap_inputs.make_task(options)
  # All sends of a tick end with the slowest one: if a pipeline spans nodes, the
  # network between them decides.
  inside = topology.gpus_per_node % options.stages == 0
  link = _overlap_inputs.stated_link(
    options, topology.kind, 1 if inside else topology.nodes
  )
  output = _output.output_directory(options.output, f"overlap-{options.model}")
  # The same table twice shows what late sends gain, in ticks and in time.
  found = []
  for late in (False, True):
    one = _read(options, topology, table, task, device, link, late)
    found.append(one)
    row = dataclasses.asdict(one) | {
      "exposed_s": one.times.exposed_s,
      "hidden_share": one.times.hidden_share,
    }
    training.append_rows(
      output / "rows.jsonl",
      [training.make_row(dataclasses.asdict(options), 0, **row)],
    )
  console = _output.console()
  console.print(_report(options, topology, table, found))
  console.print(_overlap_report.rates(device, link))
  _output.print_files(output)


def check(
  options: _commands.Overlap, topology: profiling.GpuTarget
) -> pipeline.Table:
  """Checks the options of stages, and makes their table."""
  assert options.stages is not None
  if options.stages < 2:
    raise ValueError(f"`--stages` must be at least 2, got {options.stages}.")
  words = " ".join(options.methods)
  if len(options.methods) > 1 or ":" in words:
    raise ValueError(
      "`--methods` must be one with `--stages`, in its first form, got "
      f"{words}."
    )
  if topology.num_gpus % options.stages:
    raise ValueError(
      f"`--stages` must divide the {topology.num_gpus} GPUs of `--topology` "
      f"into whole pipelines, got {options.stages}."
    )
  table = _tables.of_options(options)
  if options.batch_size * options.stages % table.num_microbatches:
    raise ValueError(
      "`--batch-size` times `--stages` must divide into the table's "
      f"{table.num_microbatches} micro-batches, got {options.batch_size} times "
      f"{options.stages}."
    )
  return table


def _read(
  options: _commands.Overlap,
  topology: profiling.GpuTarget,
  table: pipeline.Table,
  task: _overlap_inputs.Task,
  device: cluster.Device,
  link: cluster.Link,
  late: bool,
) -> FoundStages:
  """Compiles the step and forecasts its ticks."""
  assert options.stages is not None
  workers = topology.num_gpus // options.stages
  mesh = collectives.make_mesh(
    (workers, options.stages), ("worker", "stage"), topology.devices()
  )
  # Each worker is a pipeline, and the mean over workers is part of the step.
  team = collectives.workers(workers, mesh=mesh)
  samples = options.batch_size * options.stages

  def cut(size: int) -> Any:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), task.batch
    )

  layers = [_tables.cast_layer(x, options.dtype) for x in task.model.layers]
  pipe = pipeline.OneProgram(
    pipeline.cut_layers(layers, options.cuts or table.num_stages),
    task.output_loss,
    table,
    cut(samples // table.num_microbatches),
    inputs=task.inputs,
    late_sends=late,
  )
  optimizer = optax.with_extra_args_support(
    _overlap_inputs.make_optimizer(options.methods[0], options, team.axis)
  )
  start_s = time.monotonic()
  lowered = team.jit(
    pipe.make_step(optimizer, axis=team.axis), donate_argnums=0
  ).lower(
    pipe.abstract_state(team, optimizer), profiling.abstract(team, cut(samples))
  )
  # Activations and gradients are sent at once: with the default of one
  # collective in flight, one of both would wait for the other.
  flags = {_overlap_inputs.IN_FLIGHT: options.in_flight or 2}
  program: Any = lowered.compile(compiler_options=flags)
  loop = profiling.read_loop(program)
  kinds = pipe.grid.backward_ops
  seconds = _seconds(loop, table.num_stages, kinds, device)
  between_s = _sum_s(loop.events, device)
  sent = pipe.sent_bytes
  # Late sends of both directions start together and share a GPU's link, except
  # between nodes, where each of them has a link of its own.
  together = 2 if late and topology.gpus_per_node % options.stages == 0 else 1
  stages = range(table.num_stages)
  return FoundStages(
    late=late,
    around=loop.around,
    times=pipe.times(
      seconds, link.send_s(together * sent, 1), between_s=between_s
    ),
    sent_bytes=sent,
    forward_s=tuple(seconds(Op.FORWARD, s) for s in stages),
    backward_s=tuple(max(seconds(op, s) for op in kinds) for s in stages),
    between_s=between_s,
    # Branch 0 of each conditional is taken by devices without work in a tick.
    idle_s=max(_sum_s(lane[0], device) for lane in loop.branches),
    memory_bytes=_overlap_inputs.memory_bytes(program),
    compile_s=time.monotonic() - start_s,
  )


def _seconds(
  loop: profiling.Loop,
  stages: int,
  kinds: tuple[Op, ...],
  device: cluster.Device,
) -> Callable[[Op, int], float]:
  """Returns the seconds of an op of a stage, by the program's branches."""
  # The compiler may order both conditionals either way, but a backward pass
  # contains the forward pass and takes longer.
  forward, backward = sorted(
    ([_sum_s(branch, device) for branch in lane] for lane in loop.branches),
    key=sum,
  )

  def seconds(op: Op, stage: int) -> float:
    if op == Op.FORWARD:
      return forward[1 + stage]
    return backward[1 + kinds.index(op) * stages + stage]

  return seconds


def _sum_s(
  events: tuple[profiling.Event, ...], device: cluster.Device
) -> float:
  return sum(
    device.compute_s(x.flops, x.num_bytes)
    for x in events
    if x.kind == "compute"
  )


def _report(
  options: _commands.Overlap,
  topology: profiling.GpuTarget,
  table: pipeline.Table,
  found: list[FoundStages],
) -> Any:
  assert options.stages is not None
  one = found[0]
  # The longest pass of any stage decides how long a tick takes.
  passes = [1e3 * max(x) for x in (one.forward_s, one.backward_s)]
  columns: dict[str, Callable[[FoundStages], str]] = {
    "sends": lambda x: "a tick late" if x.late else "between ticks",
    "around a send": lambda x: " and ".join(map(str, x.around)),
    "ticks": lambda x: str(x.times.ticks),
    "ms, free links": lambda x: f"{x.times.free_s * 1e3:.3f}",
    "ms": lambda x: f"{x.times.step_s * 1e3:.3f}",
    "ms sending": lambda x: f"{x.times.send_s * 1e3:.3f}",
    "hidden %": lambda x: f"{100 * x.times.hidden_share:.1f}",
    "memory GB": lambda x: f"{x.memory_bytes / 1e9:.2f}",
  }
  return _output.table(
    f"{options.model} on {topology}, {options.stages} stages a worker: "
    f"{table.name}, {table.num_microbatches} micro-batches of "
    f"{options.batch_size * options.stages // table.num_microbatches}",
    f"The longest passes take {passes[0]:.3g} and {passes[1]:.3g} ms; "
    f"{one.sent_bytes / 1e6:.3g} MB each way and tick. Around a send: the "
    "tick's conditionals, which contain all passes, between its start and its "
    "end. Ticks only, without the update and the mean over the workers.",
    columns,
    found,
  )
