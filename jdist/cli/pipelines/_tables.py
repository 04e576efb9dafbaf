"""Tables that options name, from the library or from files."""

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

from jdist import cluster, models, pipeline, training
from jdist.cli import _options

# Options, and the arguments of tables that they fill.
_ARGUMENTS = {
  "iterations": "num_iterations",
  "window": "window",
  "chunks": "num_chunks",
}


def given(options: Any) -> dict[str, Any]:
  """Returns the arguments of a table that options fill."""
  found = {x: getattr(options, name, None) for name, x in _ARGUMENTS.items()}
  return {name: value for name, value in found.items() if value is not None}


def machines(options: Any, number: int) -> cluster.Cluster:
  """Returns the machines of a file, or a number of equal ones."""
  if options.cluster is None:
    return cluster.Cluster(
      tuple(cluster.Node(f"device {i}") for i in range(number))
    )
  return cluster.load_cluster(options.cluster)[0]


def make(
  name: str, stages: int, microbatches: int, **arguments: Any
) -> pipeline.Table:
  """Makes a table by its name, or reads a file, which has its own numbers."""
  if name not in pipeline.TABLES:
    if not pathlib.Path(name).is_file():
      raise ValueError(
        f"a table must be one of {', '.join(pipeline.TABLES)}, or a file that "
        f"exists, got {name!r}."
      )
    return pipeline.load_table(name)
  if name == "pipedream":
    microbatches = 1  # PipeDream updates after every micro-batch.
  return pipeline.make_table(name, stages, microbatches, **arguments)


def check_files(options: Any, names: Iterable[str], *also: str) -> None:
  """Raises a ValueError for numbers of tables from files, with their own."""
  if not pipeline.TABLES.keys() & {*names}:
    numbers = *also, "microbatches", *_ARGUMENTS
    where = f"with a table from {' or '.join(names)}, which has its own"
    _options.check_left_out(options, numbers, where)


def check_used(options: Any, names: Iterable[str]) -> None:
  """Raises a ValueError for an option that none of some tables has."""
  known = {x for name in names for x in pipeline.table_options(name)}
  unused = [name for name, x in _ARGUMENTS.items() if x not in known]
  where = f"for {', '.join(names)}, without such an option"
  _options.check_left_out(options, unused, where)


def of_options(options: Any) -> pipeline.Table:
  """Makes the table of a command that cuts models into stages."""
  # With two for each stage 1f1b is busy for about two thirds of the time.
  microbatches = options.microbatches or 2 * options.stages
  table = make(options.table, options.stages, microbatches, **given(options))
  check_files(options, [options.table])
  if len(table.devices) != options.stages:
    raise ValueError(
      f"`--stages` must be the {len(table.devices)} devices of `--table` "
      f"{options.table}, got {options.stages}."
    )
  return table


def cast_layer(layer: models.Layer, dtype: str) -> models.Layer:
  """Makes a layer compute in another dtype; its parameters stay as they are."""

  def apply(params: Any, state: Any, x: Any, **options: Any) -> Any:
    return layer.apply(training.cast(params, dtype), state, x, **options)

  if dtype == "float32":
    return layer
  return dataclasses.replace(layer, apply=apply)
