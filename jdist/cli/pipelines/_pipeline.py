"""`jdist pipeline`: draws, checks, simulates and plans tables."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jdist import cluster, pipeline, training
from jdist.cli import _commands, _output
from jdist.cli.pipelines import _plan, _tables

_COSTS = ("forward_s", "backward_s", "parameter_bytes", "saved_bytes")
# Iterations after which an asynchronous table is in its steady state.
_ITERATIONS = 12


def run(options: _commands.Pipeline) -> None:
  """Draws, checks or simulates each of the tables, or makes a plan."""
  if options.action == "plan":
    _plan.run(options)
    return
  # A plan chooses them, so that these defaults are only for the other actions.
  options = dataclasses.replace(
    options,
    tables=options.tables or ("1f1b",),
    stages=4 if options.stages is None else options.stages,
    microbatches=8 if options.microbatches is None else options.microbatches,
  )
  tables = [_table(name, options) for name in options.tables]
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
    alone = len(options.tables) == 1
    # Alone, a table refuses an option that it does not have.
    given = {key: x for key, x in given.items() if alone or key in known}
    if options.action == "simulate" and entry.asynchronous:
      given.setdefault("num_iterations", _ITERATIONS)
  assert options.stages is not None and options.microbatches is not None
  return _tables.make(name, options.stages, options.microbatches, **given)


def _check(table: pipeline.Table, options: _commands.Pipeline) -> None:
  report = pipeline.check_table(
    table,
    sends=options.sends,
    max_live=options.max_live,
    max_versions=options.max_versions,
  )
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
  training.pyplot()
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
      dataclasses.asdict(options),
      0,
      table=table.name,
      iteration_s=times.iteration_s,
      makespan_s=times.makespan_s,
      bubble=times.bubble,
      utilisation=times.utilisation,
      memory_bytes=times.memory_bytes,
      link_use=dict(times.link_use),
    )
    training.append_rows(output / "rows.jsonl", [row])
    names = machines.names[: len(table.devices)]
    _plan.plot(output / f"{table.name}.png", table, times, names)
    times.trace.save_perfetto(output / f"{table.name}.json")
  _output.console().print(_grid(found))
  _output.print_files(output, [table.name for table in tables])


def _times(
  table: pipeline.Table,
  machines: cluster.Cluster,
  options: _commands.Pipeline,
) -> pipeline.PipelineTimes:
  if options.costs is None:
    assert options.stages is not None
    # Without a file the options describe a device, and all are alike; some
    # tables give it several stages, which divide all but the messages.
    part = min(1.0, options.stages / table.num_stages)
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
    table, costs, machines, optimizer_copies=options.optimizer_copies
  )


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
  }
  return _output.table(
    "Tables on a virtual clock, a process for each device",
    "An iteration of M micro-batches: from one update to the next while the "
    "pipeline is full. Busy: mean and least over devices, of that time. "
    "Memory: the most of any device. Link: the busiest.",
    columns,
    found,
  )
