"""`jdist pipeline plan`: the fastest choice, and the alternatives."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import cluster, models, pipeline, training
from jdist.cli import _commands, _output
from jdist.cli.pipelines import _tables


def run(options: _commands.Pipeline) -> None:
  """Searches, prints the best plan and others, and writes all of them."""
  if (options.costs is None) == (options.model is None):
    raise ValueError(
      "`--costs` must be given to plan: a TOML file with a [[stages]] table "
      "for each layer; or else `--model`, a network by its name."
    )
  training.pyplot()
  costs, input_bytes = _costs(options)
  machines = _tables.machines(options, options.stages or 4)
  best, found = pipeline.plan(
    costs,
    machines,
    options.batch_size,
    samples=options.samples,
    tables=options.tables or None,
    num_microbatches=_one(options.microbatches),
    num_stages=_one(options.stages),
    windows=_one(options.window),
    max_delay=options.max_delay,
    optimizer_copies=options.optimizer_copies,
    input_bytes=input_bytes,
  )
  output = _output.output_directory(options.output, "plan")
  config = dataclasses.asdict(options)
  # All candidates become rows, so that one can see why another was not chosen.
  rows = [training.make_row(config, 0, **x.row()) for x in found]
  training.append_rows(output / "rows.jsonl", rows)
  assert best.times is not None and best.made is not None
  # `jdist train --table FILE` reads it.
  (output / "table.txt").write_text(pipeline.format_table(best.made))
  plot(output / "plan.png", best.made, best.times, best.nodes)
  console = _output.console()
  console.print(_stages(best, machines))
  console.print(_candidates(found))
  _output.print_files(output, ["plan"], timelines=False)
  print(_command(best, found, output / "table.txt"))


def _command(
  best: pipeline.Candidate,
  found: Sequence[pipeline.Candidate],
  path: pathlib.Path,
) -> str:
  """Returns the commands that train with the best table of each runtime."""
  assert best.made is not None
  train = "  jdist train --stages"
  lines = [
    f"Table: {path}. The times are those of a process for each stage:",
    f"{train} {best.num_stages} --table {path} --runtime processes",
  ]
  able = [x for x in found if x.times is not None and _one_program(x)]
  if able:
    chosen = best if best in able else able[0]
    share = chosen.samples_per_s / best.samples_per_s
    table = str(path)
    if chosen is not best:
      table = f"{chosen.table} --microbatches {chosen.num_microbatches}"
      table += f" --window {chosen.window}" if chosen.table == "ours" else ""
    lines += [
      "One program, whose devices wait for each other and run forward passes "
      f"again, has a table that takes {100 * share:.1f} % of that speed in "
      "processes:",
      f"{train} {chosen.num_stages} --table {table}",
    ]
  return "\n".join(lines)


def _one_program(choice: pipeline.Candidate) -> bool:
  """Returns whether one program can run a candidate's table."""
  assert choice.made is not None
  # `jdist train` makes a table by its name for equal stages, so that a list
  # schedule can only be read from the file of the best one.
  made = choice.made
  return made.num_iterations == 1 or (
    made.weights == "delayed" and not made.splits_backward
  )


def _costs(
  options: _commands.Pipeline,
) -> tuple[list[pipeline.LayerCost], float]:
  """Returns the layers' costs, and the bytes of a micro-batch of inputs."""
  if options.costs is not None:
    return pipeline.load_costs(options.costs), 0.0
  assert options.model is not None
  text = options.model == "transformer"
  shape: tuple[int, ...] = (256,) if text else (32, 32, 3)
  # Costs follow from shapes: no parameters are made, and nothing is compiled.
  model = models.build(
    options.model,
    input_shape=shape,
    num_classes=256 if text else 10,
    abstract=True,
  )
  dtype = jnp.int32 if text else jnp.float32
  inputs = jax.ShapeDtypeStruct((options.samples, *shape), dtype)
  costs = pipeline.layer_costs(
    model.layers, {"x": inputs}, inputs="x", source="lowered"
  )
  return costs, inputs.size * inputs.dtype.itemsize


def _one(value: int | None) -> list[int] | None:
  return None if value is None else [value]


def plot(
  path: pathlib.Path,
  table: pipeline.Table,
  times: pipeline.PipelineTimes,
  nodes: Sequence[str],
) -> None:
  """Draws the first iterations of a simulation, devices above links."""
  cluster.plot_trace(
    times.trace,
    path,
    title=f"{table}",
    resources=[*nodes, *times.link_use],
    # Later iterations repeat the first three.
    end_s=min(times.makespan_s, 3 * times.ends_s[0]),
    colours=pipeline.PIPELINE_COLOURS,
  )


def _stages(best: pipeline.Candidate, machines: cluster.Cluster) -> Any:
  assert best.plan is not None and best.times is not None
  # Figures are by device, and a stage names its machine; an interleaved plan
  # has several stages on one.
  busy = dict(zip(best.nodes, best.times.utilisation, strict=False))
  memory = dict(zip(best.nodes, best.times.memory_bytes, strict=False))
  columns: dict[str, Callable[[int, Any], str]] = {
    "stage": lambda number, _: str(number),
    "layers": lambda _, x: x[0].name,
    "machine": lambda _, x: x[1],
    "seconds": lambda _, x: f"{x[0].compute_s:.4g}",
    "out MB": lambda _, x: f"{x[0].output_bytes / 1e6:.4g}",
    "busy %": lambda _, x: f"{100 * busy[x[1]]:.1f}",
    "memory MB": lambda _, x: f"{memory[x[1]] / 1e6:.4g}",
    "of MB": lambda _, x: f"{machines.node(x[1]).memory_bytes / 1e6:.4g}",
  }
  return _output.table(
    _title(best),
    "Seconds of both passes of a micro-batch at speed 1. Cut at layers "
    f"{' '.join(map(str, best.plan.cuts)) or '-'}.",
    columns,
    enumerate(zip(best.plan.stages, best.plan.nodes, strict=True)),
    left=3,
  )


def _title(best: pipeline.Candidate) -> str:
  words = [f"{best.table}: {best.num_microbatches} micro-batches"]
  if best.window is not None:
    words.append(f"window {best.window}")
  if best.recompute:
    words.append("recomputation")
  return f"{', '.join(words)}, {best.samples_per_s:.4g} samples/s"


def _candidates(found: Sequence[pipeline.Candidate]) -> Any:
  done = [x for x in found if x.times is not None]
  # They are sorted by speed, so that the first one of a table is its best.
  best = {x.table: x for x in reversed(done)}
  columns: dict[str, Callable[[Any], str]] = {
    "table": lambda x: x.table,
    "micro-batches": lambda x: str(x.num_microbatches),
    "stages": lambda x: str(x.num_stages),
    "window": lambda x: str(x.window or ""),
    "recompute": lambda x: "yes" if x.recompute else "",
    "samples/s": lambda x: f"{x.samples_per_s:.4g}",
    "of best %": lambda x: (
      f"{100 * x.samples_per_s / done[0].samples_per_s:.1f}"
    ),
    "delay": lambda x: str(x.delay),
    "memory MB": lambda x: f"{max(x.times.memory_bytes) / 1e6:.4g}",
  }
  return _output.table(
    "The best of each table, a process for each device",
    f"{len(found)} considered, {len(done)} simulated: the others do not fit "
    "into memory, or are slower by their bottleneck alone.",
    columns,
    sorted(best.values(), key=done.index),
  )
