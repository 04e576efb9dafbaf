"""Tables that options name: those of the library, or files."""

import dataclasses
import pathlib
from typing import Any

from jdist import models, pipeline, training

# Options, and those of tables that they fill.
OPTIONS = {
  "iterations": "num_iterations",
  "window": "window",
  "chunks": "num_chunks",
}


def make(
  name: str, stages: int, microbatches: int, **given: Any
) -> pipeline.Table:
  """Makes a table by its name, or reads a file, which has its own numbers.

  Raises:
    ValueError: when there is none, or it has no such option.
  """
  if name not in pipeline.TABLES:
    if not pathlib.Path(name).is_file():
      raise ValueError(
        f"a table must be one of {', '.join(pipeline.TABLES)}, or a file that "
        f"is there, got {name!r}."
      )
    return pipeline.load_table(name)
  if name == "pipedream":
    microbatches = 1  # As published: an update after each.
  return pipeline.make_table(name, stages, microbatches, **given)


def of_options(options: Any) -> pipeline.Table:
  """Makes the table of a command that cuts models into stages.

  Raises:
    ValueError: when there is none, or it is for another number of devices.
  """
  given = {
    option: getattr(options, field)
    for field, option in OPTIONS.items()
    if getattr(options, field, None) is not None
  }
  microbatches = options.microbatches or 2 * options.stages
  table = make(options.table, options.stages, microbatches, **given)
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
