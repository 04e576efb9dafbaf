"""`jdist pipeline`: draws, checks, simulates and plans tables."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdist import cluster, models, pipeline, training
from jdist.cli import _commands, _methods, _options, _output
from jdist.cli.pipelines import _tables

_COSTS = ("forward_s", "backward_s", "parameter_bytes", "saved_bytes")
# Iterations after which an asynchronous table is in its steady state.
_ITERATIONS = 12


def run(options: _commands.Pipeline) -> None:
  """Draws, checks or simulates each of the tables, or makes a plan."""
  if options.action == "plan":
    _plan(options)
    return
  # A plan chooses them, so that these defaults are only for the other actions.
  asked = options
  options = dataclasses.replace(
    options,
    tables=options.tables or ("1f1b",),
    stages=4 if options.stages is None else options.stages,
    microbatches=8 if options.microbatches is None else options.microbatches,
  )
  if named := [x for x in options.tables if x in pipeline.TABLES]:
    _tables.check_used(asked, named)
  if options.costs is not None:
    here = "with `--costs`, whose file has them"
    _options.check_left_out(asked, (*_COSTS, "output_bytes"), here)
  tables = [_table(name, options) for name in options.tables]
  _tables.check_files(asked, options.tables, "stages")
  if options.action == "simulate":
    _simulate(tables, options)
  for table in tables:
    if options.action == "draw":
      print(f"{table}\n{pipeline.draw_table(table)}\n")
    elif options.action == "check":
      _check(table, options)


def _table(name: str, options: _commands.Pipeline) -> pipeline.Table:
  """Makes a table by its name, or reads a file."""
  given = _tables.given(options)
  entry = pipeline.TABLES.get(name)
  if entry is not None:
    # With several tables an option applies to those that have it.
    known = pipeline.table_options(name)
    given = {key: x for key, x in given.items() if key in known}
    if options.action == "simulate" and entry.asynchronous:
      given.setdefault("num_iterations", _ITERATIONS)
  assert options.stages is not None and options.microbatches is not None
  return _tables.make(name, options.stages, options.microbatches, **given)


def _check(table: pipeline.Table, options: _commands.Pipeline) -> None:
  report = pipeline.check_table(
    table, sends=options.sends, max_live=options.max_live,
    max_versions=options.max_versions,
  )  # fmt: skip
  # A table that runs with blocking sends also runs with buffered ones.
  sends = "buffered or blocking" if report.blocking else "buffered"
  print(f"{table}\n  runs to its end, with {sends} sends")
  for title, values in (
    ("micro-batches kept", report.live),
    ("versions of the parameters", report.versions),
    ("delay of the gradients", report.delays),
  ):
    print(f"  {title}, by stage: {' '.join(map(str, values))}")


def _simulate(
  tables: Sequence[pipeline.Table], options: _commands.Pipeline
) -> None:
  # Each has a timeline of its name.
  _options.check_names("TABLE", [x.name for x in tables], "tables by name")
  machines = _tables.machines(options, max(len(x.devices) for x in tables))
  for table in tables:
    if len(table.devices) > len(machines.names):
      raise ValueError(
        f"`--cluster` must have a machine for each of the {len(table.devices)} "
        f"devices of {table.name}, got {', '.join(machines.names)}. Add "
        "machines, or take fewer `--stages`."
      )
  # All tables are simulated before any output, since each may be refused.
  found = [(table, _times(table, machines, options)) for table in tables]
  output = _output.output_directory(options.output, "pipeline")
  for table, times in found:
    row = training.make_row(
      dataclasses.asdict(options), 0, table=table.name,
      iteration_s=times.iteration_s, makespan_s=times.makespan_s,
      bubble=times.bubble, utilisation=times.utilisation,
      edge_bytes=times.edge_bytes,
      memory_bytes=times.memory_bytes, link_use=dict(times.link_use),
    )  # fmt: skip
    training.append_rows(output / "rows.jsonl", [row])
    name = pathlib.PurePath(table.name).name  # A file may have any name.
    times.trace.save_perfetto(output / f"{name}.json")
  _output.console().print(_grid(found))
  _output.finish(output, options, timelines=True)


def _times(
  table: pipeline.Table, machines: cluster.Cluster, options: _commands.Pipeline
) -> pipeline.PipelineTimes:
  if options.costs is None:
    # Without a file the options describe a device, and all are alike; some
    # tables give it several stages, which divide all but the messages.
    part = min(1.0, len(table.devices) / table.num_stages)
    equal = {name: getattr(options, name) * part for name in _COSTS}
    costs = [
      pipeline.LayerCost(
        f"stage {i}", output_bytes=options.output_bytes, **equal
      )
      for i in range(table.num_stages)
    ]
  else:
    costs = pipeline.load_costs(options.costs)
  return pipeline.simulate(
    table,
    _coded(costs, options),
    machines,
    optimizer_copies=options.optimizer_copies,
  )


def _coded(
  costs: list[pipeline.LayerCost], options: _commands.Pipeline
) -> list[pipeline.LayerCost]:
  codec = _methods.edge_codec(options)
  return costs if codec is None else [x.coded(codec) for x in costs]


def _grid(found: list[tuple[pipeline.Table, pipeline.PipelineTimes]]) -> Any:
  columns: dict[str, Callable[[Any, Any], str]] = {
    "table": lambda table, _: table.name,
    "M": lambda table, _: str(table.num_microbatches),
    "iteration s": lambda _, times: f"{times.iteration_s:.4g}",
    "of it / M": lambda table, times: (
      f"{times.iteration_s / table.num_microbatches:.4g}"
    ),
    "busy %": lambda _, times: (
      f"{100 * sum(times.utilisation) / len(times.utilisation):.1f}"
    ),
    "least %": lambda _, times: f"{100 * min(times.utilisation):.1f}",
    "memory MB": lambda _, times: f"{max(times.memory_bytes) / 1e6:.4g}",
    "link %": lambda _, times: (
      f"{100 * max(times.link_use.values(), default=0.0):.1f}"
    ),
    "edge MB": lambda _, times: f"{max(times.edge_bytes, default=0) / 1e6:.4g}",
    "edge s": lambda _, times: (
      f"{max(times.link_use.values(), default=0.0) * times.iteration_s:.4g}"
    ),
  }
  return _output.table(
    "Tables on a virtual clock, a process for each device",
    "An iteration of M micro-batches: from one update to the next while the "
    "pipeline is full. Busy: mean and least over devices, of that time. "
    "Memory: the most of any device. Link: the busiest. Edge: the "
    "most bytes, and the busiest link's seconds, of an iteration.",
    columns,
    found,
  )


def _plan(options: _commands.Pipeline) -> None:
  """Searches, prints the best plan and others, and writes all of them."""
  if (options.costs is None) == (options.model is None):
    raise ValueError(
      "`--costs`, a TOML file with a [[stages]] table for each layer, or "
      "`--model`, a network by its name, must be given to plan, but not both, "
      f"got {options.costs} and {options.model}."
    )
  costs, input_bytes = _costs(options)
  machines = _tables.machines(options, options.stages or 4)
  best, found = pipeline.plan(
    _coded(costs, options), machines, options.batch_size,
    tables=options.tables or None, num_microbatches=_one(options.microbatches),
    samples=options.samples,
    num_stages=_one(options.stages), windows=_one(options.window),
    max_delay=options.max_delay, optimizer_copies=options.optimizer_copies,
    input_bytes=input_bytes,
  )  # fmt: skip
  output = _output.output_directory(options.output, "plan")
  config = dataclasses.asdict(options)
  # All candidates become rows, so that one can see why another was not chosen.
  rows = [training.make_row(config, 0, **x.row()) for x in found]
  training.append_rows(output / "rows.jsonl", rows)
  assert best.times is not None and best.made is not None
  # `jdist train --table FILE` reads it.
  (output / "table.txt").write_text(pipeline.format_table(best.made))
  best.times.trace.save_perfetto(output / "plan.json")
  console = _output.console()
  console.print(_stages(best, machines))
  console.print(_candidates(found))
  _output.finish(output, options, timelines=True)
  print(_command(best, found, output / "table.txt", options.edge_codec))


def _command(
  best: pipeline.Candidate,
  found: Sequence[pipeline.Candidate],
  path: pathlib.Path,
  codec: str | None,
) -> str:
  """Returns the commands that train with the best table of each runtime."""
  assert best.made is not None
  train = "  jdist train --stages"
  coded = "" if codec is None else f" --edge-codec {codec}"
  lines = [
    f"Table: {path}. The times are those of a process for each stage:",
    f"{train} {best.num_stages} --table {path} --runtime processes{coded}",
  ]
  # `jdist train` makes a table by its name for equal stages, so that a list
  # schedule can only be read from the file of the best one.
  able = [
    x
    for x in found
    if (made := x.made) is not None
    if made.num_iterations == 1
    or (made.weights == "delayed" and not made.splits_backward)
  ]
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
    options.model, input_shape=shape, num_classes=256 if text else 10,
    abstract=True,
  )  # fmt: skip
  dtype = jnp.int32 if text else jnp.float32
  inputs = jax.ShapeDtypeStruct((options.samples, *shape), dtype)
  costs = pipeline.layer_costs(
    model.layers, {"x": inputs}, inputs="x", source="lowered"
  )
  return costs, inputs.size * inputs.dtype.itemsize


def _one(value: int | None) -> list[int] | None:
  return None if value is None else [value]


def _stages(best: pipeline.Candidate, machines: cluster.Cluster) -> Any:
  assert best.plan is not None and best.times is not None
  # Figures are by device, and a stage names its machine; an interleaved plan
  # has several stages on one.
  busy = dict(zip(best.nodes, best.times.utilisation, strict=False))
  memory = dict(zip(best.nodes, best.times.memory_bytes, strict=False))
  times = pipeline.stage_times(best.plan, machines)
  title = f"{best.table}: {best.num_microbatches} micro-batches"
  title += "" if best.window is None else f", window {best.window}"
  title += ", recomputation" * best.recompute
  columns: dict[str, Callable[[int, Any], str]] = {
    "stage": lambda number, _: str(number),
    "layers": lambda _, x: x[0].name,
    "machine": lambda _, x: x[1],
    "seconds": lambda _, x: f"{x[0].compute_s:.4g}",
    "sent MB": lambda _, x: f"{x[0].sent_bytes / 1e6:.4g}",
    "sent s": lambda number, _: f"{times[number].send:.4g}",
    "busy %": lambda _, x: f"{100 * busy[x[1]]:.1f}",
    "memory MB": lambda _, x: f"{memory[x[1]] / 1e6:.4g}",
    "of MB": lambda _, x: f"{machines.node(x[1]).memory_bytes / 1e6:.4g}",
  }
  return _output.table(
    f"{title}, {best.samples_per_s:.4g} samples/s",
    "Seconds of both passes of a micro-batch at speed 1, and of a message to "
    "the next stage or back. Cut at layers "
    f"{' '.join(map(str, best.plan.cuts)) or '-'}.",
    columns,
    enumerate(zip(best.plan.stages, best.plan.nodes, strict=True)),
    left=3,
  )


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
    "into memory, or are slower by a lower bound of their time.",
    columns,
    sorted(best.values(), key=done.index),
  )
