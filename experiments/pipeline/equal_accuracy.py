"""Plans pipelines whose gradients are in time, and says what they gain.

    python experiments/pipeline/equal_accuracy.py hosts
    python experiments/pipeline/equal_accuracy.py hosts report

The cells of `run.py`, planned over the tables with a flush alone: they compute
the gradients of the unsplit model, so that accuracy cannot differ.  A run that
goes on without a flush in its second half takes half of its updates at either
speed.
"""

import pathlib
import statistics
import sys
from collections.abc import Mapping
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import config
import methods
import report
import run
import studies

from jdist import pipeline, training

# The tables with a flush when the rows were made.
FLUSHED = (
  *(name for name, x in pipeline.TABLES.items() if not x.asynchronous),
  "greedy",
)
_WAYS = {
  "no flush: all gradients an update late": lambda late, flushed: late,
  "a flush, then none in the second half": lambda late, flushed: (
    2 / (1 / late + 1 / flushed)
  ),
  "a flush throughout: no gradient late": lambda late, flushed: flushed,
}


def _path(preset: str) -> pathlib.Path:
  return run.FOLDER / f"{preset}-flushed.jsonl"


def results(made: methods.Cell) -> list[dict[str, Any]]:
  """Returns what our search comes to over tables with a flush."""
  found = methods.planned_over(made, FLUSHED)
  return [{"method": "ours", "partition": "flushed"} | found]


def table(
  cells: Mapping[report.Cell, Mapping[report.Run, report.Row]],
  flushed: Mapping[report.Cell, report.Row],
) -> str:
  """Returns our means over baselines with their papers' partitions."""
  lines = []
  for stages in sorted({cell[2] for cell in cells}):
    for words, speed in _WAYS.items():
      every: dict[str, list[float]] = {"": [], "plain": [], "equal": []}
      for cell, runs in cells.items():
        if cell[2] != stages:
          continue
        late = runs["ours", "ours"]["samples_per_s"]
        ours = speed(late, flushed[cell]["samples_per_s"])
        for name in report.BASELINES:
          other = runs[name, "paper"]["samples_per_s"]
          if other:
            every[""].append(ours / other)
            every["plain"] += [ours / other] * (name != "naive")
            every["equal"] += [ours / other] * (cell[1] == "equal")
      means = [f"{statistics.mean(x):.2f}" for x in every.values()]
      lines.append((stages, words, *means, f"{min(every['']):.3f}"))
  return studies.table(
    "stages | ours with | mean | without naive | equal machines | least of any",
    lines,
  )


def tables(flushed: Mapping[report.Cell, report.Row], stages: int) -> str:
  """Counts the tables with a flush that the search took."""
  found: dict[str, int] = {}
  for cell, row in flushed.items():
    if cell[2] == stages:
      found[row["table"]] = found.get(row["table"], 0) + 1
  told = ", ".join(f"{name} in {number}" for name, number in found.items())
  return f"Tables with a flush that the search took at {stages} stages: {told}."


def show(preset: str) -> None:
  """Prints the tables of the rows."""
  cells = report.by_cell(training.read_rows(run.FOLDER / f"{preset}.jsonl"))
  flushed: dict[Any, Any] = {
    (x["network"], x["topology"], x["stages"]): x
    for x in training.read_rows(_path(preset))
  }
  own = {cell: runs for cell, runs in cells.items() if cell in flushed}
  print(table(own, flushed))
  for stages in sorted({cell[2] for cell in own}):
    print(tables(flushed, stages))


if __name__ == "__main__":
  preset = sys.argv[1]
  if "report" in sys.argv[2:]:
    show(preset)
  else:
    run.main(_path(preset), config.PRESETS[preset][1], results)
