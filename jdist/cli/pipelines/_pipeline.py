"""`jdist pipeline`: tables drawn, checked, simulated and planned."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdist import cluster, pipeline, training
from jdist.cli import _commands, _output
from jdist.cli.pipelines import _plan, _tables

_COSTS = (
  "forward_s", "backward_s", "output_bytes", "parameter_bytes", "saved_bytes",
)  # fmt: skip
# What a simulation of an asynchronous table needs to be in its steady state.
_ITERATIONS = 12


def run(options: _commands.Pipeline) -> None:
  """Draws, checks or simulates each of the tables, or makes a plan."""
  if options.action == "plan":
    _plan.run(options)
    return
  options = dataclasses.replace(
    options,
    tables=options.tables or ("1f1b",),
    stages=4 if options.stages is None else options.stages,
    microbatches=8 if options.microbatches is None else options.microbatches,
  )
  tables = [_table(name, options) for name in options.tables]
  if options.action == "draw":
    for table in tables:
      print(f"{table}\n{pipeline.draw_table(table)}\n")
  elif options.action == "check":
    for table in tables:
      _check(table, options)
  else:
    _simulate(tables, options)


def _table(name: str, options: _commands.Pipeline) -> pipeline.Table:
  """Makes a table by its name, or reads a file."""
  given = {
    option: getattr(options, field)
    for field, option in _tables.OPTIONS.items()
    if getattr(options, field) is not None
  }
  entry = pipeline.TABLES.get(name)
  if entry is not None:
    # Of several tables an option is for those that have it.
    known = pipeline.table_options(name)
    alone = len(options.tables) == 1
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
  training.check_plots()
  machines = (
    cluster.workers([1.0] * max(len(x.devices) for x in tables))
    if options.cluster is None
    else cluster.load_cluster(options.cluster)[0]
  )
  # Refused before a directory is made.
  for table in tables:
    if len(table.devices) > len(machines.names):
      raise ValueError(
        f"`--cluster` must have a machine for each of the {len(table.devices)} "
        f"devices of {table.name}, got {', '.join(machines.names)}. Add "
        "machines, or take fewer `--stages`."
      )
  found = {
    table.name: (table, _times(table, machines, options)) for table in tables
  }
  output = _output.output_directory(options.output, "pipeline")
  for name, (table, times) in found.items():
    row = training.make_row(
      dataclasses.asdict(options),
      0,
      table=name,
      iteration_s=times.iteration_s,
      makespan_s=times.makespan_s,
      bubble=times.bubble,
      utilisation=times.utilisation,
      memory_bytes=times.memory_bytes,
      link_use=dict(times.link_use),
    )
    training.append_rows(output / "rows.jsonl", [row])
    machine_names = machines.names[: len(table.devices)]
    cluster.plot_trace(
      times.trace,
      output / f"{name}.png",
      title=f"{table}",
      resources=[*machine_names, *times.link_use],
      end_s=min(times.makespan_s, 3 * times.ends_s[0]),
      colours=pipeline.PIPELINE_COLOURS,
    )
    times.trace.save_perfetto(output / f"{name}.json")
  _output.console().print(_grid(found))
  print(f"Rows: {output / 'rows.jsonl'}")
  for name in found:
    print(f"Picture: {output / f'{name}.png'}")
  print(f"Timelines for https://ui.perfetto.dev: {output}/*.json")


def _times(
  table: pipeline.Table,
  machines: cluster.Cluster,
  options: _commands.Pipeline,
) -> pipeline.PipelineTimes:
  if options.costs is None:
    equal = {name: getattr(options, name) for name in _COSTS}
    costs = [
      pipeline.LayerCost(f"stage {i}", **equal) for i in range(table.num_stages)
    ]
    assert options.stages is not None
    if table.num_stages > options.stages:  # A device has several.
      part = options.stages / table.num_stages
      costs = [
        dataclasses.replace(
          x,
          forward_s=x.forward_s * part,
          backward_s=x.backward_s * part,
          weight_s=None,
          parameter_bytes=x.parameter_bytes * part,
          saved_bytes=x.saved_bytes * part,
        )
        for x in costs
      ]
  else:
    costs = pipeline.load_costs(options.costs)
  return pipeline.simulate(
    table, costs, machines, optimizer_copies=options.optimizer_copies
  )


def _grid(
  found: dict[str, tuple[pipeline.Table, pipeline.PipelineTimes]],
) -> Any:
  from rich import table

  grid = table.Table(
    title="Tables on a virtual clock",
    caption=(
      "An iteration of M micro-batches: from one update to the next while the "
      "pipeline is full. Busy: mean and least over devices, of that time. "
      "Memory: the most of any device. Link: the busiest."
    ),
  )
  grid.add_column("table", no_wrap=True)
  for title in (
    "M", "iteration s", "of it / M", "busy %", "least %", "memory MB", "link %",
  ):  # fmt: skip
    grid.add_column(title, justify="right")
  for name, (made, times) in found.items():
    busy = times.utilisation
    links = max(times.link_use.values(), default=0.0)
    grid.add_row(
      name,
      str(made.num_microbatches),
      f"{times.iteration_s:.4g}",
      f"{times.iteration_s / made.num_microbatches:.4g}",
      f"{100 * sum(busy) / len(busy):.1f}",
      f"{100 * min(busy):.1f}",
      f"{max(times.memory_bytes) / 1e6:.4g}",
      f"{100 * links:.1f}",
    )
  return grid
