"""Tables that options name: those of the library, or files."""

import pathlib
from typing import Any

from jdist import pipeline

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
        f"a table must be one of {', '.join(pipeline.TABLES)}, or a file, got "
        f"{name!r}."
      )
    return pipeline.load_table(name)
  if name == "pipedream":
    microbatches = 1  # As published: an update after each.
  return pipeline.make_table(name, stages, microbatches, **given)
